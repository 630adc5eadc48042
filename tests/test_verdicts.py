"""What becomes of a row: which rows are the same case, what a verdict says, and what makes a night red."""

from __future__ import annotations

import pytest
from nights import baseline, night, quiet, row

from lib import verdicts
from lib.verdict_text import VERDICTS, document_lines
from lib.verdicts import Row, Verdict, judge_all

TONIGHT = 20


def only(old: list[Row], new: list[Row], **more: object) -> Verdict:
    found, _ = judge_all(old, new, **more)  # type: ignore[arg-type]
    (verdict,) = found
    return verdict


def of(verdict: str, old: list[Row], new: list[Row]) -> Verdict:
    found = only(old, new)
    assert found["verdict"] == verdict, found
    return found


def test_a_night_like_the_others_is_ok_and_green() -> None:
    found = of("OK", baseline(), night(TONIGHT, quiet(seed=77)))
    assert (found["red"], found["reason"], found["nights"], found["starts"]) == (False, "", 5, 4)
    assert verdicts.exit_code([found]) == 0


def test_ten_per_cent_slower_twice_is_regressed() -> None:
    found = of("REGRESSED", baseline(), night(TONIGHT, quiet(110, seed=77), quiet(110, seed=78)))
    assert found["red"]
    assert found["change_pct"] == pytest.approx(10, abs=0.5)
    assert (found["starts"], found["again"]) == (8, 4)


def test_a_suspect_is_named_before_it_is_believed() -> None:
    slow = night(TONIGHT, quiet(110, seed=77))
    assert len(judge_all(baseline(), slow)[1]) == 1
    assert judge_all(baseline(), night(TONIGHT, quiet(seed=77)))[1] == []


def test_a_rate_is_judged_by_its_own_direction() -> None:
    old = [made | {"tokens_per_s": made["lat_us_p50"]} for made in baseline()]
    new = [made | {"tokens_per_s": made["lat_us_p50"]} for made in night(TONIGHT, quiet(50, seed=77))]
    assert only(old, new, metric="tokens_per_s")["verdict"] == "REGRESSED"
    assert only(old, new, metric="lat_us_p50")["verdict"] == "IMPROVED"


def test_a_row_that_nothing_is_accepted_for_is_no_baseline_and_red() -> None:
    found = of("NO_BASELINE", [], night(TONIGHT, quiet()))
    assert found["red"]
    assert "--accept" in found["reason"]


def test_a_row_that_was_ok_and_failed_is_lost_and_asks_for_a_second_run() -> None:
    new = night(TONIGHT, [100.0, None, 100.0, 100.0], reason="rank 1 raised")
    (found,), suspects = judge_all(baseline(), new)
    assert (found["verdict"], found["red"]) == ("LOST", True)
    assert "rank 1 raised" in found["reason"]
    assert len(suspects) == 1


def test_a_failure_that_does_not_come_again_is_inconclusive() -> None:
    found = of("INCONCLUSIVE", baseline(), night(TONIGHT, [*quiet(seed=7), None], quiet(seed=8)))
    assert "ok when run again" in found["reason"]


def test_a_wrong_result_is_lost_for_good_and_not_run_again() -> None:
    again = night(TONIGHT, [], quiet(seed=8))
    new = [*night(TONIGHT, quiet(seed=7)), row(TONIGHT, 5, None, status="wrong"), *again]
    (found,), suspects = judge_all(baseline(), new)
    assert (found["verdict"], suspects) == ("LOST", [])


def test_a_library_that_is_gone_is_lost_with_its_reason() -> None:
    new = [row(TONIGHT, start, None, status="missing", reason="not installed: DeepEP") for start in range(1, 5)]
    assert "not installed" in of("LOST", baseline(), new)["reason"]


def test_a_baseline_row_without_a_new_one_is_a_failure_of_its_own() -> None:
    other = night(TONIGHT, quiet(), tokens="4096")
    verdict = next(found for found in judge_all(baseline(), other)[0] if found["verdict"] == "LOST")
    assert verdict["reason"] == "no new row since 20261105T020000Z"
    found, _ = judge_all(baseline(), [])
    assert [verdict["verdict"] for verdict in found] == ["LOST"]


