"""Reductions over iterations and ranks, against sums done by hand."""

from __future__ import annotations

import pytest

from lib import stats

TWO_RANKS = [(3.0, 5.0), (9.0, 1.0), (4.0, 4.0)]  # [iteration][rank]


@pytest.mark.parametrize(
    ("percent", "expected"),
    [(0, 10.0), (25, 17.5), (50, 25.0), (90, 37.0), (100, 40.0)],
)
def test_a_percentile_lies_linearly_between_its_neighbours(percent: float, expected: float) -> None:
    assert stats.percentile([40.0, 10.0, 30.0, 20.0], percent) == pytest.approx(expected)


def test_the_percentile_of_one_sample_is_that_sample() -> None:
    assert stats.percentile([7.0], 99) == 7.0


def test_ranks_are_reduced_within_an_iteration() -> None:
    assert stats.max_over_ranks(TWO_RANKS) == [5.0, 9.0, 4.0]
    assert stats.median_over_ranks(TWO_RANKS) == [4.0, 5.0, 4.0]


def test_the_latency_columns_are_all_of_one_series() -> None:
    assert stats.latency_columns([4.0, 1.0, 2.0, 3.0, 10.0]) == {
        "lat_us_p50": 3.0,
        "lat_us_mean": 4.0,
        "lat_us_min": 1.0,
        "lat_us_p90": pytest.approx(7.6),  # position 3.6: 4 + 0.6 * 6
        "lat_us_p99": None,
        "lat_us_max": 10.0,
    }


@pytest.mark.parametrize(("count", "expected"), [(199, None), (200, 197.01)])
def test_p99_needs_200_samples(count: int, expected: float | None) -> None:
    p99 = stats.latency_columns([float(value) for value in range(count)])["lat_us_p99"]
    assert p99 == (expected if expected is None else pytest.approx(expected))


def test_the_latency_is_no_mean_of_ranks() -> None:
    """One late rank of two makes every iteration late; a mean over ranks would say 55."""
    assert stats.latency_columns(stats.max_over_ranks([(10.0, 100.0)] * 3))["lat_us_p50"] == 100.0


def test_the_slowest_rank_is_the_one_that_is_latest_most_often() -> None:
    assert stats.slowest_rank([(1.0, 2.0, 0.0), (1.0, 2.0, 0.0), (90.0, 2.0, 0.0)]) == 1


def test_of_ranks_that_are_latest_equally_often_the_lowest_is_named() -> None:
    assert stats.slowest_rank([(1.0, 0.0, 2.0), (1.0, 5.0, 2.0)]) == 1
    assert stats.slowest_rank([(4.0, 4.0)]) == 0


def test_skew_is_the_median_of_latest_minus_earliest() -> None:
    assert stats.skew_us([(1.0, 4.0), (7.0, 6.0), (0.0, 9.0)]) == 3.0


def test_the_gap_is_that_of_the_slowest_rank_of_each_iteration() -> None:
    totals = [(10.0, 20.0), (30.0, 20.0), (10.0, 11.0)]
    gaps = [(1.0, 2.0), (3.0, 4.0), (5.0, 60.0)]
    assert stats.gap_us(gaps, totals) == 3.0  # of 2, 3, 60


def test_gaps_and_totals_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        stats.gap_us([(1.0,)], [(1.0,), (2.0,)])


def test_drift_is_the_late_half_minus_the_early_half() -> None:
    assert stats.drift_us([1.0, 1.0, 2.0, 5.0, 5.0, 6.0]) == 4.0
    assert stats.drift_us([3.0]) == 0.0
