"""What MORI's dispatch and combine take, and how much memory. Standard library only: the coordinator plans with it.

Limits are upstream's, with their places under src/ops/dispatch_combine, at commit 624002c8 (2026-08-21). None was
provoked on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from lib.contract import Variant
from lib.problem import Problem
from lib.routing_spec import parse_routing

INTRANODE_MAX_RANKS = 8  # intranode.hpp, MAX_GPUS_PER_NODE
MAX_TOPK = 63  # common.hpp: fewer than the lanes of a wavefront, 64 on gfx9
SCALE_BLOCK = 128
BF16_BYTES, FP32_BYTES, INT32_BYTES = 2, 4, 4
ROUTING_MAPS = 5  # dispatch_combine.cpp, InitializeOrderMapBuf: int32 arrays of a token of each rank a local expert
HEAP_SLACK = 1.1  # of the symmetric heap: each buffer is aligned to the chunks that the heap is made of
HEAP_SPARE_BYTES = 1 << 30
GIB = 1 << 30


@dataclass(frozen=True)
class Kernel:
    """One of MORI's kernel types: its name there, its launch where no tuned one is found, its profiler's slots.

    Blocks and warps are those of upstream's own tests; with MORI_EP_LAUNCH_CONFIG_MODE=AUTO the library replaces them.
    """

    type_name: str
    block_num: int
    rdma_block_num: int
    warp_num_per_block: int
    slots: str
    masks: bool = True  # skips -1 ids
    every_node: bool = False  # sends every token to every node, whatever its experts are
    zero_copy: bool = False  # combine reads the registered buffer


KERNELS = {
    "mori+intranode": Kernel("IntraNode", 80, 0, 16, "IntranodeSlots", zero_copy=True),
    "mori+v1": Kernel("InterNodeV1", 96, 64, 8, "InternodeV1Slots"),
    "mori+v1_ll": Kernel("InterNodeV1LL", 256, 128, 8, "InternodeV1Slots", masks=False, every_node=True),
    "mori+async_ll": Kernel("AsyncLL", 64, 0, 8, "LowLatencyAsyncSlots", masks=False),
}


def capacity(problem: Problem) -> int:
    return max(problem.tokens, 1)


def gpus_per_node(problem: Problem) -> int:
    return problem.world // problem.nodes


def scale_dim(variant: Variant, problem: Problem) -> int:
    return problem.hidden // SCALE_BLOCK if variant.dispatch_dtype == "fp8" else 0


def shape_reason(variant: Variant, problem: Problem) -> str:
    """Why this kernel can't run this shape, "" if it can."""
    kernel, a_node = KERNELS[variant.name], gpus_per_node(problem)
    if variant.name == "mori+intranode":
        if problem.nodes > 1:
            return f"intranode is for one node, these are {problem.nodes}"
        if problem.world > INTRANODE_MAX_RANKS:
            return f"intranode takes at most {INTRANODE_MAX_RANKS} ranks, this is {problem.world}"
    if a_node & (a_node - 1):
        return f"GPUS={a_node}: MORI takes a power of two of ranks a node"
    if problem.topk > MAX_TOPK:
        return f"TOPK={problem.topk}: MORI takes at most {MAX_TOPK}"
    if variant.dispatch_dtype == "fp8" and problem.hidden % SCALE_BLOCK:
        return f"HIDDEN={problem.hidden}: fp8 needs a multiple of {SCALE_BLOCK}"
    if not kernel.masks and parse_routing(problem.routing).mask:
        return masked_reason(variant, problem)
    return ""


def masked_reason(variant: Variant, problem: Problem) -> str:
    short = variant.name.removeprefix("mori+")
    return f"ROUTING={problem.routing}: {short} has no masked entries, it takes -1 for an expert of rank 0"


def heap_bytes(variant: Variant, problem: Problem) -> int:
    """What a rank takes of the symmetric heap (dispatch_combine.cpp, InitializeShmemBuf and InitializeOrderMapBuf)."""
    tokens, ranks, topk, nodes = capacity(problem), problem.world, problem.topk, problem.nodes
    received, row = ranks * tokens, problem.hidden * BF16_BYTES
    scales = scale_dim(variant, problem) * FP32_BYTES
    message = row + topk * (INT32_BYTES + FP32_BYTES) + INT32_BYTES + scales
    staging = {
        "mori+intranode": received,
        "mori+v1": received + (3 * nodes + 1) * tokens,
        "mori+v1_ll": received + (3 * nodes + 1) * tokens,
        "mori+async_ll": 3 * received,
    }[variant.name]
    rows = (received + tokens) * row
    beside = received * (topk * (3 * FP32_BYTES + 2 * INT32_BYTES) + 2 * scales)
    return staging * message + rows + beside + received * problem.local_experts * INT32_BYTES


def heap_size(variant: Variant, problem: Problem) -> int:
    """MORI_SHMEM_HEAP_SIZE in GiB."""
    return -int(-(heap_bytes(variant, problem) * HEAP_SLACK + HEAP_SPARE_BYTES) // GIB)


def memory_bytes(variant: Variant, problem: Problem) -> int:
    """The heap, the routing's maps, what is staged for combine, and the received scales' dequantised rows."""
    received = problem.world * capacity(problem)
    maps = received * problem.local_experts * INT32_BYTES * ROUTING_MAPS
    staged = 0 if KERNELS[variant.name].zero_copy else received * problem.hidden * BF16_BYTES
    # dequantising makes a float32 and a bf16 of the rows that came
    quantised = received * problem.hidden * (FP32_BYTES + BF16_BYTES) if variant.dispatch_dtype == "fp8" else 0
    return heap_size(variant, problem) * GIB + maps + staged + quantised
