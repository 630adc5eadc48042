"""The pass that TRACE=1 records: staged calls under PyTorch's profiler, after all timing (docs/method.md, "Traces").

On a GPU an iteration lies on the stream as: a delay kernel, the L2 flush if asked, the device barrier, a marker, the
phases with a marker after each. The delay lets the host enqueue what does not block it; between two markers is a phase.
On a CPU the phases are the profiler's own annotations, by the host's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lib.contract import Phase, Session
from lib.kernels import DELAY_CYCLES, MARKER_CYCLES, SPIN_KERNEL, Kernel, kernels_of
from lib.timing import HostTools, leading_phases, main_phases
from lib.trace import PHASE_CATEGORY
from lib.trace_write import PHASE_THREAD, Iteration, Span

if TYPE_CHECKING:
    from lib.device_timing import DeviceTools

UNRECORDED = 1  # iterations under the profiler that are thrown away: its own start-up is in them
PREFIX = "moe_ep:"  # of our annotations among the profiler's events
BARRIER, ITERATION = f"{PREFIX}barrier", f"{PREFIX}iteration"
MEMORY_CATEGORIES = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}


class NothingRecorded(Exception):  # noqa: N818 - a verdict on the profiler's record
    """The profiler's record is not that of the pass; the message is a sentence without its end."""


def record_device(session: Session, tools: DeviceTools, count: int) -> list[Iteration]:
    """Run the pass on this rank's GPU. Collective. Raises NothingRecorded, after all iterations ran."""
    from torch.profiler import ProfilerActivity, profile

    phases = main_phases(session)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        for _ in range(UNRECORDED + count):
            for phase in leading_phases(session):
                phase.fn()
            torch.cuda.synchronize()
            tools.rendezvous()
            torch.cuda._sleep(DELAY_CYCLES)
            if tools.flush is not None:
                tools.flush()
            tools.align()
            torch.cuda._sleep(MARKER_CYCLES)
            for phase in phases:
                phase.fn()
                torch.cuda._sleep(MARKER_CYCLES)
            torch.cuda.synchronize()
    return cut_device(kernels_of(recorded), phases, UNRECORDED + count)[UNRECORDED:]


def cut_device(kernels: Sequence[Kernel], phases: Sequence[Phase], count: int) -> list[Iteration]:
    """Iterations and phases from the markers between the kernels. The barrier is what ended last before a marker 0."""
    ordered = sorted(kernels, key=lambda kernel: kernel.start_us)
    spins = [kernel for kernel in ordered if SPIN_KERNEL in kernel.name]
    each = len(phases) + 2  # the delay, the first marker, and one after each phase
    if len(spins) != count * each:
        raise NothingRecorded(f"the profiler saw {len(spins)} of {count * each} marker kernels")
    others = [kernel for kernel in ordered if SPIN_KERNEL not in kernel.name]
    iterations = []
    for number in range(count):
        delay, *markers = spins[number * each : (number + 1) * each]
        first, last = markers[0], markers[-1]
        before = [delay, *(k for k in others if delay.start_us <= k.start_us < first.start_us)]
        spans = [
            Span(phase.name, PHASE_CATEGORY, PHASE_THREAD, opened.end_us, closed.start_us, note_of(phase))
            for phase, opened, closed in zip(phases, markers, markers[1:], strict=False)
        ]
        spans += [
            Span(k.name, category_of(k.name), k.stream, k.start_us, k.end_us)
            for k in others
            if first.start_us <= k.start_us < last.start_us
        ]
        iterations.append(Iteration(max(k.end_us for k in before), first.end_us, last.start_us, spans))
    return iterations


def category_of(kernel: str) -> str:
    """As torch.profiler's own export names it."""
    return next((category for word, category in MEMORY_CATEGORIES.items() if kernel.startswith(word)), "kernel")


def note_of(phase: Phase) -> dict[str, Any]:
    return {} if phase.timed else {"timed": False}


def record_host(session: Session, tools: HostTools, count: int) -> list[Iteration]:
    """Run the pass on a CPU. Collective. Raises NothingRecorded, after all iterations ran."""
    from torch.profiler import ProfilerActivity, profile, record_function

    phases = main_phases(session)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        for _ in range(UNRECORDED + count):
            for phase in leading_phases(session):
                phase.fn()
            with record_function(BARRIER):
                tools.rendezvous()
            with record_function(ITERATION):
                for number, phase in enumerate(phases):
                    with record_function(f"{PREFIX}{number}"):
                        phase.fn()
    return cut_host(recorded.events(), phases, UNRECORDED + count)[UNRECORDED:]


def cut_host(events: Sequence[Any], phases: Sequence[Phase], count: int) -> list[Iteration]:
    """Iterations, phases and operations from the profiler's events; what it calls asynchronous is a collective."""
    barriers, windows = _named(events, BARRIER), _named(events, ITERATION)
    marks = [_named(events, f"{PREFIX}{number}") for number in range(len(phases))]
    if any(len(each) != count for each in (barriers, windows, *marks)):
        raise NothingRecorded(f"the profiler saw {len(windows)} of {count} iterations")
    operations = [event for event in events if not event.name.startswith(PREFIX)]
    iterations = []
    for number, window in enumerate(windows):
        start, end = _times(window)
        spans = [
            Span(phase.name, PHASE_CATEGORY, PHASE_THREAD, *_times(mark[number]), note_of(phase))
            for phase, mark in zip(phases, marks, strict=True)
        ]
        spans += [
            Span(event.name, "collective" if event.is_async else "cpu_op", int(event.thread), *_times(event))
            for event in operations
            if start <= event.time_range.start < end
        ]
        iterations.append(Iteration(_times(barriers[number])[1], start, end, spans))
    return iterations


def _named(events: Sequence[Any], name: str) -> list[Any]:
    return sorted((event for event in events if event.name == name), key=lambda event: event.time_range.start)


def _times(event: Any) -> tuple[float, float]:
    return float(event.time_range.start), float(event.time_range.end)
