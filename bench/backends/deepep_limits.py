"""What DeepEP's legacy Buffer takes, and how much memory. Standard library only: the coordinator plans with it.

Limits are upstream's asserts, with their places, at commit 92fe2de (2025-11-05, after v1.2.1), whose buffer.py is the
tested wheel's. Without a verdict here each would end a worker, and the device assert its CUDA context as well.
"""

from __future__ import annotations

import math
import os

from lib.contract import Variant
from lib.problem import Problem

HT_RANKS = (2, 4, 8)  # csrc/kernels/launch.cuh, SWITCH_RANKS
HT_MAX_TOPK = 32  # csrc/kernels/intranode.cu
HT_ROW_STEP, HT_ROW_MAX = 32, 2 * (8192 - 8)  # bytes; csrc/kernels/intranode.cu, a device assert: it ends the context
LL_MAX_TOPK = 11  # csrc/kernels/internode_ll.cu, kNumMaxTopK
LL_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)  # csrc/kernels/launch.cuh, SWITCH_HIDDEN
LL_RANK_STEP = 8  # csrc/deep_ep.cpp, Buffer: fewer ranks than NUM_MAX_NVL_PEERS, or a multiple of it
LL_SLOT_STEP = 4  # csrc/deep_ep.cpp, low_latency_dispatch: slots of an expert, over all source ranks
LL_QP_DEPTH = 1024  # deep_ep/buffer.py; each token takes two work requests and two are kept free
SCALE_BLOCK = 128
BF16_BYTES, FP32_BYTES = 2, 4
LL_HEADER_BYTES, LL_BUFFERS = 16, 2  # a double buffer, each with a send and a receive side
HT_NVL_BYTES = 1 << 30  # what vLLM's manager takes on one node; many SMs on 8 ranks need more
HT_CHUNK = 256  # deep_ep/buffer.py: tokens that one queue holds
HT_SLOT_BYTES = 8 + 128 * (8 + 4 + 4) + 1  # source, 128 ids, weights and scales; 1 for the queue's own 20 / HT_CHUNK
DEFAULT_SMS = 20  # Buffer.num_sms


def ll_slots(problem: Problem) -> int:
    """The tokens a rank that ll's calls are told of, the same on all ranks: TOKENS or a little more."""
    step = LL_SLOT_STEP // math.gcd(LL_SLOT_STEP, problem.world)
    return -(-max(problem.tokens, 1) // step) * step


def ht_buffer_bytes(problem: Problem, num_sms: int | None) -> int:
    """The larger of HT_NVL_BYTES and Config.get_nvl_buffer_size_hint (csrc/config.hpp) for bf16 rows."""
    queues = (num_sms or DEFAULT_SMS) // 2 * problem.world
    return max(HT_NVL_BYTES, queues * HT_CHUNK * (problem.hidden * BF16_BYTES + HT_SLOT_BYTES))


def ll_buffer_bytes(problem: Problem, slots_a_rank: int | None = None) -> int:
    """Buffer.get_low_latency_rdma_size_hint by its own arithmetic (csrc/config.hpp, LowLatencyLayout)."""
    slots = problem.num_experts * (slots_a_rank or ll_slots(problem))
    scales = problem.hidden // SCALE_BLOCK * FP32_BYTES
    message = LL_HEADER_BYTES + max(problem.hidden * BF16_BYTES, problem.hidden + scales)
    combined = scales + problem.hidden * BF16_BYTES
    return LL_BUFFERS * slots * (max(message, combined) + combined)


def high_throughput_reason(variant: Variant, problem: Problem) -> str:
    """Why ht can't run this shape, "" if it can."""
    if problem.world not in HT_RANKS:
        return f"ht on one node takes {', '.join(map(str, HT_RANKS))} ranks, this is {problem.world}"
    if problem.topk > HT_MAX_TOPK:
        return f"TOPK={problem.topk}: ht takes at most {HT_MAX_TOPK}"
    if variant.num_sms and variant.num_sms % 2:
        return f"NUM_SMS={variant.num_sms}: ht takes an even number of SMs (half send, half receive)"
    if variant.dispatch_dtype == "fp8" and problem.hidden % SCALE_BLOCK:
        return f"HIDDEN={problem.hidden}: fp8 needs a multiple of {SCALE_BLOCK}"
    row = problem.hidden * (1 if variant.dispatch_dtype == "fp8" else BF16_BYTES)
    if row % HT_ROW_STEP or row > HT_ROW_MAX:
        return f"HIDDEN={problem.hidden}: ht takes rows of {HT_ROW_STEP}, 64, .. {HT_ROW_MAX} bytes, this is {row}"
    return ""


def low_latency_reason(problem: Problem, slots_a_rank: int | None = None) -> str:
    """Why ll can't run this shape, "" if it can. `slots_a_rank`: of a caller that asks for more than ll_slots."""
    asked, slots = os.environ.get("NVSHMEM_QP_DEPTH") or str(LL_QP_DEPTH), slots_a_rank or ll_slots(problem)
    if not asked.isdigit():
        return f"NVSHMEM_QP_DEPTH={asked}: must be a whole number, ll sizes its queues by it"
    depth = int(asked)
    if slots > (limit := depth // 2 - 1):
        return f"TOKENS={problem.tokens} takes {slots} slots, ll has {limit} (NVSHMEM_QP_DEPTH={depth} / 2 - 1)"
    if problem.world > LL_RANK_STEP and problem.world % LL_RANK_STEP:
        return f"ll takes fewer than {LL_RANK_STEP} ranks or a multiple of it, this is {problem.world}"
    if problem.hidden not in LL_HIDDEN:
        return f"HIDDEN={problem.hidden}: ll is compiled for {', '.join(map(str, LL_HIDDEN))}"
    if problem.topk > LL_MAX_TOPK:
        return f"TOPK={problem.topk}: ll takes at most {LL_MAX_TOPK}"
    return ""
