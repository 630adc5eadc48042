"""Durations: every one is made by a method that docs/method.md defines. This file has the host-clock methods.

All times are microseconds on the monotonic clock of the rank that took them. A method returns raw samples of this
rank; lib/measure.py gathers them over ranks and lib/stats.py reduces them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from lib.contract import Phase, Session
from lib.knob_types import UNTIMED

NS_PER_US = 1000.0
# Called after the timed calls, before the timed phases; with a graph's replay, where that is what was timed.
BetweenSeries = Callable[[Callable[[], None] | None], None]
PIPELINED_CHAINS = 4
PIPELINED_MIN_CALLS = 66  # so that 4 chains keep the 200 periods that a p99 needs (lib/stats.py)
PIPELINED_DROPPED = 16  # the pipe fills: the first calls of a chain still see an idle device


@dataclass
class Samples:
    """One rank's raw series of one method. `phases` and `gaps` come from the sibling series, never from the total's."""

    total: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)
    phase_total: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)  # host time inside phases that block the host
    alone: dict[str, list[float]] = field(default_factory=dict)  # repeatable phases, each in a series of its own
    chains: int = 1
    backlog: list[float] = field(default_factory=list)  # device time left when the host had enqueued a chain


@dataclass(frozen=True)
class Plan:
    """How often: `warmup` untimed and `iters` timed iterations, `iters_per_graph` calls in one CUDA graph."""

    warmup: int
    iters: int
    iters_per_graph: int = 1


@dataclass
class HostTools:
    """What the host-clock methods need of the harness: the ranks' meeting."""

    rendezvous: Callable[[], None]


def timed_names(session: Session) -> list[str]:
    return [phase.name for phase in session.phases if phase.timed]


def _us(start_ns: int, end_ns: int) -> float:
    return (end_ns - start_ns) / NS_PER_US


def leading_phases(session: Session) -> list[Phase]:
    """The untimed phases before the first timed one: they stage the inputs."""
    return list(itertools.takewhile(lambda phase: not phase.timed, session.phases))


def main_phases(session: Session) -> list[Phase]:
    """All phases from the first timed one on."""
    return session.phases[len(leading_phases(session)) :]


def repeatable_phases(session: Session) -> list[Phase]:
    return [phase for phase in session.phases if phase.timed and phase.repeatable]


def run_phases(session: Session) -> tuple[dict[str, float], float, float]:
    """One whole staged call, input staging first; see time_phases."""
    for phase in leading_phases(session):
        phase.fn()
    return time_phases(main_phases(session))


def time_phases(phases: list[Phase]) -> tuple[dict[str, float], float, float]:
    """Microseconds by phase, the sum of gaps between timed phases, and the span without untimed ones.

    An untimed phase is taken out of the span and of the gap that it stands in.
    """
    durations: dict[str, float] = {}
    gap = untimed = 0.0
    previous_end = None
    now = time.perf_counter_ns
    for phase in phases:
        start = now()
        phase.fn()
        end = now()
        if not phase.timed:
            untimed += _us(start, end)
            continue
        durations[phase.name] = durations.get(phase.name, 0.0) + _us(start, end)
        if previous_end is not None:
            gap += _us(previous_end, start) - untimed
        previous_end, untimed = end, 0.0
    return durations, gap, sum(durations.values()) + gap


def e2e(session: Session, tools: HostTools, plan: Plan, between_series: BetweenSeries) -> Samples:
    """Barrier-cold start: rendezvous; start; call; end. The phases come from a second series of as many iterations."""
    samples = Samples(phases={name: [] for name in timed_names(session)})
    now = time.perf_counter_ns
    for iteration in range(plan.warmup + plan.iters):
        tools.rendezvous()
        start = now()
        session.call()
        end = now()
        if iteration >= plan.warmup:
            samples.total.append(_us(start, end))
    samples.host = list(samples.total)  # on a CPU the callables are the whole of it
    between_series(None)
    arrived: list[int] = []
    session.mark_arrival = lambda: arrived.append(now())
    try:
        for iteration in range(plan.warmup + plan.iters):
            arrived.clear()
            for phase in leading_phases(session):
                phase.fn()
            tools.rendezvous()
            start = now()
            durations, gap, span = time_phases(main_phases(session))
            if iteration < plan.warmup:
                continue
            for name, duration in durations.items():
                samples.phases[name].append(duration)
            samples.gaps.append(gap)
            samples.phase_total.append(span)
            if arrived:
                samples.arrivals.append(_us(start, arrived[0]))
    finally:
        del session.mark_arrival
    for phase in repeatable_phases(session):
        spans = []
        for _ in range(plan.warmup + plan.iters):
            tools.rendezvous()
            start = now()
            phase.fn()
            spans.append(_us(start, now()))
        samples.alone[phase.name] = spans[plan.warmup :]
    return samples


def e2e_pipelined(session: Session, tools: HostTools, plan: Plan, between_series: BetweenSeries) -> Samples:
    """Steady state: chains of calls back to back, one time stamp an iteration boundary and none inside.

    `total` holds the periods of all chains, one chain after the other; phases are a sibling chain's.
    """
    calls = max(plan.iters, PIPELINED_MIN_CALLS)
    samples = Samples(phases={name: [] for name in timed_names(session)}, chains=PIPELINED_CHAINS)
    now = time.perf_counter_ns
    for _ in range(plan.warmup):
        session.call()
    for _ in range(PIPELINED_CHAINS):
        tools.rendezvous()
        stamps = [now()]
        for _ in range(calls):
            session.call()
            stamps.append(now())
        periods = [_us(start, end) for start, end in pairwise(stamps)]
        samples.total.extend(periods[PIPELINED_DROPPED:])
    samples.host = list(samples.total)
    between_series(None)
    tools.rendezvous()
    for call in range(calls):
        durations, gap, span = time_phases(main_phases(session))
        if call < PIPELINED_DROPPED:
            continue
        for name, duration in durations.items():
            samples.phases[name].append(duration)
        samples.gaps.append(gap)
        samples.phase_total.append(span)
    for phase in repeatable_phases(session):
        tools.rendezvous()
        stamps = [now()]
        for _ in range(calls):
            phase.fn()
            stamps.append(now())
        samples.alone[phase.name] = [_us(start, end) for start, end in pairwise(stamps)][PIPELINED_DROPPED:]
    return samples


def untimed(session: Session, tools: object, plan: Plan, between_series: BetweenSeries) -> Samples:
    """One call and one staged call, so that the check after them has what it has after timed ones; no duration."""
    session.call()
    between_series(None)
    run_phases(session)
    return Samples()


METHODS = {"e2e": e2e, "e2e_pipelined": e2e_pipelined, UNTIMED: untimed}
