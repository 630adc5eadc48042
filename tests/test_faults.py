"""What the coordinator survives: ranks that die, raise, hang, refuse, and tear-downs that go wrong.

Each scenario is one run of real worker groups on fakes (tests/fakes.py); the tests look at its rows, its log and at
what it said.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from harness import Run, scenario

TIMEOUT_S, SETUP_TIMEOUT_S, TEARDOWN_S = "4", "20", "2"


def sweep(folder: Path) -> Run:
    return Run(folder, prefix="sweep")


# --- scenarios, the longest first -------------------------------------------------------------------------------------


@scenario
def deadly(folder: Path) -> Run:
    """T=1: rank 1 is killed, its peer in a collective; 2: its peer asleep; 3: it raises; 4: a wrong result; 5: well."""
    return sweep(folder).go("deadly", SEQ_LENS="1 2 3 4 5")


@scenario
def refused(folder: Path) -> Run:
    """Verdicts that only open and bind can reach."""
    return sweep(folder).go("raises_in_open unsupported missing picky", SEQ_LENS="1 2")


@scenario
def stuck(folder: Path) -> Run:
    """T=1: rank 1 hangs in Python, the others in a collective; 2: all hang in C; 3: all is well."""
    return sweep(folder).go("stuck", SEQ_LENS="1 2 3", TIMEOUT_S=TIMEOUT_S)


@scenario
def clinging(folder: Path) -> Run:
    """Closing the session of T=1 raises, that of 2 hangs, in that of 3 rank 1 dies, and closing the engine raises."""
    return sweep(folder).go("clinging", SEQ_LENS="1 2 3 4", MOE_EP_TEARDOWN_S=TEARDOWN_S)


@scenario(idle=True)
def stuck_in_open(folder: Path) -> Run:
    return Run(folder).go("hangs_in_open", SETUP_TIMEOUT_S=SETUP_TIMEOUT_S)


@scenario
def swapped(folder: Path) -> Run:
    """Over the points 1, 2, 4: while 2 is measured, another routing is written over the file."""
    for name, shift in (("routing.npy", 0), ("other.npy", 4)):
        np.save(folder / name, np.broadcast_to(np.arange(shift, shift + 2), (2, 4, 2)).astype(np.int64))
    return sweep(folder).go("swaps_the_routing", SEQ_LENS="1 2 4", ROUTING=str(folder / "routing.npy"))


@scenario
def isolated(folder: Path) -> Run:
    return sweep(folder).go("isolated", SEQ_LENS="1 2")


# --- a rank that dies or raises ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2], ids=["its peers in a collective", "its peers asleep"])
def test_a_rank_killed_in_mid_case_is_named_in_the_failed_row(deadly: Run, tokens: int) -> None:
    row = deadly.row("deadly", tokens)
    assert row["status"] == "failed"
    assert row["reason"].startswith("rank 1 died in phase time (pid ")


def test_a_rank_that_raises_in_timing_is_named_with_the_first_line_of_its_error(deadly: Run) -> None:
    row = deadly.row("deadly", 3)
    assert (row["status"], row["reason"]) == ("failed", "rank 1 in phase time: RuntimeError: the wire is cut")
    assert "and this line is for the log" in deadly.log_text()


def test_a_wrong_result_is_a_row_that_says_which_rank_saw_it_and_has_no_figures(deadly: Run) -> None:
    row = deadly.row("deadly", 4)
    assert (row["status"], row["check"], row["lat_us_p50"]) == ("wrong", "wrong", "")
    assert row["reason"].startswith("before timing: rank 1: ")


def test_after_each_failure_the_next_case_of_the_variant_runs_in_a_fresh_group(deadly: Run) -> None:
    assert deadly.row("deadly", 5)["status"] == "ok"
    assert len({entry["agent"] for entry in deadly.bound()}) == 5
    assert [entry["tokens"] for entry in deadly.bound() if entry["rank"] == 1] == [1, 2, 3, 4, 5]


def test_a_failed_row_makes_the_exit_code_1(deadly: Run) -> None:
    assert deadly.code == 1


def test_a_rank_that_raises_in_open_while_its_peer_waits_for_it_fails_the_case_with_its_name(refused: Run) -> None:
    reasons = {row["reason"] for row in refused.rows() if row["variant"] == "raises_in_open"}
    assert reasons == {"rank 1 in phase open: OSError: no such device: fabric0"}
    assert {row["status"] for row in refused.rows() if row["variant"] == "raises_in_open"} == {"failed"}


def test_other_variants_still_run_after_one_whose_open_raises(refused: Run) -> None:
    assert refused.row("picky", 2)["status"] == "ok"


# --- verdicts of open and bind ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [("unsupported", "the fabric has no multicast"), ("missing", "libfabric >= 2 is not installed")],
)
def test_a_verdict_of_open_is_every_points_row_after_one_group(refused: Run, verdict: str, reason: str) -> None:
    rows = [row for row in refused.rows() if row["variant"] == verdict]
    assert [(row["tokens"], row["status"], row["reason"]) for row in rows] == [(t, verdict, reason) for t in "12"]
    assert refused.log_text().count(f"{verdict}: a worker group of") == 1


def test_a_verdict_of_bind_is_that_points_row_alone(refused: Run) -> None:
    told = [(row["status"], row["reason"]) for row in refused.rows() if row["variant"] == "picky"]
    assert told == [("unsupported", "TOKENS=1: this library knows no such number"), ("ok", "")]


# --- a rank that hangs ------------------------------------------------------------------------------------------------


def stacks(run: Run, rank: int, occurrence: int) -> str:
    """What the log has between the header of a rank's stacks and the next header."""
    return run.log_text().split(f"--- stacks of rank {rank} ")[occurrence].split("--- stacks of rank")[0]


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_hang_is_a_timeout_row_that_names_the_knob_and_every_ranks_phase(stuck: Run, tokens: int) -> None:
    row = stuck.row("stuck", tokens)
    assert row["status"] == "timeout"
    assert row["reason"].startswith(f"not done within TIMEOUT_S={TIMEOUT_S} s: rank 0 in time, rank 1 in time;")


