#!/usr/bin/env python3
"""One page of a run, or of many: what is red, which variant wins where, plots, history, every row with its repro line.

Reads files only: CSVs of rows, and what lies beside them (JSONL, measured peaks, verdicts of the nightly gate). Needs
matplotlib and jinja2 for the page; the Markdown needs nothing.

    tools/report.py results --out report.html
    tools/report.py results/sweep_20261130T221332Z_comm.csv --baseline results/baseline_nvidia-h200-x2.csv
    tools/report.py results --only timing=graph --markdown -
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a file, from any folder

from lib.history import is_stream
from lib.talk import say, show
from tools.arguments import OneLineParser, UsageError, condition
from tools.ready_python import how_to_get
from tools.report_data import read_results
from tools.report_e2e import find_e2e
from tools.report_markdown import markdown
from tools.report_model import Options, Report
from tools.report_verdicts import find_gate, read_gate

USAGE_EXIT, INTERRUPTED_EXIT = 2, 130
PROGRAM = "report"
LONGEST_WORDS = 300
NEEDED = ("matplotlib", "jinja2")
STALE_HOURS = 36.0  # a night and a half: one night that did not come is told the next day


def main(argv: list[str] | None = None) -> int:
    try:
        return _run(_parser().parse_args(argv))
    except UsageError as error:
        say(f"{PROGRAM}: {error}")
        return USAGE_EXIT
    except (OSError, ValueError, RecursionError) as error:  # a path or a file that nobody can read or write
        say(f"{PROGRAM}: {shown(error)}; give other files, or another name")
        return USAGE_EXIT
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT


def shown(error: Exception) -> str:
    """One printable line, whatever the name that it is about."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text.splitlines()[0][:LONGEST_WORDS].encode("ascii", "backslashreplace").decode()


def _parser() -> argparse.ArgumentParser:
    title, about, examples = (__doc__ or "").split("\n\n")
    parser = OneLineParser(
        prog=PROGRAM,
        description=f"{title}\n{about}",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="CSVs of rows, or folders of them")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the page (report.html)")
    parser.add_argument("--markdown", metavar="FILE", help="also a summary in Markdown; - = stdout")
    parser.add_argument("--baseline", type=Path, metavar="B", help="a CSV or folder to show medians beside; no verdict")
    found = "verdicts_<night>.json; by default the one beside the results, if it is of their newest run"
    parser.add_argument("--verdicts", type=Path, metavar="FILE", help=found)
    only = "keep rows whose column has this value; may be given again"
    parser.add_argument("--only", type=condition, action="append", default=[], metavar="COLUMN=VALUE", help=only)
    stale = "age of the newest run from which the page says that it is old; 0 = never (36)"
    parser.add_argument("--stale-hours", type=_hours, default=STALE_HOURS, metavar="H", help=stale)
    parser.add_argument("--title", default="moe-ep-bench", help="heading of the page (moe-ep-bench)")
    return parser


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not 0 <= hours < 1e6:
        raise argparse.ArgumentTypeError(f"{text} must be a number of hours, 0 or more")
    return hours


def _run(options: argparse.Namespace) -> int:
    results = read_results(options.results, options.only)
    gate = read_gate(options.verdicts) if options.verdicts else find_gate(options.results, results)
    baseline = read_results([options.baseline], options.only) if options.baseline else None
    if baseline is not None and gate is not None:
        results.notices.append(f"--baseline {options.baseline} was not used: {gate.file} has the verdicts")
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    page = "" if lacking else str(options.out)
    told = Options(datetime.now(timezone.utc), options.stale_hours, options.title, page)
    report = Report(results, told, gate, baseline, find_e2e(options.results, results.notices))
    if options.markdown:
        _write(options.markdown, markdown(report))
    if lacking:
        raise UsageError(f"no page: {sys.executable} lacks {' and '.join(lacking)}; {how_to_get(*lacking)}")
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # a home that can't be written is no news here
    from tools.report_page import render

    _write(str(options.out), render(report))
    line = f"{PROGRAM}: {options.out}"
    if options.markdown == "-":
        say(line)
    else:
        show([line])
    return 0


def _write(path: str, text: str) -> None:
    """A file is replaced whole: nobody finds half a page; a stream is not. Raises UsageError if it can't be written."""
    if path == "-":
        show([text.rstrip("\n")])
        return
    target = Path(path)
    try:
        if is_stream(target):
            target.write_text(text, encoding="utf-8")
        else:
            _replace(Path(os.path.realpath(target)), text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error


def _replace(target: Path, text: str) -> None:
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)


if __name__ == "__main__":
    raise SystemExit(main())
