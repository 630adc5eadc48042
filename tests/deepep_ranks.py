"""Every variant of the DeepEP adapter on two ranks over the fake library: what each rank finds, saved for the tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.backends.deepep import DeepEPBackend, DeepEPSession
from lib.check import Checker
from lib.contract import Group
from lib.knobs import MachineFacts, parse_knobs
from lib.problem import Inputs, Problem, token_payload
from lib.routing import make_routing
from lib.timing import run_phases
from tests import fake_deep_ep

CPU = torch.device("cpu")
KNOBS = parse_knobs(
    {"ALGO": "ht ll", "DISPATCH_DTYPE": "bf16 fp8", "NUM_SMS": "24"}, MachineFacts(gpu_count=8, sm=(9, 0))
)
BACKEND = DeepEPBackend()
PAIR = Problem(world=2, nodes=1, tokens=6, num_experts=8, topk=3, hidden=2048, inter=128, seed=0, routing="uniform")
VARIANTS = {f"{variant.name} {variant.dispatch_dtype}": variant for variant in BACKEND.variants(KNOBS)}
SHAPES: dict[str, dict[str, Any]] = {
    "masks and an empty rank": {"routing": "uniform,mask=0.4,empty=1"},
    "zipf": {"routing": "zipf:1.2"},
    "all to one rank": {"routing": "onehot"},
    "odd tokens, the first rank empty": {"routing": "zipf:1.2,mask=0.2,empty=0", "tokens": 5},
    "all masked": {"routing": "uniform,mask=1"},
    "no tokens": {"tokens": 0},
}


def faults_of(name: str) -> tuple[str, ...]:
    """Weights are the library's in ll alone."""
    return fake_deep_ep.FAULTS if VARIANTS[name].algo == "ll" else fake_deep_ep.FAULTS[:2]


def inputs_of(problem: Problem, rank: int) -> tuple[Any, Inputs]:
    routing = make_routing(problem)
    count = routing.tokens_of(rank)
    ids, weights = (torch.from_numpy(a[rank, :count].copy()) for a in (routing.topk_idx, routing.topk_weights))
    return routing, Inputs(token_payload(problem, rank, count, 0, CPU), ids, weights)


def checked(engine: Any, group: Group, problem: Problem, fault: str = "", stale: str = "") -> str:
    """What lib/measure.py does around the timing: check, replay what may be captured, check again."""
    routing, inputs = inputs_of(problem, group.rank)
    session = engine.bind(problem, inputs)
    run_phases(session)
    session.call()
    fake_deep_ep.Buffer.fault = fault
    if stale:
        setattr(session, stale, lambda: None)
    checker = Checker(session, inputs, problem, routing, group)
    found = checker.before(1)
    if not found:
        session.call()
        checker.between_series(None if session.capturable else session.call)
        run_phases(session)
        found = checker.after(1)
    fake_deep_ep.Buffer.fault = ""
    session.close()
    return found


def described(session: DeepEPSession) -> dict[str, Any]:
    return {
        "phases": [(phase.name, phase.timed, phase.blocks_host) for phase in session.phases],
        "capturable": session.capturable,
        "deterministic": session.deterministic,
        "quant_included": session.quant_included,
        "staging_included": session.staging_included,
        "formats": (session.dispatch_format, session.combine_format),
        "transport": session.transport(),
    }


def calls_of_one_call(session: DeepEPSession) -> list[tuple[str, dict[str, Any]]]:
    fake_deep_ep.Buffer.calls.clear()
    session.call()
    return list(fake_deep_ep.Buffer.calls)


def slots_and_limits(engine: Any, group: Group) -> dict[str, Any]:
    """The fake's own rules, on a Buffer that an ll engine made."""
    _, inputs = inputs_of(PAIR, group.rank)
    ask = (inputs.x, inputs.topk_idx, 6, PAIR.num_experts, None, None, False)
    held = [engine.buffer.low_latency_dispatch(*ask) for _ in range(2)]
    found: dict[str, Any] = {"orders": [result[2][0].tolist() for result in held]}
    found["ranges"] = [result[2][1].tolist() for result in held]
    refusals = {"a third result": lambda: engine.buffer.low_latency_dispatch(*ask)}
    refusals["an early end"] = dist.destroy_process_group
    return found | {name: refusal(call) for name, call in refusals.items()}


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except AssertionError as refused:
        return str(refused)
    return "nothing was said against it"


def two_rank_findings(group: Group) -> dict[str, Any]:
    found: dict[str, Any] = {"wrong": {}, "teeth": {}, "described": {}, "calls": {}}
    for name, variant in VARIANTS.items():
        fake_deep_ep.Buffer.calls.clear()
        engine = BACKEND.open(group, variant, PAIR, KNOBS)
        found["calls"][f"{name} open"] = list(fake_deep_ep.Buffer.calls)
        for shape, changes in SHAPES.items():
            found["wrong"][f"{name}, {shape}"] = checked(engine, group, replace(PAIR, **changes))
        for fault in faults_of(name):
            found["teeth"][f"{name}, {fault}"] = checked(engine, group, PAIR, fault)
        session = engine.bind(PAIR, inputs_of(PAIR, group.rank)[1])
        run_phases(session)
        found["described"][name] = described(session)
        found["calls"][name] = calls_of_one_call(session)
        session.close()
        if name == "deepep_ll fp8":
            found["teeth"]["stale staging"] = checked(engine, group, PAIR, stale="_dequantize")
            found["rules"] = slots_and_limits(engine, group)
        engine.close()
    return found


def rank_main(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    with fake_deep_ep.installed():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        group = Group(rank, 2, rank, 1, CPU, pg=dist.group.WORLD, host_pg=dist.group.WORLD)
        torch.save(two_rank_findings(group), Path(folder) / f"rank{rank}.pt")
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort an interpreter that is ending