def test_the_log_has_the_stacks_of_the_rank_that_hangs_and_of_the_one_that_waits_for_it(stuck: Run) -> None:
    assert "in hang_in_python" in stacks(stuck, 1, occurrence=1)
    assert "in all_to_all_single" in stacks(stuck, 0, occurrence=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_log_has_the_stacks_of_ranks_that_hang_in_c(stuck: Run, rank: int) -> None:
    assert re.search(r'fake_faults\.py", line \d+ in call', stacks(stuck, rank, occurrence=2))


def test_the_case_after_a_hang_runs(stuck: Run) -> None:
    assert stuck.row("stuck", 3)["status"] == "ok"
    assert stuck.code == 1


def test_a_hang_in_open_names_the_set_ups_knob_and_shows_all_stacks(stuck_in_open: Run) -> None:
    row = stuck_in_open.row("hangs_in_open", 4)
    assert row["status"] == "timeout"
    assert f"SETUP_TIMEOUT_S={SETUP_TIMEOUT_S} s: rank 0 in open, rank 1 in open" in row["reason"]
    assert "in hang_in_python" in stacks(stuck_in_open, 1, occurrence=1)
    assert "in hang_in_open" in stacks(stuck_in_open, 0, occurrence=1)


# --- tear-down --------------------------------------------------------------------------------------------------------


def test_trouble_in_the_tear_down_leaves_every_row_ok_and_the_exit_code_0(clinging: Run) -> None:
    assert clinging.statuses() == [("clinging", tokens, "ok") for tokens in "1234"]
    assert clinging.code == 0


@pytest.mark.parametrize(
    "notice",
    [
        "rank 1: closing the session failed: RuntimeError: the session would not let go; its row stands",
        f"closing took more than {TEARDOWN_S} s after the row was saved: rank 0 in close, rank 1 in close; stacks of",
        "rank 1 died in phase close (pid ",
        "rank 0: closing the engine failed: RuntimeError: the engine would not let go; its row stands",
    ],
    ids=["raises", "hangs", "dies", "engine raises"],
)
def test_trouble_in_the_tear_down_is_said_once_and_logged(clinging: Run, notice: str) -> None:
    assert clinging.said.count(f"[fake] {notice}") == 1
    assert notice in clinging.log_text()


def test_the_point_after_a_bad_tear_down_runs_in_a_fresh_group(clinging: Run) -> None:
    assert len({entry["agent"] for entry in clinging.bound()}) == 4


# --- process bookkeeping ----------------------------------------------------------------------------------------------


def test_an_engine_that_asks_for_it_gets_its_own_processes_for_each_point(isolated: Run) -> None:
    assert isolated.statuses() == [("isolated", tokens, "ok") for tokens in "12"]
    assert len({entry["pid"] for entry in isolated.bound()}) == 4
    assert (isolated.code, isolated.said.count("\n")) == (0, 2)


def leftovers(run: Run) -> set[object]:
    """Processes of earlier groups that were alive when a later group was bound."""
    seen: set[object] = set()
    for entry in run.bound():
        others = set(entry["marked"]) - {entry["agent"]}  # type: ignore[call-overload]
        peers = {peer["pid"] for peer in run.bound() if peer["agent"] == entry["agent"]}
        seen |= others - peers
    return seen


def test_no_process_of_an_ended_group_is_alive_when_the_next_one_starts(
    deadly: Run, refused: Run, stuck: Run, clinging: Run
) -> None:
    assert [leftovers(run) for run in (deadly, refused, stuck, clinging)] == [set()] * 4


def test_nothing_lives_when_a_run_has_ended(
    deadly: Run, refused: Run, stuck: Run, clinging: Run, isolated: Run
) -> None:
    assert [run.living() for run in (deadly, refused, stuck, clinging, isolated)] == [[]] * 5


def test_rows_after_a_routing_file_was_replaced_are_failed_not_filed_under_the_old_one(swapped: Run) -> None:
    by_tokens = {row["tokens"]: row for row in swapped.rows()}
    assert by_tokens["1"]["status"] == "ok"
    for tokens in ("2", "4"):
        assert by_tokens[tokens]["status"] == "failed"
        assert by_tokens[tokens]["reason"].startswith("ROUTING: the file was changed while the run was going on")
    assert swapped.code == 1
