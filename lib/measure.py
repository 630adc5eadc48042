"""One case on one rank: inputs, bind, check, time, check again, and the columns that come of it."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from lib import stats, timing, traffic
from lib.check import Checker
from lib.contract import Engine, Group, Session, Unsupported
from lib.knob_types import UNTIMED
from lib.plan import Case
from lib.problem import TIMED_PAYLOAD, Inputs, token_payload
from lib.roofline import Peaks, sol_columns
from lib.routing import Routing, make_routing, uneven

if TYPE_CHECKING:
    from lib.knobs import Knobs

SayPhase = Callable[[str], None]
LAUNCH_BOUND_SHARE = 0.9  # of the total: above it the host's enqueue is what was measured
MOE_FLOPS_PER_WEIGHT = 2  # one multiply and one add


def make_inputs(case: Case, routing: Routing, group: Group) -> Inputs:
    import torch

    count = routing.tokens_of(group.rank)
    ids = torch.from_numpy(routing.topk_idx[group.rank, :count].copy()).to(group.device)
    weights = torch.from_numpy(routing.topk_weights[group.rank, :count].copy()).to(group.device)
    x = token_payload(case.problem, group.rank, count, TIMED_PAYLOAD, group.device)
    return Inputs(x, ids, weights)


def gather(value: Any, group: Group) -> list[Any]:
    """Every rank's value, on every rank."""
    import torch.distributed as dist

    values: list[Any] = [None] * group.world
    dist.all_gather_object(values, value, group=group.host_pg)
    return values


@dataclass
class Bench:
    """What a worker group measures with: its ranks, the knobs, its methods, and this machine's peaks."""

    group: Group
    knobs: Knobs
    methods: dict[str, Any]  # name -> (session, tools, plan, between_series) -> Samples
    tools: Any  # lib.timing.HostTools or lib.device_timing.DeviceTools
    peaks: Peaks | None
    stamp: str = ""  # of the run, for the names of traces

    @classmethod
    def make(cls, group: Group, knobs: Knobs, peaks: dict[str, Any] | None, stamp: str = "") -> Bench:
        import torch.distributed as dist

        if group.device.type == "cpu":
            host_tools = timing.HostTools(lambda: dist.barrier(group=group.host_pg))
            return cls(group, knobs, timing.METHODS, host_tools, None, stamp)
        from lib import device_timing
        from lib.device import make_tools

        tools = make_tools(group, knobs.l2 == "cold")
        return cls(group, knobs, device_timing.METHODS, tools, Peaks.read(peaks) if peaks else None, stamp)


class CheckMemory:
    """Device memory that the check takes beside the bound session; nothing is known of it on a CPU."""

    def __init__(self, group: Group) -> None:
        import torch

        self.device = group.device if group.device.type == "cuda" else None
        if self.device is not None:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)

    def peak_bytes(self) -> int | None:
        import torch

        return None if self.device is None else torch.cuda.max_memory_allocated(self.device) - self.before


def choose_method(case: Case, session: Session, eager: str) -> tuple[str, str]:
    """The timing that will really be made, and the graph column: a graph that can't be is eager, and says so."""
    if case.timing == "kernel":
        if session.replayed_kernel and eager:
            raise Unsupported(f"TIMING=kernel: {eager}")
        if not session.replayed_kernel and session.bare_kernel() is None:
            raise Unsupported("TIMING=kernel: this backend has no bare kernel to launch")
        return "kernel", "captured" if session.replayed_kernel else ""
    if case.timing != "graph":
        return case.timing, ""
    reason = eager or session.capturable
    return ("e2e_pipelined", f"eager: {reason}") if reason else ("graph", "captured")


@dataclass(frozen=True)
class Bound:
    """A case that is ready to be checked and timed: what it is made of, and how it will be timed."""

    case: Case
    routing: Routing
    inputs: Inputs
    session: Session
    method: str
    graph: str  # the column

    def tokens(self) -> int:
        """Of all ranks."""
        return sum(self.routing.tokens_of(rank) for rank in range(self.case.problem.world))


