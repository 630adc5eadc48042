"""What MSCCL++'s EP extension takes, and how much memory. Standard library only: the coordinator plans with it.

Limits are upstream's asserts, with their places under src/ext/ep, at commit 3d02152b (branch feature/ep, 2026-08-21).
None was provoked on a GPU. ll is upstream's LATENCY mode, ht its THROUGHPUT mode.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from lib.contract import Variant
from lib.problem import Problem
from lib.routing_spec import parse_routing

LL_HIDDEN = (4096, 4352, 6656, 7168, 8192, 8704, 9216)  # combine/common.cuh; dispatch alone also has 2048
LL_MAX_TOPK = 9  # combine/common.cuh, CombineMaxNTopk; dispatch takes 32
LL_MAX_RANKS = 64  # dispatch/common.cuh, 2 * WARP_SIZE
LL_RESERVED_BLOCKS, LL_MAX_BLOCKS = 2, 130  # include/kernels.hpp; one worker block a rank at least
HT_RANKS = (2, 4, 8, 16)  # include/launch.hpp, SWITCH_RANKS
HT_MAX_TOPK = 32  # include/recv_pool.hpp, MaxTopk
HT_MAX_LOCAL_EXPERTS = 128  # dispatch/throughput_dispatch.cu, NumThreads
HT_HIDDEN_STEP = 8  # throughput.cc: bf16 rows in units of 16 bytes
HT_POOL_ROWS = 65536  # include/recv_pool.hpp, RecvPoolMaxTokens
HT_POOL_ROW_BYTES = 16384  # include/recv_pool.hpp, RecvPoolMaxHiddenBytes
HT_POOL_META_BYTES = 768  # include/recv_pool.hpp, RecvPoolMetaBytes
ALIGNMENT = 128  # include/config.hpp, BufferAlignmentBytes
PAYLOAD_ALIGNMENT = 32  # include/config.hpp, PayloadView
PACKET_BYTES = 8  # LL8Packet
SCALE_BLOCK = 128
BF16_BYTES, FP32_BYTES, INT32_BYTES, INT64_BYTES = 2, 4, 4, 8
BUILD_HINT = "build it from the branch feature/ep with MSCCLPP_BUILD_EXT_EP=ON for sm_90 or newer"


def capacity(problem: Problem) -> int:
    """max_tokens_per_rank, which the library wants positive."""
    return max(problem.tokens, 1)


def build_reason() -> str:
    """Why the installed mscclpp has no EP, "" if it has: looked up in its folder, since importing it loads CUDA."""
    spec = importlib.util.find_spec("mscclpp")
    if spec is None or not spec.submodule_search_locations:
        return ""
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / "ep" / "__init__.py").exists():
        return f"the installed mscclpp has no mscclpp.ep: {BUILD_HINT}"
    if not any(folder.glob("mscclpp_ep_cpp*.so")):
        return f"the installed mscclpp was built without its EP extension: {BUILD_HINT}"
    return ""


def aligned(size: int, step: int = ALIGNMENT) -> int:
    return -(-size // step) * step


def ll_buffer_bytes(problem: Problem, layout: str, combine_mode: str) -> int:
    """The symmetric buffer of a rank, by upstream's own arithmetic (include/config.hpp, LatencyStorageLayout)."""
    ranks, experts, topk, tokens = problem.world, problem.num_experts, problem.topk, capacity(problem)
    row, slots = problem.hidden * BF16_BYTES, ranks * tokens
    metadata = topk * (INT32_BYTES + FP32_BYTES) + INT32_BYTES
    counts = aligned((ranks + experts) * PACKET_BYTES)
    staged = counts + slots * aligned(aligned(row + metadata, PAYLOAD_ALIGNMENT))
    if layout == "expert_major":
        output = experts * tokens * row
        return aligned(max(staged, output)) + 2 * aligned(output)
    topk_ids_end = aligned(counts + slots * topk * INT32_BYTES)
    direct = aligned(topk_ids_end + slots * topk * FP32_BYTES) + slots * row
    routes = slots * row * topk if combine_mode == "direct_send" else 0
    return aligned(max(staged, direct)) + aligned(routes)


def ht_pool_bytes(problem: Problem) -> int:
    """The fixed receive pool, its metadata, and the positions that combine looks up (throughput.cc, initialize)."""
    pool = HT_POOL_ROWS * (HT_POOL_ROW_BYTES + HT_POOL_META_BYTES)
    return pool + HT_POOL_ROWS * problem.world * INT32_BYTES