def test_what_never_ran_and_does_not_run_has_no_verdict() -> None:
    never = [row(TONIGHT, start, None, status="unsupported") for start in range(1, 5)]
    assert judge_all([], never) == ([], [])


DIFFERENT = [
    ({"hidden": "4096"}, "hidden: 7168 -> 4096"),
    ({"routing": "zipf:1"}, "routing: uniform -> zipf:1"),
    ({"dispatch_dtype": "fp8"}, "dispatch_dtype: bf16 -> fp8"),
    ({"l2": "cold"}, "l2: warm -> cold"),
    ({"device": "NVIDIA B200"}, "device: NVIDIA H200 -> NVIDIA B200"),
    ({"world": "8"}, "world: 2 -> 8"),
    ({"iters": "10"}, "iters: 50 -> 10"),
    ({"routing_sha": "r7777777"}, "routing_sha: "),
]


@pytest.mark.parametrize(("change", "told"), DIFFERENT, ids=[next(iter(change)) for change, _ in DIFFERENT])
def test_another_setting_is_incomparable_and_named(change: dict[str, str], told: str) -> None:
    found = of("INCOMPARABLE", baseline(), night(TONIGHT, quiet(), **change))
    assert found["red"]
    assert any(part.startswith(told) for part in found["differs"]), found["differs"]


def test_mixed_timings_are_incomparable_also_where_a_graph_fell_back() -> None:
    repro = baseline()[0]["repro"]
    other = night(TONIGHT, quiet(), timing="e2e", repro=repro.replace("TIMING=graph", "TIMING=e2e"))
    assert of("INCOMPARABLE", baseline(), other)["differs"][0] == "timing: graph -> e2e"
    eager = night(TONIGHT, quiet(), timing="e2e_pipelined", graph="eager: capture failed")
    assert "capture failed" in of("INCOMPARABLE", baseline(), eager)["reason"]


def test_another_machine_with_everything_else_different_is_paired_by_variant_and_tokens() -> None:
    new = night(TONIGHT, quiet(), device="CPU (x, 2 cores)", world="4", hidden="512", l2="")
    assert len(of("INCOMPARABLE", baseline(), new)["differs"]) == 4


def test_an_upgraded_library_is_compared_and_is_the_first_suspect() -> None:
    upgraded = [
        made | {"versions": made["versions"].replace("torch 2.11.0+cu130", "torch 2.12.0"), "git": "g2"}
        for made in night(TONIGHT, quiet(120, seed=1), quiet(120, seed=2))
    ]
    found, _ = judge_all(baseline(), upgraded)
    told = verdicts.document("N", baseline(), upgraded, found, "B", [])
    assert told["suspects"][0] == "torch: 2.11.0+cu130 -> 2.12.0"
    assert told["suspects"][-1].endswith("-> g2")
    assert "REGRESSED" in told["line"]
    assert "torch: 2.11.0+cu130 -> 2.12.0" in told["line"]


@pytest.mark.parametrize("mark", ["throttled", "contended", "tainted"])
def test_a_marked_night_is_inconclusive_and_red_only_the_third_time(mark: str) -> None:
    marked = night(TONIGHT, quiet(300, seed=7), **{mark: "1"})
    first = only(baseline(), marked)
    assert (first["verdict"], first["red"], first["streak"]) == ("INCONCLUSIVE", False, 1)
    assert mark in first["reason"]
    second = only(baseline(), marked, streaks={first["case"]: 1})
    third = only(baseline(), marked, streaks={first["case"]: 2})
    assert (second["red"], third["red"]) == (False, True)
    assert "night 3 in a row" in third["reason"]


