"""The gate's statistics: exact ranks, the threshold, what a second run changes, and how often it is wrong."""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from nights import quiet

from lib import gate
from lib.rows import COLUMNS
from tools import gate_simulation as simulation

SIMULATED = Path(__file__).resolve().parent.parent / "docs" / "measured" / "gate_simulation.csv"
NIGHTS_3000 = 3000 * simulation.ROWS


def nights(count: int = 5, starts: int = 4, noise: float = 0.004) -> list[list[float]]:
    return [quiet(noise=noise, starts=starts, seed=night) for night in range(count)]


# -- exact ranks


@pytest.mark.parametrize(("n", "m"), [(2, 3), (4, 4), (3, 6), (5, 2)])
def test_rank_probabilities_are_those_of_counting_every_order(n: int, m: int) -> None:
    inversions: Counter[int] = Counter()
    above: Counter[int] = Counter()
    for places in itertools.combinations(range(n + m), n):
        others = set(range(n + m)) - set(places)
        inversions[sum(other > place for place in places for other in others)] += 1
        above[sum(other > min(places) for other in others)] += 1
    for most in range(n * m // 2 + 1):
        share = sum(inversions[count] for count in range(most + 1)) / math.comb(n + m, n)
        assert gate.mann_whitney_p(n, m, most) == pytest.approx(share)
    for most in range(m + 1):
        share = sum(above[count] for count in range(most + 1)) / math.comb(n + m, n)
        assert gate.precedence_p(n, m, most) == pytest.approx(share)


def test_a_tie_counts_against_the_alarm() -> None:
    assert gate.rank_p([2.0] * 4, [1.0] * 20) < gate.ALPHA_ONCE
    assert gate.rank_p([1.0] * 4, [1.0] * 20) == 1.0


def test_one_baseline_start_far_out_does_not_hide_a_regression() -> None:
    outlier = [*[1.0 + index / 100 for index in range(19)], 50.0]
    assert gate.rank_p([2.0] * 8, outlier) <= gate.ALPHA
    assert gate.rank_p([2.0] * 8, [*outlier[:18], 50.0, 51.0]) > gate.ALPHA


@pytest.mark.parametrize("starts", [gate.MIN_STARTS, gate.MAX_STARTS])
def test_the_smallest_allowed_night_can_be_red(starts: int) -> None:
    assert 2 * gate.mann_whitney_p(2 * starts, starts * gate.MIN_NIGHTS, 0) <= gate.ALPHA
    assert 2 * gate.mann_whitney_p(starts, starts * gate.MIN_NIGHTS, 0) <= gate.ALPHA_ONCE


# -- one row


def test_the_threshold_is_never_under_three_per_cent_nor_over_a_hundred() -> None:
    assert gate.threshold([[100.0] * 4] * 5) == gate.FLOOR
    assert gate.threshold([[100.0, 900.0, 100.0, 900.0]] * 5) == gate.CEILING


def test_five_nights_that_agree_by_luck_are_not_trusted_more_than_their_starts() -> None:
    lucky = [[90.0, 100.0, 100.0, 110.0]] * 5
    assert gate.threshold(lucky) > 0.2


def test_twice_as_slow_in_both_runs_is_red() -> None:
    found = gate.judge(nights(), quiet(200, seed=8), quiet(200, seed=9))
    assert found.verdict == "REGRESSED"
    assert found.loss == pytest.approx(1.0, abs=0.02)


def test_slower_at_first_only_is_not_red() -> None:
    found = gate.judge(nights(), quiet(104, seed=8), quiet(100, seed=9))
    assert found.verdict == "OK"
    assert "at first" in found.reason
    assert gate.judge(nights(), quiet(110, seed=8), quiet(100, seed=9)).verdict == "INCONCLUSIVE"


def test_a_suspect_asks_for_a_second_run_and_a_second_run_is_the_last() -> None:
    assert gate.judge(nights(), quiet(110, seed=8)).suspect
    assert not gate.judge(nights(), quiet(110, seed=8), quiet(110, seed=9)).suspect
    assert not gate.judge(nights(), quiet(101, seed=8)).suspect


def test_one_bad_start_among_five_is_no_alarm() -> None:
    assert gate.judge(nights(starts=5), [*quiet(seed=8), 184.0]).verdict == "OK"


def test_a_slow_night_whose_starts_overlap_the_baseline_is_inconclusive() -> None:
    wide = [[100.0, 100.0, 100.0, 109.0]] * 6
    found = gate.judge(wide, [120.0, 120.0, 120.0, 101.0], [120.0, 120.0, 100.0, 101.0])
    assert (found.verdict, found.tonight) == ("INCONCLUSIVE", True)
    assert "overlap" in found.reason


def test_faster_is_improved_and_never_run_again() -> None:
    found = gate.judge(nights(), quiet(80, seed=8))
    assert (found.verdict, found.suspect) == ("IMPROVED", False)


def test_too_few_nights_or_starts_are_inconclusive_even_when_ten_times_slower() -> None:
    assert "4 baseline nights" in gate.judge(nights(4), quiet(1000)).reason
    assert "3 usable starts" in gate.judge(nights(5), quiet(1000)[:3]).reason
    short = [night[:3] for night in nights(9)]
    assert gate.judge(short, quiet(1000)).verdict == "INCONCLUSIVE"
    assert gate.judge([], quiet()).verdict == "NO_BASELINE"


def test_a_rate_that_halves_is_worse_by_a_hundred_per_cent() -> None:
    assert gate.badness(50.0, "tokens_per_s") / gate.badness(100.0, "tokens_per_s") == 2.0
    assert gate.badness(50.0, "lat_us_p50") == 50.0


def test_every_metric_with_a_direction_is_a_column() -> None:
    assert set(gate.BETTER) <= set(COLUMNS)
    assert set(gate.BETTER.values()) == {"lower", "higher"}


# -- how often it is wrong: with the scatter of the committed H200 rows


def test_the_simulation_decides_as_the_gate_does() -> None:
    rng = np.random.default_rng(5)
    sds = np.resize(np.array(simulation.start_sds()), 400)
    old, new = simulation.draw(rng, simulation.Setting(night_over_start=1.0), sds)
    new *= rng.choice([1.0, 1.1, 1.5], (400, 1))
    reds = simulation.red(old, new)
    for index in range(400):
        starts = new[index].tolist()
        found = gate.judge(old[index].tolist(), starts[:4], starts[4:])
        assert (found.verdict == "REGRESSED") == reds[index], index
    assert 50 < reds.sum() < 350


@pytest.mark.parametrize("noise", ["normal", "heavy_tails"])
def test_at_most_one_false_red_in_a_thousand_nights_of_150_rows(noise: str) -> None:
    setting = simulation.Setting(noise, simulation.night_over_start())
    assert simulation.count_red(setting, NIGHTS_3000, 1.0, seed=1) <= 3


@pytest.mark.parametrize("rule", ["START_SPREADS", "ALPHA"])
def test_without_one_of_the_rules_there_would_be_more_false_reds(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, rule, {"START_SPREADS": 0.0, "ALPHA": 0.5}[rule])
    simulation.largest.cache_clear()
    setting = simulation.Setting("two_modes", simulation.night_over_start())
    assert simulation.count_red(setting, NIGHTS_3000 // 3, 1.0, seed=1) > 20
    simulation.largest.cache_clear()


@pytest.mark.parametrize(("starts", "count"), [(4, 5), (4, 30), (8, 5), (20, 5)])
def test_twice_the_threshold_is_found_nine_times_in_ten(starts: int, count: int) -> None:
    setting = simulation.Setting("normal", simulation.night_over_start(), starts, count)
    assert simulation.count_red(setting, 4000, "twice", seed=2) >= 0.9 * 4000


@pytest.mark.parametrize("slower", [2.5, 10.0])
@pytest.mark.parametrize("starts", range(gate.MIN_STARTS, gate.MAX_STARTS + 1))
def test_far_slower_is_always_red(starts: int, slower: float) -> None:
    """Here by the gate itself, on the noisiest of the measured rows; more nights by simulation, next."""
    noise = max(simulation.start_sds())
    for count in (5, 6, 7, 10, 20, 30):
        tonight = [quiet(100 * slower, noise, starts, seed=1000 + run) for run in (1, 2)]
        assert gate.judge(nights(count, starts, noise), *tonight).verdict == "REGRESSED", count


@pytest.mark.parametrize("slower", [2.5, 10.0])
@pytest.mark.parametrize(("starts", "count"), [(4, 5), (4, 30), (8, 5), (20, 5)])
def test_far_slower_is_always_red_in_thousands_of_nights(starts: int, count: int, slower: float) -> None:
    setting = simulation.Setting("normal", simulation.night_over_start(), starts, count)
    assert simulation.count_red(setting, 3400, slower, seed=3) == 3400


def test_far_slower_is_red_against_the_longest_baseline() -> None:
    many = nights(gate.MAX_NIGHTS, noise=0.1)
    assert gate.judge(many, quiet(250, 0.1, seed=901), quiet(250, 0.1, seed=902)).verdict == "REGRESSED"


def test_ten_per_cent_is_found_on_rows_that_scatter_like_graphs() -> None:
    rng = random.Random(1)
    for trial in range(50):
        tonight = [quiet(110, 0.0035, seed=rng.randrange(10**9)) for _ in range(2)]
        assert gate.judge(nights(noise=0.0035), *tonight).verdict == "REGRESSED", trial


def test_the_committed_figures_are_what_the_simulation_gives() -> None:
    with SIMULATED.open(newline="") as file:
        rows = list(csv.DictReader(file))
    measured = f"{simulation.night_over_start():.2f}"
    assert {row["what"] for row in rows} == {"false red", "twice the threshold", "slower"}
    for row in rows:
        share = int(row["red"]) / int(row["row_nights"])
        assert float(row["red_share"]) == pytest.approx(share, rel=1e-5, abs=1e-12)
        if (
            row["what"] == "false red"
            and row["noise"] == "normal"
            and float(row["night_over_start"]) <= float(measured)
        ):
            assert float(row["per_1000_nights"]) <= 1
        if row["what"] == "twice the threshold":
            assert share >= 0.9
        if row["what"] == "slower" and float(row["slower"]) >= 2.5:
            assert share == 1
    again = next(row for row in rows if row["what"] == "slower" and row["slower"] == "1.5")
    setting = simulation.Setting("normal", simulation.night_over_start(), int(again["starts"]), int(again["nights"]))
    assert simulation.count_red(setting, int(again["row_nights"]), 1.5) == int(again["red"])


def test_the_table_in_the_documentation_is_made_from_the_committed_figures() -> None:
    text = (SIMULATED.parent.parent / "nightly.md").read_text()
    with SIMULATED.open(newline="") as file:
        assert "\n".join(simulation.markdown(csv.DictReader(file))) in text
