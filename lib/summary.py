"""`python -m lib.summary CSV...`: the table that a person sees on stdout at the end of a run."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.rows import NOT_RUN, STATUSES, SchemaError, read_rows
from lib.talk import show

Row = dict[str, str]

# heading, column, digits after the point
FIGURES = (
    ("p50 us", "lat_us_p50", 1),
    ("p90 us", "lat_us_p90", 1),
    ("kernel us", "kernel_us", 1),
    ("dispatch", "dispatch_us", 1),
    ("experts", "experts_us", 1),
    ("combine", "combine_us", 1),
    ("stage", "stage_us", 1),
    ("forward", "forward_us", 1),
    ("wire GB/s", "dispatch_wire_gbps", 2),
    ("% of light", "sol_pct", 1),
    ("acc loss %", "acc_loss_pct", 2),
)
LABELS = ("variant", "algo", "timing", "tokens", "dispatch_dtype")
SHAPE = ("world", "num_experts", "topk", "hidden", "inter", "routing")
REASON_CHARACTERS = 110
NAMES_TOLD = 3  # of variants that did not run for one reason


def peaks_text(path: Path) -> str:
    """The ceilings that the run measured, if it did (lib/peaks.py)."""
    try:
        peaks = json.loads(path.read_text())
        wire, hbm, matmul = peaks["wire_gbps"], peaks["hbm_gbps"], peaks["matmul_tflops"]["bf16"]
    except (OSError, ValueError, LookupError, TypeError):  # none were measured, or the file was cut short
        return ""
    wire_text = f"wire {wire:.0f} GB/s, " if wire else ""
    return f"peaks: {wire_text}HBM {hbm:.0f} GB/s, bf16 {matmul:.0f} TFLOP/s"


def header(rows: list[Row], peaks: str) -> str:
    """One line: machine, its measured peaks, versions, section and what all rows share of the shape.

    Versions and commits are all that the rows were made with: RESUME may have gone on with others.
    """
    measured = next((row for row in rows if row["versions"]), rows[0])
    shape = " ".join(f"{name}={measured[name]}" for name in SHAPE)
    commits = ", ".join(dict.fromkeys(row["git"] for row in rows))
    parts = [measured["section"], measured["device"], peaks, shape, all_versions(rows), commits]
    return " | ".join(part for part in parts if part)


def all_versions(rows: list[Row]) -> str:
    """`torch 2.13.0, 2.11.0; numpy 2.4.6`: each package once, in the order of the rows."""
    found: dict[str, dict[str, None]] = {}
    for part in (part for row in rows for part in row["versions"].split("; ") if part):
        name, _, version = part.partition(" ")
        found.setdefault(name, {})[version] = None
    return "; ".join(f"{name} {', '.join(versions)}" for name, versions in found.items())


def row_cells(row: Row, labels: list[str], figures: list[tuple[str, str, int]]) -> list[str]:
    """A row without figures shows its reason where they would stand."""
    named = [row[name] for name in labels] + [row["status"]]
    if row["status"] != "ok":
        return [*named, shortened(row["reason"])]
    return [*named, *(figure(row[name], digits) for _, name, digits in figures), row["check"]]


def shortened(reason: str) -> str:
    return reason if len(reason) <= REASON_CHARACTERS else reason[: REASON_CHARACTERS - 1] + "…"


def not_run_lines(rows: list[Row]) -> list[str]:
    """What did not run here, a line a reason with the variants that share it: `status  variants: reason`."""
    told: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        variants = told.setdefault((row["status"], row["reason"]), [])
        variants += [row["variant"]] if row["variant"] not in variants else []
    lines = []
    for (status, reason), variants in told.items():
        more = f" and {len(variants) - NAMES_TOLD} more" if len(variants) > NAMES_TOLD else ""
        lines.append(f"{status}  {', '.join(variants[:NAMES_TOLD])}{more}: {reason}")
    return lines


def remark_lines(rows: list[Row]) -> list[str]:
    """What ok rows have to say beside their figures, each sentence once with the variants that say it."""
    said: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] == "ok" and row["reason"]:
            variants = said.setdefault(row["reason"], [])
            variants += [row["variant"]] if row["variant"] not in variants else []
    return [f"  {', '.join(variants)}: {shortened(reason)}" for reason, variants in said.items()]


def figure(text: str, digits: int) -> str:
    """Fixed digits in a column; a value that they would show as zero keeps two that count."""
    if not text:
        return ""
    fixed = f"{float(text):.{digits}f}"
    return fixed if float(fixed) or not float(text) else f"{float(text):.2g}"


def table_lines(rows: list[Row]) -> list[str]:
    """Columns that say nothing in this table (all blank, or a label that never differs) are left out."""
    labels = [name for name in LABELS if name == "variant" or len({row[name] for row in rows}) > 1]
    figures = [figure for figure in FIGURES if any(row[figure[1]] for row in rows)]
    heading = [*labels, "status", *(title for title, _, _ in figures), "check"] if figures else [*labels, "status"]
    lines = [heading] + [row_cells(row, labels, figures) for row in rows]
    full = [line for line in lines if len(line) == len(heading)]
    left = len(labels) + 1
    widths = [max(len(line[column]) for line in (lines if column < left else full)) for column in range(len(heading))]
    text = []
    for line in lines:
        pairs = list(zip(line, widths, strict=False))
        cells = [cell.ljust(width) for cell, width in pairs[:left]]
        rest = [cell.rjust(width) for cell, width in pairs[left:]] if len(line) == len(heading) else line[left:]
        text.append("  ".join([*cells, *rest]).rstrip())
    return text


def is_row(row: Mapping[Any, Any]) -> bool:
    """The reader leaves None where a line lacks a cell, and puts cells too many under None."""
    return row["repro"] is not None and None not in row


def whole_rows(path: Path) -> tuple[list[Row], bool]:
    """As `read_rows`, and raises SchemaError also on a line that somebody's edit left without a row's cells."""
    rows, torn = read_rows(path)
    for number, row in enumerate(rows, 2):
        if not is_row(row):
            raise SchemaError(f"{path}: line {number} is not a row; mend it or leave it out")
    return rows, torn


def summary(path: Path) -> list[str]:
    rows, torn = whole_rows(path)
    if not rows:
        return [f"{path}: no rows"]
    counts = Counter(row["status"] for row in rows)
    told = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    notice = ["(a torn last line was left out)"] if torn else []
    order = {status: place for place, status in enumerate(STATUSES)}
    rows.sort(key=lambda row: order.get(row["status"], 0))  # what ran comes first; the file keeps the plan's order
    peaks = peaks_text(path.with_name(f"peaks_{rows[0]['stamp']}.json"))
    ran = [row for row in rows if row["status"] not in NOT_RUN]
    table = [*table_lines(ran), *remark_lines(ran)] if ran else []
    absent = not_run_lines([row for row in rows if row["status"] in NOT_RUN])
    return [header(rows, peaks), *table, *absent, f"rows: {path}   {told}", *notice]


def main(paths: list[str]) -> int:
    show(["\n\n".join(block(Path(path)) for path in paths)])
    return 0


def block(path: Path) -> str:
    try:
        return "\n".join(summary(path))
    except (SchemaError, OSError, ValueError) as error:  # the last: a figure that somebody edited
        return f"{path}: no table ({error})"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
