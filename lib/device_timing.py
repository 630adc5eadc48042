"""Durations on a CUDA device, by the methods of docs/method.md. The host-clock twins are in lib/timing.py.

Every method takes a session, this rank's tools and a plan, and returns this rank's raw samples in microseconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from lib.contract import NotCaptured, Phase, Session
from lib.knob_types import UNTIMED
from lib.timing import (
    PIPELINED_CHAINS,
    PIPELINED_DROPPED,
    PIPELINED_MIN_CALLS,
    BetweenSeries,
    Plan,
    Samples,
    leading_phases,
    main_phases,
    repeatable_phases,
    timed_names,
    untimed,
)

NS_PER_US = 1000.0
US_PER_MS = 1000.0
GRAPH_UNTIMED_REPLAYS = 3
GRAPH_MIN_REPLAYS = 20
DELAY_CYCLES = 400_000  # about 0.2 ms: longer than the enqueue of a graph or a bare kernel
HOST_WARM_UP_NS = 3_000_000
CAPTURE_WARMUP_CALLS = 3  # on a side stream, so that lazy allocations are over before capture


@dataclass
class DeviceTools:
    """What the harness brings: the ranks' meeting on the host, their meeting on the device, and the L2 flush."""

    rendezvous: Callable[[], None]
    align: Callable[[], None]
    flush: Callable[[], None] | None  # None: L2=warm
    agree: Callable[[str], str]  # "" from all ranks, or the first rank's problem
    make_flush: Callable[[], Callable[[], None]] | None = None  # a flush for a method that needs one though L2=warm

    def cold_start(self, hide_enqueue: bool = False) -> None:
        """Nothing in flight, all ranks here, then all devices here. Enqueued work ends with the device barrier.

        With `hide_enqueue` a delay kernel before the barrier lets the host enqueue what follows while it runs, for
        methods that time the device alone.
        """
        torch.cuda.synchronize()
        if self.flush is not None:
            self.flush()
            torch.cuda.synchronize()  # else the host would run ahead under the flush, and hide its enqueue time
        self.rendezvous()
        warm_up_host()
        if hide_enqueue:
            torch.cuda._sleep(DELAY_CYCLES)
        self.align()


def warm_up_host() -> None:
    """Keep the launch path busy for a moment: a host that slept enqueues slower for a while, and so would be timed.

    Launches and events for 3 ms, and a wait that does not sleep, leave about 1 us of a 2 ms sleep in a total; events
    alone for 1 ms left up to 3.5 us (docs/method.md).
    """
    until = time.perf_counter_ns() + HOST_WARM_UP_NS
    mark = event()
    while time.perf_counter_ns() < until:
        torch.cuda._sleep(1)
        mark.record()
    while not mark.query():
        pass


def event(external: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, external=True) if external else torch.cuda.Event(enable_timing=True)


