"""The end-to-end gate's command with a test's defaults, and files of questions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fake_server import FakeServer

from tools import e2e_gate


def question_file(path: Path, count: int) -> Path:
    lines = [
        {"question": f"How much is {number} and 7?", "answer": f"They make {number + 7}.\n#### {number + 7}"}
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def gate(out: Path, *arguments: object, mode: str = "gsm8k") -> int:
    words = [mode, "--out-dir", str(out), "--concurrency", "8", "--timeout", "2", *map(str, arguments)]
    return e2e_gate.main(words)


def verdict(out: Path) -> dict[str, Any]:
    (path,) = out.glob("e2e_*.json")
    return dict(json.loads(path.read_text()))


def both(reference: FakeServer, candidate: FakeServer) -> Sequence[str]:
    return ("--reference", reference.url, "--candidate", candidate.url)
