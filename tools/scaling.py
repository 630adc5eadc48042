#!/usr/bin/env python3
"""What more ranks cost: the same cases at several numbers of ranks, side by side, as Markdown.

    python -m tools.scaling results/ep2 results/ep4 results/ep8 [--metric lat_us_p50] [--only timing=graph]

Tokens are those of a rank, so this is weak scaling: an exchange that cost the same at any number of ranks would have
the same latency in every column. A case is what agrees in every input but the ranks; of a case that was measured
more than once the newest run counts, its median. Reads CSVs of rows, or folders of them. Exit code: 0 a table; 2 usage;
3 no case at two numbers of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a file, from any folder

from lib.history import MARKS
from lib.knob_types import UNTIMED
from lib.talk import say, show
from tools.arguments import OneLineParser, UsageError, column, condition
from tools.report_cases import FORMAT_COLUMNS, LATENCY, PANEL_COLUMNS, SERIES_COLUMNS, find_cases
from tools.report_data import Row, number, read_results

USAGE_EXIT, NOTHING_EXIT = 2, 3
LIGHT = "sol_pct"
SHAPE = ("device", "num_experts", "topk", "hidden", "inter", "routing", "seed", "warmup", "iters", "l2")
NAMES = ("section", "variant", "options", "num_sms", "timing", "dispatch_dtype", "tokens")
INPUTS = tuple(
    name for name in (*PANEL_COLUMNS, *FORMAT_COLUMNS, *SERIES_COLUMNS, "tokens") if name not in ("world", "nodes")
)

Inputs = tuple[str, ...]
Ranks = tuple[int, int]  # of all nodes, and nodes
Figures = dict[Ranks, dict[str, float]]  # {ranks: {column: value}}


def by_ranks(rows: Sequence[Row], metric: str) -> dict[Inputs, Figures]:
    """Of each case, its figures at each number of ranks: the metric's, and % of the speed of light if it has that.

    Rows that are marked (tainted, throttled, contended) or unchecked count as little as those that are not ok.
    """
    timed = [row for row in rows if row["status"] == "ok" and row["timing"] != UNTIMED and is_clean(row)]
    found: dict[Inputs, Figures] = {}
    for case in find_cases(timed).values():
        row = case.rows[-1]
        inputs = tuple(row[name] for name in INPUTS)
        figures = {name: value for name in (metric, LIGHT) if (value := case.now(name)) is not None}
        if metric in figures:
            found.setdefault(inputs, {})[ranks_of(row)] = figures
    return found


def is_clean(row: Row) -> bool:
    return min(ranks_of(row)) > 0 and row["check"] != "skipped" and not any(row[mark] == "1" for mark in MARKS)


def ranks_of(row: Row) -> Ranks:
    world, nodes = (number(row, column) or 0 for column in ("world", "nodes"))
    return int(world), int(nodes)


def named(ranks: Ranks) -> str:
    return f"EP{ranks[0]}" + (f" on {ranks[1]} nodes" if ranks[1] > 1 else "")


def tables(found: Mapping[Inputs, Figures], metric: str) -> list[str]:
    """Markdown: a table for each shape, of the cases that are there at two numbers of ranks or more."""
    shapes: dict[Inputs, dict[Inputs, Figures]] = {}
    for inputs, figures in found.items():
        if len(figures) > 1:
            row = dict(zip(INPUTS, inputs, strict=True))
            shapes.setdefault(tuple(row[name] for name in SHAPE), {})[inputs] = figures
    lines: list[str] = []
    for shape, cases in shapes.items():
        lines += ["", ", ".join(f"{name} {value}" for name, value in zip(SHAPE, shape, strict=True) if value), ""]
        lines += table(cases, metric)
    return lines[1:]


def table(cases: Mapping[Inputs, Figures], metric: str) -> list[str]:
    """Columns that are blank in every case are left out, and so are inputs in which no two cases differ."""
    worlds = sorted({each for figures in cases.values() for each in figures})
    rows = [dict(zip(INPUTS, inputs, strict=True)) for inputs in cases]
    names = [name for name in NAMES if any(row[name] for row in rows)]
    names = [name for name in names if name in ("variant", "tokens") or len({row[name] for row in rows}) > 1]
    lit = [each for each in worlds if any(LIGHT in figures.get(each, {}) for figures in cases.values())]
    heads = [*names, *(f"{named(each)} {metric}" for each in worlds), "most / fewest ranks"]
    heads += [f"{named(each)} % of light" for each in lit]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row, figures in zip(rows, cases.values(), strict=True):
        values = {each: figures[each][metric] for each in worlds if each in figures}
        cells = [row[name].replace("|", "/") for name in names]
        cells += [f"{values[each]:.1f}" if each in values else "" for each in worlds]
        cells.append(ratio(values))
        cells += [f"{figures[each][LIGHT]:.1f}" if LIGHT in figures.get(each, {}) else "" for each in lit]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def ratio(values: Mapping[Ranks, float]) -> str:
    fewest = values[min(values)]
    return f"{values[max(values)] / fewest:.2f}" if fewest else ""


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="scaling", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="CSV", help="rows, or folders of them")
    parser.add_argument("--metric", type=column, default=LATENCY, help=f"column to lay side by side ({LATENCY})")
    only = "keep rows whose column has this value; may be given again"
    parser.add_argument("--only", type=condition, action="append", default=[], metavar="COLUMN=VALUE", help=only)
    try:
        options = parser.parse_args(argv)
        results = read_results(options.paths, options.only)
    except UsageError as error:
        say(f"scaling: {error}")
        return USAGE_EXIT
    for notice in results.notices:
        say(f"notice: {notice}")
    found = by_ranks(results.rows, options.metric)
    lines = tables(found, options.metric)
    if not lines:
        say(f"scaling: {len(found)} cases have {options.metric}, none of them at two numbers of ranks")
        return NOTHING_EXIT
    show(lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
