"""Runs over several "nodes" of 2 ranks on this machine, each in a network namespace of its own where that is allowed.

Each scenario is one run, or a few after another; the tests look at node 0's files and at what every node said.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import FAKE_SECTION, ROOT, Run, scenario, wait_until
from node_helpers import (
    Cluster,
    inside,
    meeting_point,
    remove_namespaces,
    srun_tasks,
    torchrun_tasks,
    without_namespaces,
)

from lib.nodes import NOT_MET
from lib.problem import Problem
from lib.routing import make_routing
from lib.rows import read_rows
from lib.traffic import count_copies

TIMEOUT_S = "4"
SILENT_S = "2"
HOST = socket.gethostname()
ALL_SLOW = ("slow_0", "slow_1", "slow_2", "slow_3")
# What a run of the same world has in common, however many nodes it is on.
SAME = (
    "schema section variant comm compute_kernel algo timing status world tokens num_experts topk hidden inter "
    "dispatch_dtype combine_dtype layout transport routing routing_sha load_max_over_mean seed warmup iters "
    "dispatch_bytes_selection dispatch_bytes_dedup dispatch_bytes_wire combine_bytes_selection combine_bytes_dedup "
    "combine_bytes_wire check"
).split()


@pytest.fixture(scope="session", autouse=True)
def _namespaces_go_with_the_session() -> Iterator[None]:
    yield
    remove_namespaces()


# --- scenarios, the longest first -------------------------------------------------------------------------------------


@scenario
def far(folder: Path) -> Cluster:
    """T=1: rank 2, on node 1, hangs; 2: it is killed; 3: all is well."""
    return Cluster.go(folder, "far", MOE_EP_FAKE_CULPRIT="2", SEQ_LENS="1 2 3", TIMEOUT_S=TIMEOUT_S)


@dataclass
class Killed:
    """A run whose node 1 was killed in mid case, what it had written by then, and the run that took it up."""

    run: Cluster
    rows: list[dict[str, str]]
    gone_after_s: float
    resumed: Cluster


@scenario
def node_killed(folder: Path) -> Killed:
    """In T=2 of 2, 3, the coordinator of node 1 is killed; then RESUME on both nodes."""
    knobs = {"SEQ_LENS": "2 3"}
    run = Cluster.start(folder, "slow", **knobs)
    run.first.wait_for(*ALL_SLOW)
    os.kill(run.nodes[1].process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    run.end()
    gone_after_s, rows = run.first.seconds_until_nothing_lives(), run.first.rows()
    (folder / "go").touch()
    resumed = Cluster.go(folder, "slow", stamp=run.first.stamp, RESUME=run.first.stamp, **knobs)
    return Killed(run, rows, gone_after_s, resumed)


@scenario
def by_torchrun(folder: Path) -> list[Run]:
    """One task a node, started by somebody else's torchrun, whose agent holds MASTER_PORT."""
    point, runs = meeting_point(), []
    for node in range(2):
        command = torchrun_tasks(node, point, FAKE_SECTION[1:])
        run = Run(folder if node == 0 else folder / "node1", command=[*inside(node), *command])
        runs.append(run.start("honest", GPUS="2", MOE_EP_FAKE_DIR=str(folder)))
    return [run.end() for run in runs]


@scenario
def three_by_srun(folder: Path) -> list[Run]:
    """One task a node on three nodes, as srun starts them: 6 ranks."""
    tasks = list(srun_tasks(3, 1))
    return _tasks(folder, tasks, {"GPUS": "2", "NUM_EXPERTS": "12"})


@scenario
def a_task_a_gpu_by_srun(folder: Path) -> list[Run]:
    return _tasks(folder, list(srun_tasks(2, 2)), {"SECTION": "ref"})


def _tasks(folder: Path, tasks: list[dict[str, str]], knobs: dict[str, str]) -> list[Run]:
    knobs = knobs | meeting_point() | {"MOE_EP_FAKE_DIR": str(folder)}
    runs = []
    for number, task in enumerate(tasks):
        where = folder if number == 0 else folder / f"task{number}"
        run = Run(where, command=[*inside(int(task["SLURM_NODEID"])), *FAKE_SECTION])
        runs.append(run.start("honest", **knobs, **task))
    return [run.end() for run in runs]