def between_us(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(start.elapsed_time(end)) * US_PER_MS


def window(work: Callable[[], Any]) -> tuple[float, float]:
    """Microseconds of `work` on the device, and of the host inside it; drained afterwards."""
    start, end = event(), event()
    start.record()
    started = time.perf_counter_ns()
    work()
    host = (time.perf_counter_ns() - started) / NS_PER_US
    end.record()
    torch.cuda.synchronize()
    return between_us(start, end), host


@dataclass
class Mark:
    """One phase of one staged call: its events, and the host's time inside it."""

    phase: Phase
    start: torch.cuda.Event
    end: torch.cuda.Event
    host_us: float = 0.0


def record_phases(phases: list[Phase], external: bool = False) -> list[Mark]:
    """Enqueue phases with an event before and after each, untimed ones included."""
    marks = []
    for phase in phases:
        mark = Mark(phase, event(external), event(external))
        mark.start.record()
        started = time.perf_counter_ns()
        phase.fn()
        mark.host_us = (time.perf_counter_ns() - started) / NS_PER_US
        mark.end.record()
        marks.append(mark)
    return marks


def read_phases(marks: list[Mark]) -> tuple[dict[str, float], float, float]:
    """Microseconds by phase, the gap between timed phases, and the span without untimed ones (all work is done)."""
    durations: dict[str, float] = {}
    gap = untimed = 0.0
    previous: Mark | None = None
    for mark in marks:
        length = between_us(mark.start, mark.end)
        if not mark.phase.timed:
            untimed += length
            continue
        durations[mark.phase.name] = durations.get(mark.phase.name, 0.0) + length
        if previous is not None:
            gap += between_us(previous.end, mark.start) - untimed
        previous, untimed = mark, 0.0
    return durations, gap, sum(durations.values()) + gap


def add_phases(samples: Samples, marks: list[Mark]) -> None:
    durations, gap, span = read_phases(marks)
    for name, duration in durations.items():
        samples.phases[name].append(duration)
    samples.gaps.append(gap)
    samples.phase_total.append(span)
    samples.blocked.append(sum(mark.host_us for mark in marks if mark.phase.timed and mark.phase.blocks_host))


def e2e(session: Session, tools: DeviceTools, plan: Plan, between_series: BetweenSeries) -> Samples:
    """Barrier-cold start; the phases come from a second series of as many iterations."""
    samples = Samples(phases={name: [] for name in timed_names(session)})
    for iteration in range(plan.warmup + plan.iters):
        tools.cold_start()
        total, host = window(session.call)
        if iteration >= plan.warmup:
            samples.total.append(total)
            samples.host.append(host)
    between_series(None)
    arrived: list[torch.cuda.Event] = []

    def mark_arrival() -> None:
        arrived.append(event())
        arrived[-1].record()

    session.mark_arrival = mark_arrival
    try:
        for iteration in range(plan.warmup + plan.iters):
            arrived.clear()
            for phase in leading_phases(session):
                phase.fn()
            tools.cold_start()
            start = event()
            start.record()
            marks = record_phases(main_phases(session))
            torch.cuda.synchronize()
            if iteration >= plan.warmup:
                add_phases(samples, marks)
                if arrived:
                    samples.arrivals.append(between_us(start, arrived[0]))
    finally:
        del session.mark_arrival
    for phase in repeatable_phases(session):
        spans = []
        for _ in range(plan.warmup + plan.iters):
            tools.cold_start()
            spans.append(window(phase.fn)[0])
        samples.alone[phase.name] = spans[plan.warmup :]
    return samples


def e2e_pipelined(session: Session, tools: DeviceTools, plan: Plan, between_series: BetweenSeries) -> Samples:
    """Steady state: chains of calls back to back, one event an iteration boundary and none inside."""
    calls = max(plan.iters, PIPELINED_MIN_CALLS)
    samples = Samples(phases={name: [] for name in timed_names(session)}, chains=PIPELINED_CHAINS)
    for _ in range(plan.warmup):
        session.call()
    stamps = [event() for _ in range(calls + 1)]
    for _ in range(PIPELINED_CHAINS):
        tools.cold_start()
        hosts = []
        stamps[0].record()
        for call in range(calls):
            started = time.perf_counter_ns()
            session.call()
            hosts.append((time.perf_counter_ns() - started) / NS_PER_US)
            stamps[call + 1].record()
        enqueued = time.perf_counter_ns()
        torch.cuda.synchronize()
        samples.backlog.append((time.perf_counter_ns() - enqueued) / NS_PER_US)
        periods = [between_us(before, after) for before, after in pairwise(stamps)]
        samples.total.extend(periods[PIPELINED_DROPPED:])
        samples.host.extend(hosts[PIPELINED_DROPPED:])
    between_series(None)
    tools.cold_start()
    chain = [record_phases(main_phases(session)) for _ in range(calls)]
    torch.cuda.synchronize()
    for marks in chain[PIPELINED_DROPPED:]:
        add_phases(samples, marks)
    for phase in repeatable_phases(session):
        tools.cold_start()
        stamps[0].record()
        for call in range(calls):
            phase.fn()
            stamps[call + 1].record()
        torch.cuda.synchronize()
        samples.alone[phase.name] = [between_us(*pair) for pair in pairwise(stamps)][PIPELINED_DROPPED:]
    return samples


def capture(work: Callable[[], Any], tools: DeviceTools) -> torch.cuda.CUDAGraph:
    """One graph of `work` on every rank, or NotCaptured on every rank."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    problem = ""
    graph = torch.cuda.CUDAGraph()
    try:
        # thread_local: NCCL's watchdog thread may query events while this thread captures
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            work()
    except Exception as error:  # noqa: BLE001 - whatever the library raised is why the row is eager
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    torch.cuda.current_stream().wait_stream(side)
    if agreed := tools.agree(problem):
        raise NotCaptured(agreed)
    return graph


def graph(session: Session, tools: DeviceTools, plan: Plan, between_series: BetweenSeries) -> Samples:
    """Calls captured in one graph, replayed; the phases from a sibling graph with external events at the boundaries."""
    samples = Samples(phases={name: [] for name in timed_names(session)})
    count = plan.iters_per_graph
    for _ in range(CAPTURE_WARMUP_CALLS):
        session.call()
    torch.cuda.synchronize()

    def all_calls() -> None:
        for _ in range(count):
            session.call()

    calls = capture(all_calls, tools)
    session.poison()  # the eager calls before capture left the right output
    replays = max(GRAPH_MIN_REPLAYS, math.ceil(plan.iters / count))
    for replay in range(GRAPH_UNTIMED_REPLAYS + replays):
        tools.cold_start(hide_enqueue=True)
        total, host = window(calls.replay)
        if replay >= GRAPH_UNTIMED_REPLAYS:
            samples.total.append(total / count)
            samples.host.append(host / count)
    between_series(calls.replay)
    chain: list[list[Mark]] = []

    def all_phases() -> None:
        chain.extend(record_phases(main_phases(session), external=True) for _ in range(count))

    phases = capture(all_phases, tools)
    session.poison()
    for _ in range(2):  # the first replay warms the graph up; the events keep the last one's times
        tools.cold_start()
        phases.replay()
        torch.cuda.synchronize()
    for marks in chain:
        add_phases(samples, marks)
    return samples


def kernel(session: Session, tools: DeviceTools, plan: Plan, between_series: BetweenSeries) -> Samples:
    """The library's bare launch, one at a time; its enqueue hides behind a delay kernel before the device barrier.

    A session without one may have a graph of one call replayed in its place (`replayed_kernel`).
    """
    if session.cold_kernel and tools.flush is None and tools.make_flush is not None:
        tools = replace(tools, flush=tools.make_flush())
    replay = None if (launch := session.bare_kernel()) else captured_call(session, tools)
    launch = launch or replay
    assert launch is not None
    samples = Samples()
    for iteration in range(plan.warmup + plan.iters):
        tools.cold_start(hide_enqueue=True)
        total, host = window(launch)
        if iteration >= plan.warmup:
            samples.total.append(total)
            samples.host.append(host)
    between_series(replay)
    launch()  # this method has no second series, and the output is looked at once more after the last one
    torch.cuda.synchronize()
    return samples


def captured_call(session: Session, tools: DeviceTools) -> Callable[[], None]:
    """The replay of a graph of one call. What the eager calls before it left is gone."""
    for _ in range(CAPTURE_WARMUP_CALLS):
        session.call()
    torch.cuda.synchronize()
    replay = capture(session.call, tools).replay
    session.poison()
    return replay


METHODS = {"e2e": e2e, "e2e_pipelined": e2e_pipelined, "graph": graph, "kernel": kernel, UNTIMED: untimed}
