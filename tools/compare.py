#!/usr/bin/env python3
"""Compare rows with a baseline, by the rules of the nightly gate (docs/nightly.md).

    python -m tools.compare BASELINE NEW [--metric lat_us_p50] [--json FILE]

Each of the two is a CSV of rows, of a night (night_*.csv) or of a baseline, or a folder of them. What differs beside
the figures is told too: versions, transport, code. Nothing can be run again here: a slower row is judged by p <= 0.002.
NEW needs 4 starts at least (four ./run_sweep.sh within hours of each other) and BASELINE 5 nights of 4. For two single
runs there is `python -m tools.report NEW --baseline BASELINE`: medians side by side, and no verdict.
Exit code: 0 no row is worse and at least one could be judged; 2 usage, also a metric that has no direction, a NEW that
can't be read and a --json that can't be written; 3 worse, lost or not comparable, or no baseline.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

if __package__ in (None, ""):  # started as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib import verdicts
from lib.gate import BETTER, METRIC
from lib.history import BaselineError, Row, read_all, write_whole
from lib.rows import SchemaError
from lib.talk import say, show
from lib.verdict_text import document_lines

USAGE_EXIT, RED_EXIT = 2, verdicts.RED_EXIT


class NewError(Exception):
    """NEW is no file of rows: a slip of whoever typed it, and no verdict on what was measured."""


def read_new(path: Path) -> tuple[list[Row], list[str]]:
    try:
        return read_all(path)
    except (BaselineError, SchemaError, OSError) as error:
        raise NewError(str(error)) from error


def sides(baseline: Path, new: Path) -> tuple[list[Row], list[Row], list[str]]:
    """Rows of both; of NEW the latest night. Raises BaselineError where a side has no row to compare, and NewError."""
    rows, more = read_new(new)
    old, told = read_all(baseline)
    for path, found in ((baseline, old), (new, rows)):
        if not found:
            raise BaselineError(f"{path}: has a header and no rows; nothing to compare")
    notices = [*told, *more]
    night = max(row["night"] for row in rows)
    nights = {row["night"] for row in rows}
    if len(nights) > 1:
        notices.append(f"{new}: has {len(nights)} nights; the last one, {night}, is compared")
    before = [row for row in old if row["night"] != night]
    if len(before) < len(old) and before:
        notices.append(f"{baseline}: night {night} is the one compared and is left out of the baseline")
        old = before
    if max(row["night"] for row in old) > night:
        notices.append(f"{baseline}: has nights after {night}: is it the newer side, or did a clock go back?")
    return old, [row for row in rows if row["night"] == night], notices


def compare(baseline: Path, new: Path, metric: str) -> dict[str, object]:
    """The document of docs/nightly.md, "verdicts_<night>.json"."""
    old, tonight, notices = sides(baseline, new)
    rows, _ = verdicts.judge_all(old, tonight, metric)
    return verdicts.document(tonight[0]["night"], old, tonight, rows, str(baseline), notices)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline", type=Path, metavar="BASELINE")
    parser.add_argument("new", type=Path, metavar="NEW")
    parser.add_argument("--metric", default=METRIC, help=f"column to judge by ({METRIC})")
    parser.add_argument("--json", type=Path, help="also write all verdicts there")
    given = parser.parse_args()
    if given.metric not in BETTER:
        parser.error(f"--metric {given.metric}: no direction is known for it; choose from: {' '.join(BETTER)}")
    try:
        document = compare(given.baseline, given.new, given.metric)
        # without an indent it is ten times as quick, and says the same of a figure that is none
        text = json.dumps(document, indent=1 if given.json else None, allow_nan=False) + "\n"
    except NewError as error:
        say(str(error))
        return USAGE_EXIT
    except (BaselineError, SchemaError, OSError, ValueError) as error:  # the last: a cell that is no number
        say(str(error))
        return RED_EXIT
    show(document_lines(document))
    try:
        if given.json:
            write_whole(given.json, text)
    except OSError as error:
        say(f"--json {given.json}: cannot be written ({error.strerror}); give another name")
        return USAGE_EXIT
    return int(str(document["exit"]))


if __name__ == "__main__":
    sys.exit(main())
