"""Who started us, from the variables that launchers set."""

from __future__ import annotations

import pytest

from lib.launcher import Launcher, detect_launcher, joined_environment, joined_problem, own_environment, run_mark

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
SRUN = {
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NNODES": "1",
}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Launcher()),
        (TORCHRUN, Launcher(True, 3, 4, 3, 4, 1, "torchrun")),
        (SRUN, Launcher(True, 2, 4, 2, 4, 1, "srun")),
        (TORCHRUN | SRUN, Launcher(True, 3, 4, 3, 4, 1, "torchrun")),
        # srun without --ntasks tells the tasks of a node only
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS_PER_NODE": "8", "SLURM_STEP_NUM_TASKS": "8"},
            Launcher(True, 0, 8, 0, 8, 1, "srun"),
        ),
        # inside a batch script, before any srun: alone on the node, whatever the job asked for
        ({"SLURM_PROCID": "0", "SLURM_NTASKS_PER_NODE": "8"}, Launcher()),
        # one task a node: it starts a node's ranks by itself
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}, Launcher()),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}, Launcher(nodes=2)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2"}, Launcher(nodes=2)),
        (TORCHRUN | {"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}, Launcher(True, 3, 8, 3, 4, 2, "torchrun")),
        # a user's own variable of that name is not a launcher's
        ({"RANK": "colonel", "LOCAL_WORLD_SIZE": "4"}, Launcher()),
    ],
)
def test_a_launcher_is_known_by_its_variables(env: dict[str, str], expected: Launcher) -> None:
    assert detect_launcher(env) == expected


def test_only_a_joined_rank_above_0_follows() -> None:
    assert detect_launcher(TORCHRUN).follower
    assert not detect_launcher(TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}).follower
    assert not detect_launcher({}).follower


def test_our_own_torchrun_sees_nothing_of_an_outer_launcher() -> None:
    ours = {"PATH": "/bin", "RANKING": "x", "OMP_NUM_THREADS": "4", "TOKENS": "8", "SLURM_JOB_ID": "7"}
    assert own_environment(TORCHRUN | {"LOCAL_SOMETHING": "1"} | ours) == ours


def test_a_rank_that_srun_started_is_told_in_torchruns_words() -> None:
    env = SRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    told = joined_environment(env, detect_launcher(env))
    assert told.items() >= env.items()
    words = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4", "MOE_EP_JOINED": "1"}
    assert {name: told[name] for name in words} == words


def problem(env: dict[str, str], gpus: int = 4, sections: int = 1, families: str = "torch") -> str:
    return joined_problem(detect_launcher(env), gpus, env, sections, set(families.split()))


def test_a_group_that_fits_is_joined_and_a_run_of_our_own_has_nothing_to_join() -> None:
    assert problem(TORCHRUN) == ""
    assert problem({}, gpus=2, sections=5, families="torch deepep") == ""


@pytest.mark.parametrize(
    ("changed", "asked", "said"),
    [
        ({}, {"gpus": 2}, "GPUS=2: torchrun started 4 tasks on this node"),
        ({}, {"sections": 2}, "exactly one section and one backend family (asked: 2 sections; families: torch)"),
        ({}, {"families": "torch deepep"}, "families: deepep, torch); name them with SECTION and"),
        ({}, {"families": ""}, "families: none"),
        ({"MASTER_ADDR": ""}, {}, "MASTER_ADDR is not set: torchrun started one task a GPU"),
        ({"MASTER_PORT": ""}, {}, "MASTER_PORT is not set"),
        ({"GROUP_WORLD_SIZE": "2"}, {}, "torchrun spans 2 nodes: this version measures one node"),
    ],
)
def test_what_keeps_a_group_from_being_joined_is_one_sentence(
    changed: dict[str, str], asked: dict[str, int], said: str
) -> None:
    sentence = problem(TORCHRUN | changed, **asked)  # type: ignore[arg-type]
    assert said in sentence
    assert "\n" not in sentence


def test_two_nodes_are_refused_also_with_one_task_a_node() -> None:
    said = problem({"SLURM_NNODES": "2", "SLURM_PROCID": "0"})
    assert said == "the launcher spans 2 nodes: this version measures one node"


def test_all_ranks_of_a_joined_group_carry_the_same_mark() -> None:
    ranks = [("0", "20261130T190000Z"), ("3", "")]
    marks = {run_mark(detect_launcher(TORCHRUN | {"RANK": rank}), TORCHRUN, stamp) for rank, stamp in ranks}
    assert marks == {"joined-node0-29500"}
    assert run_mark(detect_launcher({}), {}, "20261130T190000Z") == "20261130T190000Z"
