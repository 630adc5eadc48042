"""How long a function may be: one idea, seen whole on a screen."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES = 50  # from `def` to the last line, docstring included


def functions_over(most: int) -> list[str]:
    found = []
    for path in (path for folder in ("lib", "bench", "tools") for path in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                found.append((f"{path.name}:{node.name}", (node.end_lineno or 0) - node.lineno + 1))
    return [name for name, lines in found if lines > most]


def test_no_function_is_longer_than_a_screen() -> None:
    assert functions_over(MOST_LINES) == []


def test_a_longer_function_would_be_found() -> None:
    assert "measure.py:measure_case" in functions_over(20)
