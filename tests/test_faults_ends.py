"""How a run ends before its time - signals, kills, a full disk - how another takes it up, and who may start it."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import Run, one_of, outer_launcher, scenario, wait_until

from lib.interrupt import Interrupted, Signals
from lib.rows import HEADER

TWO_RANKS_ARE_SLOW = ("slow_0", "slow_1")
# What two runs of the same case on the same machine have in common.
KEYS = (
    "schema section variant comm compute_kernel algo timing status world nodes tokens num_experts topk hidden inter "
    "dispatch_dtype combine_dtype layout transport routing routing_sha seed warmup iters dispatch_bytes_wire check"
).split()


@dataclass
class Outcome:
    """A run that was ended, what it had written by then, and the runs that came after it."""

    run: Run
    rows: list[dict[str, str]]
    later: dict[str, Run]
    gone_after_s: float = 0.0

    def row(self, tokens: int) -> dict[str, str]:
        (row,) = [row for row in self.rows if row["tokens"] == str(tokens)]
        return row


def sweep(folder: Path) -> Run:
    return Run(folder, prefix="sweep")


def again(run: Run) -> Run:
    """Another command on the same files."""
    return Run(run.folder, run.stamp, run.section, run.prefix)


# --- scenarios --------------------------------------------------------------------------------------------------------


@scenario
def interrupted(folder: Path) -> Outcome:
    """Ctrl-C in the second of three cases; a second run on the stamp meanwhile; then RESUME, and torn files."""
    run = sweep(folder).start("slow", SEQ_LENS="1 2 3")
    run.wait_for(*TWO_RANKS_ARE_SLOW)
    knobs = {"fakes": "slow", "SEQ_LENS": "1 2 3", "RESUME": run.stamp}
    later = {"beside": again(run).go(**knobs), "on its stamp": again(run).go("slow", SEQ_LENS="1 2 3")}
    os.kill(run.process.pid, signal.SIGINT)  # type: ignore[union-attr]
    run.end()
    outcome = Outcome(run, run.rows(), later, run.seconds_until_nothing_lives())
    (folder / "go").touch()
    later["resumed"] = again(run).go(**knobs)
    cut(run.csv, 5)
    later["torn"] = again(run).go(**knobs)
    whole = run.csv.read_text()
    run.csv.write_text(whole.replace("lat_us_p50", "latency"))
    later["other schema"] = again(run).go(**knobs)
    run.csv.write_text(whole)
    return outcome


@scenario
def terminated(folder: Path) -> Outcome:
    """TERM in the second of two cases; then both files lose the end of the first one's row, and RESUME."""
    knobs = {"fakes": "slow", "SEQ_LENS": "1 2", "GPUS": "1"}
    run = sweep(folder).start(**knobs)
    run.wait_for("slow_0")
    os.kill(run.process.pid, signal.SIGTERM)  # type: ignore[union-attr]
    run.end()
    outcome = Outcome(run, run.rows(), {}, run.seconds_until_nothing_lives())
    (folder / "go").touch()
    for path, kept in ((run.csv, 2), (run.jsonl, 1)):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:kept]))
        cut(path, 5)
    outcome.later["resumed"] = again(run).go(RESUME=run.stamp, **knobs)
    return outcome


@scenario
def coordinator_killed(folder: Path) -> Outcome:
    """Its ranks hang in C, so that nothing but the kernel's signal of their parent's death can end them."""
    run = sweep(folder).start("stuck", SEQ_LENS="3 2")
    run.wait_for(*TWO_RANKS_ARE_SLOW)
    assert len(run.living()) == 3  # two ranks and their agent
    run.process.kill()  # type: ignore[union-attr]
    gone_after_s = run.seconds_until_nothing_lives()
    return Outcome(run.end(), run.rows(), {}, gone_after_s)


@scenario
def agent_killed(folder: Path) -> Outcome:
    run = sweep(folder).start("slow", SEQ_LENS="2 3")
    run.wait_for(*TWO_RANKS_ARE_SLOW)
    old = set(run.living())
    (agent,) = {int(str(entry["agent"])) for entry in run.bound()}
    os.kill(agent, signal.SIGKILL)
    gone_after_s = wait_until(lambda: not old & set(run.living()), "the agent's ranks to be gone", 10)
    return Outcome(run.end(), run.rows(), {}, gone_after_s)