def test_a_second_run_that_was_throttled_confirms_nothing() -> None:
    again = [made | {"throttled": "1"} for made in night(TONIGHT, [], quiet(150, seed=8))]
    found = of("INCONCLUSIVE", baseline(), night(TONIGHT, quiet(150, seed=7)) + again)
    assert (found["red"], found["streak"]) == (False, 1)
    assert "throttled in 4 of 8 starts" in found["reason"]


def test_want_of_baseline_nights_is_no_streak() -> None:
    assert only(baseline(3), night(TONIGHT, quiet()))["streak"] == 0


@pytest.mark.parametrize("bad", [{"throttled": "1"}, {"check": "skipped"}, {"contended": "1"}, {"tainted": "1"}])
def test_a_marked_or_unchecked_row_is_never_a_baseline(bad: dict[str, str]) -> None:
    assert of("NO_BASELINE", baseline(9, **bad), night(TONIGHT, quiet()))["red"]


def test_the_second_run_of_a_baseline_night_does_not_count_in_it() -> None:
    old = baseline() + night(3, [], [150.0] * 4)
    assert only(old, night(TONIGHT, quiet(seed=5)))["baseline_starts"] == 20


def test_nothing_judged_is_not_green() -> None:
    assert verdicts.exit_code([]) == 3
    assert verdicts.exit_code([only(baseline(3), night(TONIGHT, quiet()))]) == 3
    assert (
        "could be judged"
        in verdicts.document(
            "N", baseline(3), night(TONIGHT, quiet()), judge_all(baseline(3), night(TONIGHT, quiet()))[0], "B", []
        )["line"]
    )


def test_a_graph_that_fell_back_and_its_eager_neighbour_are_two_cases() -> None:
    repro = baseline()[0]["repro"]
    eager = {"timing": "e2e_pipelined", "graph": "eager: host reads"}
    plain = {"timing": "e2e_pipelined", "graph": "", "repro": repro.replace("TIMING=graph", "TIMING=e2e_pipelined")}
    old, new = baseline(**eager) + baseline(**plain), night(9, quiet(), **eager) + night(9, quiet(), **plain)
    assert [found["verdict"] for found in judge_all(old, new)[0]] == ["OK", "OK"]


def test_the_worst_comes_first_and_the_one_line_last() -> None:
    old = baseline() + baseline(tokens="256")
    new = night(TONIGHT, quiet(110, seed=1), quiet(110, seed=2)) + night(TONIGHT, quiet(seed=3), tokens="256")
    found, _ = judge_all(old, new)
    assert [verdict["verdict"] for verdict in found] == ["REGRESSED", "OK"]
    lines = document_lines(verdicts.document("20261120T020000Z", old, new, found, "B", ["a notice"]))
    assert lines[0].startswith("REGRESSED")
    assert lines[-1].startswith("RED 20261120T020000Z nvidia-h200-x2: 1 REGRESSED, 1 OK | comm deepep_ll bf16 graph")
    assert "notice: a notice" in lines


def test_every_verdict_has_a_rank_and_each_row_the_fields_of_the_documentation() -> None:
    from pathlib import Path

    text = (Path(__file__).resolve().parent.parent / "docs" / "nightly.md").read_text()
    found = only(baseline(), night(TONIGHT, quiet()))
    assert [name for name in (*found, *VERDICTS) if f"`{name}`" not in text] == []
    assert [name for name in verdicts.document("N", [], [], [], "", []) if f"`{name}`" not in text] == []


# --- what looks well and vouches for nothing --------------------------------------------------------------------------


@pytest.mark.parametrize("given", [True, False])
def test_a_start_that_wrote_no_row_of_a_case_is_lost_and_asks_for_a_second_run(given: bool) -> None:
    """Six starts, two of them killed: four good ones are no night. `given`: the starts are known from their folders."""
    new = [made for made in night(TONIGHT, quiet(seed=7, starts=6)) if made["start"] not in ("2", "4")]
    others = [] if given else [made | {"tokens": str(t)} for t in (1, 2, 3) for made in night(TONIGHT, quiet(starts=6))]
    base = [made | {"tokens": str(t)} for t in (1, 2, 3) for made in baseline()] if others else []
    found, suspects = judge_all(baseline() + base, new + others, starts="123456" if given else ())
    (lost,) = [verdict for verdict in found if verdict["verdict"] == "LOST"]
    assert lost["reason"] == "failed in start 2: that start wrote no row of it"
    assert (lost["red"], suspects) == (True, [lost])


