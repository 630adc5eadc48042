"""The device methods' logic on a clock of our own; on real GPUs tools/clock_check.py reads known lengths back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lib import device_timing
from lib.contract import Phase, Session
from lib.device_timing import DeviceTools
from lib.timing import PIPELINED_CHAINS, PIPELINED_DROPPED, PIPELINED_MIN_CALLS, Plan


class Device:
    """A stream that is done as soon as it is enqueued: its time is moved by the session alone."""

    def __init__(self) -> None:
        self.now_us, self.met, self.slept = 0.0, 0, 0

    def spend(self, us: float) -> None:
        self.now_us += us


class Event:
    device: Device

    def __init__(self, **options: bool) -> None:
        self.at_us = 0.0

    def record(self) -> None:
        self.at_us = self.device.now_us

    def elapsed_time(self, end: Event) -> float:
        return (end.at_us - self.at_us) / 1000


class Graph:
    """Replays what was captured, which here is the work itself."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work

    def replay(self) -> None:
        self.work()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    Event.device = device
    monkeypatch.setattr(device_timing, "event", lambda external=False: Event())
    monkeypatch.setattr(device_timing, "warm_up_host", lambda: None)
    monkeypatch.setattr(device_timing.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(device_timing.torch.cuda, "_sleep", lambda cycles: setattr(device, "slept", device.slept + 1))
    monkeypatch.setattr(device_timing, "capture", lambda work, tools: Graph(work))
    return device


class Fake(Session):
    """quantize (untimed, leading), dispatch 20 us, identity (untimed) 400 us, combine 30 us; arrival after 5."""

    def __init__(self, device: Device) -> None:
        self.device, self.calls, self.poisoned = device, 0, 0
        self.phases = [
            Phase("quantize", lambda: device.spend(1000), timed=False),
            Phase("dispatch", self.dispatch, blocks_host=True),
            Phase("identity", lambda: device.spend(400), timed=False),
            Phase("combine", lambda: device.spend(30)),
        ]

    def dispatch(self) -> None:
        self.device.spend(5)
        self.mark_arrival()
        self.device.spend(15)

    def call(self) -> None:
        self.calls += 1
        self.dispatch()
        self.device.spend(30)

    def poison(self) -> None:
        self.poisoned += 1

    def bare_kernel(self) -> Callable[[], None]:
        return lambda: self.device.spend(7)


def tools_of(device: Device) -> DeviceTools:
    def meet() -> None:
        device.met += 1
        device.spend(3)  # a barrier takes its time, before the window opens

    return DeviceTools(rendezvous=lambda: None, align=meet, flush=None, agree=lambda problem: problem)


PLAN = Plan(warmup=2, iters=5, iters_per_graph=10)


def measured(method: str, device: Device) -> tuple[Any, Fake, list[Any]]:
    session, looked = Fake(device), []
    samples = device_timing.METHODS[method](session, tools_of(device), PLAN, looked.append)
    return samples, session, looked


def test_e2e_times_the_call_and_leaves_barrier_and_staging_out(device: Device) -> None:
    samples, _, looked = measured("e2e", device)
    assert samples.total == pytest.approx([50.0] * 5)
    assert samples.phases == {"dispatch": pytest.approx([20.0] * 5), "combine": pytest.approx([30.0] * 5)}
    assert samples.gaps == pytest.approx([0.0] * 5)
    assert samples.phase_total == pytest.approx([50.0] * 5)
    assert samples.arrivals == pytest.approx([5.0] * 5)
    assert len(samples.host) == len(samples.blocked) == 5
    assert looked == [None]
    assert device.slept == 0, "the host's enqueue is part of e2e"


def test_a_pipelined_chain_drops_its_first_periods_and_has_no_mark_inside(device: Device) -> None:
    samples, session, looked = measured("e2e_pipelined", device)
    assert samples.chains == PIPELINED_CHAINS
    assert samples.total == pytest.approx([50.0] * PIPELINED_CHAINS * (PIPELINED_MIN_CALLS - PIPELINED_DROPPED))
    assert len(samples.host) == len(samples.total)
    assert len(samples.backlog) == PIPELINED_CHAINS
    assert len(samples.phases["dispatch"]) == PIPELINED_MIN_CALLS - PIPELINED_DROPPED
    assert device.met == PIPELINED_CHAINS + 1
    assert session.calls == PLAN.warmup + PIPELINED_CHAINS * PIPELINED_MIN_CALLS
    assert looked == [None]


def test_a_graphs_sample_is_a_call_and_the_check_gets_its_replay(device: Device) -> None:
    samples, session, looked = measured("graph", device)
    assert samples.total == pytest.approx([50.0] * device_timing.GRAPH_MIN_REPLAYS)
    assert samples.phases["combine"][: PLAN.iters_per_graph] == pytest.approx([30.0] * PLAN.iters_per_graph)
    assert session.poisoned == 2, "what the eager calls before each capture left is gone"
    before = session.calls
    looked[0]()
    assert session.calls == before + PLAN.iters_per_graph
    assert device.slept == device_timing.GRAPH_UNTIMED_REPLAYS + device_timing.GRAPH_MIN_REPLAYS


def test_a_bare_kernel_is_timed_behind_a_delay(device: Device) -> None:
    samples, _, _ = measured("kernel", device)
    assert samples.total == pytest.approx([7.0] * 5)
    assert device.slept == PLAN.warmup + PLAN.iters


class Fused(Fake):
    """stage 10 us, then a forward of 40 us that may run again without it; no bare kernel but a graph of a call."""

    replayed_kernel = True

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.order: list[str] = []
        self.phases = [
            Phase("stage", lambda: self.spent("stage", 10)),
            Phase("forward", lambda: self.spent("forward", 40), repeatable=True),
        ]

    def spent(self, name: str, us: float) -> None:
        self.order.append(name)
        self.device.spend(us)

    def call(self) -> None:
        self.spent("call", 50)

    def bare_kernel(self) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize(("method", "count"), [("e2e", 5), ("e2e_pipelined", PIPELINED_MIN_CALLS - PIPELINED_DROPPED)])
def test_a_repeatable_phase_has_a_series_in_which_nothing_else_runs(device: Device, method: str, count: int) -> None:
    session = Fused(device)
    samples = device_timing.METHODS[method](session, tools_of(device), PLAN, lambda replay: None)
    assert samples.alone == {"forward": pytest.approx([40.0] * count)}
    assert samples.phases["stage"][0] == pytest.approx(10.0)
    tail = session.order[-(count + PLAN.warmup) :]
    assert set(tail) == {"forward"}


def test_a_replayed_call_stands_in_for_a_kernel_and_the_check_gets_its_replay(device: Device) -> None:
    session, looked = Fused(device), list[Any]()
    samples = device_timing.METHODS["kernel"](session, tools_of(device), PLAN, looked.append)
    assert samples.total == pytest.approx([50.0] * 5)
    assert session.poisoned == 1, "what the eager calls before the capture left is gone"
    before = len(session.order)
    looked[0]()
    assert session.order[before:] == ["call"]


def test_a_bare_kernel_leaves_an_output_after_the_check_has_poisoned_it(device: Device) -> None:
    launches = list[str]()
    session = Fake(device)
    session.bare_kernel = lambda: lambda: launches.append("launch")  # type: ignore[method-assign,return-value]
    device_timing.METHODS["kernel"](session, tools_of(device), PLAN, lambda replay: launches.append("check"))
    assert launches[-2:] == ["check", "launch"]


def test_the_l2_is_written_over_between_bare_launches_where_the_library_does_so(device: Device) -> None:
    flushes = list[int]()
    tools = tools_of(device)
    tools.make_flush = lambda: lambda: flushes.append(1)
    device_timing.METHODS["kernel"](Fake(device), tools, PLAN, lambda replay: None)
    assert flushes == []
    session = Fake(device)
    session.cold_kernel = True
    device_timing.METHODS["kernel"](session, tools, PLAN, lambda replay: None)
    assert len(flushes) == PLAN.warmup + PLAN.iters
    device_timing.METHODS["e2e"](session, tools, PLAN, lambda replay: None)
    assert len(flushes) == PLAN.warmup + PLAN.iters, "the other methods keep to L2=warm"


def test_a_cold_start_writes_the_l2_over_before_the_ranks_meet(device: Device) -> None:
    order: list[str] = []
    tools = DeviceTools(
        rendezvous=lambda: order.append("host"),
        align=lambda: order.append("device"),
        flush=lambda: order.append("flush"),
        agree=lambda problem: problem,
    )
    tools.cold_start()
    assert order == ["flush", "host", "device"]
