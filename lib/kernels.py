"""kernel_us: the durations of a session's kernels, from a profiler pass of its own (docs/method.md, "kernel_us").

Each iteration is laid out on the stream as: a delay kernel, the L2 flush if asked, the device barrier, a short marker,
the call. The delay lets the host enqueue all of it before the first kernel starts; between the marker and the next
delay everything that ran belongs to the session.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from lib.contract import Session
from lib.device_timing import DeviceTools

ITERATIONS = 10
DELAY_CYCLES = 4_000_000  # about 2 ms: covers the host's enqueue of a call
MARKER_CYCLES = 1
SPIN_KERNEL = "spin_kernel"  # what torch.cuda._sleep launches
UNMATCHED_LIMIT = 0.02
STAGING = "staging"  # patterns of kernels that run inside a call and are not the library's: named, not summed


@dataclass
class KernelTimes:
    """`total_us`: a sum an iteration, or a problem. `by_phase`: the median sum an iteration of each phase's kernels."""

    total_us: list[float] = field(default_factory=list)
    by_phase: dict[str, float] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Kernel:
    name: str
    start_us: float
    duration_us: float
    stream: int = 0

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


def profile_session(session: Session, tools: DeviceTools) -> KernelTimes:
    """Run the pass and attribute it. A problem is a sentence; it is never turned into 0."""
    from torch.profiler import ProfilerActivity, profile

    session.call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        for _ in range(ITERATIONS):
            tools.rendezvous()
            torch.cuda._sleep(DELAY_CYCLES)
            if tools.flush is not None:
                tools.flush()
            tools.align()
            torch.cuda._sleep(MARKER_CYCLES)
            session.call()
            torch.cuda.synchronize()
    return attribute(kernels_of(recorded), session.kernels, ITERATIONS)


def kernels_of(recorded: Any) -> list[Kernel]:
    """The GPU's part of what a torch.profiler.profile recorded, by the profiler's clock."""
    device = torch.autograd.DeviceType.CUDA
    return [
        Kernel(entry.name, entry.time_range.start, entry.time_range.elapsed_us(), entry.device_resource_id)
        for entry in recorded.events()
        if entry.device_type == device
    ]


def iterations_of(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The session's kernels of each iteration: those after a marker, up to the next delay."""
    found: list[list[Kernel]] = []
    spins = 0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_us):
        if SPIN_KERNEL in kernel.name:
            spins += 1
            if spins % 2 == 0:
                found.append([])
        elif spins and spins % 2 == 0:
            found[-1].append(kernel)
    return found


def attribute(kernels: Sequence[Kernel], patterns: dict[str, list[str]], expected: int) -> KernelTimes:
    """Sum durations by the session's patterns (regular expressions, the first phase that matches takes the kernel)."""
    iterations = iterations_of(kernels)
    if len(iterations) != expected or not all(iterations):
        return KernelTimes(problem=f"the profiler saw kernels in {sum(map(bool, iterations))} of {expected} iterations")
    sums: dict[str, list[float]] = {phase: [0.0] * expected for phase in patterns}
    charged = [phase for phase in patterns if phase != STAGING]
    unmatched: dict[str, float] = {}
    for index, iteration in enumerate(iterations):
        for kernel in iteration:
            phase = next(
                (phase for phase, found in patterns.items() if any(re.search(p, kernel.name) for p in found)), ""
            )
            if phase:
                sums[phase][index] += kernel.duration_us
            else:
                unmatched[kernel.name] = unmatched.get(kernel.name, 0.0) + kernel.duration_us
    total = [sum(sums[phase][index] for phase in charged) for index in range(expected)]
    whole = sum(map(sum, sums.values())) + sum(unmatched.values())
    if sum(unmatched.values()) > UNMATCHED_LIMIT * whole:
        worst = sorted(unmatched, key=unmatched.__getitem__, reverse=True)[:3]
        share = 100 * sum(unmatched.values()) / whole
        return KernelTimes(
            problem=f"{share:.0f} % of the GPU time is in kernels that no pattern names: {'; '.join(worst)}"
        )
    return KernelTimes(total, {phase: median(values) for phase, values in sums.items()})
