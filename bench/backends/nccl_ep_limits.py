"""What NCCL-EP takes, and how much memory. Standard library only: the coordinator plans with it.

Limits are upstream's asserts, with their places under nccl_ep/, at commit 44d2de0 of NVIDIA/nccl-extensions, whose
device headers are the tested wheel's (0.1.0, library 0.2.0) but for ll_ep.cuh. An assert of the library aborts its
process, so each has to be a verdict here.
"""

from __future__ import annotations

from lib.contract import Variant
from lib.problem import Problem

MAX_TOPK = 32  # include/common.hpp, MAX_NUM_TOPK
LL_HIDDEN_STEP = 512  # device/ll_ep.cuh, combine: a warp's two unrolled 16-byte vectors; and DS_FP8E3M4's own
LL_MAX_WARP_GROUPS, WARPS = 14, 32  # include/common.hpp, kLlDispatchMaxWarpGroups; nccl_ep.cc, validate_ll_geometry
HT_RANKS = (2, 4, 8)  # ep_test.py takes no others on one node
HT_MAX_TOKENS = 8192  # RELEASE.md, MAX_SUPPORTED_TOKENS_PER_RANK
HT_ROW_STEP = 16  # nccl_ep.cc, ncclEpDispatch: bytes of a row, and of its forwarded scales
HT_EXPERT_STEP = 4  # nccl_ep.cc, ncclEpDispatch: experts of all ranks
HT_MAX_LOCAL_EXPERTS = 256  # device/ht_ep.cuh, kLocalPermuteMaxExpertsPerRank: expert-major
SCALE_BLOCK = 128
BF16_BYTES, FP32_BYTES = 2, 4


def capacity(variant: Variant, problem: Problem) -> int:
    """Tokens a rank that the group is made for, the same on all ranks: at least 1; even in ht, which R = 2 needs."""
    tokens = max(problem.tokens, 1)
    return tokens + tokens % 2 if variant.algo == "ht" else tokens


def ht_slots(variant: Variant, problem: Problem) -> int:
    """Rows that a rank may receive: every token of every rank, once or (expert-major) once a chosen local expert."""
    copies = min(problem.topk, problem.local_experts) if variant.layout == "expert_major" else 1
    return problem.world * capacity(variant, problem) * copies


def low_latency_reason(variant: Variant, problem: Problem) -> str:
    """Why ll can't run this shape, "" if it can."""
    if problem.topk > MAX_TOPK:
        return f"TOPK={problem.topk}: ll takes at most {MAX_TOPK}"
    if problem.hidden % LL_HIDDEN_STEP:
        return f"HIDDEN={problem.hidden}: ll takes a multiple of {LL_HIDDEN_STEP}"
    return low_latency_sms_reason(variant.num_sms or 0, problem) if variant.num_sms else ""


def low_latency_sms_reason(sms: int, problem: Problem) -> str:
    """A block's warps are split into groups, one an expert in turn; one warp a choice and one more have to be there."""
    experts = problem.num_experts
    groups = -(-experts // sms)
    if groups > LL_MAX_WARP_GROUPS:
        needed = -(-experts // LL_MAX_WARP_GROUPS)
        return f"NUM_SMS={sms}: ll needs at least {needed} SMs for NUM_EXPERTS={experts}"
    warps = groups * (WARPS // groups)
    if problem.topk + 1 > warps:
        return f"TOPK={problem.topk}: ll has {warps - 1} warps for the choices at NUM_SMS={sms} NUM_EXPERTS={experts}"
    return ""


def high_throughput_reason(variant: Variant, problem: Problem) -> str:
    """Why ht can't run this shape, "" if it can."""
    if problem.world not in HT_RANKS:
        return f"ht on one node takes {', '.join(map(str, HT_RANKS))} ranks, this is {problem.world}"
    if problem.tokens > HT_MAX_TOKENS:
        return f"TOKENS={problem.tokens}: ht takes at most {HT_MAX_TOKENS}"
    if problem.topk > MAX_TOPK:
        return f"TOPK={problem.topk}: ht takes at most {MAX_TOPK}"
    if problem.num_experts % HT_EXPERT_STEP:
        return f"NUM_EXPERTS={problem.num_experts}: ht takes a multiple of {HT_EXPERT_STEP}"
    if variant.dispatch_dtype == "fp8":
        step = SCALE_BLOCK * HT_ROW_STEP // FP32_BYTES
        if problem.hidden % step:
            return f"HIDDEN={problem.hidden}: ht in fp8 takes a multiple of {step}"
    elif problem.hidden * BF16_BYTES % HT_ROW_STEP:
        return f"HIDDEN={problem.hidden}: ht takes a multiple of {HT_ROW_STEP // BF16_BYTES}"
    if variant.layout == "expert_major":
        local = problem.local_experts
        if local & (local - 1) or local > HT_MAX_LOCAL_EXPERTS:
            return f"{local} experts a rank: ht by expert takes a power of two, at most {HT_MAX_LOCAL_EXPERTS}"
    return ""


def ll_buffer_bytes(variant: Variant, problem: Problem) -> int:
    """include/common.hpp, LowLatencyLayout: two banks, each for dispatch's or combine's messages, the larger."""
    tokens, world, row = capacity(variant, problem), problem.world, problem.hidden * BF16_BYTES
    router = 8 if variant.layout == "rank_major" else 2
    header = -(-(4 + problem.topk * router) // 16) * 16
    sends = world if variant.layout == "rank_major" else problem.num_experts
    combined = row + problem.hidden // SCALE_BLOCK * FP32_BYTES
    return 2 * tokens * max((1 + world) * (header + row), (sends + problem.topk) * combined)


def ll_memory_bytes(variant: Variant, problem: Problem) -> int:
    """The buffer, and the received slots once more where they are staged."""
    copies = problem.local_experts if variant.layout == "expert_major" else 1
    slots = copies * problem.world * capacity(variant, problem)
    staged = variant.layout == "rank_major" or variant.dispatch_dtype == "fp8"
    return ll_buffer_bytes(variant, problem) + slots * problem.hidden * BF16_BYTES * (2 if staged else 1)


def ht_memory_bytes(variant: Variant, problem: Problem) -> int:
    """The library's staging of both directions, with a dense row of weights a slot; the received and staged rows."""
    slots, row = ht_slots(variant, problem), problem.hidden * BF16_BYTES
    dense = (2 * slots + capacity(variant, problem)) * problem.num_experts * FP32_BYTES
    return 4 * slots * row + dense + capacity(variant, problem) * row