@scenario
def ctrl_c_at_a_terminal(folder: Path) -> Outcome:
    """The signal goes to run.sh's whole process group, as a terminal sends it, in the first of two sections."""
    run = Run(folder, section="comm", command=["./run.sh"])
    endless = {"SECTION": "comm ref", "COMM_LIST": "torch", "REF_LIST": "torch", "ITERS": "1000000"}
    run.start(PYTHON=sys.executable, **endless)
    wait_until(lambda: bool(list(folder.glob("*.log"))), "the log")
    run.stamp = next(folder.glob("*.log")).name.split("_")[1]
    wait_until(lambda: len(run.living()) == 3, "a worker group")
    os.killpg(run.process.pid, signal.SIGINT)  # type: ignore[union-attr]
    run.end()
    rows = [*run.rows(), *Run(folder, run.stamp, "ref").rows()]
    return Outcome(run, rows, {}, run.seconds_until_nothing_lives())


@scenario
def disk_full(folder: Path) -> Outcome | str:
    """The disk fills up in the second of three cases. Returns why that cannot be tried, where it cannot."""
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        return f"mounting a small tmpfs takes root: {mounted.stderr.strip()}"
    knobs = {"SEQ_LENS": "1 2 3", "GPUS": "1", "ITERS": "300", "OUT_DIR": str(disk)}  # a record far above a page
    try:
        run = sweep(folder).start("slow", **knobs)
        run.wait_for("slow_0")
        with pytest.raises(OSError, match="No space left"):
            fill(disk / "filler")
        (folder / "go").touch()
        run.end()
        for path in disk.iterdir():
            if path.name != "filler":
                shutil.copy(path, folder)
        (disk / "filler").unlink()
        rows = run.rows()
        return Outcome(run, rows, {"resumed": again(run).go("slow", RESUME=run.stamp, **knobs)})
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@scenario
def alone(folder: Path) -> Run:
    return Run(folder).go("honest")


@scenario
def joined(folder: Path) -> Run:
    return Run(folder, command=outer_launcher(2)).go("honest", SECTION="ref")


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def cut(path: Path, count: int) -> None:
    os.truncate(path, path.stat().st_size - count)


# --- signals ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_lets_measured_rows_stand_and_writes_every_other_case_as_interrupted(interrupted: Outcome) -> None:
    assert [(row["tokens"], row["status"]) for row in interrupted.rows] == [
        ("1", "ok"),
        ("2", "interrupted"),
        ("3", "interrupted"),
    ]
    assert interrupted.run.code == 130


def test_term_does_the_same(terminated: Outcome) -> None:
    assert [(row["tokens"], row["status"]) for row in terminated.rows] == [("1", "ok"), ("2", "interrupted")]
    assert terminated.run.code == 130


def test_ctrl_c_at_a_terminal_interrupts_every_section(ctrl_c_at_a_terminal: Outcome) -> None:
    told = [(row["section"], row["status"]) for row in ctrl_c_at_a_terminal.rows]
    assert told == [("comm", "interrupted"), ("ref", "interrupted")]
    assert ctrl_c_at_a_terminal.run.code == 130


def test_nothing_is_left_after_a_signal(
    interrupted: Outcome, terminated: Outcome, ctrl_c_at_a_terminal: Outcome
) -> None:
    """The coordinator waits for its ranks, so there is nothing to wait for once it has ended."""
    assert max(outcome.gone_after_s for outcome in (interrupted, terminated, ctrl_c_at_a_terminal)) < 1


@contextmanager
def caught_signals() -> Iterator[Signals]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signals = Signals()
    signals.catch()
    try:
        yield signals
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def test_a_signal_waits_while_a_row_is_being_saved() -> None:
    saved = []

    def save(signals: Signals) -> None:
        with signals.held():
            saved.append("JSONL")
            os.kill(os.getpid(), signal.SIGTERM)
            saved.append("CSV")

    with caught_signals() as signals:
        with pytest.raises(Interrupted):
            save(signals)
        save(signals)  # the row of a case that is left: a second signal changes nothing
    assert saved == ["JSONL", "CSV"] * 2


# --- kill -9 ----------------------------------------------------------------------------------------------------------


def test_no_process_outlives_a_killed_coordinator_and_its_rows_stand(coordinator_killed: Outcome) -> None:
    assert coordinator_killed.gone_after_s < 10
    assert coordinator_killed.run.code == -signal.SIGKILL
    assert [(row["tokens"], row["status"]) for row in coordinator_killed.rows] == [("3", "ok")]


def test_a_killed_agent_is_named_in_the_failed_row_and_the_next_case_runs(agent_killed: Outcome) -> None:
    assert agent_killed.row(2)["status"] == "failed"
    assert "the worker group's launcher (pid " in agent_killed.row(2)["reason"]
    assert agent_killed.row(2)["reason"].endswith(" was killed by signal 9")
    assert agent_killed.row(3)["status"] == "ok"
    assert (agent_killed.run.code, agent_killed.run.living()) == (1, [])