@scenario
def two_nodes(folder: Path) -> Cluster:
    return Cluster.go(folder, "honest", SEQ_LENS="1 4")


@scenario
def one_node(folder: Path) -> Run:
    return Run(folder, prefix="sweep").go("honest", SEQ_LENS="1 4", GPUS="4")


@scenario
def nodes_that_differ(folder: Path) -> dict[str, Cluster]:
    """Nodes that differ, one thing after the other."""
    elsewhere = folder / "elsewhere"
    for name in ("bench", "lib", "tests"):
        shutil.copytree(ROOT / name, elsewhere / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (elsewhere / "lib" / "plan.py").open("a") as file:
        file.write("# a later version\n")

    def other(name: str, folders: dict[int, Path] | None = None, **knobs: str) -> Cluster:
        return Cluster.go(folder / name, "honest", each={1: knobs}, folders=folders)

    return {
        "knobs": other("knobs", GPUS="4", ITERS="9"),
        "plan": other("plan", MOE_EP_FAKES="honest slow"),
        "interface": other("interface", GLOO_SOCKET_IFNAME="wire9"),
        "code": other("code", folders={1: elsewhere}),
        "rank": Cluster.go(folder / "rank", "honest", count=3, each={2: {"NODE_RANK": "1"}}, NUM_EXPERTS="12"),
    }


@scenario(idle=True)
def nodes_that_are_absent(folder: Path) -> dict[str, Cluster]:
    """Node 2 of three never comes; node 0 never comes; somebody else listens at MASTER_PORT."""
    short = {"MOE_EP_NODE_SILENT_S": SILENT_S, "NUM_EXPERTS": "12"}
    without_2 = Cluster.start(folder / "without 2", "honest", count=3, come=(0, 1), **short)
    without_0 = Cluster.start(folder / "without 0", "honest", count=3, come=(1,), **short)
    point = meeting_point()
    server = f"server = socket.create_server(('', {point['MASTER_PORT']}))"
    listen = f"import socket, time; {server}; print(flush=True); time.sleep(600)"
    stranger = subprocess.Popen([*inside(0), sys.executable, "-c", listen], stdout=subprocess.PIPE)
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == b"\n"
    taken = Cluster.start(folder / "taken", "honest", **short, **point)
    waiting = Run(folder / "waiting", command=["./run.sh"])
    waiting.start(SECTION="ref comm", NNODES="2", GPUS="2", PYTHON=sys.executable, **meeting_point())
    wait_until(lambda: bool(list(waiting.folder.glob(".claim_*"))), "the claim of a stamp")
    time.sleep(1)  # by then it waits for node 1, or on a busy machine is on its way there, where the same is due
    os.killpg(waiting.process.pid, signal.SIGINT)  # type: ignore[union-attr]
    outcome = {
        "waiting": Cluster([waiting.end()]),
        "without 2": without_2.end(),
        "without 0": without_0.end(),
        "taken": taken.end(),
    }
    stranger.kill()
    stranger.wait()
    stranger.stdout.close()
    return outcome


# --- a run that goes well ---------------------------------------------------------------------------------------------


def test_the_nodes_of_these_tests_are_in_network_namespaces_of_their_own() -> None:
    if reason := without_namespaces():
        pytest.skip(reason)
    assert inside(0) != inside(1)


def test_the_rows_of_two_nodes_equal_those_of_one_node_with_the_same_ranks(two_nodes: Cluster, one_node: Run) -> None:
    assert two_nodes.codes == [0, 0]
    there, here = two_nodes.first.rows(), one_node.rows()
    assert [{name: row[name] for name in SAME} for row in there] == [{name: row[name] for name in SAME} for row in here]
    assert [(row["status"], row["nodes"]) for row in there] == [("ok", "2")] * 2


def test_node_0_alone_has_files_and_the_others_say_where_the_rows_are(two_nodes: Cluster) -> None:
    first, other = two_nodes.nodes
    assert sorted(path.name for path in first.folder.glob("*_*_*.*")) == [
        f"{first.stem}.{e}" for e in ("csv", "jsonl", "log")
    ]
    assert list(other.folder.iterdir()) == []
    assert other.said == f"fake: the rows are on node 0 ({HOST}): {first.csv}\n"


def test_node_bytes_are_counted_from_the_routing_and_blank_on_one_node(two_nodes: Cluster, one_node: Run) -> None:
    for row in two_nodes.first.rows():
        problem = Problem(4, 2, int(row["tokens"]), 8, 2, 64, 32, 0, "uniform")
        copies = count_copies(make_routing(problem).topk_idx, problem)
        a_row = 2 * 64 / 4  # bytes of a bf16 row, and the mean over ranks
        assert float(row["node_bytes_algo"]) == copies.node_algo.sum() * a_row
        assert float(row["node_bytes_physical"]) == copies.node_physical.sum() * a_row
    assert {(row["node_bytes_algo"], row["node_bytes_physical"]) for row in one_node.rows()} == {("", "")}


def test_a_record_holds_the_fingerprint_of_every_node(two_nodes: Cluster) -> None:
    record = json.loads(two_nodes.first.jsonl.read_text().splitlines()[0])
    mine = dict(record["fingerprint"])
    assert mine.pop("others") == {f"node 1 ({HOST})": mine}


def test_the_repro_line_is_node_0s_and_names_the_meeting_point(two_nodes: Cluster) -> None:
    (line, *_) = [row["repro"] for row in two_nodes.first.rows()]
    words = dict(word.split("=", 1) for word in line.split() if "=" in word)
    assert (words["NNODES"], words["NODE_RANK"], words["GPUS"]) == ("2", "0", "2")
    assert int(words["MASTER_PORT"]) > 0


# --- outer launchers --------------------------------------------------------------------------------------------------


def outcome_of(run: Run) -> list[tuple[str, str, str]]:
    return [(row["status"], row["world"], row["nodes"]) for row in run.rows()]


def test_one_task_a_node_by_torchrun_finds_node_0_through_torchruns_store(by_torchrun: list[Run]) -> None:
    assert [run.code for run in by_torchrun] == [0, 0]
    assert outcome_of(by_torchrun[0]) == [("ok", "4", "2")]
    assert f"the rows are on node 0 ({HOST})" in by_torchrun[1].said


def test_one_task_a_node_by_srun_on_three_nodes(three_by_srun: list[Run]) -> None:
    assert [run.code for run in three_by_srun] == [0, 0, 0]
    assert outcome_of(three_by_srun[0]) == [("ok", "6", "3")]


def test_one_task_a_gpu_by_srun_is_one_group_over_both_nodes(a_task_a_gpu_by_srun: list[Run]) -> None:
    assert [run.code for run in a_task_a_gpu_by_srun] == [0, 0, 0, 0]
    assert outcome_of(a_task_a_gpu_by_srun[0]) == [("ok", "4", "2")]
    assert [run.said.count("the rows are on node 0") for run in a_task_a_gpu_by_srun[1:]] == [0, 1, 0]  # once a node


# --- ranks that break on another node ---------------------------------------------------------------------------------


def test_a_hang_on_node_1_is_a_timeout_with_the_stacks_of_both_nodes(far: Cluster) -> None:
    row = far.first.row("far", 1)
    assert row["status"] == "timeout"
    where = f"rank 1 on node 0 ({HOST}) in time, rank 2 on node 1 ({HOST}) in time"
    assert f"TIMEOUT_S={TIMEOUT_S} s: " in row["reason"]
    assert where in row["reason"]
    log = far.first.log_text()
    assert "in hang_in_python" in log.split("--- stacks of rank 2 ")[1].split("--- stacks of rank")[0]
    assert "in all_to_all_single" in log.split("--- stacks of rank 0 ")[1].split("--- stacks of rank")[0]


def test_a_rank_killed_on_node_1_fails_its_case_by_name_and_the_next_one_runs(far: Cluster) -> None:
    row = far.first.row("far", 2)
    assert row["status"] == "failed"
    assert row["reason"].startswith(f"rank 2 on node 1 ({HOST}) died in phase time (pid ")
    assert far.first.row("far", 3)["status"] == "ok"
    assert far.codes == [1, 1]


# --- a node that goes -------------------------------------------------------------------------------------------------


def test_a_node_killed_in_mid_case_fails_the_case_by_name_and_ends_the_run(node_killed: Killed) -> None:
    gone = f"node 1 ({HOST}) went away in mid run"
    told = [(row["tokens"], row["status"], row["reason"]) for row in node_killed.rows]
    assert told == [("2", "failed", gone), ("3", "interrupted", f"{gone}; RESUME continues")]
    assert node_killed.run.codes == [1, -signal.SIGKILL]


def test_no_process_is_left_on_any_node_after_one_was_killed(node_killed: Killed) -> None:
    assert node_killed.gone_after_s < 1


def test_resume_goes_on_over_the_nodes(node_killed: Killed) -> None:
    assert node_killed.resumed.codes == [0, 0]
    assert node_killed.resumed.first.statuses() == [("slow", "2", "ok"), ("slow", "3", "ok")]


# --- nodes that differ, or do not come --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("knobs", f"GPUS differs between nodes: 2 on node 0 ({HOST}), 4 on node 1 ({HOST}); give every node the same"),
        ("knobs", f"ITERS differs between nodes: 3 on node 0 ({HOST}), 9 on node 1 ({HOST}); give"),
        ("plan", "plan differs between nodes: slow e2e T=1, slow e2e T=2, slow e2e T=4 and 11 more only on node 1"),
        ("interface", f"node 1 ({HOST}): GLOO_SOCKET_IFNAME: names 1 interface(s) that this node does not have"),
        ("code", "code differs between nodes: g"),
        ("rank", f"NODE_RANK=1: two nodes say so (node 1 ({HOST}) came second); give each of them its own"),
    ],
)
def test_nodes_that_differ_are_refused_on_every_node_with_the_difference_named(
    nodes_that_differ: dict[str, Cluster], what: str, sentence: str
) -> None:
    cluster = nodes_that_differ[what]
    assert set(cluster.codes) == {2}
    for said in cluster.said:
        assert sentence in said
        assert "Traceback" not in said
    assert not cluster.first.csv.exists()


