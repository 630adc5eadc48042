"""Every variant of the MORI adapter on two ranks over the fake library."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.backends.mori import MoriBackend
from lib.contract import Group, LibraryProfiler, Variant
from lib.knobs import MachineFacts, parse_knobs
from lib.problem import Problem
from tests import fake_mori
from tests.library_ranks import Suite, refusal, run_rank

KNOBS = parse_knobs({"ALGO": "ht ll", "DISPATCH_DTYPE": "bf16 fp8"}, MachineFacts(gpu_count=8, sm=(9, 0)))
PAIR = Problem(world=2, nodes=1, tokens=6, num_experts=8, topk=3, hidden=256, inter=128, seed=0, routing="uniform")
TWO_NODES = {"two nodes": {"nodes": 2, "routing": "zipf:1.2"}}
BACKEND = MoriBackend()


def faults_of(variant: Variant) -> tuple[str, ...]:
    """All kernels have one session; its formats differ."""
    return fake_mori.FAULTS if variant.name == "mori+intranode" else ()


def steps_of(variant: Variant) -> tuple[str, ...]:
    """A dispatch without its combine is no state that the library has."""
    return ("_dispatch", "_stage") if variant.name == "mori+intranode" else ()


def shapes_of(variant: Variant) -> dict[str, dict[str, Any]]:
    return {} if variant.name == "mori+intranode" else TWO_NODES


SUITE = Suite(
    BACKEND,
    KNOBS,
    PAIR,
    fake_mori.EpDispatchCombineOp,
    fake_mori.installed,
    faults_of,
    fake_mori.alive,
    shapes_of=shapes_of,
    steps_of=steps_of,
)


def more(name: str, session: Any, group: Group) -> dict[str, Any]:
    """The fake's own rules, on a session's op; only what no rank has to meet the other for."""
    found: dict[str, Any] = {"profiler": session.library_profiler(), "count after combine": int(session.received_count)}
    found["rows"], found["every node"] = (session.count, len(session.rows)), session.every_node
    if name == "mori+intranode bf16":
        found |= traced(session)
        short = session.ids[:-1]
        found["another routing"] = refusal(lambda: session.op.combine(session.staged, None, short))
        session._dispatch()
        session._dispatch()
        found["dispatched twice"] = refusal(lambda: session.op.combine(session.staged, None, session.ids))
        found["an early end of the heap"] = refusal(sys.modules["mori.shmem"].shmem_finalize)
    elif name == "mori+async_ll bf16":
        session.op.dispatch(*session.payload[:1], session.inputs.topk_weights, None, session.ids)
        found["too early"] = refusal(lambda: session.op.combine(session.staged, None, session.ids))
        session.op.dispatch_recv()
    return found


def traced(session: Any) -> dict[str, Any]:
    """With a build that has the profiler: what was recorded before is forgotten, and the file has the right names."""
    cpp: Any = sys.modules["mori.cpp"]
    cpp.get_debug_time_buf, cpp.IntranodeSlots = object(), "slots of intranode"
    profiler = session.library_profiler()
    assert isinstance(profiler, LibraryProfiler)
    session.op._debug[:] = 7
    profiler.start()
    session.op._debug[0] = 1
    with tempfile.TemporaryDirectory() as folder:
        profiler.write(Path(folder) / "trace.json")
        written = (Path(folder) / "trace.json").read_text()
    del cpp.get_debug_time_buf
    return {"written": written}


def rank_main(rank: int, folder: str) -> None:
    largest = replace(PAIR, nodes=2)
    sizes = [BACKEND.env(v, largest, KNOBS)["MORI_SHMEM_HEAP_SIZE"] for v in SUITE.variants.values()]
    os.environ["MORI_SHMEM_HEAP_SIZE"] = max(sizes)
    torch.manual_seed(rank)
    run_rank(SUITE, rank, 2, folder, more)
