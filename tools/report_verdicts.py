"""The nightly gate's verdicts, read from its file; without one, medians beside a baseline, which is no verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.arguments import UsageError
from tools.report_cases import LATENCY, Case, Key, case_key, middle
from tools.report_data import Results, Row, stamp_order

SCHEMA = 1
GLOB = "verdicts_*.json"
LABEL_COLUMNS = ("section", "variant", "timing", "dispatch_dtype", "tokens")  # what a reader is told of the key


@dataclass(frozen=True)
class Verdict:
    """One row's verdict; figures are in the metric's unit, `change_pct` above 0 is worse."""

    key: Row
    word: str
    red: bool
    reason: str
    baseline: float | None
    new: float | None
    change_pct: float | None
    threshold_pct: float | None
    starts: str
    repro: str


@dataclass(frozen=True)
class Gate:
    """What the gate said of a night."""

    file: str
    night: str
    line: str
    suspects: list[str]
    notices: list[str]
    counts: dict[str, int]
    verdicts: list[Verdict]
    baseline: str
    exit: int

    @property
    def red(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.red]


def read_gate(path: Path) -> Gate:
    """Raises UsageError on a file that is no verdict file of this schema."""
    try:
        record = json.loads(path.read_text())
        if record["schema"] != SCHEMA:
            raise UsageError(f"{path}: is of schema {record['schema']}, this version reads {SCHEMA}")
        return Gate(
            file=path.name,
            night=str(record["night"]),
            line=str(record["line"]),
            suspects=[str(each) for each in record["suspects"]],
            notices=[str(each) for each in record["notices"]],
            counts={str(word): int(count) for word, count in record["counts"].items()},
            verdicts=[_verdict(each) for each in record["verdicts"]],
            baseline=str(record["baseline"]),
            exit=int(record["exit"]),
        )
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: is not a file of verdicts; give verdicts_<night>.json of nightly.sh") from error


def _verdict(record: Mapping[str, Any]) -> Verdict:
    again = f", {record['again']} of them again" if record["again"] else ""
    return Verdict(
        key={name: str(record[name]) for name in LABEL_COLUMNS},
        word=str(record["verdict"]),
        red=bool(record["red"]),
        reason=str(record["reason"]),
        baseline=_figure(record["baseline_median"]),
        new=_figure(record["new_median"]),
        change_pct=_figure(record["change_pct"]),
        threshold_pct=_figure(record["threshold_pct"]),
        starts=f"{record['starts']} against {record['baseline_starts']} of {record['nights']} nights{again}",
        repro=str(record["repro"]),
    )


def _figure(value: object) -> float | None:
    return None if value is None else float(value)  # type: ignore[arg-type]


def find_gate(paths: Sequence[Path], results: Results) -> Gate | None:
    """The verdicts on the newest run that was given, from the folders of the results; None if there are none.

    An older night's are left out, with a notice if its rows were given. Raises UsageError if the newest run's file is
    there and can't be read: red must not go unseen.
    """
    folders = {path if path.is_dir() else path.parent for path in paths}
    files = sorted((file for folder in folders for file in folder.glob(GLOB)), key=_night_order)
    runs = results.runs
    if not files or _night(files[-1]) not in runs:
        return None
    if _night(files[-1]) != runs[-1]:
        results.notices.append(f"{files[-1].name} is not shown: {runs[-1]} is newer; --verdicts shows it all the same")
        return None
    return read_gate(files[-1])


def _night(path: Path) -> str:
    return path.stem.removeprefix("verdicts_")


def _night_order(path: Path) -> tuple[str, int, str]:
    return stamp_order(_night(path))


@dataclass(frozen=True)
class Compared:
    """Medians side by side, with no claim about what the difference means."""

    case: Case
    baseline_us: float
    new_us: float

    @property
    def change_pct(self) -> float:
        return 100 * (self.new_us / self.baseline_us - 1)


def compare(cases: Mapping[Key, Case], baseline: Results) -> tuple[list[Compared], int]:
    """Cases that both have, largest change first, and how many of ours have no counterpart. Only equal cases meet."""
    by_key: dict[Key, list[dict[str, str]]] = {}
    for row in baseline.rows:
        by_key.setdefault(case_key(row), []).append(row)
    found, alone = [], 0
    for key, case in cases.items():
        new = case.now(LATENCY)
        if new is None:
            continue
        old = middle(by_key.get(key, []), LATENCY)
        if old:
            found.append(Compared(case, old, new))
        else:
            alone += 1
    return sorted(found, key=lambda each: -abs(each.change_pct)), alone
