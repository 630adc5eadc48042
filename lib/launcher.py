"""Who started us: a person, or an outer launcher that has already placed one task a GPU.

Several nodes are a later part; their place is here (NNODES, GROUP_WORLD_SIZE, SLURM_NNODES and what follows from them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# What an outer launcher or an earlier torchrun leaves behind; our own torchrun must not see it.
FOREIGN_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
FOREIGN_NAMES = ("RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Launcher:
    """`joined`: one task a GPU was started for us, so we join that group instead of starting one."""

    joined: bool = False
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    nodes: int = 1
    source: str = ""

    @property
    def follower(self) -> bool:
        return self.joined and self.rank > 0


def _number(env: Mapping[str, str], name: str, default: int = 0) -> int:
    text = env.get(name, "")
    return int(text) if text.isdigit() else default


def detect_launcher(env: Mapping[str, str]) -> Launcher:
    """torchrun's variables first, then Slurm's. One task a node is a node launcher: we are alone on the node."""
    if env.get("RANK", "").isdigit() and _number(env, "LOCAL_WORLD_SIZE") > 1:
        return Launcher(
            joined=True,
            rank=_number(env, "RANK"),
            world=_number(env, "WORLD_SIZE", 1),
            local_rank=_number(env, "LOCAL_RANK"),
            local_world=_number(env, "LOCAL_WORLD_SIZE"),
            nodes=_number(env, "GROUP_WORLD_SIZE", 1),
            source="torchrun",
        )
    tasks = _number(env, "SLURM_NTASKS_PER_NODE")
    # srun alone sets SLURM_STEP_NUM_TASKS: in a batch script PROCID is 0 too, and nobody else was started
    if env.get("SLURM_PROCID", "").isdigit() and tasks > 1 and _number(env, "SLURM_STEP_NUM_TASKS") > 1:
        nodes = _number(env, "SLURM_NNODES", 1)
        return Launcher(
            joined=True,
            rank=_number(env, "SLURM_PROCID"),
            world=_number(env, "SLURM_NTASKS", tasks * nodes),
            local_rank=_number(env, "SLURM_LOCALID"),
            local_world=tasks,
            nodes=nodes,
            source="srun",
        )
    return Launcher(nodes=max(_number(env, "GROUP_WORLD_SIZE", 1), _number(env, "SLURM_NNODES", 1)))


def joined_problem(launcher: Launcher, gpus: int, env: Mapping[str, str], sections: int, families: set[str]) -> str:
    """Why this run cannot join the outer launcher's group, in one sentence; "" if it can."""
    if launcher.nodes > 1:
        return f"{launcher.source or 'the launcher'} spans {launcher.nodes} nodes: this version measures one node"
    if not launcher.joined:
        return ""
    if gpus != launcher.local_world:
        return f"GPUS={gpus}: {launcher.source} started {launcher.local_world} tasks on this node; leave GPUS unset"
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
    """The environment for a joined rank's worker, in torchrun's words whoever launched it."""
    return dict(env) | {
        "RANK": str(launcher.rank),
        "WORLD_SIZE": str(launcher.world),
        "LOCAL_RANK": str(launcher.local_rank),
        "LOCAL_WORLD_SIZE": str(launcher.local_world),
        "MOE_EP_JOINED": "1",
    }


def run_mark(launcher: Launcher, env: Mapping[str, str], stamp: str) -> str:
    """What every process of a run carries; joined ranks above 0 do not know the stamp, but share the meeting point."""
    return f"joined-{env.get('MASTER_ADDR')}-{env.get('MASTER_PORT')}" if launcher.joined else stamp
