"""Fakes measured on GPUs, one result a line from rank 0; started by torchrun from tests/test_gpu.py.

    python -m torch.distributed.run --standalone --nproc-per-node=N -m tests.gpu_ranks

On one rank a capturable session of this file's own is added: the whole exchange is a copy, so it can be captured.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from lib.contract import Backend, Engine, Group, Phase, Received, Session, Support, Variant
from lib.device import cuda_group
from lib.knobs import Knobs, parse_knobs
from lib.machine import Machine, detect_facts, detect_machine
from lib.measure import Bench, measure_case
from lib.plan import Section, make_plan
from lib.problem import Inputs, Problem
from lib.tracing import add_trace
from tests.fakes import FAKES, TEETH, FakeBackend

TIMEOUT = datetime.timedelta(seconds=120)


class Local(Session):
    """World of one: dispatch is a copy of all rows, combine weighs them. Capturable, and honest."""

    capturable = ""
    deterministic = True
    kernels = {"call": [""]}  # noqa: RUF012 - a constant of the class

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.rows, self.out = torch.zeros_like(inputs.x), torch.zeros_like(inputs.x)
        self.phases = [Phase("dispatch", self._dispatch), Phase("combine", self._combine)]

    def _dispatch(self) -> None:
        self.mark_arrival()
        self.rows.copy_(self.inputs.x)

    def _combine(self) -> None:
        weights = self.inputs.topk_weights.sum(1, keepdim=True)
        self.out.copy_((self.rows.float() * weights).to(torch.bfloat16))

    def call(self) -> None:
        self._dispatch()
        self._combine()

    def output(self) -> torch.Tensor:
        return self.out

    def poison(self) -> None:
        self.rows.fill_(float("nan"))
        self.out.fill_(float("nan"))

    def received(self) -> Received:
        tokens = torch.arange(len(self.rows), device=self.rows.device)
        return Received(
            self.rows, torch.zeros_like(tokens), tokens, self.inputs.topk_idx, self.inputs.topk_weights, format="bf16"
        )


class EmptyGraph(Local):
    """Nothing is captured: the replays are as fast as can be."""

    def call(self) -> None:
        if not torch.cuda.is_current_stream_capturing():
            super().call()


class GraphOfCombine(Local):
    """The graph leaves the dispatch out, and combines what poison does not reach."""

    def _dispatch(self) -> None:
        if not torch.cuda.is_current_stream_capturing():
            super()._dispatch()

    def poison(self) -> None:
        self.out.fill_(float("nan"))


class Uncapturable(Local):
    """Declares itself capturable and waits for the device."""

    def call(self) -> None:
        torch.cuda.synchronize()
        super().call()


LOCAL = {"local": Local, "empty_graph": EmptyGraph, "graph_of_combine": GraphOfCombine, "uncapturable": Uncapturable}


@dataclass
class LocalEngine(Engine):
    kind: type[Local]

    def bind(self, problem: Problem, inputs: Inputs) -> Local:
        return self.kind(inputs)


class LocalBackend(Backend):
    family = "local"

    def __init__(self, name: str) -> None:
        self.name = name

    def variants(self, knobs: Knobs) -> list[Variant]:
        return [Variant(self.name, "local", dispatch_dtype="bf16", combine_dtype="bf16")]

    def supports(self, variant: Variant, machine: Machine, problem: Problem, knobs: Knobs) -> Support:
        return Support()

    def memory_bytes(self, variant: Variant, problem: Problem) -> int:
        return 0

    def open(self, group: Group, variant: Variant, capacity: Problem, knobs: Knobs) -> LocalEngine:
        return LocalEngine(LOCAL[self.name])


def backends(world: int) -> dict[str, list[Backend]]:
    """By the kind of output."""
    if world == 1:
        return {"combine": [LocalBackend(name) for name in LOCAL]}
    names = ["honest", *TEETH]
    return {kind: [FakeBackend(FAKES[name], kind == "moe") for name in names] for kind in ("combine", "moe")}


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = cuda_group(rank, world, int(os.environ["LOCAL_RANK"]), 1, TIMEOUT)
    knobs = parse_knobs(os.environ, detect_facts({}))
    bench = Bench.make(group, knobs, peaks=None)
    machine = detect_machine(knobs, os.environ)
    for kind, found in backends(world).items():
        section = Section(kind, __name__, lambda knobs, found=found: found)  # type: ignore[misc]
        for case in make_plan(section, knobs, machine, sweep=False):
            engine = section.find(case.backend, knobs).open(group, case.variant, case.problem, knobs)
            words = {"kind": kind, "fake": case.backend, "asked": case.timing}
            try:
                result, session = measure_case(case, engine, bench, lambda phase: None, eager="")
                if result["status"] == "ok":
                    add_trace(result, case, session, bench)
                columns = result["columns"]
                words |= {"status": result["status"], "reason": result["reason"], "timing": columns.get("timing", "")}
                words |= {"graph": columns.get("graph", ""), "kernel_us": str(columns.get("kernel_us", ""))}
                traces = result["samples"].get("trace", {}).get("files", [])
                words["traces"] = " ".join(str(Path(knobs.out_dir) / name) for name in traces)
            except Exception as error:  # noqa: BLE001 - what a section would report
                words |= {"status": type(error).__name__, "reason": str(error), "timing": "", "graph": ""}
            if rank == 0:
                sys.stdout.write(json.dumps(words) + "\n")
                sys.stdout.flush()
    dist.barrier(group=group.host_pg)


if __name__ == "__main__":
    main()
    os._exit(0)
