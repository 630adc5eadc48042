"""The harness's own CUDA pieces on a rank: process groups, the device-side barrier, the L2 flush."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lib.contract import Group
from lib.device_timing import DeviceTools
from lib.loaded_nccl import loaded_nccl

NCCL_SHARES_A_GPU = (2, 30, 0)  # two ranks on one device are refused before
FLUSH_OF_L2 = 4  # the flush writes this many times the L2, so that no line of the session's data survives
BARRIER_BYTES = 4096


def cuda_group(rank: int, world: int, local_rank: int, nodes: int, timeout: datetime.timedelta) -> Group:
    """NCCL for the backend's data and gloo for the harness's words, on this rank's GPU.

    Ranks that share a GPU move their data by gloo where NCCL would refuse them.
    """
    place = local_rank // ranks_per_gpu()
    device = torch.device("cuda", place % torch.cuda.device_count())  # a launcher may show each task its own GPU
    torch.cuda.set_device(device)
    if ranks_per_gpu() > 1 and (loaded_nccl() or NCCL_SHARES_A_GPU) < NCCL_SHARES_A_GPU:
        dist.init_process_group("gloo", timeout=timeout)
    else:
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
    host_pg = dist.new_group(backend="gloo", timeout=timeout)
    return Group(rank, world, local_rank, nodes, device, pg=dist.group.WORLD, host_pg=host_pg)


def ranks_per_gpu() -> int:
    """How many neighbouring ranks of this run are on each GPU (RANKS_PER_GPU)."""
    return int(os.environ.get("MOE_EP_RANKS_PER_GPU", "1"))


def device_barrier(group: Group) -> tuple[Callable[[], None], str]:
    """A barrier of all ranks, enqueued on the current stream, and its name.

    Symmetric memory's takes about 4 us; an all-reduce of one number stands in where GPUs can't map each other's memory.
    """
    if group.world == 1:
        return lambda: None, "none"
    if group.nodes > 1:  # symmetric memory is one node's
        return all_reduce_barrier(group), "all_reduce"
    try:
        import torch.distributed._symmetric_memory as symmetric

        cell = symmetric.empty(BARRIER_BYTES, dtype=torch.uint8, device=group.device)
        handle: Any = symmetric.rendezvous(cell, group.pg)
        problem = ""
    except RuntimeError as error:
        problem = str(error)
    problems: list[Any] = [None] * group.world
    dist.all_gather_object(problems, problem, group=group.host_pg)
    if any(problems):
        return all_reduce_barrier(group), "all_reduce"

    def barrier(keep: Any = cell) -> None:
        handle.barrier()

    return barrier, "symmetric_memory"


def all_reduce_barrier(group: Group) -> Callable[[], None]:
    one = torch.ones(1, device=group.device)
    return lambda: dist.all_reduce(one, group=group.pg)


def l2_flush(device: torch.device) -> Callable[[], None]:
    size = torch.cuda.get_device_properties(device).L2_cache_size * FLUSH_OF_L2
    buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def flush() -> None:
        buffer.zero_()

    return flush


def make_tools(group: Group, cold: bool) -> DeviceTools:
    """This rank's tools; collective."""
    align, _ = device_barrier(group)

    def agree(problem: str) -> str:
        problems: list[Any] = [None] * group.world
        dist.all_gather_object(problems, problem, group=group.host_pg)
        return next((f"rank {rank}: {found}" for rank, found in enumerate(problems) if found), "")

    flush = l2_flush(group.device) if cold else None
    make_flush = partial(l2_flush, group.device)
    return DeviceTools(lambda: dist.barrier(group=group.host_pg), align, flush, agree, make_flush)