def latency_bytes(variant: Variant, problem: Problem) -> int:
    """Device memory of a rank in ll: the symmetric buffer, received ids and weights, output, what is staged."""
    row, tokens, combine_mode = problem.hidden * BF16_BYTES, capacity(problem), variant.option("combine_mode")
    found = ll_buffer_bytes(problem, variant.layout, combine_mode) + tokens * row
    if variant.layout == "expert_major":
        scales = problem.hidden // SCALE_BLOCK * FP32_BYTES
        staged = row + scales if variant.dispatch_dtype == "fp8" else 0
        return found + problem.num_experts * tokens * (staged + INT32_BYTES)
    return found + (0 if combine_mode == "direct_send" else problem.world * tokens * row)


def throughput_bytes(variant: Variant, problem: Problem) -> int:
    """Device memory of a rank in ht: the pool, a copy of the received rows, their ids and weights, the output.

    Twice in rank-major order, which the check compares with token-major.
    """
    row, tokens = problem.hidden * BF16_BYTES, capacity(problem)
    rows = problem.world * tokens
    once = ht_pool_bytes(problem) + rows * (row + problem.topk * (INT64_BYTES + FP32_BYTES)) + tokens * row
    return once * (2 if variant.layout == "rank_major" else 1)


def latency_reason(variant: Variant, problem: Problem) -> str:
    """Why ll can't run this shape, "" if it can."""
    if problem.world > LL_MAX_RANKS:
        return f"ll takes at most {LL_MAX_RANKS} ranks, this is {problem.world}"
    if problem.hidden not in LL_HIDDEN:
        return f"HIDDEN={problem.hidden}: ll's combine is compiled for {', '.join(map(str, LL_HIDDEN))}"
    if problem.topk > LL_MAX_TOPK:
        return f"TOPK={problem.topk}: ll's combine takes at most {LL_MAX_TOPK}"
    least = problem.world + LL_RESERVED_BLOCKS
    if variant.num_sms and not least <= variant.num_sms <= LL_MAX_BLOCKS:
        return (
            f"NUM_SMS={variant.num_sms}: ll takes {least}..{LL_MAX_BLOCKS} blocks here "
            f"(one a rank, {LL_RESERVED_BLOCKS} more to schedule)"
        )
    return ""


def throughput_reason(variant: Variant, problem: Problem) -> str:
    """Why ht can't run this shape, "" if it can; what depends on the routing's counts is in routed_reason."""
    if problem.world not in HT_RANKS:
        return f"ht takes {', '.join(map(str, HT_RANKS))} ranks, this is {problem.world}"
    if problem.topk > HT_MAX_TOPK:
        return f"TOPK={problem.topk}: ht takes at most {HT_MAX_TOPK}"
    if problem.local_experts > HT_MAX_LOCAL_EXPERTS:
        return f"NUM_EXPERTS={problem.num_experts}: ht takes at most {HT_MAX_LOCAL_EXPERTS} a rank, this is more"
    if problem.hidden % HT_HIDDEN_STEP:
        return f"HIDDEN={problem.hidden}: ht takes a multiple of {HT_HIDDEN_STEP}"
    empty = parse_routing(problem.routing).empty
    if not problem.tokens or empty is not None:
        what = f"ROUTING={problem.routing}" if problem.tokens else "TOKENS=0"
        return f"{what}: ht needs a token on every rank, its combine asserts one"
    rows = problem.world * problem.tokens
    if variant.layout == "rank_major" and rows > pool_rows(problem):
        return f"TOKENS={problem.tokens} takes {rows} rows, ht's receive pool has {pool_rows(problem)}"
    return ""


def pool_rows(problem: Problem) -> int:
    """Rows of this width that ht's receive pool holds (throughput.cc, canUseDirectRecvPool)."""
    return min(HT_POOL_ROWS, HT_POOL_ROWS * HT_POOL_ROW_BYTES // (problem.hidden * BF16_BYTES))


def routed_reason(layout: str, problem: Problem, sent: list[int], received: list[int]) -> str:
    """Why ht can't run a routing: tokens of each rank, and rows that each rank gets. The same on all ranks.

    A torch tensor of no rows has the address 0, which the library takes for a buffer of its own that is missing
    (throughput_reduce_combine.cu, sendHead; throughput.cc, recvX).
    """
    if 0 in sent:
        return f"rank {sent.index(0)} has no token: ht needs one on every rank, its combine asserts one"
    if layout == "rank_major":
        return ""
    if 0 in received:
        return f"rank {received.index(0)} gets no row: ht in token-major order needs one on every rank"
    most = max(received)
    if most > pool_rows(problem):
        return f"rank {received.index(most)} gets {most} rows, ht's receive pool has {pool_rows(problem)}"
    return ""
