"""Durations on a clock that only the session moves, so that every figure is known beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from knob_helpers import parsed

from lib import measure, timing
from lib.contract import Phase, Session, Unsupported
from lib.knob_types import UNTIMED
from lib.problem import Problem
from lib.stats import MIN_SAMPLES_FOR_P99
from lib.timing import (
    PIPELINED_CHAINS,
    PIPELINED_DROPPED,
    PIPELINED_MIN_CALLS,
    BetweenSeries,
    HostTools,
    Plan,
    Samples,
    run_phases,
)


class Clock:
    """Nanoseconds; each look at it costs `tick_us`, as on a real machine."""

    def __init__(self) -> None:
        self.ns, self.tick_us = 0, 0.0

    def read(self) -> int:
        self.advance(self.tick_us)
        return self.ns

    def advance(self, us: float) -> None:
        self.ns += round(us * 1000)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter_ns=clock.read))
    return clock


Part = tuple[str, float, bool]  # name, microseconds, timed


class FakeSession(Session):
    """Phases of given length; `call` runs the timed ones. `spend` is what makes time pass."""

    def __init__(self, spend: Callable[[float], None], parts: list[Part], arrive_us: float = 0) -> None:
        self.spend, self.parts, self.arrive_us, self.calls = spend, parts, arrive_us, 0
        self.phases = [
            Phase(name, lambda name=name, us=us: self.run(name, us), timed)  # type: ignore[misc]
            for name, us, timed in parts
        ]

    def run(self, name: str, us: float) -> None:
        if name == "dispatch":
            self.spend(self.arrive_us)
            self.mark_arrival()
        self.spend(us)

    def call(self) -> None:
        self.calls += 1
        for name, us, timed in self.parts:
            if timed:
                self.run(name, us)


SPLIT = [("dispatch", 20.0, True), ("experts", 50.0, True), ("combine", 30.0, True)]
STAGED = [("quantize", 7.0, False), ("dispatch", 20.0, True), ("identity", 400.0, False), ("combine", 30.0, True)]


def nothing(replay: object = None) -> None:
    """Every rank is there already; nothing is to be looked at between two series."""


def e2e(session: Session, rendezvous: Callable[[], None], plan: Plan, between: BetweenSeries = nothing) -> Samples:
    return timing.e2e(session, HostTools(rendezvous), plan, between)


def e2e_pipelined(
    session: Session, rendezvous: Callable[[], None], plan: Plan, between: BetweenSeries = nothing
) -> Samples:
    return timing.e2e_pipelined(session, HostTools(rendezvous), plan, between)


# -- one staged call


def test_phases_and_gaps_add_up_to_the_span(clock: Clock) -> None:
    clock.tick_us = 1.0
    durations, gap, span = run_phases(FakeSession(clock.advance, SPLIT))
    assert durations == {"dispatch": 21.0, "experts": 51.0, "combine": 31.0}  # each holds one look at the clock
    assert gap == 2.0
    assert span == sum(durations.values()) + gap


def test_an_untimed_phase_is_in_no_duration_no_gap_and_no_span(clock: Clock) -> None:
    durations, gap, span = run_phases(FakeSession(clock.advance, STAGED))
    assert durations == {"dispatch": 20.0, "combine": 30.0}
    assert (gap, span) == (0.0, 50.0)


def test_only_the_time_beside_an_untimed_phase_is_a_gap(clock: Clock) -> None:
    clock.tick_us = 1.0
    _, gap, _ = run_phases(FakeSession(clock.advance, STAGED))
    assert gap == 2.0  # dispatch's end to identity's start, identity's end to combine's start; not identity itself


def test_untimed_phases_at_both_ends_do_not_count(clock: Clock) -> None:
    parts = [("stage", 1000.0, False), *SPLIT, ("clean", 1000.0, False)]
    assert run_phases(FakeSession(clock.advance, parts))[1:] == (0.0, 100.0)


def test_two_phases_of_one_name_are_one_column(clock: Clock) -> None:
    parts = [("dispatch", 20.0, True), ("experts", 5.0, True), ("dispatch", 3.0, True)]
    assert run_phases(FakeSession(clock.advance, parts))[0] == {"dispatch": 23.0, "experts": 5.0}


# -- e2e


def test_waiting_for_a_late_rank_is_not_part_of_the_total(clock: Clock) -> None:
    samples = e2e(FakeSession(clock.advance, SPLIT), lambda: clock.advance(2000), Plan(warmup=2, iters=5))
    assert samples.total == [100.0] * 5
    assert samples.phases["dispatch"] == [20.0] * 5


def test_on_a_real_clock_too_the_wait_stays_outside() -> None:
    session = FakeSession(lambda us: time.sleep(us / 1e6), [("dispatch", 50.0, True)])
    samples = e2e(session, lambda: time.sleep(0.01), Plan(warmup=1, iters=5))
    assert 50 <= median(samples.total) < 10_000


def test_warm_up_is_run_and_not_recorded(clock: Clock) -> None:
    session = FakeSession(clock.advance, SPLIT)
    samples = e2e(session, nothing, Plan(warmup=3, iters=4))
    assert session.calls == 7  # the staged series makes no calls
    assert [len(series) for series in (samples.total, samples.host, samples.gaps, samples.phase_total)] == [4] * 4
    assert {len(series) for series in samples.phases.values()} == {4}


def test_the_total_is_of_the_call_and_not_of_its_phases(clock: Clock) -> None:
    """The staged series costs more, and none of that may reach the total."""
    session = FakeSession(clock.advance, SPLIT)
    session.phases = [replace(phase, fn=lambda: clock.advance(500)) for phase in session.phases]
    samples = e2e(session, nothing, Plan(0, 3))
    assert samples.total == [100.0] * 3
    assert samples.phase_total == [1500.0] * 3


@pytest.mark.parametrize("method", timing.METHODS)
def test_the_output_is_looked_at_once_between_the_calls_and_the_phases(method: str, clock: Clock) -> None:
    """Later it would be the phases' output, and a call that did nothing would go unseen."""
    session = FakeSession(clock.advance, SPLIT)
    looked: list[tuple[int, int]] = []
    staged = 0

    def combine() -> None:
        nonlocal staged
        staged += 1

    session.phases[2] = Phase("combine", combine)
    timing.METHODS[method](
        session, HostTools(nothing), Plan(1, 70), lambda replay: looked.append((session.calls, staged))
    )
    assert looked == [(session.calls, 0)]
    assert staged >= (1 if method == UNTIMED else 70)


