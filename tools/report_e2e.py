"""Verdicts of the end-to-end gate (tools/e2e_gate.py) beside the rows: the newest of each pair that was compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.report_data import stamp_order

SCHEMA = 1
GLOB = "e2e_*.json"
SIDES = ("reference", "candidate")


@dataclass(frozen=True)
class EndToEnd:
    """`line` is the gate's own sentence; `red`: it did not pass."""

    stamp: str
    mode: str
    reference: str
    candidate: str
    line: str
    red: bool
    notices: tuple[str, ...]


def find_e2e(paths: Sequence[Path], notices: list[str]) -> list[EndToEnd]:
    """From the folders among the paths, newest first. A file that can't be read is told in `notices`."""
    found: dict[tuple[str, str, str], EndToEnd] = {}
    files = [file for path in paths if path.is_dir() for file in path.glob(GLOB)]
    for file in sorted(files, key=lambda file: stamp_order(file.stem.removeprefix("e2e_"))):
        try:
            verdict = read_e2e(file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            notices.append(f"left out: {file.name} is no verdict of tools/e2e_gate.py of this version")
            continue
        found[(verdict.mode, verdict.reference, verdict.candidate)] = verdict
    return sorted(found.values(), key=lambda verdict: (verdict.red, stamp_order(verdict.stamp)), reverse=True)


def called(side: Mapping[str, Any]) -> str:
    """The model and the backend's name, or where it was asked: two backends take turns at one address."""
    return " ".join(filter(None, (str(side["model"]), str(side.get("name") or side["source"]))))


def read_e2e(path: Path) -> EndToEnd:
    record = json.loads(path.read_text())
    if record["schema"] != SCHEMA:
        raise ValueError(record["schema"])
    names = [called(record[side]) for side in SIDES]
    return EndToEnd(
        stamp=str(record["stamp"]),
        mode=str(record["mode"]),
        reference=names[0],
        candidate=names[1],
        line=str(record["line"]),
        red=bool(record["red"]),
        notices=tuple(map(str, record["notices"])),
    )
