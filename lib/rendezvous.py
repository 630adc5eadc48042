"""How ranks that several commands started become one process group.

Each command's ranks count from 0; `place` gives their numbers over all of them. Rank 0 hosts the group's store on a
port that the OS chooses, so no port is guessed and lost in between; the others hear of it through the coordinator.
"""

from __future__ import annotations

import datetime
import os
import queue
from collections.abc import Callable, Mapping
from typing import Any

from lib.launcher import AGENT_STORE

FIRST_RANK = "MOE_EP_FIRST_RANK"  # of the ranks that this command started; set only where there are several commands
WORLD = "MOE_EP_WORLD"  # ranks of all commands
_kept: list[Any] = []  # rank 0's store lives as long as its process


def place(env: Mapping[str, str]) -> tuple[int, int]:
    """This rank and the number of ranks, over all nodes."""
    if FIRST_RANK not in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"])
    return int(env[FIRST_RANK]) + int(env["RANK"]), int(env[WORLD])


def meet(say_port: Callable[[int], None], ports: queue.Queue[int], host: str, timeout_s: float) -> None:
    """Set the variables by which `init_process_group`, and libraries that do it themselves, find rank 0's store.

    host: where this rank reaches node 0 · ports: yields the store's port once rank 0 has said it.
    """
    import torch.distributed as dist

    rank, world = place(os.environ)
    if rank == 0:
        limit = datetime.timedelta(seconds=timeout_s)
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        _kept.append(store)
        say_port(store.port)
        port = store.port
    else:
        port = ports.get()
    nodes, local = int(os.environ["MOE_EP_NODES"]), int(os.environ["LOCAL_WORLD_SIZE"])
    # the agent's-store word: every rank, rank 0 too, is a client of a store that is there already
    os.environ |= {AGENT_STORE: "True", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"GROUP_RANK": str(rank // local), "GROUP_WORLD_SIZE": str(nodes)}
    os.environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0")