def bind(case: Case, engine: Engine, bench: Bench, eager: str) -> Bound:
    """Raises RuntimeError if ranks differ in the routing, Unsupported on a timing that can't be made. Collective."""
    routing = make_routing(case.problem)
    if len(set(gather(routing.sha, bench.group))) != 1:
        raise RuntimeError("the routing differs between ranks")
    if case.identity_experts:
        routing = uneven(routing)
    inputs = make_inputs(case, routing, bench.group)
    session = engine.bind(case.problem, inputs)
    method, graph = choose_method(case, session, eager)
    timing.run_phases(session)  # what is compiled or allocated at first use belongs to set-up
    session.call()
    gather(None, bench.group)
    return Bound(case, routing, inputs, session, method, graph)


def measure_case(
    case: Case, engine: Engine, bench: Bench, say_phase: SayPhase, eager: str
) -> tuple[dict[str, Any], Session]:
    """The result (status, reason, columns, samples), complete on rank 0, and the session, which is still open."""
    group, knobs = bench.group, bench.knobs
    seconds: dict[str, float] = {}
    say_phase = clocked(say_phase, seconds)
    say_phase("bind")
    bound = bind(case, engine, bench, eager)
    session = bound.session

    say_phase("check")
    memory = CheckMemory(group)
    checker = Checker(session, bound.inputs, case.problem, bound.routing, group)
    half = (knobs.check_repeats + 1) // 2
    wrong = checker.before(half) if case.checked else ""
    check_bytes = memory.peak_bytes()
    if wrong:
        return wrong_result(f"before timing: {wrong}"), session

    say_phase("time")
    plan = timing.Plan(knobs.warmup, knobs.iters, knobs.iters_per_graph)
    between = checker.between_series if case.checked else lambda replay: None
    samples = bench.methods[bound.method](session, bench.tools, plan, between)

    say_phase("recheck")
    wrong = checker.after(max(knobs.check_repeats - half, 1)) if case.checked else ""
    acc = checker.acc_loss_pct()
    everyone = gather(samples, group)
    if wrong:
        return wrong_result(f"after timing: {wrong}"), session
    result = ok_result(bound, bench, everyone, acc)
    clocked(lambda phase: None, seconds)("end")
    result["samples"] |= {"seconds": spans(seconds), "check_bytes": check_bytes}
    return result, session


def ok_result(bound: Bound, bench: Bench, everyone: list[timing.Samples], acc_loss_pct: float | None) -> dict[str, Any]:
    """The result of a case whose checks passed. Collective on a GPU, where kernels are profiled for it."""
    session, timed_kernel = bound.session, bound.method == "kernel"
    columns = row_columns(bound, bench, everyone) | {"acc_loss_pct": acc_loss_pct}
    if timed_kernel:
        columns |= bare_kernel_columns(session)
    reason = f"kernel: {session.kernel_note}" if timed_kernel and session.kernel_note else ""
    samples = raw_samples(everyone) | {"facts": session.facts()}
    result: dict[str, Any] = {"status": "ok", "reason": reason, "columns": columns, "samples": samples}
    if bench.group.device.type == "cuda" and bound.method != UNTIMED:
        add_kernel_times(result, session, bench)
    return result


def row_columns(bound: Bound, bench: Bench, everyone: list[timing.Samples]) -> dict[str, Any]:
    """What the times, the counted bytes and the session itself say of a case."""
    case, session, method, knobs = bound.case, bound.session, bound.method, bench.knobs
    times = {} if method == UNTIMED else time_columns(method, bound.tokens(), everyone)
    return {
        **times,
        **byte_and_rate_columns(case, session, bound.routing, times, bench.peaks),
        "timing": method,
        "graph": bound.graph,
        "iters_per_graph": knobs.iters_per_graph if method == "graph" else None,
        "check": "ok" if case.checked else "skipped",
        "quant_included": session.quant_included,
        "staging_included": session.staging_included,
        "transport": transport(session, knobs.ranks_per_gpu),
        "timer": None if not times else "monotonic" if bench.group.device.type == "cpu" else "cuda_event",
        "versions": versions_text(session),
        "tainted": knobs.trace != "0",
    }


