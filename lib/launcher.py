"""Who started us: a person, or an outer launcher that has placed one task a node, or one task a GPU.

A *member* is one started command: a node, or, where one task a GPU was started (`joined`), a rank. Member 0 leads: it
keeps the files and decides; the others do what it says (lib/nodes.py, lib/follower.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lib.knobs import Knobs

# What an outer launcher or an earlier torchrun leaves behind; our own torchrun must not see it.
FOREIGN_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
FOREIGN_NAMES = ("RANK", "WORLD_SIZE")
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torchrun's word: its agent keeps a store at MASTER_ADDR:MASTER_PORT


@dataclass(frozen=True)
class Launcher:
    """`joined`: one task a GPU was started for us; else we start a node's ranks. `store`: see AGENT_STORE."""

    joined: bool = False
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    nodes: int = 1
    source: str = ""
    node_rank: int = 0
    store: bool = False

    @property
    def members(self) -> int:
        return self.world if self.joined else self.nodes

    @property
    def member(self) -> int:
        return self.rank if self.joined else self.node_rank

    @property
    def follower(self) -> bool:
        return self.member > 0

    def name(self, member: int, host: str) -> str:
        """What a member is called in sentences."""
        if self.joined:
            return f"rank {member}'s task on node {member // self.local_world} ({host})"
        return f"node {member} ({host})"

    def placed(self, knobs: Knobs) -> Launcher:
        """With the number of nodes and this one's rank as the knobs have settled them."""
        return replace(self, nodes=knobs.nnodes, node_rank=knobs.node_rank)


def _number(env: Mapping[str, str], name: str, default: int = 0) -> int:
    text = env.get(name, "")
    return int(text) if text.isdigit() else default


def detect_launcher(env: Mapping[str, str]) -> Launcher:
    """torchrun's variables first, then Slurm's. One task a node is a node launcher: it starts the node's ranks."""
    tasks, nodes = _number(env, "LOCAL_WORLD_SIZE"), _number(env, "GROUP_WORLD_SIZE", 1)
    if env.get("RANK", "").isdigit() and (tasks > 1 or (tasks == 1 and nodes > 1)):
        whole = Launcher(
            joined=True,
            rank=_number(env, "RANK"),
            world=_number(env, "WORLD_SIZE", 1),
            local_rank=_number(env, "LOCAL_RANK"),
            local_world=tasks,
            nodes=nodes,
            source="torchrun",
            node_rank=_number(env, "GROUP_RANK"),
            store=env.get(AGENT_STORE) == "True",
        )
        return whole if tasks > 1 else _of_a_node(whole)
    return _detect_slurm(env)


def _detect_slurm(env: Mapping[str, str]) -> Launcher:
    """srun alone sets SLURM_STEP_NUM_TASKS: in a batch script PROCID is 0 too, and nobody else was started."""
    everyone = _number(env, "SLURM_STEP_NUM_TASKS")
    if not env.get("SLURM_PROCID", "").isdigit() or everyone < 2:
        return Launcher()
    nodes = min(_number(env, "SLURM_STEP_NUM_NODES") or _number(env, "SLURM_NNODES", 1), everyone)
    # a step may have fewer tasks a node than its job asked for
    tasks = 0 if "SLURM_STEP_NUM_NODES" in env else _number(env, "SLURM_NTASKS_PER_NODE")
    whole = Launcher(
        joined=True,
        rank=_number(env, "SLURM_PROCID"),
        world=everyone,
        local_rank=_number(env, "SLURM_LOCALID"),
        local_world=tasks or everyone // nodes,
        nodes=nodes,
        source="srun",
        node_rank=_number(env, "SLURM_NODEID"),
    )
    return whole if whole.local_world > 1 else _of_a_node(whole)


def _of_a_node(whole: Launcher) -> Launcher:
    return Launcher(nodes=whole.nodes, source=whole.source, node_rank=whole.node_rank, store=whole.store)


def joined_problem(launcher: Launcher, gpus: int, env: Mapping[str, str], sections: int, families: set[str]) -> str:
    """Why this run cannot join the outer launcher's group, in one sentence; "" if it can."""
    if not launcher.joined:
        return ""
    if gpus != launcher.local_world:
        return f"GPUS={gpus}: {launcher.source} started {launcher.local_world} tasks on this node; leave GPUS unset"
    if launcher.world != launcher.nodes * launcher.local_world:
        return (
            f"{launcher.source} started {launcher.world} tasks on {launcher.nodes} nodes, "
            f"{launcher.local_world} on this one: start equally many on each"
        )
    if launcher.rank != launcher.node_rank * launcher.local_world + launcher.local_rank:
        return (
            f"{launcher.source} placed rank {launcher.rank} on node {launcher.node_rank}: the ranks of a node must be "
            "neighbours (srun --distribution=block)"
        )
    if sections != 1 or len(families) != 1:
        found = ", ".join(sorted(families)) or "none"
        return (
            f"SECTION: a group joined from {launcher.source} runs exactly one section and one backend family "
            f"(asked: {sections} sections; families: {found}); name them with SECTION and REF_LIST or COMM_LIST"
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            return f"{name} is not set: {launcher.source} started one task a GPU; they meet at MASTER_ADDR:MASTER_PORT"
    return ""


def own_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment for our own torchrun: without what an outer launcher put there for its group."""
    return {
        name: value
        for name, value in env.items()
        if name not in FOREIGN_NAMES and not name.startswith(FOREIGN_PREFIXES)
    }


def joined_environment(env: Mapping[str, str], launcher: Launcher) -> dict[str, str]:
    """The environment for a joined rank's worker: what our own torchrun would tell the one rank that it started."""
    return own_environment(env) | {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": str(launcher.local_rank),
        "LOCAL_WORLD_SIZE": str(launcher.local_world),
    }