def test_the_look_between_the_series_is_in_no_duration(clock: Clock) -> None:
    samples = e2e(FakeSession(clock.advance, SPLIT), nothing, Plan(0, 3), lambda replay: clock.advance(50_000))
    assert samples.total == samples.phase_total == [100.0] * 3


def test_untimed_phases_have_no_series(clock: Clock) -> None:
    samples = e2e(FakeSession(clock.advance, STAGED), nothing, Plan(0, 2))
    assert list(samples.phases) == ["dispatch", "combine"]
    assert samples.total == [50.0] * 2


def test_arrivals_are_counted_from_the_rendezvous(clock: Clock) -> None:
    session = FakeSession(clock.advance, SPLIT, arrive_us=9)
    samples = e2e(session, lambda: clock.advance(2000), Plan(warmup=2, iters=3))
    assert samples.arrivals == [9.0] * 3


def test_a_session_that_marks_no_arrival_has_none(clock: Clock) -> None:
    assert e2e(FakeSession(clock.advance, [("forward", 5.0, True)]), nothing, Plan(1, 3)).arrivals == []


def test_the_arrival_mark_is_taken_back_even_after_an_error(clock: Clock) -> None:
    def broken() -> None:
        raise RuntimeError("lost a peer")

    session = FakeSession(clock.advance, SPLIT)
    e2e(session, nothing, Plan(0, 1))
    assert session.mark_arrival is Session.mark_arrival
    session.phases[2] = Phase("combine", broken)
    with pytest.raises(RuntimeError, match="lost a peer"):
        e2e(session, nothing, Plan(0, 1))
    assert session.mark_arrival is Session.mark_arrival


# -- e2e_pipelined