def bare_kernel_columns(session: Session) -> dict[str, Any]:
    """What a bare launch is timed without, and the L2 that it found."""
    columns: dict[str, Any] = {"l2": "cold"} if session.cold_kernel else {}
    if not session.replayed_kernel:
        columns["staging_included"] = False
        columns["quant_included"] = None if session.quant_included is None else False
    return columns


def clocked(say_phase: SayPhase, seconds: dict[str, float]) -> SayPhase:
    """Also notes when each phase of the case began, on the monotonic clock."""

    def say(phase: str) -> None:
        seconds[phase] = time.monotonic()
        say_phase(phase)

    return say


def spans(seconds: dict[str, float]) -> dict[str, float]:
    """Seconds from each phase to the next: what binding, checking and timing of a case cost."""
    names, starts = list(seconds), list(seconds.values())
    return {name: end - start for name, start, end in zip(names, starts, starts[1:], strict=False)}


def add_kernel_times(result: dict[str, Any], session: Session, bench: Bench) -> None:
    """kernel_us, or the reason why it stays blank on a row that is otherwise ok."""
    from lib.kernels import profile_session

    everyone = gather(profile_session(session, bench.tools), bench.group)
    if problem := next((times.problem for times in everyone if times.problem), ""):
        result["reason"] = "; ".join(filter(None, (result["reason"], f"kernel_us: {problem}")))
        return
    result["columns"]["kernel_us"] = median(stats.max_over_ranks(_by_iteration([t.total_us for t in everyone])))
    result["samples"]["kernel_us"] = [times.total_us for times in everyone]
    result["samples"]["kernel_phases_us"] = [times.by_phase for times in everyone]


def wrong_result(reason: str) -> dict[str, Any]:
    """A wrong result keeps no figure: it must not be read as a fast one."""
    return {"status": "wrong", "reason": reason, "columns": {"check": "wrong"}, "samples": {}}


def _by_iteration(series: list[list[float]]) -> list[tuple[float, ...]]:
    """From one list a rank to one tuple an iteration."""
    return list(zip(*series, strict=True))


def time_columns(method: str, tokens: int, everyone: list[timing.Samples]) -> dict[str, Any]:
    """Latency, phases, gap, skew, host time and rate. `tokens`: of all ranks; `everyone` holds each rank's samples."""
    total = _by_iteration([samples.total for samples in everyone])
    pipelined = method == "e2e_pipelined"
    latency = stats.latency_columns(stats.median_over_ranks(total) if pipelined else stats.max_over_ranks(total))
    columns: dict[str, Any] = dict(latency)
    for name in everyone[0].phases:
        series = _by_iteration([samples.phases[name] for samples in everyone])
        # Back to back, a rank's phase contains its wait for the others: the floor is the rank that waited least.
        reduced = [min(ranks) for ranks in series] if pipelined else stats.max_over_ranks(series)
        columns[f"{name}_us"] = median(reduced)
    for name in everyone[0].alone:  # over ranks as the total, since it is a whole collective too
        series = _by_iteration([samples.alone[name] for samples in everyone])
        columns[f"{name}_us"] = median(stats.median_over_ranks(series) if pipelined else stats.max_over_ranks(series))
    spans = _by_iteration([samples.phase_total for samples in everyone])
    if len(everyone[0].phases) > 1:
        columns["gap_us"] = stats.gap_us(_by_iteration([samples.gaps for samples in everyone]), spans)
    arrivals = _by_iteration([samples.arrivals for samples in everyone])
    if arrivals:
        columns["skew_us"] = stats.skew_us(arrivals)
        columns["slowest_rank"] = stats.slowest_rank(arrivals)
    columns["host_us"] = median(stats.max_over_ranks(_by_iteration([samples.host for samples in everyone])))
    columns["launch_bound"] = launch_bound(columns, everyone)
    p50_s = columns["lat_us_p50"] / 1e6
    columns["tokens_per_s"] = tokens / p50_s if tokens else None
    return columns