def test_a_lost_start_whose_second_run_is_well_is_inconclusive() -> None:
    new = night(TONIGHT, quiet(seed=7, starts=5), quiet(seed=8))
    (found,), _ = judge_all(baseline(), new, starts="123456")
    assert (found["verdict"], found["streak"]) == ("INCONCLUSIVE", 1)
    assert "start 6: that start wrote no row of it; ok when run again" in found["reason"]


def test_separate_runs_of_other_points_are_no_lost_starts() -> None:
    first = [made | {"tokens": "8"} for made in night(TONIGHT, quiet(seed=7))]
    second = [made | {"tokens": "64", "start": str(int(made["start"]) + 4)} for made in night(TONIGHT, quiet(seed=7))]
    old = [made | {"tokens": tokens} for tokens in ("8", "64") for made in baseline()]
    assert {verdict["verdict"] for verdict in judge_all(old, first + second)[0]} == {"OK"}


def test_kernel_options_of_the_repro_line_make_another_case() -> None:
    new = [made | {"repro": "MEGA_KNOBS='{\"swap_ab\": true}' " + made["repro"]} for made in night(TONIGHT, quiet(70))]
    found = of("INCOMPARABLE", baseline(), new)
    assert found["differs"] == ["options: blank -> MEGA_KNOBS='{\"swap_ab\": true}'"]


@pytest.mark.parametrize("column", ["quant_included", "staging_included", "timer", "routing_sha", "timing"])
def test_one_start_that_was_measured_otherwise_is_never_green(column: str) -> None:
    """Also where the last start is as it should be."""
    new = night(TONIGHT, quiet(seed=77))
    new[1][column] = "other"
    found = of("INCOMPARABLE", baseline(), new)
    assert found["differs"][0].startswith(f"{column}: ")


def test_starts_that_nobody_checked_are_inconclusive() -> None:
    """MEGA_ACC=0: correctness could be off for good."""
    found = of("INCONCLUSIVE", baseline(), night(TONIGHT, quiet(seed=77), check="skipped"))
    assert found["streak"] == 1
    assert "unchecked in 4 of 4 starts" in found["reason"]


@pytest.mark.parametrize("column", ["git", "versions"])
def test_a_night_of_two_commits_or_versions_is_inconclusive(column: str) -> None:
    new = night(TONIGHT, quiet(seed=77))
    new[3][column] = "gother"
    found = of("INCONCLUSIVE", baseline(), new)
    assert f"its starts were made with different {column}: " in found["reason"]
    slow = night(TONIGHT, quiet(200, seed=77))
    slow[3][column] = "gother"
    assert only(baseline(), slow)["verdict"] == "REGRESSED"  # red stays red


def test_many_rows_without_a_new_one_are_one_line_and_hide_nothing() -> None:
    old = [made | {"tokens": str(tokens)} for tokens in range(1, 50) for made in baseline()]
    new = [made | {"tokens": "1"} for made in night(TONIGHT, quiet(200, seed=7))]
    found, _ = judge_all(old, new)
    lines = document_lines(verdicts.document("n", old, new, found, "b", []))
    assert lines[0].startswith("LOST          48 rows of the baseline have no new row, the first: ")
    assert lines[1].startswith("REGRESSED")


def test_a_green_night_says_what_its_rows_could_lose_unseen() -> None:
    old = [made for n in range(1, 6) for made in night(n, quiet(noise=0.1, seed=n))]
    new = night(TONIGHT, quiet(seed=77))
    found, _ = judge_all(old, new)
    line = verdicts.document("n", old, new, found, "b", [])["line"]
    assert line.startswith("green n ")
    assert "1 row could lose 20 % unseen: comm deepep_ll bf16 graph T=8 up to " in line
