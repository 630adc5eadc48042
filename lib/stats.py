"""Reductions over iterations and ranks. A series is `samples[iteration][rank]`, in microseconds.

The statistic of a row is never a mean of ranks: a collective is as slow as its slowest rank (docs/method.md).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median

Series = Sequence[Sequence[float]]

MIN_SAMPLES_FOR_P99 = 200  # under that, the 99th percentile is one of the two largest samples


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between order statistics (what numpy calls `linear`)."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def max_over_ranks(samples: Series) -> list[float]:
    return [max(ranks) for ranks in samples]


def median_over_ranks(samples: Series) -> list[float]:
    return [median(ranks) for ranks in samples]


def latency_columns(series: Sequence[float]) -> dict[str, float | None]:
    """The lat_us_* columns of a series that is already reduced over ranks."""
    return {
        "lat_us_p50": median(series),
        "lat_us_mean": fmean(series),
        "lat_us_min": min(series),
        "lat_us_p90": percentile(series, 90),
        "lat_us_p99": percentile(series, 99) if len(series) >= MIN_SAMPLES_FOR_P99 else None,
        "lat_us_max": max(series),
    }


def slowest_rank(arrivals: Series) -> int:
    """The rank that is latest most often; the lowest of equals."""
    latest = Counter(max(range(len(ranks)), key=ranks.__getitem__) for ranks in arrivals)
    most = max(latest.values())
    return min(rank for rank, count in latest.items() if count == most)


def skew_us(arrivals: Series) -> float:
    """Median over iterations of latest minus earliest arrival at the call's first collective."""
    return median(max(ranks) - min(ranks) for ranks in arrivals)


def gap_us(gaps: Series, totals: Series) -> float:
    """Median over iterations of the time between timed phases on that iteration's slowest rank."""
    chosen = []
    for gap, total in zip(gaps, totals, strict=True):
        chosen.append(gap[max(range(len(total)), key=total.__getitem__)])
    return median(chosen)


def drift_us(periods: Sequence[float]) -> float:
    """Median of the late half minus median of the early half of one chain."""
    half = len(periods) // 2
    return median(periods[half:]) - median(periods[:half]) if half else 0.0
