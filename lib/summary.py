"""`python -m lib.summary CSV...`: the table that a person sees on stdout at the end of a run."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from lib.rows import STATUSES, read_rows

Row = dict[str, str]

# heading, column, digits after the point
FIGURES = (
    ("p50 us", "lat_us_p50", 1),
    ("dispatch", "dispatch_us", 1),
    ("experts", "experts_us", 1),
    ("combine", "combine_us", 1),
    ("wire GB/s", "dispatch_wire_gbps", 2),
    ("% of light", "sol_pct", 1),
    ("acc %", "acc_loss_pct", 2),
)
LABELS = (("variant", "variant"), ("algo", "algo"), ("timing", "timing"), ("tokens", "tokens"), ("dtype", "dispatch_dtype"))
SHAPE = ("world", "num_experts", "topk", "hidden", "inter", "routing")
REASON_CHARACTERS = 110


def header(rows: list[Row]) -> str:
    """One line: machine, versions, section and what all rows share of the shape."""
    measured = next((row for row in rows if row["versions"]), rows[0])
    shape = " ".join(f"{name}={measured[name]}" for name in SHAPE)
    parts = [measured["section"], measured["device"], shape, measured["versions"], measured["git"]]
    return " | ".join(part for part in parts if part)


def table_lines(rows: list[Row]) -> list[str]:
    """Columns that say nothing in this table (all blank, or a label that never differs) are left out."""
    labels = [(title, name) for title, name in LABELS if name == "variant" or len({row[name] for row in rows}) > 1]
    figures = [figure for figure in FIGURES if any(row[figure[1]] for row in rows)]
    lines = [[title for title, _ in labels] + ["status"] + [title for title, _, _ in figures] + ["check"]]
    for row in rows:
        figure_cells = [f"{float(row[name]):.{digits}f}" if row[name] else "" for _, name, digits in figures]
        lines.append([row[name] for _, name in labels] + [row["status"], *figure_cells, row["check"]])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    left = len(labels) + 1
    text = []
    for line, row in zip(lines, [None, *rows], strict=True):
        cells = [cell.ljust(width) if column < left else cell.rjust(width) for column, (cell, width) in enumerate(zip(line, widths, strict=True))]
        if row is not None and row["reason"]:
            reason = row["reason"]
            shown = reason if len(reason) <= REASON_CHARACTERS else reason[: REASON_CHARACTERS - 1] + "…"
            cells = [*cells[:left], shown]
        text.append("  ".join(cells).rstrip())
    return text


def summary(path: Path) -> list[str]:
    rows, torn = read_rows(path)
    if not rows:
        return [f"{path}: no rows"]
    counts = Counter(row["status"] for row in rows)
    told = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    notice = ["(a torn last line was left out)"] if torn else []
    rows.sort(key=lambda row: STATUSES.index(row["status"]))  # what ran comes first; the file keeps the plan's order
    return [header(rows), *table_lines(rows), f"rows: {path}   {told}", *notice]


def main(paths: list[str]) -> int:
    blocks = ["\n".join(summary(Path(path))) for path in paths if Path(path).exists()]
    sys.stdout.write("\n\n".join(blocks) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
