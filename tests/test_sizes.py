"""How long a function may be: one idea, seen whole on a screen."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES_OF_A_FILE = 400
MOST_LINES = 50  # from `def` to the last line, docstring included


def functions_over(most: int) -> list[str]:
    paths = [path for folder in ("lib", "bench", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]
    nodes = [(path.name, node) for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    functions = [(name, node) for name, node in nodes if isinstance(node, ast.FunctionDef)]
    return [f"{name}:{node.name}" for name, node in functions if (node.end_lineno or 0) - node.lineno >= most]


def test_no_function_is_longer_than_a_screen() -> None:
    assert functions_over(MOST_LINES) == []


def test_a_longer_function_would_be_found() -> None:
    assert "measure.py:measure_case" in functions_over(20)


def test_no_file_is_longer_than_400_lines() -> None:
    folders = ("lib", "bench", "tools", "tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")] + list(ROOT.rglob("*.sh"))
    paths = [path for path in paths if ".venv" not in path.parts]
    assert [path.name for path in paths if len(path.read_text().splitlines()) > MOST_LINES_OF_A_FILE] == []