def test_a_chain_drops_the_calls_that_fill_the_pipe(clock: Clock) -> None:
    """The first 16 calls after each rendezvous are slow here; not one of them may be in the series."""
    since_rendezvous = 0

    def rendezvous() -> None:
        nonlocal since_rendezvous
        since_rendezvous = 0
        clock.advance(2000)

    def spend(us: float) -> None:
        nonlocal since_rendezvous
        since_rendezvous += 1
        clock.advance(us + (1000 if since_rendezvous <= PIPELINED_DROPPED else 0))

    session = FakeSession(spend, [("forward", 10.0, True)])
    samples = e2e_pipelined(session, rendezvous, Plan(warmup=5, iters=80))
    assert samples.total == [10.0] * (PIPELINED_CHAINS * (80 - PIPELINED_DROPPED))
    assert samples.phases["forward"] == [10.0] * (80 - PIPELINED_DROPPED)
    assert samples.chains == PIPELINED_CHAINS
    assert session.calls == 5 + PIPELINED_CHAINS * 80


def test_a_default_run_has_the_samples_of_a_p99(clock: Clock) -> None:
    samples = e2e_pipelined(FakeSession(clock.advance, SPLIT), nothing, Plan(0, 3))
    assert len(samples.total) == MIN_SAMPLES_FOR_P99


def test_a_period_holds_one_look_at_the_clock(clock: Clock) -> None:
    clock.tick_us = 1.0
    assert set(e2e_pipelined(FakeSession(clock.advance, SPLIT), nothing, Plan(0, 1)).total) == {101.0}


# -- the row's columns, from the samples of two ranks

PROBLEM = Problem(world=2, nodes=1, tokens=8, num_experts=4, topk=2, hidden=64, inter=32, seed=0, routing="uniform")


def columns(first: Samples, second: Samples, method: str = "e2e", problem: Problem = PROBLEM) -> dict[str, Any]:
    return measure.time_columns(method, problem.world * problem.tokens, [first, second])


def rank_samples(scale: float) -> Samples:
    return Samples(
        total=[10 * scale, 40.0, 20.0],
        host=[9 * scale, 39.0, 19.0],
        phases={"dispatch": [5 * scale, 6.0, 7.0], "combine": [1.0, 2.0 * scale, 3.0]},
        phase_total=[8 * scale, 9.0, 10.0],
        gaps=[2 * scale, 1.0, 1.5],
        arrivals=[1 * scale, 2.0, 3.0 * scale],
    )


def test_a_row_is_the_median_over_iterations_of_the_slowest_rank() -> None:
    row = columns(rank_samples(1), rank_samples(3))
    assert row["lat_us_p50"] == 30.0  # of max(10, 30), 40, 20; a median of rank medians would be 25
    assert row["dispatch_us"] == 7.0  # of 15, 6, 7
    assert row["combine_us"] == 3.0  # of 1, 6, 3
    assert row["host_us"] == 27.0
    assert row["gap_us"] == 1.5  # of rank 1's 6, then 1 and 1.5
    assert row["skew_us"] == 2.0  # of 2, 0, 6
    assert row["slowest_rank"] == 1
    assert row["tokens_per_s"] == pytest.approx(2 * 8 / 30e-6)


def test_pipelined_takes_the_middle_rank_and_its_phases_are_floors() -> None:
    row = columns(rank_samples(1), rank_samples(3), "e2e_pipelined")
    assert row["lat_us_p50"] == 20.0  # of (10+30)/2, 40, 20
    assert row["dispatch_us"] == 6.0  # of 5, 6, 7
    assert row["combine_us"] == 2.0  # of 1, 2, 3


def bound(host: float, blocked: float, backlogs: tuple[float, float] | None = None) -> bool | None:
    """launch_bound of a total of 100 us, from the host's time, its blocked share, and what each device had left."""
    ranks = [
        Samples(total=[100.0] * 3, host=[host] * 3, blocked=[blocked] * 3, backlog=[] if left is None else [left] * 2)
        for left in backlogs or (None, None)
    ]
    return columns(*ranks, method="e2e_pipelined" if backlogs else "e2e")["launch_bound"]


