"""Reads what a report is made of: rows, and beside them measured peaks, machine fingerprints. Files only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lib.history import NIGHT_HEADER
from lib.repro import options
from lib.rows import COLUMNS, HEADER, SchemaError, dict_rows, read_rows
from tools.arguments import UsageError

Row = dict[str, str]  # the columns of lib/rows.py, and `run`: the night of a night's file, else the stamp

STAMP = re.compile(r"(\d{8}T\d{6}Z)(?:-(\d+))?")
LARGEST = 1e18  # of bytes, microseconds or anything else in a row
FIRST_COLUMNS = (NIGHT_HEADER.removesuffix(HEADER), HEADER.partition(",")[0] + ",")  # of nights and baselines, of runs


@dataclass
class Results:
    """All rows that were given, oldest run first. `notices` says what was left out, and why."""

    rows: list[Row] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    peaks: dict[str, dict[str, Any]] = field(default_factory=dict)  # by their `source`, as rows name it
    fingerprints: dict[str, dict[str, Any]] = field(default_factory=dict)  # by stamp
    files: int = 0

    @property
    def runs(self) -> list[str]:
        """Stamps of runs and nights, oldest first."""
        return sorted({row["run"] for row in self.rows}, key=stamp_order)


def stamp_order(stamp: str) -> tuple[str, int, str]:
    """Sorts stamps by time: `...Z-10` comes after `...Z-9`."""
    match = STAMP.fullmatch(stamp)
    return (match[1], int(match[2] or 1), "") if match else ("", 0, stamp)


def stamp_time(stamp: str) -> datetime | None:
    """When a run started, or None if the stamp does not say."""
    match = STAMP.fullmatch(stamp)
    try:
        return datetime.strptime(match[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc) if match else None
    except ValueError:
        return None


def number(row: Row, column: str) -> float | None:
    """A cell as a number; None if it is blank, or nothing that was ever measured: text, inf, 1e300."""
    text = row[column]
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < LARGEST else None


def read_results(paths: Sequence[Path], only: Sequence[tuple[str, str]] = ()) -> Results:
    """Rows of these files, and of every CSV of rows in these folders.

    `only`: keep rows whose columns have these values. Raises UsageError on a path that is not there, and if every file
    that was named is unreadable: a page about nothing would look like a page without trouble.
    """
    results = Results()
    seen: set[tuple[str, ...]] = set()
    problems: list[str] = []
    for path in paths:
        for file in _csv_files(path, results.notices):
            problems += _add_file(results, file, seen, only)
    if problems and not results.files:
        raise UsageError(problems[0])
    results.notices += [f"left out: {problem}" for problem in problems]
    for folder in {path if path.is_dir() else path.parent for path in paths}:
        _read_peaks(results, folder)
    results.rows.sort(key=lambda row: stamp_order(row["run"]))
    return results


def _csv_files(path: Path, notices: list[str]) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"{path}: there is no such file or folder")
    files = sorted(file for file in path.glob("*.csv") if _looks_like_rows(file))
    if not files:
        notices.append(f"{path}: no CSV of rows in this folder")
    return files


def _looks_like_rows(path: Path) -> bool:
    """Rows of any schema: other tables in a folder are nobody's mistake, rows of another version are told."""
    try:
        with path.open(errors="replace") as file:
            return file.readline().startswith(FIRST_COLUMNS)
    except OSError:
        return False


def _add_file(results: Results, path: Path, seen: set[tuple[str, ...]], only: Sequence[tuple[str, str]]) -> list[str]:
    """Returns what keeps the file from being read: another schema, or no permission."""
    try:
        rows, torn = _read(path)
    except (SchemaError, OSError) as error:
        return [str(error)]
    results.files += 1
    if torn:
        results.notices.append(f"{path.name}: a torn last line was left out")
    twice = 0
    for line in rows:
        if line.get("again") == "1":  # of suspects only, so it would pull a night's median
            continue
        row = {name: line.get(name) or "" for name in COLUMNS}  # a line that lost cells by hand has None in their place
        cells = tuple(row.values())
        if cells in seen:
            twice += 1
            continue
        seen.add(cells)
        row["run"] = line.get("night") or row["stamp"]
        row["place"] = f"{path} {line.get('start') or ''}"  # two rows of one case there: the later one counts
        row["options"] = options(row)
        if all(row[column] == value for column, value in only):
            results.rows.append(row)
    if twice:
        results.notices.append(f"{path.name}: {twice} rows are the same as rows read before, and count once")
    _read_fingerprint(results, path.with_suffix(".jsonl"))
    return []


def _read(path: Path) -> tuple[list[dict[str, str]], bool]:
    """Rows of one run's file or of a night's, and whether a torn last line was dropped. Raises SchemaError, OSError."""
    with path.open(errors="replace") as file:
        if file.readline() != NIGHT_HEADER:
            return read_rows(path)
        *lines, tail = file.read().split("\n")
    return dict_rows(path, [NIGHT_HEADER, *lines]), bool(tail)


def _read_peaks(results: Results, folder: Path) -> None:
    """Measured peaks by the name that rows call them."""
    for file in folder.glob("peaks_*.json"):
        peaks = _json_object(file.read_text(errors="replace"))
        if peaks and "source" in peaks:
            results.peaks.setdefault(str(peaks["source"]), peaks)


def _read_fingerprint(results: Results, records: Path) -> None:
    """The machine, from the first record: all of a file are of one."""
    if not records.is_file():
        return
    with records.open(errors="replace") as lines:
        record = _json_object(lines.readline()) or {}
    row, machine = record.get("row"), record.get("fingerprint")
    if isinstance(row, dict) and isinstance(machine, dict):
        results.fingerprints.setdefault(str(row.get("stamp")), machine)


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def wire_peak_gbps(results: Results, rows: Iterable[Row]) -> tuple[float, str] | None:
    """The measured wire peak that these rows were held against, and where it comes from; None if no file has it."""
    for source in sorted({row["peak_source"] for row in rows if row["peak_source"]}, reverse=True):
        gbps = (results.peaks.get(source) or results.peaks.get(_source_in_file(source)) or {}).get("wire_gbps")
        if isinstance(gbps, (int, float)) and gbps > 0:
            return float(gbps), source
    return None


def _source_in_file(peak_source: str) -> str:
    """With PEAKS=<file> a row names the file: `peaks_<stamp>.json` holds what was `measured <stamp>`."""
    match = STAMP.search(peak_source)
    return f"measured {match[0]}" if match else ""