def launch_bound(columns: dict[str, Any], everyone: list[timing.Samples]) -> bool | None:
    """Was the host's enqueue what was measured? Unknown on a CPU.

    A device that has less than one call left when the host has enqueued a whole chain was waiting for the host. Where
    single calls are timed, or the host waits inside them, its share of the total has to tell.
    """
    blocked = _by_iteration([samples.blocked for samples in everyone])
    if not blocked:
        return None
    blocked_us = median(stats.max_over_ranks(blocked))
    if everyone[0].backlog and blocked_us == 0:
        backlog_us = median(min(ranks) for ranks in _by_iteration([samples.backlog for samples in everyone]))
        return bool(backlog_us < columns["lat_us_p50"])
    return bool(columns["host_us"] - blocked_us > LAUNCH_BOUND_SHARE * columns["lat_us_p50"])


def transport(session: Session, ranks_per_gpu: int) -> str:
    """What the session names, and that some of it was no link where ranks share a GPU."""
    return session.transport() + ", ranks share a GPU" * (ranks_per_gpu > 1)


def byte_and_rate_columns(
    case: Case, session: Session, routing: Routing, times: dict[str, Any], peaks: Peaks | None
) -> dict[str, Any]:
    """Bytes and GB/s of each leg from the counted routing, and TFLOP/s of a MoE."""
    copies = traffic.count_copies(routing.topk_idx, case.problem)
    if session.every_node:
        tokens = [routing.tokens_of(rank) for rank in range(case.problem.world)]
        copies = traffic.to_every_node(copies, tokens, case.problem.nodes)
    formats = (session.dispatch_format, session.combine_format)
    legs = (times.get("dispatch_us"), times.get("combine_us"))
    p50_us = times.get("lat_us_p50")
    columns: dict[str, Any] = {
        "routing_sha": routing.sha,
        "load_max_over_mean": routing.load_max_over_mean,
        **traffic.byte_columns(copies, case.problem, *formats),
        **traffic.bandwidth_columns(copies, case.problem, *formats, *legs),
    }
    if p50_us is not None:
        columns |= sol_columns(case.problem, copies, session, peaks, p50_us)
    if p50_us is not None and session.kind == "moe":
        routed = int(copies.selection.sum()) / case.problem.world
        flops = MOE_FLOPS_PER_WEIGHT * routed * 3 * case.problem.inter * case.problem.hidden
        columns["tflops"] = flops / p50_us / 1e6 if flops else None
    return columns


def versions_text(session: Session) -> str:
    """Versions of what is loaded in this process."""
    import numpy
    import torch

    loaded = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
    return "; ".join(f"{name} {version}" for name, version in {**loaded, **session.versions()}.items())


def raw_samples(everyone: list[timing.Samples]) -> dict[str, Any]:
    """What JSONL keeps: series by rank, and the drift of each pipelined chain."""
    if not everyone[0].total:
        return {}
    raw: dict[str, Any] = {
        "total_us": [samples.total for samples in everyone],
        "rank0_p50_us": median(everyone[0].total),
        "alone_us": {name: [samples.alone[name] for samples in everyone] for name in everyone[0].alone},
        "phases_us": {name: [samples.phases[name] for samples in everyone] for name in everyone[0].phases},
        "phase_total_us": [samples.phase_total for samples in everyone],
        "gaps_us": [samples.gaps for samples in everyone],
        "host_us": [samples.host for samples in everyone],
        "blocked_us": [samples.blocked for samples in everyone],
        "backlog_us": [samples.backlog for samples in everyone],
        "arrivals_us": [samples.arrivals for samples in everyone],
    }
    chains = everyone[0].chains
    if chains > 1:
        series = stats.median_over_ranks(_by_iteration([samples.total for samples in everyone]))
        length = len(series) // chains
        starts = range(0, chains * length, length)
        raw["drift_us"] = [stats.drift_us(series[start : start + length]) for start in starts]
    return raw
