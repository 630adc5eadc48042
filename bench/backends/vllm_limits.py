"""What vLLM's fused-MoE layers take, how much memory, and the environment they run in. Standard library only.

Shapes and gates are those of vLLM 0.20 to 0.33 and of DeepEP's legacy Buffer (deepep_limits.py), read in their source.
"""

from __future__ import annotations

import math
import os
import re

from bench.backends.deepep_limits import (
    BF16_BYTES,
    FP32_BYTES,
    SCALE_BLOCK,
    high_throughput_reason,
    ht_buffer_bytes,
    ll_buffer_bytes,
    low_latency_reason,
)
from lib.contract import OK, Support, Variant, missing, unsupported
from lib.machine import Machine
from lib.plan import needs_packages
from lib.problem import Problem
from lib.provenance import package_version

VLLM = {"vllm": "vLLM (pip install vllm)"}
DEEPEP = {"deep_ep": "DeepEP (https://github.com/deepseek-ai/DeepEP)"}
FLASHINFER = {"flashinfer": "FlashInfer (pip install flashinfer-python)"}
OLDEST, NEWEST = (0, 20), (0, 33)  # recorded in tests/signatures; older names differ, newer ones are not known
HOPPER, BLACKWELL_MAJOR = (9, 0), 10
# A tile of DeepGEMM's masked product is 64 or 128 rows, and is stored whole (sm90_fp8_gemm_1d2d.cuh, TMA store): in a
# buffer whose rows an expert are no multiple of it, the last tile runs into the next expert's rows.
MASKED_TILE = 128
CONTIGUOUS_TILE = 128  # rows an expert is padded to in DeepGEMM's contiguous product
FP8_BYTES = 1 + FP32_BYTES / SCALE_BLOCK  # of an activation, its share of a scale included
BLOCK_BYTES = 1 + FP32_BYTES / SCALE_BLOCK**2  # of a weight
MXFP4_BYTES = 1 / 2 + 1 / 32
QUANTISING_COPIES = 6  # float32 copies of one expert's w13 that lib.formats holds while it quantises

# Variables that choose kernels or formats, set before vLLM is imported whatever the caller's shell says, and recorded.
KERNEL_ENVIRONMENT = {
    "VLLM_USE_DEEP_GEMM": "1",
    "VLLM_MOE_USE_DEEP_GEMM": "1",
    "VLLM_BATCH_INVARIANT": "0",
    "VLLM_MOE_SKIP_PADDING": "0",
}
E8M0 = "VLLM_USE_DEEP_GEMM_E8M0"
UNSET = ("VLLM_TUNED_CONFIG_FOLDER",)  # tuned Triton tiles of the caller's
QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}  # unless the caller says else


def set_environment(power_of_two_scales: bool) -> dict[str, str]:
    """Set what chooses kernels in this process, before vLLM's import; returns it, for the row's `versions`."""
    chosen = KERNEL_ENVIRONMENT | {E8M0: str(int(power_of_two_scales))}
    os.environ.update(chosen)
    for name in UNSET:
        os.environ.pop(name, None)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    return chosen


def version_numbers(version: str) -> tuple[int, int]:
    """Major and minor of a version, (0, 0) of one that does not read as such."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def version_label(version: str) -> str:
    """The version, marked where the adapter's calls were not compared with it."""
    return version if OLDEST <= version_numbers(version) <= NEWEST else f"{version}(untested)"


def vllm_verdict(machine: Machine, packages: dict[str, str], why: Support = OK) -> Support:
    """`why`, or what is missing: packages first, then a vLLM that is too old."""
    support = needs_packages(machine, VLLM | packages, why)
    version = package_version("vllm") if machine.has("vllm") else ""
    if support.ok and version and version_numbers(version) < OLDEST:
        return missing(f"vLLM {version} is too old: {OLDEST[0]}.{OLDEST[1]} or newer (pip install -U vllm)")
    return support


def hardware_reason(machine: Machine, blackwell: bool) -> str:
    """Why this machine can't, "" if it can. `blackwell`: the kernels are compiled for sm_10x alone."""
    if machine.vendor != "cuda":
        return "needs an NVIDIA GPU, this machine has no GPU"
    sm = machine.sm
    if sm is None:
        return ""
    here = f"this is sm_{sm[0]}{sm[1]}"
    if blackwell:
        return "" if sm[0] == BLACKWELL_MAJOR else f"needs sm_{BLACKWELL_MAJOR}x, {here}"
    return "" if sm >= HOPPER else f"needs sm_{HOPPER[0]}{HOPPER[1]} or newer, {here}"


