"""Every variant of the DeepEP 2, NCCL-EP and FlashInfer adapters on two ranks over fakes: what each rank finds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.backends import deepep_v2, nccl_ep
from bench.backends.deepep_v2 import DeepEPV2Backend
from bench.backends.flashinfer_a2a import FlashInferBackend
from bench.backends.nccl_ep import NcclEpBackend
from lib.check import Checker
from lib.contract import Backend, Group, Session, Variant
from lib.knobs import MachineFacts, parse_knobs
from lib.problem import Inputs, Problem, token_payload
from lib.routing import make_routing
from lib.timing import run_phases
from tests import fake_deep_ep2, fake_exchange, fake_flashinfer_alltoall, fake_nccl_ep

CPU = torch.device("cpu")
KNOBS = parse_knobs(
    {"ALGO": "ht ll", "DISPATCH_DTYPE": "bf16 fp8", "NUM_SMS": "24"}, MachineFacts(gpu_count=8, sm=(9, 0))
)
PAIR = Problem(world=2, nodes=1, tokens=6, num_experts=8, topk=4, hidden=512, inter=128, seed=0, routing="uniform")
SHAPES: dict[str, dict[str, Any]] = {
    "masks and an empty rank": {"routing": "uniform,mask=0.4,empty=1"},
    "all to one rank": {"routing": "onehot"},
    "odd tokens, the first rank empty": {"routing": "zipf:1.2,mask=0.2,empty=0", "tokens": 5},
    "all masked": {"routing": "uniform,mask=1"},
    "no tokens": {"tokens": 0},
}
FAKES: list[tuple[Backend, Any, type]] = [
    (DeepEPV2Backend(), fake_deep_ep2, fake_deep_ep2.ElasticBuffer),
    (NcclEpBackend(), fake_nccl_ep, fake_nccl_ep.Handle),
    (FlashInferBackend(), fake_flashinfer_alltoall, fake_flashinfer_alltoall.MoeAlltoAll),
]


def label(variant: Variant) -> str:
    return f"{variant.name} {variant.dispatch_dtype}"


def cases() -> Iterator[tuple[str, Backend, Variant]]:
    for backend, _, _ in FAKES:
        for variant in backend.variants(KNOBS):
            yield label(variant), backend, variant


VARIANTS = {name: variant for name, _, variant in cases()}


def shapes_of(name: str) -> list[str]:
    """fp8 differs in its format alone, so it needs fewer."""
    return list(SHAPES) if name.endswith("bf16") else list(SHAPES)[::2]


def faults_of(name: str) -> tuple[str, ...]:
    return fake_exchange.FAULTS if name.endswith("bf16") else fake_exchange.FAULTS[:1]


def inputs_of(problem: Problem, rank: int) -> tuple[Any, Inputs]:
    routing = make_routing(problem)
    count = routing.tokens_of(rank)
    ids, weights = (torch.from_numpy(a[rank, :count].copy()) for a in (routing.topk_idx, routing.topk_weights))
    return routing, Inputs(token_payload(problem, rank, count, 0, CPU), ids, weights)


def checked(engine: Any, group: Group, problem: Problem, fault: str = "", stale: bool = False) -> str:
    """What lib/measure.py does around the timing: check, replay what may be captured, check again."""
    routing, inputs = inputs_of(problem, group.rank)
    session = engine.bind(problem, inputs)
    run_phases(session)
    session.call()
    fake_exchange.fault = fault
    if stale:
        session._identity = lambda: None  # the phases still stage, so call() combines what an earlier dispatch brought
    checker = Checker(session, inputs, problem, routing, group)
    found = checker.before(1)
    if not found:
        session.call()
        checker.between_series(None if session.capturable else session.call)
        run_phases(session)
        found = checker.after(1)
    fake_exchange.fault = ""
    session.close()
    return found


def described(session: Session) -> dict[str, Any]:
    return {
        "phases": [(phase.name, phase.timed, phase.blocks_host) for phase in session.phases],
        "capturable": session.capturable,
        "quant_included": session.quant_included,
        "staging_included": session.staging_included,
        "formats": (session.dispatch_format, session.combine_format),
        "transport": session.transport(),
        "versions": session.versions(),
    }


def findings(group: Group) -> dict[str, Any]:
    found: dict[str, Any] = {"wrong": {}, "teeth": {}, "described": {}, "calls": {}}
    for backend, fake, noted in FAKES:
        with fake.installed():
            for variant in backend.variants(KNOBS):
                try_variant(group, backend, variant, noted.calls, found)  # type: ignore[attr-defined]
    return found


def try_variant(group: Group, backend: Backend, variant: Variant, calls: list[Any], found: dict[str, Any]) -> None:
    name = label(variant)
    os.environ.update(backend.env(variant, PAIR, KNOBS))
    calls.clear()
    engine = backend.open(group, variant, PAIR, KNOBS)
    found["calls"][f"{name} open"] = list(calls)
    for shape in shapes_of(name):
        found["wrong"][f"{name}, {shape}"] = checked(engine, group, replace(PAIR, **SHAPES[shape]))
    for fault in faults_of(name):
        found["teeth"][f"{name}, {fault}"] = checked(engine, group, PAIR, fault)
    session = engine.bind(PAIR, inputs_of(PAIR, group.rank)[1])
    run_phases(session)
    found["described"][name] = described(session)
    calls.clear()
    session.call()
    found["calls"][name] = list(calls)
    session.close()
    if session.staging_included:
        found["teeth"][f"{name}, stale staging"] = checked(engine, group, PAIR, stale=True)
    engine.close()


def rank_main(rank: int, folder: str, pipes: tuple[Any, Any]) -> None:
    fake_exchange.peer = pipes[rank]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    for adapter in (deepep_v2, nccl_ep):
        adapter.require_nccl = lambda who: "2.30.7"  # type: ignore[attr-defined]
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = Group(rank, 2, rank, 1, CPU, pg=dist.group.WORLD, host_pg=dist.group.WORLD)
    torch.save(findings(group), Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort an interpreter that is ending
