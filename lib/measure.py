"""One case on one rank: inputs, bind, check, time, check again, and the columns that come of it."""

from __future__ import annotations

import platform
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from lib import stats, timing, traffic
from lib.check import Checker
from lib.contract import Engine, Group, Session
from lib.plan import Case
from lib.problem import TIMED_PAYLOAD, Inputs, token_payload
from lib.routing import Routing, make_routing

if TYPE_CHECKING:
    from lib.knobs import Knobs

SayPhase = Callable[[str], None]
MOE_FLOPS_PER_WEIGHT = 2  # one multiply and one add


def make_inputs(case: Case, routing: Routing, group: Group) -> Inputs:
    import torch

    count = routing.tokens_of(group.rank)
    ids = torch.from_numpy(routing.topk_idx[group.rank, :count].copy()).to(group.device)
    weights = torch.from_numpy(routing.topk_weights[group.rank, :count].copy()).to(group.device)
    x = token_payload(case.problem, group.rank, count, TIMED_PAYLOAD, group.device)
    return Inputs(x, ids, weights)


def gather(value: Any, group: Group) -> list[Any]:
    import torch.distributed as dist

    values: list[Any] = [None] * group.world
    dist.all_gather_object(values, value, group=group.host_pg)
    return values


def measure_case(
    case: Case, engine: Engine, group: Group, knobs: Knobs, say_phase: SayPhase
) -> tuple[dict[str, Any], Session]:
    """The result (status, reason, columns, samples), complete on rank 0, and the session, which is still open."""
    import torch.distributed as dist

    say_phase("bind")
    routing = make_routing(case.problem)
    if len(set(gather(routing.sha, group))) != 1:
        raise RuntimeError("the routing differs between ranks")
    inputs = make_inputs(case, routing, group)
    session = engine.bind(case.problem, inputs)
    timing.run_phases(session)  # what is compiled or allocated at first use belongs to set-up
    session.call()
    dist.barrier(group=group.host_pg)

    say_phase("check")
    checker = Checker(session, inputs, case.problem, routing, group)
    half = (knobs.check_repeats + 1) // 2
    wrong = checker.before(half) if case.checked else ""
    if wrong:
        return wrong_result(f"before timing: {wrong}"), session

    say_phase("time")
    plan = timing.Plan(knobs.warmup, knobs.iters)
    between = checker.between_series if case.checked else lambda: None
    samples = timing.METHODS[case.timing](session, lambda: dist.barrier(group=group.host_pg), plan, between)

    say_phase("recheck")
    wrong = checker.after(max(knobs.check_repeats - half, 1)) if case.checked else ""
    acc = checker.acc_loss_pct()
    everyone = gather(samples, group)
    if wrong:
        return wrong_result(f"after timing: {wrong}"), session
    times = time_columns(case, everyone)
    columns = {
        **times,
        **byte_and_rate_columns(case, session, routing, times),
        "acc_loss_pct": acc,
        "check": "ok" if case.checked else "skipped",
        "quant_included": session.quant_included,
        "staging_included": session.staging_included,
        "transport": session.transport(),
        "timer": "monotonic",
        "versions": versions_text(session),
        "tainted": False,
    }
    return {"status": "ok", "reason": "", "columns": columns, "samples": raw_samples(everyone)}, session


def wrong_result(reason: str) -> dict[str, Any]:
    """A wrong result keeps no figure: it must not be read as a fast one."""
    return {"status": "wrong", "reason": reason, "columns": {"check": "wrong"}, "samples": {}}


def _by_iteration(series: list[list[float]]) -> list[tuple[float, ...]]:
    """From one list a rank to one tuple an iteration."""
    return list(zip(*series, strict=True))


def time_columns(case: Case, everyone: list[timing.Samples]) -> dict[str, Any]:
    """Latency, phases, gap, skew and host time of one case; `everyone` holds each rank's samples."""
    total = _by_iteration([samples.total for samples in everyone])
    pipelined = case.timing == "e2e_pipelined"
    latency = stats.latency_columns(stats.median_over_ranks(total) if pipelined else stats.max_over_ranks(total))
    columns: dict[str, Any] = dict(latency)
    for name in everyone[0].phases:
        series = _by_iteration([samples.phases[name] for samples in everyone])
        # Back to back, a rank's phase contains its wait for the others: the floor is the rank that waited least.
        reduced = [min(ranks) for ranks in series] if pipelined else stats.max_over_ranks(series)
        columns[f"{name}_us"] = median(reduced)
    spans = _by_iteration([samples.phase_total for samples in everyone])
    if len(everyone[0].phases) > 1:
        columns["gap_us"] = stats.gap_us(_by_iteration([samples.gaps for samples in everyone]), spans)
    arrivals = _by_iteration([samples.arrivals for samples in everyone])
    if arrivals:
        columns["skew_us"] = stats.skew_us(arrivals)
        columns["slowest_rank"] = stats.slowest_rank(arrivals)
    columns["host_us"] = median(stats.max_over_ranks(_by_iteration([samples.host for samples in everyone])))
    p50_s = columns["lat_us_p50"] / 1e6
    columns["tokens_per_s"] = case.problem.world * case.problem.tokens / p50_s if case.problem.tokens else None
    return columns


def byte_and_rate_columns(case: Case, session: Session, routing: Routing, times: dict[str, Any]) -> dict[str, Any]:
    """Bytes and GB/s of each leg from the counted routing, and TFLOP/s of a MoE."""
    copies = traffic.count_copies(routing.topk_idx, case.problem)
    formats = (session.dispatch_format, session.combine_format)
    legs = (times.get("dispatch_us"), times.get("combine_us"))
    columns: dict[str, Any] = {
        "routing_sha": routing.sha,
        "load_max_over_mean": routing.load_max_over_mean,
        **traffic.byte_columns(copies, case.problem, *formats),
        **traffic.bandwidth_columns(copies, case.problem, *formats, *legs),
    }
    if session.kind == "moe":
        routed = int(copies.selection.sum()) / case.problem.world
        flops = MOE_FLOPS_PER_WEIGHT * routed * 3 * case.problem.inter * case.problem.hidden
        columns["tflops"] = flops / times["lat_us_p50"] / 1e6 if flops else None
    return columns


def versions_text(session: Session) -> str:
    """Versions of what is loaded in this process."""
    import numpy
    import torch

    loaded = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
    return "; ".join(f"{name} {version}" for name, version in {**loaded, **session.versions()}.items())


def raw_samples(everyone: list[timing.Samples]) -> dict[str, Any]:
    """What JSONL keeps: series by rank, and the drift of each pipelined chain."""
    raw: dict[str, Any] = {
        "total_us": [samples.total for samples in everyone],
        "phases_us": {name: [samples.phases[name] for samples in everyone] for name in everyone[0].phases},
        "gaps_us": [samples.gaps for samples in everyone],
        "arrivals_us": [samples.arrivals for samples in everyone],
    }
    chains = everyone[0].chains
    if chains > 1:
        series = stats.median_over_ranks(_by_iteration([samples.total for samples in everyone]))
        length = len(series) // chains
        starts = range(0, chains * length, length)
        raw["drift_us"] = [stats.drift_us(series[start : start + length]) for start in starts]
    return raw