def block_reason(problem: Problem, what: str) -> str:
    for name, value in (("HIDDEN", problem.hidden), ("INTER", problem.inter)):
        if value % SCALE_BLOCK:
            return f"{name}={value}: {what} need a multiple of {SCALE_BLOCK}"
    return ""


# -- section vllm_split


def split_slots(problem: Problem) -> int:
    """The tokens a rank that ll is told of, the same on all ranks: up to where all ranks' fill whole tiles."""
    step = MASKED_TILE // math.gcd(MASKED_TILE, problem.world)
    return -(-max(problem.tokens, 1) // step) * step


def split_verdict(experts: str, variant: Variant, machine: Machine, problem: Problem) -> Support:
    packages = DEEPEP | (FLASHINFER if experts == "trtllm" else {})
    reason = hardware_reason(machine, blackwell=experts == "trtllm")
    if not reason and experts == "deepgemm" and machine.sm and machine.sm[0] not in (9, 10):
        reason = f"DeepGEMM's fp8 products need sm_90 or sm_10x, this is sm_{machine.sm[0]}{machine.sm[1]}"
    reason = reason or variant.option("unsupported")
    reason = reason or block_reason(problem, "128 x 128 block scales")
    if not reason and variant.algo == "ht":
        reason = high_throughput_reason(variant, problem)
    elif not reason:
        reason = low_latency_reason(problem, split_slots(problem))
    return vllm_verdict(machine, packages, unsupported(reason) if reason else OK)


def split_memory_bytes(experts: str, variant: Variant, problem: Problem) -> int:
    """Weights and what converting them takes; the Buffer; received rows and workspaces of the worst routing."""
    hidden, inter, local = problem.hidden, problem.inter, problem.local_experts
    # the shuffle for TRT-LLM's kernels makes new tensors; one expert is quantised at a time
    weights = problem.weight_bytes(BLOCK_BYTES) * (2 if experts == "trtllm" else 1)
    making = QUANTISING_COPIES * 2 * inter * hidden * FP32_BYTES
    copies = problem.tokens * problem.world
    if variant.algo == "ll":
        slots = split_slots(problem)
        rows = local * problem.world * slots
        received = rows * hidden * FP8_BYTES * 2  # the last dispatch's stay while the next one comes
        between = rows * (max(hidden, 2 * inter) * BF16_BYTES + inter * (BF16_BYTES + FP8_BYTES))
        return int(weights + making + ll_buffer_bytes(problem, slots) + received + between)
    rows = copies * min(problem.topk, local)
    if experts == "deepgemm":
        rows += local * CONTIGUOUS_TILE
    elif experts == "triton":
        rows = copies * problem.topk  # it has a row a choice, also for the other ranks' experts
    received = copies * (hidden * FP8_BYTES + problem.topk * 16) * 2
    between = rows * (max(hidden, inter) + max(hidden, 2 * inter)) * BF16_BYTES
    between += rows * (hidden + inter) * FP8_BYTES
    combined = problem.tokens * hidden * BF16_BYTES * 3
    return int(weights + making + ht_buffer_bytes(problem, None) + received + between + combined)


# -- section vllm_mega


def mega_verdict(machine: Machine, problem: Problem) -> Support:
    reason = hardware_reason(machine, blackwell=True) or block_reason(problem, "the mega kernel's tiles")
    return vllm_verdict(machine, {}, unsupported(reason) if reason else OK)


def mega_memory_bytes(problem: Problem) -> int:
    """Weights, once more while they are laid out for the kernel, and its symmetric buffer for the worst routing."""
    weights = problem.weight_bytes(MXFP4_BYTES) * 2
    rows = problem.tokens * problem.world * min(problem.topk, problem.local_experts)
    rows += problem.local_experts * CONTIGUOUS_TILE
    pool = rows * (problem.hidden + problem.inter) * (1 + 1 / 32)
    combine = problem.tokens * (problem.topk + 2) * problem.hidden * BF16_BYTES
    return int(weights + pool + combine + QUANTISING_COPIES * 2 * problem.inter * problem.hidden * FP32_BYTES)
