"""The gate's statistics: is tonight slower than the baseline nights? Standard library only.

Every value is a start's metric turned so that larger is worse (`badness`). docs/nightly.md tells why each rule is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


# --- exact one-sided rank tests: the chance that n of n + m exchangeable starts stand so high ---------------------------


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


# --- one row ------------------------------------------------------------------------------------------------------------


def relative_mad(values: Sequence[float], centre: float) -> float:
    """Median absolute deviation from `centre`, as a share of it; not scaled to a standard deviation."""
    return median(abs(value - centre) for value in values) / centre


def spread(starts: Sequence[float], centre: float) -> float:
    """Root mean square of the starts' distance from `centre`, as a share of it, the farthest TRIM left out."""
    distances = sorted(abs(start / centre - 1) for start in starts)
    kept = distances[: len(distances) - ceil(TRIM * len(distances))]
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
    """What the figures of one row say. `suspect`: slower than the threshold, and not run again yet."""

    verdict: str
    reason: str
    baseline_median: float | None = None
    new_median: float | None = None
    loss: float | None = None
    threshold: float | None = None
    p_value: float | None = None
    suspect: bool = False


def judge(nights: Sequence[Sequence[float]], first: Sequence[float], again: Sequence[float] = ()) -> Finding:
    """`nights`: badness of each baseline night's starts; `first`, `again`: tonight's, and of its second run.

    Nights of fewer than MIN_STARTS starts do not count. Sources of the rules: docs/nightly.md.
    """
    nights = [night for night in nights if len(night) >= MIN_STARTS]
    tonight = [*first, *again]
    if not nights:
        new = median(tonight) if tonight else None
        return Finding("NO_BASELINE", f"no baseline night has {MIN_STARTS} usable starts of this row", None, new)
    base, limit, new = median(median(night) for night in nights), threshold(nights), median(tonight)
    starts = [start for night in nights for start in night]
    loss = new / base - 1
    if len(nights) < MIN_NIGHTS:
        why = f"{len(nights)} baseline nights, {MIN_NIGHTS} are needed"
        return Finding("INCONCLUSIVE", why, base, new, loss, limit)
    if median(first) / base - 1 > limit:
        p = rank_p(tonight, starts)
        return _slower(Finding("", "", base, new, loss, limit, p), median(first) / base - 1, len(first), len(again))
    if base / median(first) - 1 > limit:
        p = rank_p([-value for value in first], [-value for value in starts])
        if p <= ALPHA_ONCE:
            return Finding("IMPROVED", f"{-loss:.1%} faster or better", base, new, loss, limit, p)
    return Finding("OK", "", base, new, loss, limit)


def _slower(figures: Finding, first_loss: float, first: int, again: int) -> Finding:
    """Tonight's first run was beyond the threshold: what the ranks, and the second run if there was one, make of it."""
    assert figures.loss is not None
    assert figures.threshold is not None
    assert figures.p_value is not None
    confirmed = again >= MIN_STARTS
    told = f"+{first_loss:.1%}"
    if confirmed:
        told += f", with the second run +{figures.loss:.1%}" if figures.loss > 0 else ", not when run again"
    values = (figures.baseline_median, figures.new_median, figures.loss, figures.threshold, figures.p_value)
    if confirmed and figures.loss <= figures.threshold:
        return Finding("OK", told, *values)
    if figures.p_value <= (ALPHA if confirmed else ALPHA_ONCE):
        return Finding("REGRESSED", told if confirmed else f"{told}, not run again", *values, suspect=not confirmed)
    why = f"{told}, but the {first + again} starts overlap with the baseline's (p = {figures.p_value:.2g})"
    return Finding("INCONCLUSIVE", why, *values, suspect=not confirmed)
