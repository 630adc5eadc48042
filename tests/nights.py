"""Nights for tests: rows made from real H200 rows, files of nights, nightly.sh with a stand-in for the sweep."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fake_sweep import sweep_row

from lib import history, nightly
from lib.history import Row
from lib.rows import COLUMNS

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "docs" / "measured"
STARTS = 4


@cache
def measured(name: str = "comm_h200x2_first.csv") -> tuple[dict[str, str], ...]:
    with (MEASURED / name).open(newline="") as file:
        return tuple(csv.DictReader(file))


@cache
def template() -> dict[str, str]:
    wanted = ("deepep_ll", "graph", "ok")
    return next(row for row in measured() if (row["variant"], row["timing"], row["status"]) == wanted)


def stamp(night: int, hour: int = 2) -> str:
    """Of night 1, 2, ..."""
    return f"202611{night:02d}T{hour:02d}0000Z"


def row(night: int, start: int, p50: float | None = 100.0, again: int = 0, **columns: str) -> Row:
    """One row; p50=None: it was not ok."""
    made = {"night": stamp(night), "start": str(start), "again": str(again), **template(), **columns}
    if p50 is None:
        made |= {"lat_us_p50": "", "check": "", "routing_sha": "", "status": columns.get("status", "failed")}
    else:
        made["lat_us_p50"] = f"{p50:.6g}"
    return made


def night(number: int, values: Iterable[float | None], again: Iterable[float | None] = (), **columns: str) -> list[Row]:
    rows = [row(number, start, value, **columns) for start, value in enumerate(values, 1)]
    return rows + [row(number, start, value, again=1, **columns) for start, value in enumerate(again, 1)]


def quiet(base: float = 100.0, noise: float = 0.004, starts: int = STARTS, seed: int = 0) -> list[float]:
    """Starts of a night that scatter like a measured graph row's."""
    rng = random.Random(seed)
    return [base * (1 + rng.gauss(0, noise)) for _ in range(starts)]


def baseline(nights: int = 5, **columns: str) -> list[Row]:
    return [made for number in range(1, nights + 1) for made in night(number, quiet(seed=number), **columns)]


def write_nights(folder: Path, rows: Iterable[Row]) -> None:
    """night_<stamp>.csv of every night in the rows."""
    folder.mkdir(exist_ok=True)
    by_night: dict[str, list[Row]] = {}
    for made in rows:
        by_night.setdefault(made["night"], []).append(made)
    for name, its in by_night.items():
        history.write_whole(folder / f"night_{name}.csv", history.as_text(its))


def judged(folder: Path, night_stamp: str, given: str = "") -> dict[str, Any]:
    """Judge a night as nightly.sh does, and read what it wrote."""
    code = nightly.main(["judge", str(folder), night_stamp, given])
    document: dict[str, Any] = json.loads((folder / f"verdicts_{night_stamp}.json").read_text())
    assert document["exit"] == code
    return document


class Suite:
    """nightly.sh and lib as they are, in a folder with a space, beside a run_sweep.sh that makes up its rows."""

    def __init__(self, folder: Path) -> None:
        self.root, self.out = folder / "a suite", folder / "out dir"
        (self.root / "lib").mkdir(parents=True)
        shutil.copy(ROOT / "nightly.sh", self.root)
        for path in [*(ROOT / "lib").glob("*.py"), ROOT / "lib" / "env.sh"]:
            shutil.copy(path, self.root / "lib")
        fake = self.root / "run_sweep.sh"
        fake.write_text(f'#!/bin/bash\nexec "{sys.executable}" "{ROOT}/tests/fake_sweep.py" "$@"\n')
        fake.chmod(0o755)

    def environment(self, words: Mapping[str, str]) -> dict[str, str]:
        """As bare as cron's."""
        fixed = {"PATH": "/usr/bin:/bin", "HOME": os.environ.get("HOME", "/"), "PYTHON": sys.executable}
        fixed["FAKE_LOG"] = str(self.root / "sweeps.jsonl")
        return {**fixed, "OUT_DIR": str(self.out), "SECTION": "ref", "GPUS": "1", "SEQ_LENS": "8", **words}

    def start(self, *arguments: str, **words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.root / "nightly.sh", *arguments],
            env=self.environment(words),
            cwd=self.root.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **words: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **words)
        said, told = process.communicate(timeout=150)
        return subprocess.CompletedProcess(process.args, process.returncode, said, told)

    def sweeps(self) -> list[dict[str, str]]:
        """What each sweep of the suite was called with, in order."""
        path = self.root / "sweeps.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def fake_nights(self, count: int) -> None:
        """Finished nights of the rows that the fake sweep makes, long ago."""
        self.out.mkdir(exist_ok=True)
        for number in range(1, count + 1):
            name = f"202001{number:02d}T020000Z"
            starts = [{"night": name, "start": str(start), "again": "0"} for start in range(1, STARTS + 1)]
            blank = dict.fromkeys(COLUMNS, "")
            rows = [place | blank | sweep_row(name, f"{number} {place['start']}") for place in starts]
            write_nights(self.out, rows)
            (self.out / f"verdicts_{name}.json").write_text('{"machine": "", "line": "", "exit": 3, "verdicts": []}')
