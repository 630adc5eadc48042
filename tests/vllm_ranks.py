"""Every variant of the vLLM adapters on two ranks over the fake library: what each rank finds, saved for the tests."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bench.backends import vllm_split
from bench.backends.vllm_mega import MegaBackend
from bench.backends.vllm_split import SplitBackend
from lib.check import Checker
from lib.contract import Backend, Group, Session, Variant
from lib.knobs import Knobs, MachineFacts, parse_knobs
from lib.problem import Problem
from lib.timing import run_phases
from tests import fake_deep_ep, fake_vllm
from tests.deepep_ranks import inputs_of

CPU = torch.device("cpu")
FACTS = MachineFacts(gpu_count=8, sm=(9, 0))
PAIR = Problem(world=2, nodes=1, tokens=6, num_experts=8, topk=3, hidden=2048, inter=256, seed=0, routing="uniform")
SHAPES: dict[str, dict[str, Any]] = {
    "masks and an empty rank": {"routing": "uniform,mask=0.4,empty=1", "tokens": 5},
    "all to one rank": {"routing": "onehot"},
    "all masked": {"routing": "uniform,mask=1", "tokens": 3},
    "no tokens": {"tokens": 0},
}
MAIN = "0.25.1"


def knobs(**env: str) -> Knobs:
    return parse_knobs({"ALGO": "ht ll", "EXPERTS_LIST": "deepgemm triton trtllm", **env}, FACTS)


def variants() -> dict[str, tuple[Backend, Variant]]:
    """What can run, by name."""
    asked = knobs()
    backends: list[Backend] = [*(SplitBackend(name) for name in asked.experts_list), MegaBackend()]
    every = {variant.name: (backend, variant) for backend in backends for variant in backend.variants(asked)}
    return {name: pair for name, pair in every.items() if not pair[1].option("unsupported")}


VARIANTS = variants()


def checked(engine: Any, group: Group, problem: Problem, state: Any, fault: str = "") -> str:
    """What lib/measure.py does around the timing."""
    routing, inputs = inputs_of(problem, group.rank)
    session = engine.bind(problem, inputs)
    run_phases(session)
    session.call()
    state.fault = fault
    checker = Checker(session, inputs, problem, routing, group)
    found = checker.before(2)
    if not found:
        session.call()
        checker.between_series(None)
        run_phases(session)
        found = checker.after(1)
    state.fault = ""
    session.close()
    return found


def described(session: Session) -> dict[str, Any]:
    return {
        "phases": [(phase.name, phase.timed, phase.blocks_host) for phase in session.phases],
        "capturable": session.capturable,
        "quant_included": session.quant_included,
        "formats": (session.dispatch_format, session.combine_format, session.number_format),
        "versions": session.versions(),
        "bare": session.bare_kernel() is not None,
    }


def steps(state: Any, buffer_calls: list[Any], run: Any) -> list[str]:
    """Names of the library's calls and of the Buffer's in what `run` does."""
    state.calls.clear()
    buffer_calls.clear()
    run()
    return [*state.calls, *(name for name, _ in buffer_calls)]


def of_variant(group: Group, name: str, state: Any, asked: Knobs, shapes: dict[str, Any]) -> dict[str, Any]:
    backend, variant = VARIANTS[name]
    buffer_calls = fake_deep_ep.Buffer.calls
    buffer_calls.clear()
    engine: Any = backend.open(group, variant, PAIR, asked)
    found: dict[str, Any] = {"open": list(buffer_calls)}
    found["wrong"] = {shape: checked(engine, group, replace(PAIR, **more), state) for shape, more in shapes.items()}
    found["wrong"]["uniform"] = checked(engine, group, PAIR, state)
    session = engine.bind(PAIR, inputs_of(PAIR, group.rank)[1])
    run_phases(session)
    found["described"] = described(session)
    found["call"] = steps(state, buffer_calls, session.call)
    found["phases"] = {phase.name: steps(state, buffer_calls, phase.fn) for phase in session.phases}
    found["expected_m"] = list(state.expected_m)
    state.expected_m.clear()
    session.close()
    found["context after"] = state.context is not None
    found["teeth"] = {}
    if isinstance(backend, SplitBackend) and shapes:
        found["teeth"] = {fault: checked(engine, group, PAIR, state, fault) for fault in fake_vllm.FAULTS}
        buffer_faults = fake_deep_ep.FAULTS[:1]
        for fault in buffer_faults:
            fake_deep_ep.Buffer.fault = ""
            found["teeth"][fault] = with_buffer_fault(engine, group, state, fault)
    engine.close()
    found["workspace after"] = state.workspace
    return found


def with_buffer_fault(engine: Any, group: Group, state: Any, fault: str) -> str:
    routing, inputs = inputs_of(PAIR, group.rank)
    session = engine.bind(PAIR, inputs)
    fake_deep_ep.Buffer.fault = fault
    found = Checker(session, inputs, PAIR, routing, group).before(1)
    fake_deep_ep.Buffer.fault = ""
    session.close()
    return found


def findings(group: Group) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for version in fake_vllm.VERSIONS:
        main = version == MAIN
        for name in VARIANTS:
            with fake_vllm.installed(version) as state:
                shapes = SHAPES if main else {}
                found[f"{version} {name}"] = of_variant(group, name, state, knobs(), shapes)
    with fake_vllm.installed(MAIN) as state:
        included = of_variant(group, "deepep_ht+triton", state, knobs(EXCLUDE_QUANT="0"), {"no tokens": {"tokens": 0}})
        found["quantisation included"] = included
    asks = mock.patch.object(vllm_split, "wants_power_of_two_scales", lambda experts, device: experts == "deepgemm")
    with fake_vllm.installed(MAIN) as state, asks:
        found["power of two"] = of_variant(group, "deepep_ht+deepgemm", state, knobs(), {})
    return found


def rank_main(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    with fake_deep_ep.installed():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        group = Group(rank, 2, rank, 1, CPU, pg=dist.group.WORLD, host_pg=dist.group.WORLD)
        torch.save(findings(group), Path(folder) / f"rank{rank}.pt")
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort an interpreter that is ending