def test_a_single_call_is_launch_bound_when_the_hosts_own_work_fills_it() -> None:
    assert bound(host=95, blocked=0) is True
    assert bound(host=95, blocked=50) is False
    assert columns(rank_samples(1), rank_samples(1))["launch_bound"] is None


def test_a_chain_is_launch_bound_when_a_device_has_nothing_left_at_its_end() -> None:
    assert bound(host=80, blocked=0, backlogs=(5000.0, 40.0)) is True
    assert bound(host=98, blocked=0, backlogs=(5000.0, 4000.0)) is False
    assert bound(host=98, blocked=60, backlogs=(5.0, 5.0)) is False, "the host waits in every call"


def test_no_tokens_means_no_rate_and_no_marks_mean_no_skew() -> None:
    first = replace(rank_samples(1), arrivals=[])
    row = columns(first, first, problem=PROBLEM.at(0))
    assert row["tokens_per_s"] is None
    assert "skew_us" not in row
    assert "slowest_rank" not in row


def test_one_phase_has_no_gap() -> None:
    only = replace(rank_samples(1), phases={"forward": [1.0, 2.0, 3.0]})
    assert "gap_us" not in columns(only, only)


def test_the_method_of_every_cpu_timing_exists() -> None:
    from lib.plan import CPU_TIMINGS

    assert set(timing.METHODS) == set(CPU_TIMINGS)
    assert set(timing.METHODS) <= set(parsed(TIMING="e2e e2e_pipelined kernel graph none").timing)


# -- phases that may repeat


def test_a_repeatable_phase_has_a_series_of_its_own(clock: Clock) -> None:
    session = FakeSession(clock.advance, [("stage", 10.0, True), ("forward", 40.0, True)])
    session.phases[1] = replace(session.phases[1], repeatable=True)
    assert e2e(session, nothing, Plan(1, 3)).alone == {"forward": [40.0] * 3}
    assert e2e_pipelined(session, nothing, Plan(0, 1)).alone == {
        "forward": [40.0] * (PIPELINED_MIN_CALLS - PIPELINED_DROPPED)
    }
    assert e2e(FakeSession(clock.advance, SPLIT), nothing, Plan(0, 1)).alone == {}


def test_its_column_is_that_series_reduced_over_ranks_as_the_total() -> None:
    first, second = (
        replace(
            rank_samples(scale), phases={"stage": [1.0], "forward": [9.0]}, alone={"forward": [4 * scale, 6.0, 8.0]}
        )
        for scale in (1, 3)
    )
    assert columns(first, second)["forward_us"] == 8.0  # of 12, 6, 8, the slowest rank; from the chain it would be 9
    assert columns(first, second, "e2e_pipelined")["forward_us"] == 8.0  # of (4+12)/2, 6, 8
    assert columns(first, second)["stage_us"] == 1.0


def test_the_record_keeps_rank_0s_own_median() -> None:
    raw = measure.raw_samples([rank_samples(1), rank_samples(3)])
    assert raw["rank0_p50_us"] == 20.0
    assert raw["alone_us"] == {}


# -- which method is made


class Bare(FakeSession):
    """May have a bare kernel, or a graph in its place."""

    def __init__(self, bare: bool, replayed: bool) -> None:
        super().__init__(nothing, SPLIT)
        self.bare, self.replayed_kernel = bare, replayed

    def bare_kernel(self) -> Callable[[], None] | None:
        return nothing if self.bare else None


def test_kernel_timing_needs_a_bare_kernel_or_a_graph_in_its_place() -> None:
    case: Any = SimpleNamespace(timing="kernel")
    assert measure.choose_method(case, Bare(bare=True, replayed=False), "") == ("kernel", "")
    assert measure.choose_method(case, Bare(bare=False, replayed=True), "") == ("kernel", "captured")
    with pytest.raises(Unsupported, match="no bare kernel"):
        measure.choose_method(case, Bare(bare=False, replayed=False), "")
    with pytest.raises(Unsupported, match="TIMING=kernel: rank 1: no graph"):
        measure.choose_method(case, Bare(bare=False, replayed=True), "rank 1: no graph")
