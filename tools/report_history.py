"""How a case moved from run to run, and where its level changed.

A change point lies before run i of x_1..x_n if, with b and a the medians of the up to WINDOW runs before it and from it
on, and m the median of the absolute residuals of both windows from their own medians (1.4826 m estimates a deviation),

    |a - b| > max(0.05 b, 4 * 1.4826 m)

and the change can be seen: x_i lies nearer to a and the run before it nearer to b, as at least LEAST runs of each
window do. Among such runs closer than APART, the one with the least residuals is kept. Sixty runs of pure noise get no
mark at 1 and 2 % noise and one in nine series at 5 and 10 %; a step of 10 % is found in 8 of 10 series at 2 % noise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from tools.report_cases import LATENCY, Case
from tools.report_data import Row, number

WINDOW, LEAST, APART = 8, 3, 4
SMALLEST_SHIFT = 0.05
NOISE_FACTOR = 4 * 1.4826
MARKED = ("throttled", "contended", "tainted")  # never part of a baseline, and so of no change either


@dataclass(frozen=True)
class Change:
    run: str  # the first one at the new level
    index: int  # of that run among the points
    pct: float  # positive = slower


@dataclass
class History:
    """Points of one case, oldest first: median p50 of a run's ok rows. Marked rows are left out."""

    case: Case
    runs: list[str]
    values_us: list[float]
    changes: list[Change]

    @property
    def last_pct(self) -> float | None:
        """The newest point against the median of up to WINDOW points before it."""
        if len(self.values_us) < 2:
            return None
        before = median(self.values_us[-1 - WINDOW : -1])
        return 100 * (self.values_us[-1] / before - 1)


def history(case: Case) -> History:
    by_run: dict[str, list[float]] = defaultdict(list)
    for row in case.rows:
        value = number(row, LATENCY)
        if row["status"] == "ok" and value is not None and value > 0 and not is_marked(row):
            by_run[row["run"]].append(value)
    values = [median(found) for found in by_run.values()]
    runs = list(by_run)
    return History(case, runs, values, [Change(runs[i], i, pct) for i, pct in change_points(values)])


def is_marked(row: Row) -> bool:
    return any(row[column] == "1" for column in MARKED)


def change_points(values: Sequence[float]) -> list[tuple[int, float]]:
    """(index of the first value at the new level, change in %) by the rule above. `values`: positive, oldest first."""
    found = []
    for index in range(LEAST, len(values) - LEAST + 1):
        before, after = values[max(0, index - WINDOW) : index], values[index : index + WINDOW]
        old, new = median(before), median(after)
        residuals = [abs(value - old) for value in before] + [abs(value - new) for value in after]
        clear = abs(new - old) > max(SMALLEST_SHIFT * old, NOISE_FACTOR * median(residuals))
        if clear and _seen(before, old, new, -1) and _seen(after, new, old, 0):
            found.append((fmean(residuals) / abs(new - old), index, 100 * (new / old - 1)))
    kept: list[tuple[int, float]] = []
    for _, index, pct in sorted(found):
        if all(abs(index - other) >= APART for other, _ in kept):
            kept.append((index, pct))
    return sorted(kept)


def _seen(window: Sequence[float], own: float, other: float, edge: int) -> bool:
    """The value at the change, and at least LEAST of them all, lie nearer to their own level than to the other."""
    nearer = [abs(value - own) < abs(value - other) for value in window]
    return nearer[edge] and sum(nearer) >= LEAST
