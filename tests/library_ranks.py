"""Every variant of an adapter on a few ranks over its fake library: what each rank finds, saved for the tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lib.check import Checker
from lib.contract import Backend, Group, Session, Unsupported, Variant
from lib.knobs import Knobs
from lib.problem import Inputs, Problem, token_payload
from lib.routing import make_routing
from lib.timing import run_phases

CPU = torch.device("cpu")
SHAPES: dict[str, dict[str, Any]] = {
    "masks and an empty rank": {"routing": "uniform,mask=0.4,empty=1"},
    "odd tokens, masks": {"routing": "zipf:1.2,mask=0.3", "tokens": 5},
    "all to one rank": {"routing": "onehot"},
    "no tokens": {"tokens": 0},
}


@dataclass(frozen=True)
class Suite:
    """An adapter and its fake. `fake` has `calls` and `fault`; `alive` counts what should have been freed."""

    backend: Backend
    knobs: Knobs
    pair: Problem
    fake: Any
    installed: Callable[[], AbstractContextManager[Any]]
    faults_of: Callable[[Variant], tuple[str, ...]]
    alive: Callable[[], int]
    shapes_of: Callable[[Variant], dict[str, dict[str, Any]]] = lambda variant: {}  # beside SHAPES
    steps_of: Callable[[Variant], tuple[str, ...]] = lambda variant: ()  # of which a check has to miss each

    @property
    def variants(self) -> dict[str, Variant]:
        return {f"{variant.name} {variant.dispatch_dtype}": variant for variant in self.backend.variants(self.knobs)}


def inputs_of(problem: Problem, rank: int) -> tuple[Any, Inputs]:
    routing = make_routing(problem)
    count = routing.tokens_of(rank)
    ids, weights = (torch.from_numpy(a[rank, :count].copy()) for a in (routing.topk_idx, routing.topk_weights))
    return routing, Inputs(token_payload(problem, rank, count, 0, CPU), ids, weights)


def checked(suite: Suite, engine: Any, group: Group, problem: Problem, fault: str = "", without: str = "") -> str:
    """What lib/measure.py does around the timing: check, replay what may be captured, check again.

    `without` names a method of the session that does nothing from the check on.
    """
    routing, inputs = inputs_of(problem, group.rank)
    try:
        session = engine.bind(problem, inputs)
    except Unsupported as refused:
        return f"refused: {refused}"
    run_phases(session)
    session.call()
    suite.fake.fault = fault
    if without:
        setattr(session, without, lambda: None)
    checker = Checker(session, inputs, problem, routing, group)
    found = checker.before(1)
    if not found:
        session.call()
        checker.between_series(None if session.capturable else session.call)
        run_phases(session)
        found = checker.after(1)
    suite.fake.fault = ""
    session.close()
    return found


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except AssertionError as refused:
        return str(refused)
    return "nothing was said against it"


def described(session: Session) -> dict[str, Any]:
    return {
        "phases": [(phase.name, phase.timed, phase.blocks_host) for phase in session.phases],
        "capturable": session.capturable,
        "deterministic": session.deterministic,
        "quant_included": session.quant_included,
        "staging_included": session.staging_included,
        "formats": (session.dispatch_format, session.combine_format),
        "transport": session.transport(),
        "versions": session.versions(),
    }


def findings(suite: Suite, group: Group, more: Callable[[str, Any, Group], dict[str, Any]]) -> dict[str, Any]:
    """`more(name, session, group)` looks at a bound session of each variant that has made one call."""
    found: dict[str, Any] = {"wrong": {}, "teeth": {}, "described": {}, "calls": {}, "alive": {}, "more": {}}
    for name, variant in suite.variants.items():
        suite.fake.calls.clear()
        engine = suite.backend.open(group, variant, suite.pair, suite.knobs)
        for shape, changes in {**SHAPES, **suite.shapes_of(variant)}.items():
            found["wrong"][f"{name}, {shape}"] = checked(suite, engine, group, replace(suite.pair, **changes))
        for fault in suite.faults_of(variant):
            found["teeth"][f"{name}, {fault}"] = checked(suite, engine, group, suite.pair, fault)
        for step in suite.steps_of(variant):
            found["teeth"][f"{name}, no {step}"] = checked(suite, engine, group, suite.pair, without=step)
        suite.fake.calls.clear()
        session = engine.bind(suite.pair, inputs_of(suite.pair, group.rank)[1])
        found["calls"][f"{name} bind"] = list(suite.fake.calls)
        run_phases(session)
        found["described"][name] = described(session)
        suite.fake.calls.clear()
        session.call()
        found["calls"][name] = list(suite.fake.calls)
        found["more"][name] = more(name, session, group)
        session.close()
        found["alive"][name] = suite.alive()
        del session
        engine.close()
        del engine
        gc.collect()
    return found


def run_rank(
    suite: Suite, rank: int, world: int, folder: str, more: Callable[[str, Any, Group], dict[str, Any]]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    with suite.installed():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        group = Group(rank, world, rank, suite.pair.nodes, CPU, pg=dist.group.WORLD, host_pg=dist.group.WORLD)
        torch.save(findings(suite, group, more), Path(folder) / f"rank{rank}.pt")
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort an interpreter that is ending
