"""The table of all rows as compact JSON: texts are numbers into one list of words, a repro line is a list of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.report_cases import FORMAT_COLUMNS, PANEL_COLUMNS, SERIES_COLUMNS, marks
from tools.report_data import Row, number

# heading, column; in this order
LABELS = (("status", "status"), ("section", "section"), ("variant", "variant"), ("timing", "timing"))
FIGURES = (
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
ALWAYS = ("section", "variant", "timing")
OWN_TEXT = ("check", "run")


class Words:
    """Texts by number, each kept once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def table_data(rows: Sequence[Row]) -> dict[str, Any]:
    """{"columns": [[heading, kind]], "words": [...], "rows": [[...]]}; kind t = word, n = number or null, r = repro.

    Columns that are blank throughout are left out; an input that never differs is too: the page's head tells it.
    """
    words = Words()
    inputs = [name for name in (*PANEL_COLUMNS, *FORMAT_COLUMNS, *SERIES_COLUMNS) if name not in ALWAYS]
    differing = [name for name in inputs if len({row[name] for row in rows}) > 1]
    figures = [(heading, name) for heading, name in FIGURES if any(row[name] for row in rows)]
    texts = [*LABELS, *((name, name) for name in differing)]
    columns = [[heading, "t"] for heading, _ in texts] + [["tokens", "n"]]
    columns += [[heading, "n"] for heading, _ in figures]
    columns += [["check", "t"], ["marks", "t"], ["run", "t"], ["reason", "t"], ["repro", "r"]]
    lines = []
    for row in rows:
        line: list[Any] = [words(row[name]) for _, name in texts]
        line.append(_short(number(row, "tokens")))
        line += [_short(number(row, name)) for _, name in figures]
        line += [words(row["check"]), words(", ".join(marks(row))), words(row["run"]), words(row["reason"])]
        line.append([words(part) for part in row["repro"].split(" ")])
        lines.append(line)
    return {"columns": columns, "words": list(words.numbers), "rows": lines}


def _short(value: float | None) -> float | int | None:
    return int(value) if value is not None and value == int(value) else value
