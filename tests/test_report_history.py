"""Change points: a step is found where it is, noise is not, and marked rows never count."""

from __future__ import annotations

import random

from report_rows import night

from tools.report_cases import Case
from tools.report_history import change_points, history, is_marked


def noisy(level: float, count: int, sigma: float, seed: int = 0) -> list[float]:
    draws = random.Random(seed)
    return [level * draws.gauss(1, sigma) for _ in range(count)]


def test_a_step_is_marked_at_its_first_run_with_its_size() -> None:
    ((index, pct),) = change_points([100.0] * 10 + [120.0] * 10)
    assert (index, round(pct, 6)) == (10, 20.0)


def test_a_step_down_is_negative_and_two_steps_are_two_points() -> None:
    found = change_points([100.0] * 8 + [120.0] * 8 + [90.0] * 8)
    assert [(index, round(pct)) for index, pct in found] == [(8, 20), (16, -25)]


def test_a_step_of_a_tenth_is_found_through_noise_of_two_per_cent() -> None:
    found = [change_points(noisy(100, 30, 0.02, seed) + noisy(110, 30, 0.02, seed + 1000)) for seed in range(40)]
    right = [points for points in found if any(abs(index - 30) <= 1 for index, _ in points)]
    assert len(right) >= 0.8 * len(found)


def test_noise_alone_marks_nothing_up_to_two_per_cent_and_little_above() -> None:
    for sigma, most in ((0.01, 0.0), (0.02, 0.0), (0.05, 0.12), (0.1, 0.12)):
        marked = sum(len(change_points(noisy(100, 60, sigma, seed))) for seed in range(100))
        assert marked / 100 <= most, sigma


def test_a_level_that_lasts_five_runs_is_two_points() -> None:
    assert [index for index, _ in change_points([100.0] * 20 + [120.0] * 5 + [100.0] * 20)] == [20, 25]


def test_one_outlier_is_no_change_of_level() -> None:
    assert change_points([100.0] * 8 + [300.0] + [100.0] * 8) == []


def test_a_change_needs_three_runs_on_either_side() -> None:
    assert change_points([100.0] * 6 + [150.0] * 2) == []
    assert change_points([100.0] * 2 + [150.0] * 2) == []
    assert [index for index, _ in change_points([100.0] * 6 + [150.0] * 3)] == [6]


def a_row(number: int, us: float | str, **columns: str) -> dict[str, str]:
    marks = {"throttled": "0", "contended": "0", "tainted": "0"}
    return {"run": night(number), "status": "ok", "lat_us_p50": str(us), **marks, **columns}


def test_starts_of_one_run_are_one_point_and_marked_rows_are_none() -> None:
    rows = [a_row(1, 90), a_row(1, 100), a_row(1, 110), a_row(2, 500, throttled="1"), a_row(3, 105), a_row(4, "")]
    past = history(Case(8, rows))
    assert (past.runs, past.values_us) == ([night(1), night(3)], [100.0, 105.0])
    assert round(past.last_pct or 0, 6) == 5.0
    assert is_marked(rows[3])


def test_a_single_run_has_no_change() -> None:
    past = history(Case(8, [a_row(1, 90)]))
    assert past.last_pct is None
    assert past.changes == []