def test_a_node_that_never_comes_is_named_in_time_on_the_nodes_that_came(
    nodes_that_are_absent: dict[str, Cluster],
) -> None:
    cluster = nodes_that_are_absent["without 2"]
    assert cluster.codes == [NOT_MET, NOT_MET]
    for said in cluster.said:
        assert said.startswith("fake: node 2 has not come to ")
        assert f" within {SILENT_S} s; start it with the same command and its own NODE_RANK" in said


def test_ctrl_c_while_node_0_waits_for_the_others_writes_every_row_without_them(
    nodes_that_are_absent: dict[str, Cluster],
) -> None:
    (run,) = nodes_that_are_absent["waiting"].nodes
    rows = [line for path in sorted(run.folder.glob("*.csv")) for line in read_rows(path)[0]]
    assert {row["section"] for row in rows} == {"ref", "comm"}
    assert {row["status"] for row in rows} <= {"interrupted", "unsupported"}
    assert run.code == 130


def test_a_node_0_that_never_comes_is_named(nodes_that_are_absent: dict[str, Cluster]) -> None:
    cluster = nodes_that_are_absent["without 0"]
    assert cluster.codes == [NOT_MET]
    assert cluster.said[0].startswith("fake: node 0 was not found at ")


def test_a_taken_master_port_is_refused_in_one_sentence(nodes_that_are_absent: dict[str, Cluster]) -> None:
    node_0, node_1 = nodes_that_are_absent["taken"].nodes
    assert (node_0.code, node_0.said.count("\n")) == (2, 1)
    assert " is taken on node 0, something listens there already; give a free port" in node_0.said
    assert (node_1.code, node_1.said.count("\n")) == (NOT_MET, 1)


def test_nothing_lives_when_the_runs_over_nodes_have_ended(
    far: Cluster, two_nodes: Cluster, by_torchrun: list[Run], a_task_a_gpu_by_srun: list[Run]
) -> None:
    for run in (far.first, two_nodes.first, by_torchrun[0], a_task_a_gpu_by_srun[0]):
        assert run.living() == []
