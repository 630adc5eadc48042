"""The gate's statistics: is tonight slower than the baseline nights? Standard library only.

Every value is a start's metric turned so that larger is worse (`badness`). docs/nightly.md tells why the rules are so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, comb, sqrt
from statistics import fmean, median

MIN_STARTS, MAX_STARTS = 4, 20  # process starts of a night; under 4 a night's median is one start's mood
MIN_NIGHTS, MAX_NIGHTS = 5, 365
FLOOR, CEILING = 0.03, 1.0  # what nobody acts on; what no scatter may hide: more than twice as slow
NIGHT_MADS, START_SPREADS = 3.0, 4.0
TRIM = 0.05  # share of a baseline's starts, the farthest out, that do not count for their spread
# One false red in 1,000 nights of 150 rows: the largest chance that a row may have, whatever its noise looks like.
ALPHA = 1 / 150_000
ALPHA_ONCE = 0.002  # where nothing can be run again: the smallest allowed night against 5 nights reaches 1/10626
BETTER = {
    **dict.fromkeys(
        "lat_us_p50 lat_us_mean lat_us_min lat_us_p90 lat_us_p99 lat_us_max quant_us dispatch_us experts_us combine_us "
        "stage_us forward_us kernel_us host_us gap_us skew_us acc_loss_pct".split(),
        "lower",
    ),
    **dict.fromkeys(
        "tokens_per_s tflops dispatch_dedup_gbps combine_dedup_gbps dispatch_wire_gbps combine_wire_gbps wire_gbps_min "
        "sol_pct".split(),
        "higher",
    ),
}
METRIC = "lat_us_p50"  # what a night is judged by


def badness(value: float, metric: str) -> float:
    """Larger = worse, so that `after / before - 1` is the loss whatever the metric's direction."""
    return value if BETTER[metric] == "lower" else 1 / value


# --- exact one-sided rank tests: the chance that n of n + m exchangeable starts stand so high -------------------------


@lru_cache(maxsize=4096)
def mann_whitney_p(n: int, m: int, inversions: int) -> float:
    """P(at most `inversions` of the n x m pairs (tonight, baseline) are in the wrong order), exactly.

    Mann and Whitney 1947: the counts are the coefficients of the Gaussian binomial [n + m choose n], which is
    prod (1 - q^(m+i)) / (1 - q^i) over i = 1..n; here up to q^inversions, in whole numbers.
    """
    counts = [1] + [0] * inversions
    for i in range(1, n + 1):
        for power in range(inversions, m + i - 1, -1):
            counts[power] -= counts[power - m - i]
        for power in range(i, inversions + 1):
            counts[power] += counts[power - i]
    return sum(counts) / comb(n + m, n)


def precedence_p(n: int, m: int, above: int) -> float:
    """P(at most `above` of m baseline starts are not below the best of tonight's n): C(n + above, n) / C(n + m, n).

    Rosenbaum 1954 (Annals of Mathematical Statistics 25). However far out those few are, they count no more.
    """
    return comb(n + above, n) / comb(n + m, n)


def rank_p(tonight: Sequence[float], baseline: Sequence[float]) -> float:
    """The smaller of both tests' p, doubled as two were made. A tie counts against the alarm."""
    n, m = len(tonight), len(baseline)
    inversions = sum(old >= new for new in tonight for old in baseline)
    above = sum(old >= min(tonight) for old in baseline)
    ranked = mann_whitney_p(n, m, inversions) if 2 * inversions < n * m else 1.0
    return min(1.0, 2 * min(ranked, precedence_p(n, m, above)))


# --- one row ----------------------------------------------------------------------------------------------------------


def relative_mad(values: Sequence[float], centre: float) -> float:
    """Median absolute deviation from `centre`, as a share of it; not scaled to a standard deviation."""
    return median(abs(value - centre) for value in values) / centre


def spread(starts: Sequence[float], centre: float) -> float:
    """Root mean square of the starts' distance from `centre`, as a share of it, the farthest TRIM left out."""
    distances = sorted(abs(start / centre - 1) for start in starts)
    kept = distances[: max(len(distances) - ceil(TRIM * len(distances)), 1)]
    return sqrt(fmean(distance * distance for distance in kept))


def threshold(nights: Sequence[Sequence[float]]) -> float:
    """The loss below which a row is never red: max(3 %, 3 MAD of the night medians, 4 spreads of the starts).

    The MAD of five nights is often near 0 by luck; their twenty starts tell better what a night may be off.
    """
    medians = [median(night) for night in nights]
    base = median(medians)
    starts = [start for night in nights for start in night]
    scatter = max(NIGHT_MADS * relative_mad(medians, base), START_SPREADS * spread(starts, base))
    return min(max(FLOOR, scatter), CEILING)


@dataclass(frozen=True)
class Finding:
    """What the figures of one row say."""

    verdict: str
    reason: str
    baseline_median: float | None = None
    new_median: float | None = None
    loss: float | None = None
    threshold: float | None = None
    p_value: float | None = None
    suspect: bool = False  # beyond the threshold, and not run again yet
    tonight: bool = False  # inconclusive by what tonight was like, not for want of baseline nights


def judge(nights: Sequence[Sequence[float]], first: Sequence[float], again: Sequence[float] = ()) -> Finding:
    """`nights`: badness of each baseline night's starts; `first`, `again`: tonight's, and of its second run.

    Nights of fewer than MIN_STARTS starts do not count. Why the rules are as they are: docs/nightly.md.
    """
    whole = [night for night in nights if len(night) >= MIN_STARTS]
    some = whole or [night for night in nights if night]
    if not some:
        return Finding("NO_BASELINE", "no baseline night has this figure")
    base = median(median(night) for night in some)
    if not first:
        return Finding("INCONCLUSIVE", "no usable start", base, tonight=True)
    new, limit = median([*first, *again]), threshold(some)
    short = Finding("INCONCLUSIVE", "", base, new, new / base - 1, limit)
    if len(first) < MIN_STARTS:
        return replace(short, reason=f"{len(first)} usable starts, {MIN_STARTS} are needed", tonight=True)
    if len(whole) < MIN_NIGHTS:
        return replace(short, reason=f"{len(whole)} baseline nights of {MIN_STARTS} starts, {MIN_NIGHTS} are needed")
    starts = [start for night in whole for start in night]
    if median(first) / base - 1 > limit:
        measured = replace(short, p_value=rank_p([*first, *again], starts))
        return _slower(measured, median(first) / base - 1, len(first), len(again))
    if base / median(first) - 1 > limit:
        p = rank_p([-start for start in first], [-start for start in starts])
        if p <= ALPHA_ONCE:
            return replace(short, verdict="IMPROVED", p_value=p)
    return replace(short, verdict="OK")


def _slower(figures: Finding, first_loss: float, first: int, again: int) -> Finding:
    """Tonight's first run was beyond the threshold: what the ranks, and the second run if there was one, make of it."""
    assert figures.loss is not None
    assert figures.threshold is not None
    assert figures.p_value is not None
    confirmed = again >= MIN_STARTS
    told = f"{first_loss:+.1%} at first, {figures.loss:+.1%} with the second run" if confirmed else "not run again"
    if confirmed and figures.loss <= figures.threshold:
        return replace(figures, verdict="OK", reason=told)
    if figures.p_value <= (ALPHA if confirmed else ALPHA_ONCE):
        return replace(figures, verdict="REGRESSED", reason=told, suspect=not confirmed)
    why = f"{told}; its {first + again} starts overlap with the baseline's (p = {figures.p_value:.2g})"
    return replace(figures, reason=why, suspect=not confirmed, tonight=True)
