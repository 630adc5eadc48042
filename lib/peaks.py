"""What this machine reaches, measured: the ceilings that a row's speed of light is computed from.

Runs on every rank of a worker group of its own, once a run; the result is kept in `peaks_<stamp>.json`.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lib.contract import Group

MIB = 1 << 20
WIRE_SIZES = (64 * MIB, 256 * MIB, 512 * MIB)
HBM_SIZES = (1024 * MIB, 4096 * MIB)
MATMUL_SIZES = (4096, 8192)
PUSHES = 8  # back to back in one timed window, so that the barrier before it is a small share
SAMPLES = 10
BARRIERS = 50
US_PER_MS = 1e3


def timed_us(work: Callable[[], Any], align: Callable[[], None]) -> float:
    """Median over SAMPLES of the device time of `work`, all ranks aligned before it."""
    work()
    samples = []
    for _ in range(SAMPLES):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        align()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * US_PER_MS)
    return median(samples)


def slowest(value: float, group: Group) -> float:
    """The smallest of all ranks' rates."""
    values: list[Any] = [None] * group.world
    dist.all_gather_object(values, value, group=group.host_pg)
    return float(min(values))


def push_gbps(group: Group, align: Callable[[], None], copy: Callable[[torch.Tensor, torch.Tensor], Any]) -> float:
    """All ranks push to a peer at once, one direction counted; best of several sizes of the slowest rank's rate.

    The peer of round s is (rank + s) mod R, so that over the rounds every pair of GPUs is used.
    """
    import torch.distributed._symmetric_memory as symmetric

    best = 0.0
    for size in WIRE_SIZES:
        count = size // 4
        inbox = symmetric.empty(count, dtype=torch.float32, device=group.device)
        handle = symmetric.rendezvous(inbox, group.pg)
        source = torch.rand(count, device=group.device)
        peers = [(group.rank + shift) % group.world for shift in range(1, group.world)]
        outboxes = [handle.get_buffer(peer, (count,), torch.float32) for peer in peers]

        def push(source: torch.Tensor = source, outboxes: list[torch.Tensor] = outboxes) -> None:
            for number in range(PUSHES):
                copy(source, outboxes[number % len(outboxes)])

        best = max(best, slowest(PUSHES * size / timed_us(push, align) / 1e3, group))
        dist.barrier(group=group.host_pg)
    return best


def sm_copy(source: torch.Tensor, target: torch.Tensor) -> Any:
    """A copy by the SMs: an elementwise kernel with 16-byte accesses (Tensor.copy_ would be the copy engine)."""
    return torch.mul(source, 1.0, out=target)


def hbm_gbps(group: Group, align: Callable[[], None]) -> float:
    """Device-to-device copy, bytes read plus bytes written."""
    best = 0.0
    for size in HBM_SIZES:
        source = torch.rand(size // 4, device=group.device)
        target = torch.empty_like(source)
        duration = timed_us(lambda source=source, target=target: target.copy_(source), align)  # type: ignore[misc]
        best = max(best, slowest(2 * size / duration / 1e3, group))
    return best


def matmul_tflops(group: Group, align: Callable[[], None]) -> dict[str, float]:
    """Square products of random data: bf16, and e4m3 with a scale a row where the device has it."""
    best = {"bf16": 0.0}
    for size in MATMUL_SIZES:
        a, b = (torch.randn(size, size, device=group.device).to(torch.bfloat16) for _ in range(2))
        flops = 2 * size**3
        duration = timed_us(lambda a=a, b=b: a @ b, align)  # type: ignore[misc]
        best["bf16"] = max(best["bf16"], slowest(flops / duration / 1e6, group))
        if torch.cuda.get_device_capability(group.device) >= (8, 9):
            a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
            ones_a, ones_b = torch.ones(size, 1, device=group.device), torch.ones(1, size, device=group.device)

            def product(a8: Any = a8, b8: Any = b8, ones_a: Any = ones_a, ones_b: Any = ones_b) -> Any:
                return torch._scaled_mm(a8, b8, scale_a=ones_a, scale_b=ones_b, out_dtype=torch.bfloat16)

            best["fp8"] = max(best.get("fp8", 0.0), slowest(flops / timed_us(product, align) / 1e6, group))
    return best


def barrier_us(align: Callable[[], None]) -> float:
    """One device barrier, in a CUDA graph of many, so that the host's launches are not what is measured."""
    graph = torch.cuda.CUDAGraph()
    align()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(BARRIERS):
            align()
    return timed_us(graph.replay, align) / BARRIERS


def measure_peaks(group: Group, align: Callable[[], None]) -> dict[str, Any]:
    """Every ceiling of this machine, the same dictionary on all ranks."""
    alone = group.world == 1

    push = None if alone else push_gbps(group, align, sm_copy)
    memcpy = None if alone else push_gbps(group, align, lambda source, target: target.copy_(source))
    return {
        # a ceiling is what any mover reached; which of the two is faster differs between machines
        "wire_gbps": max(filter(None, (push, memcpy)), default=None),
        "sm_push_gbps": push,
        "memcpy_gbps": memcpy,
        "hbm_gbps": hbm_gbps(group, align),
        "matmul_tflops": matmul_tflops(group, align),
        "barrier_us": None if alone else barrier_us(align),
        "device": torch.cuda.get_device_name(group.device),
        "world": group.world,
    }
