"""Every fake of TEETH, and the honest one, measured on one group of two ranks: one result a line from rank 0.

    python -m tests.teeth_ranks RANK RENDEZVOUS_FILE      (the knobs come from the environment)

The section runs each of these in a group of its own, at seconds each; what is under test here is the check alone.
"""

from __future__ import annotations

import datetime
import json
import os
import sys

import torch
import torch.distributed as dist

from lib.contract import Group
from lib.knobs import parse_knobs
from lib.machine import detect_facts, detect_machine
from lib.measure import Bench, measure_case
from lib.plan import Section, make_plan
from tests.fakes import FAKES, TEETH, FakeBackend

WORLD = 2
TIMEOUT = datetime.timedelta(seconds=60)
PIPELINED = ["honest", "skips_timed_calls", "skips_timed_phases"]  # in that timing too (a second each)
KINDS = {"combine": False, "moe": True}  # of the session's output -> with_experts


def main(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD, timeout=TIMEOUT)
    world = dist.group.WORLD
    group = Group(rank, WORLD, rank, 1, torch.device("cpu"), pg=world, host_pg=world)
    knobs = parse_knobs(os.environ, detect_facts(os.environ))
    bench = Bench.make(group, knobs, peaks=None)
    machine = detect_machine(knobs, os.environ)
    for kind, with_experts in KINDS.items():
        backends = [FakeBackend(FAKES[name], with_experts) for name in ["honest", *TEETH]]
        listed = lambda knobs, backends=backends: backends  # noqa: E731
        section = Section(kind, __name__, listed, identity_experts=not with_experts)
        for case in make_plan(section, knobs, machine, sweep=False):
            steady = case.timing == "e2e_pipelined"
            if steady and (case.backend not in PIPELINED or kind == "moe" or case.variant.dispatch_dtype == "fp8"):
                continue
            engine = section.find(case.backend, knobs).open(group, case.variant, case.problem, knobs)
            result, _ = measure_case(case, engine, bench, lambda phase: None, eager="")
            words = {"kind": kind, "fake": case.backend, "dtype": case.variant.dispatch_dtype, "timing": case.timing}
            if rank == 0:
                sys.stdout.write(json.dumps({**words, "status": result["status"], "reason": result["reason"]}) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
    os._exit(0)  # the rendezvous file's store may outlive its group
