"""The table of all rows as compact JSON: texts are numbers into one list of words, a repro line is a list of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lib.rows import STATUSES
from tools.report_cases import FORMAT_COLUMNS, PANEL_COLUMNS, RED, marks
from tools.report_data import Row, number

LABELS = ("section", "variant", "timing")
SETTINGS = (*FORMAT_COLUMNS, "num_sms", *(name for name in PANEL_COLUMNS if name not in ("section", "timing")))
ORDER = (*RED, *(status for status in STATUSES if status not in RED))
FIGURES = (  # heading, column
    ("p50 us", "lat_us_p50"),
    ("p90 us", "lat_us_p90"),
    ("quant", "quant_us"),
    ("stage", "stage_us"),
    ("dispatch", "dispatch_us"),
    ("experts", "experts_us"),
    ("forward", "forward_us"),
    ("combine", "combine_us"),
    ("kernel us", "kernel_us"),
    ("dispatch wire GB/s", "dispatch_wire_gbps"),
    ("combine wire GB/s", "combine_wire_gbps"),
    ("TFLOP/s", "tflops"),
    ("% of light", "sol_pct"),
    ("acc loss %", "acc_loss_pct"),
)


class Words:
    """Texts by number, each kept once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def table_data(rows: Sequence[Row]) -> dict[str, Any]:
    """{"columns": [[heading, kind]], "words": [...], "rows": [[...]]}; kind t = word, n = number or null, r = repro.

    Red rows come first, then newest runs. Columns that are blank throughout are left out, settings of one value too.
    """
    words = Words()
    differing = [name for name in SETTINGS if len({row[name] for row in rows} - {""}) > 1]
    figures = [(heading, name) for heading, name in FIGURES if any(row[name] for row in rows)]
    columns = [["status", "t"], ["repro", "r"], *([name, "t"] for name in LABELS), ["tokens", "n"]]
    columns += [[name, "t"] for name in differing]
    columns += [[heading, "n"] for heading, _ in figures]
    columns += [["check", "t"], ["marks", "t"], ["run", "t"], ["reason", "t"]]
    lines = []
    for row in sorted(newest_first(rows), key=lambda row: ORDER.index(row["status"]) if row["status"] in ORDER else 0):
        line: list[Any] = [words(row["status"]), [words(part) for part in row["repro"].split(" ")]]
        line += [words(row[name]) for name in LABELS]
        line.append(_short(number(row, "tokens")))
        line += [words(row[name]) for name in differing]
        line += [_short(number(row, name)) for _, name in figures]
        line += [words(row["check"]), words(", ".join(marks(row))), words(row["run"]), words(row["reason"])]
        lines.append(line)
    return {"columns": columns, "words": list(words.numbers), "rows": lines}


def newest_first(rows: Sequence[Row]) -> list[Row]:
    """Runs newest first, each in its own order. `rows`: oldest run first."""
    by_run: dict[str, list[Row]] = {}
    for row in rows:
        by_run.setdefault(row["run"], []).append(row)
    return [row for run in reversed(by_run) for row in by_run[run]]


def _short(value: float | None) -> float | int | None:
    return int(value) if value is not None and value == int(value) else value
