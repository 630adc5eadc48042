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
from tests.fake_vllm_experts import FAULTS

CPU = torch.device("cpu")
FACTS = MachineFacts(gpu_count=8, sm=(9, 0))
PAIR = Problem(world=2, nodes=1, tokens=6, num_experts=8, topk=3, hidden=512, inter=256, seed=0, routing="uniform")
LL_PAIR = replace(PAIR, hidden=2048, inter=128, num_experts=6)  # ll is compiled for hidden sizes from 2048 on
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
BROKEN = ("deepep_ht+deepgemm", "deepep_ll+deepgemm")  # whose faults must be seen, one of each mode
OTHER_VERSIONS = {version for version in fake_vllm.VERSIONS if version != MAIN}
IN_OTHER_VERSIONS = (*BROKEN, "vllm_deep_gemm_mega")


def pair_of(name: str) -> Problem:
    return LL_PAIR if VARIANTS[name][1].algo == "ll" else PAIR


def checked(engine: Any, group: Group, problem: Problem, state: Any, fault: str = "") -> str:
    """What lib/measure.py does around the timing."""
    routing, inputs = inputs_of(problem, group.rank)
    session = engine.bind(problem, inputs)
    run_phases(session)
    session.call()
    state.fault = fault
    checker = Checker(session, inputs, problem, routing, group)
    found = checker.before(1)
    if not found and not fault:
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
    problem, buffer_calls = pair_of(name), fake_deep_ep.Buffer.calls
    buffer_calls.clear()
    engine: Any = backend.open(group, variant, problem, asked)
    found: dict[str, Any] = {"open": list(buffer_calls)}
    every = {"uniform": {}} | shapes
    found["wrong"] = {shape: checked(engine, group, replace(problem, **more), state) for shape, more in every.items()}
    session = engine.bind(problem, inputs_of(problem, group.rank)[1])
    run_phases(session)
    found["described"] = described(session)
    state.expected_m.clear()
    found["call"] = steps(state, buffer_calls, session.call)
    found["phases"] = {phase.name: steps(state, buffer_calls, phase.fn) for phase in session.phases}
    found["expected_m"] = list(state.expected_m)
    session.close()
    found["context after"] = state.context is not None
    if shapes and name in BROKEN:
        found["teeth"] = {fault: checked(engine, group, problem, state, fault) for fault in FAULTS}
        fake_deep_ep.Buffer.fault = "corrupt_row"
        found["teeth"]["corrupt_row"] = checked(engine, group, problem, state, "in the Buffer")
        fake_deep_ep.Buffer.fault = ""
    engine.close()
    found["workspace after"] = state.workspace
    return found


def findings(group: Group) -> dict[str, Any]:
    found: dict[str, Any] = {}
    runs = [(MAIN, name, SHAPES) for name in VARIANTS]
    runs += [(version, name, {}) for version in sorted(OTHER_VERSIONS) for name in IN_OTHER_VERSIONS]
    for version, name, shapes in runs:
        with fake_vllm.installed(version) as state:
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
