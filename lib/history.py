"""Nights on disk: what a night's starts wrote, gathered in one CSV a night; the accepted baseline; what is kept.

A night's file is whole or absent (lib/nightly.py writes it under another name first). Standard library only.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from lib.rows import COLUMNS, HEADER, SCHEMA, SchemaError, cell, dict_rows, read_rows

Row = dict[str, str]
NIGHT_COLUMNS = ("night", "start", "again", *COLUMNS)  # again = 1: of the second run that suspects get
NIGHT_HEADER = ",".join(NIGHT_COLUMNS) + "\n"
STAMP = r"\d{8}T\d{6}Z(?:-\d+)?"
AGAIN = "again-"  # folders of a night: 1, 2, ... and again-1-<section>, ...
SAME_NIGHT = timedelta(hours=6)  # plain rows name no night: starts less than this apart are of one,
LONGEST_NIGHT = timedelta(hours=12)  # and this far from its first; else a run every five hours is a night of a week
VERDICT_KEYS = {"machine": str, "line": str, "exit": int, "verdicts": list}  # that others read
MARKS = ("throttled", "contended", "tainted")


class BaselineError(Exception):
    """A file that cannot be compared with: the gate fails closed on it."""


def utc(stamp: str) -> datetime:
    return datetime.strptime(stamp[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)


def is_stamp(text: str) -> bool:
    """One like 20261130T190000Z or 20261130T190000Z-2, of a time that there is."""
    if not re.fullmatch(STAMP, text):
        return False
    try:
        utc(text)
    except ValueError:
        return False
    return True


def machine_key(row: Mapping[str, str]) -> str:
    """Whose baseline a row belongs to: the device and how many of it, as part of a file name."""
    device = re.sub(r"[^a-z0-9]+", "-", row["device"].lower()).strip("-")
    return f"{device}-x{row['world']}" + (f"-{row['nodes']}-nodes" if row["nodes"] != "1" else "")


def is_stream(path: Path) -> bool:
    """A pipe, a terminal, /dev/null: a file put in its place would take it from everybody. Raises OSError."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_whole(path: Path, text: str) -> None:
    """Complete on disk before it takes its name, so that no reader ever sees half of it. Raises OSError.

    A stream is written to as it is; a link stays one.
    """
    if is_stream(path):
        path.write_text(text)
        return
    path = Path(os.path.realpath(path))
    fresh = path.with_name(f".{path.name}.new")
    try:
        with fresh.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def as_text(rows: Iterable[Mapping[str, str]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in rows:
        writer.writerow([cell(row[name]) for name in NIGHT_COLUMNS])
    return NIGHT_HEADER + out.getvalue()


# --- reading ----------------------------------------------------------------------------------------------------------


def read(path: Path) -> tuple[list[Row], list[str]]:
    """Rows with night, start and again, of a night's file, a baseline, or plain rows; and notices.

    Raises BaselineError on a file that is missing, empty or of another schema, or has a line without one cell a column;
    SchemaError on a line that is no CSV.
    """
    try:
        *lines, tail = path.read_text(errors="replace").split("\n")
    except OSError as error:
        raise BaselineError(f"{path}: cannot be read ({error.strerror}); nothing to compare with") from error
    header = lines[0] + "\n" if lines else ""
    if header not in (HEADER, NIGHT_HEADER):
        what = "is empty" if not lines and not tail else f"its header is not that of schema {SCHEMA}"
        raise BaselineError(f"{path}: {what}; give a CSV that this version of the suite wrote")
    rows = dict_rows(path, lines)
    for number, row in enumerate(rows, 2):
        if row["repro"] is None or None in row:
            raise BaselineError(f"{path}: line {number} has not one cell a column; mend it or leave it out")
    notices = [f"{path.name}: a torn last line was left out"] if tail else []
    return (rows if header == NIGHT_HEADER else with_nights(rows)), notices


def with_nights(rows: list[Row]) -> list[Row]:
    """Plain rows: each stamp is a start, and stamps less than SAME_NIGHT apart are one night, named by the first.

    A case that a stamp has twice (RESUME after a change) counts by its last row.
    """
    places: dict[str, tuple[str, str]] = {}
    night, before, count = "", None, 0
    for stamp in sorted({row["stamp"] for row in rows}):
        if not is_stamp(stamp):
            raise BaselineError(f"stamp '{stamp}' is not one like 20261130T190000Z; is this a file of the suite?")
        if before is None or utc(stamp) - before > SAME_NIGHT or utc(stamp) - utc(night) > LONGEST_NIGHT:
            night, count = stamp, 0
        before, count = utc(stamp), count + 1
        places[stamp] = (night, str(count))
    last = {(row["stamp"], row["section"], row["variant"], row["repro"], row["device"]): row for row in rows}
    return [
        {"night": places[row["stamp"]][0], "start": places[row["stamp"]][1], "again": "0", **row}
        for row in last.values()
    ]


def read_all(path: Path) -> tuple[list[Row], list[str]]:
    """As `read`, and also a folder: all of its night files, or, if there are none, all of its row files."""
    if not path.is_dir():
        return read(path)
    files = sorted(path.glob("night_*.csv")) or sorted([*path.rglob("bench_*.csv"), *path.rglob("sweep_*.csv")])
    if not files:
        raise BaselineError(f"{path}: has no night_*.csv and no rows (bench_*.csv, sweep_*.csv)")
    rows: list[Row] = []
    notices: list[str] = []
    for file in files:
        more, told = read(file)
        rows += more
        notices += told
    plain = not files[0].name.startswith("night_")
    return (with_nights([{name: row[name] for name in COLUMNS} for row in rows]) if plain else rows), notices


# --- nights of a folder -----------------------------------------------------------------------------------------------


def night_files(folder: Path) -> dict[str, Path]:
    """Gathered nights by stamp, oldest first."""
    return _by_stamp(folder, rf"night_({STAMP})\.csv")


def night_folders(folder: Path) -> dict[str, Path]:
    return _by_stamp(folder, rf"night_({STAMP})")


def verdict_files(folder: Path) -> dict[str, Path]:
    return _by_stamp(folder, rf"verdicts_({STAMP})\.json")


def read_verdicts(path: Path) -> dict[str, Any]:
    """A night's verdicts. Raises BaselineError, which names the file, on one that was torn or edited."""
    try:
        document = json.loads(path.read_text())
        told = {name: kind for name, kind in VERDICT_KEYS.items() if not isinstance(document[name], kind)}
        known = not told and all({"case", "verdict", "streak"} <= set(row) for row in document["verdicts"])
    except (ValueError, TypeError, KeyError, RecursionError):
        known = False
    if not known:
        raise BaselineError(f"{path}: is not what a night wrote; move it away")
    return dict(document)


def _by_stamp(folder: Path, pattern: str) -> dict[str, Path]:
    """A name whose digits are no date is not a night's: it is left alone."""
    found = {match[1]: path for path in folder.iterdir() if (match := re.fullmatch(pattern, path.name))}
    return {stamp: path for stamp, path in sorted(found.items()) if is_stamp(stamp)}


def gather(folder: Path, night: str) -> list[Row]:
    """Rows of all starts of a night; a case that a start has twice (RESUME after a change) counts by its last row."""
    rows: list[Row] = []
    for start in sorted((folder / f"night_{night}").iterdir()):
        match = re.fullmatch(rf"({AGAIN})?(\d+)(-\w+)?", start.name)
        if match is None:
            continue
        place = {"night": night, "start": match[2], "again": "1" if match[1] else "0"}
        for file in sorted(start.glob("sweep_*.csv")):
            try:
                found, _ = read_rows(file)
            except SchemaError:
                if file.stat().st_size >= len(HEADER):
                    raise
                continue  # the disk was full, or the run killed, before its header was whole
            rows += {(row["variant"], row["repro"]): place | row for row in found}.values()
    return rows


def prune(folder: Path, keep: int) -> list[str]:
    """Remove all but the newest `keep` nights; the baseline holds copies. Returns the stamps that went."""
    gone = list(night_folders(folder) | night_files(folder))
    gone = sorted(gone)[:-keep] if len(gone) > keep else []
    for night in gone:
        shutil.rmtree(folder / f"night_{night}", ignore_errors=True)
        for name in (f"night_{night}.csv", f"verdicts_{night}.json", f"report_{night}.html"):
            (folder / name).unlink(missing_ok=True)
    return gone