# --- RESUME -----------------------------------------------------------------------------------------------------------


def test_resume_runs_only_what_was_not_measured_and_ends_with_the_plans_rows(interrupted: Outcome) -> None:
    resumed = interrupted.later["resumed"]
    assert resumed.code == 0
    assert resumed.statuses() == [("slow", tokens, "ok") for tokens in "123"]
    assert resumed.rows()[0] == interrupted.row(1)
    assert "2 cases that failed or were cut short are run again" in resumed.said
    assert [entry["tokens"] for entry in resumed.bound() if entry["rank"] == 0] == [1, 2, 2, 3]


def test_a_torn_last_line_is_dropped_with_a_notice_and_its_row_restored_without_a_run(interrupted: Outcome) -> None:
    torn = interrupted.later["torn"]
    assert f"{torn.csv.name}: a torn last line was dropped" in torn.said
    assert "resumed: 3 of 3 cases are there already" in torn.said
    assert (torn.code, torn.statuses()) == (0, [("slow", tokens, "ok") for tokens in "123"])
    assert torn.log_text().count("a worker group of") == 2  # the first run's, and that of `resumed`


def test_a_row_torn_in_both_files_is_run_again(terminated: Outcome) -> None:
    resumed = terminated.later["resumed"]
    assert (resumed.code, resumed.statuses()) == (0, [("slow", "1", "ok"), ("slow", "2", "ok")])
    for path in (resumed.csv, resumed.jsonl):
        assert f"{path.name}: a torn last line was dropped" in resumed.said
    assert len(resumed.jsonl.read_text().splitlines()) == 2


def test_a_header_of_another_schema_is_refused(interrupted: Outcome) -> None:
    refused = interrupted.later["other schema"]
    assert refused.code == 2
    assert refused.said.startswith("RESUME: ")
    assert refused.said.count("\n") == 1
    assert refused.csv.read_text().startswith(HEADER)  # it was put back after that


def test_a_second_run_on_a_stamp_that_is_being_written_is_refused(interrupted: Outcome) -> None:
    beside = interrupted.later["beside"]
    assert (beside.code, beside.said.count("\n")) == (75, 1)
    assert "is being written by another run" in beside.said
    assert interrupted.later["on its stamp"].code == 2


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def full(disk_full: Outcome | str) -> Outcome:
    if isinstance(disk_full, str):
        pytest.skip(disk_full)
    return disk_full


def test_a_full_disk_ends_the_run_in_one_sentence_with_the_row_that_was_not_saved(full: Outcome) -> None:
    assert full.run.code == 1
    (sentence,) = [line for line in full.run.said.splitlines() if line.startswith("OUT_DIR=")]
    assert "No space left on device" in sentence
    (lost,) = csv.DictReader([HEADER, full.run.said.splitlines()[-1]])
    assert (lost["tokens"], lost["status"]) == ("2", "ok")


def test_rows_saved_before_the_disk_was_full_are_intact_and_resume_adds_the_others(full: Outcome) -> None:
    assert [(row["tokens"], row["status"]) for row in full.rows] == [("1", "ok")]
    assert full.later["resumed"].code == 0


# --- launchers --------------------------------------------------------------------------------------------------------


def test_a_run_alone_does_not_mind_a_listener_on_torchruns_default_port(alone: Run) -> None:
    assert (alone.code, alone.row("honest", 4)["status"]) == (0, "ok")


def test_a_joined_group_writes_one_set_of_rows_equal_to_that_of_a_run_alone(joined: Run, alone: Run) -> None:
    assert joined.code == 0
    assert sorted(path.name for path in joined.folder.glob("*_*_*.*")) == [
        f"{joined.stem}.{e}" for e in ("csv", "jsonl", "log")
    ]
    (row,), (other,) = joined.rows(), alone.rows()
    assert {name: row[name] for name in KEYS} == {name: other[name] for name in KEYS}


@pytest.mark.parametrize(
    ("fakes", "knobs", "sentence"),
    [
        ("honest", {"GPUS": "1"}, "GPUS=1: torchrun started 2 tasks on this node; leave GPUS unset"),
        ("honest of_another_family", {}, "exactly one section and one backend family"),
    ],
)
def test_what_cannot_join_is_refused_in_one_sentence(
    tmp_path: Path, fakes: str, knobs: dict[str, str], sentence: str
) -> None:
    run = Run(tmp_path).go(fakes, SECTION="ref", **one_of(2), **knobs)
    assert (run.code, run.said.count("\n")) == (2, 1)
    assert sentence in run.said
    assert not run.csv.exists()
