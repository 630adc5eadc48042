"""Who started us, from the variables that launchers set."""

from __future__ import annotations

import pytest
from knob_helpers import parsed

from lib.launcher import Launcher, detect_launcher, joined_environment, joined_problem, own_environment

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OF_NODE_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
SRUN = {
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
}
A_STEP = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NNODES": "2"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Launcher()),
        (TORCHRUN, Launcher(True, 3, 4, 3, 4, 1, "torchrun", 0, True)),
        (SRUN, Launcher(True, 2, 4, 2, 4, 1, "srun")),
        (TORCHRUN | SRUN, Launcher(True, 3, 4, 3, 4, 1, "torchrun", 0, True)),
        # srun without --ntasks tells the tasks of a node only
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS_PER_NODE": "8", "SLURM_STEP_NUM_TASKS": "8"},
            Launcher(True, 0, 8, 0, 8, 1, "srun"),
        ),
        # inside a batch script, before any srun: alone on the node, whatever the job asked for
        ({"SLURM_PROCID": "0", "SLURM_NTASKS_PER_NODE": "8", "SLURM_NNODES": "2"}, Launcher()),
        # one task a node: it starts a node's ranks by itself
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}, Launcher()),
        (OF_NODE_1, Launcher(nodes=2, source="torchrun", node_rank=1)),
        (
            OF_NODE_1 | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
            Launcher(nodes=2, source="torchrun", node_rank=1, store=True),
        ),
        # a step of one task a node in a job of eight: the step counts
        (
            A_STEP | {"SLURM_NTASKS_PER_NODE": "8", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"},
            Launcher(nodes=2, source="srun", node_rank=1),
        ),
        # a step on one node of a job of two
        (A_STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}, Launcher()),
        (
            A_STEP | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"},
            Launcher(True, 5, 8, 1, 4, 2, "srun", 1),
        ),
        (
            TORCHRUN | {"RANK": "7", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1"},
            Launcher(True, 7, 8, 3, 4, 2, "torchrun", 1, True),
        ),
        # a user's own variable of that name is not a launcher's
        ({"RANK": "colonel", "LOCAL_WORLD_SIZE": "4"}, Launcher()),
    ],
)
def test_a_launcher_is_known_by_its_variables(env: dict[str, str], expected: Launcher) -> None:
    assert detect_launcher(env) == expected


def test_everybody_but_the_first_rank_or_the_first_node_follows() -> None:
    assert detect_launcher(TORCHRUN).follower
    assert not detect_launcher(TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}).follower
    assert not detect_launcher({}).follower
    assert detect_launcher(OF_NODE_1).follower
    by_hand = parsed(NNODES="2", NODE_RANK="1", MASTER_ADDR="node0", MASTER_PORT="29500")
    assert detect_launcher({}).placed(by_hand).follower


def test_members_are_ranks_where_one_task_a_gpu_was_started_and_nodes_elsewhere() -> None:
    joined, node = detect_launcher(TORCHRUN), detect_launcher(OF_NODE_1)
    assert (joined.members, joined.member, joined.name(3, "a")) == (4, 3, "rank 3's task on node 0 (a)")
    assert (node.members, node.member, node.name(1, "b")) == (2, 1, "node 1 (b)")


def test_our_own_torchrun_sees_nothing_of_an_outer_launcher() -> None:
    ours = {"PATH": "/bin", "RANKING": "x", "OMP_NUM_THREADS": "4", "TOKENS": "8", "SLURM_JOB_ID": "7"}
    assert own_environment(TORCHRUN | {"LOCAL_SOMETHING": "1"} | ours) == ours


def test_a_joined_ranks_worker_is_told_what_our_own_torchrun_would_tell_it() -> None:
    env = SRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    told = joined_environment(env, detect_launcher(env))
    assert told == SRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}


def problem(env: dict[str, str], gpus: int = 4, sections: int = 1, families: str = "torch") -> str:
    return joined_problem(detect_launcher(env), gpus, env, sections, set(families.split()))


def test_a_group_that_fits_is_joined_and_a_run_of_our_own_has_nothing_to_join() -> None:
    assert problem(TORCHRUN) == ""
    assert problem({}, gpus=2, sections=5, families="torch deepep") == ""
    assert problem(OF_NODE_1, gpus=2, sections=5, families="torch deepep") == ""


@pytest.mark.parametrize(
    ("changed", "asked", "said"),
    [
        ({}, {"gpus": 2}, "GPUS=2: torchrun started 4 tasks on this node"),
        ({}, {"sections": 2}, "exactly one section and one backend family (asked: 2 sections; families: torch)"),
        ({}, {"families": "torch deepep"}, "families: deepep, torch); name them with SECTION and"),
        ({}, {"families": ""}, "families: none"),
        ({"MASTER_ADDR": ""}, {}, "MASTER_ADDR is not set: torchrun started one task a GPU"),
        ({"MASTER_PORT": ""}, {}, "MASTER_PORT is not set"),
        ({"GROUP_WORLD_SIZE": "2"}, {}, "torchrun started 4 tasks on 2 nodes, 4 on this one: start equally many on"),
        (
            {"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1"},
            {},
            "torchrun placed rank 3 on node 1: the ranks of a node must be neighbours (srun --distribution=block)",
        ),
    ],
)
def test_what_keeps_a_group_from_being_joined_is_one_sentence(
    changed: dict[str, str], asked: dict[str, int], said: str
) -> None:
    sentence = problem(TORCHRUN | changed, **asked)  # type: ignore[arg-type]
    assert said in sentence
    assert "\n" not in sentence
