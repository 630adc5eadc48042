"""The symm adapter on two ranks: its own kernels under Triton's interpreter, in memory that both map on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from bench.backends import symm_memory
from bench.backends.symm import SymmBackend, SymmEngine
from bench.backends.symm_launch import Launcher
from bench.backends.symm_ref import SymmMoeBackend
from lib.contract import Backend, Group, Variant
from lib.knobs import MachineFacts, parse_knobs
from lib.problem import Problem
from tests.library_ranks import Suite, run_rank

KNOBS = parse_knobs(
    {"ALGO": "ht ll", "DISPATCH_DTYPE": "bf16 fp8", "NUM_SMS": "2"}, MachineFacts(gpu_count=8, sm=(9, 0))
)
PAIR = Problem(world=2, nodes=1, tokens=3, num_experts=8, topk=3, hidden=256, inter=64, seed=0, routing="uniform")
MANY = {"many rows a tile": {"tokens": 20}}  # more than an item a program, and tiles of several rows
FAULTS = ("rows stay at home", "a flag too early", "no source is told")
FIELDS = [field.name for field in symm_memory.fields(PAIR, 1, True, 1)]
LATER = 1 << 30  # than any call


class Log:
    """What library_ranks asks of a fake library: there is none here, so the fault is in the launches."""

    calls: list[str] = []  # noqa: RUF012
    fault = ""
    folder = ""
    arenas = 0


def shared_bytes(group: Group, size: int) -> tuple[torch.Tensor, list[int], Any]:
    """Every rank's arena as a file that all ranks map."""
    Log.arenas += 1
    names = [f"{Log.folder}/arena{Log.arenas}_{rank}" for rank in range(group.world)]
    dist.barrier(group=group.host_pg)
    parts = [torch.from_file(name, shared=True, size=size, dtype=torch.uint8) for name in names]
    return parts[group.rank], [part.data_ptr() for part in parts], parts


def with_faults(name: str) -> Any:
    """Launcher.dispatch or .combine, noted, and broken as Log.fault says."""
    honest = getattr(Launcher, name)

    def launch(self: Launcher, *arguments: Any) -> None:
        Log.calls.append(name)
        arena, rank, meet = self.session.arena, self.rank, partial(dist.barrier, group=self.session.group.host_pg)
        table = arena.table.clone()
        lost = {"rows stay at home": FIELDS.index("rows" if name == "dispatch" else "returned"),
                "no source is told": FIELDS.index("source")}  # fmt: skip
        if Log.fault in lost:
            arena.table[lost[Log.fault]] = arena.table[lost[Log.fault], rank]
        if early := Log.fault == "a flag too early" and name == "combine":
            arena.views["arrived"].fill_(LATER)  # so rank 0 waits for nothing, and it is through before rank 1 begins
            if rank > 0:
                meet()
        honest(self, *arguments)
        arena.table.copy_(table)
        if early:
            if rank == 0:
                meet()
            meet()
            arena.views["arrived"].fill_(0)

    return launch


@contextmanager
def installed() -> Iterator[None]:
    symm_memory.allocate = shared_bytes  # type: ignore[assignment]
    for name in ("plan", "dispatch", "combine"):
        setattr(Launcher, name, with_faults(name))
    yield


def faults_of(variant: Variant) -> tuple[str, ...]:
    return {"symm_ht": FAULTS, "symm_ll": FAULTS[:1]}.get(variant.name, ())


def shapes_of(variant: Variant) -> dict[str, dict[str, Any]]:
    return MANY if variant.name in ("symm_ht", "symm_ll") else {}


def steps_of(variant: Variant) -> tuple[str, ...]:
    return {"symm_ht+weighted": ("_dispatch", "_combine"), "symm": ("_identity",)}.get(variant.name, ())


class Everything(SymmBackend):
    """Both sections' variants in bf16. fp8 differs in its format alone, which the interpreter of Triton 3.9 rounds
    wrongly (0.99 becomes 0.5): tests/symm_compiled.py runs it as it is compiled."""

    def variants(self, knobs: Any) -> list[Variant]:
        every = super().variants(knobs) + SymmMoeBackend().variants(knobs)
        return [variant for variant in every if variant.dispatch_dtype == "bf16"]

    def open(self, group: Group, variant: Variant, capacity: Problem, knobs: Any) -> SymmEngine:
        made: Backend = SymmMoeBackend() if variant.name == "symm" else SymmBackend()
        return made.open(group, variant, capacity.at(20), knobs)  # type: ignore[return-value]


SUITE = Suite(
    Everything(),
    KNOBS,
    PAIR,
    Log,
    installed,
    faults_of,
    alive=lambda: 0,
    shapes_of=shapes_of,
    steps_of=steps_of,
)


def more(name: str, session: Any, group: Group) -> dict[str, Any]:
    """A second call, and a second combine of the same rows, give the same bits; where the rows lie."""
    first = session.output().clone()
    session.call()
    again = torch.equal(first, session.output())
    session._combine()
    session._combine()
    starts, counts = session.arrivals.tolist()
    same = again and torch.equal(first, session.output())
    return {"same": same, "starts": starts, "counts": counts, "waits": host_waits(session)}


def host_waits(session: Any) -> list[str]:
    """What the staged steps ask of the device: none of it can be in a CUDA graph."""
    asked: list[str] = []

    def noting(name: str) -> Any:
        honest = getattr(torch.Tensor, name)

        def ask(tensor: torch.Tensor, *arguments: Any, **more: Any) -> Any:
            asked.append(name)
            return honest(tensor, *arguments, **more)

        return patch.object(torch.Tensor, name, ask)

    with ExitStack() as stack:
        for name in ("tolist", "item", "nonzero", "__bool__", "cpu"):
            stack.enter_context(noting(name))
        for phase in session.phases:
            if phase.name not in ("dispatch", "combine"):  # launches, in which Triton's interpreter asks for itself
                phase.fn()
    return asked


def rank_main(rank: int, world: int, folder: str) -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
    Log.folder = folder
    run_rank(SUITE, rank, world, folder, more)
