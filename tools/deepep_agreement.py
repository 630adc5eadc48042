"""Our DeepEP sessions timed by the rules of DeepEP's own tests (v1.2.1), to be laid beside what those tests print.

    python -m torch.distributed.run --standalone --nproc-per-node=2 -m tools.deepep_agreement [--out agreement.csv]

Their rules: test_intranode.py takes 50 events pairs around one cached call after the other, the first dropped, and the
mean; test_low_latency.py profiles 30 pairs of dispatch and combine back to back, ranks aligned once before them, and
takes each kernel's mean duration. The combine's input is whatever was staged once, as there.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from bench.backends.deepep import DeepEPBackend
from lib.contract import Group, Session, Variant
from lib.device import cuda_group, device_barrier, make_tools
from lib.device_timing import between_us, event
from lib.kernels import profile_session
from lib.problem import TIMED_PAYLOAD, Inputs, Problem, token_payload
from lib.routing import make_routing
from lib.timing import run_phases

PAIRS, WARMUP, PROFILED = 50, 50, 30
RULES: dict[str, Callable[[list[float]], float]] = {"mean": fmean, "median": median, "min": min}  # theirs is the mean
FLUSH_BYTES = 256_000_000
DELAY_CYCLES = 20_000_000  # about 10 ms: longer than the enqueue of all pairs
TIMEOUT_S = 300
HT = Problem(2, 1, 4096, 256, 8, 7168, 2048, 0, "uniform")
LL = Problem(2, 1, 128, 288, 8, 7168, 2048, 0, "uniform,mask=0.01")  # their test masks 10 of 1024 entries


def bind(group: Group, problem: Problem, variant: Variant) -> Session:
    routing = make_routing(problem)
    ids = torch.from_numpy(routing.topk_idx[group.rank].copy()).to(group.device)
    weights = torch.from_numpy(routing.topk_weights[group.rank].copy()).to(group.device)
    x = token_payload(problem, group.rank, problem.tokens, TIMED_PAYLOAD, group.device)
    engine = DeepEPBackend().open(group, variant, problem, None)  # type: ignore[arg-type]  # it reads no knob
    session = engine.bind(problem, Inputs(x, ids, weights))
    run_phases(session)
    return session


def event_mean_us(call: Callable[[], None], device: torch.device) -> float:
    """test_intranode.py's `bench`."""
    cache = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    for _ in range(WARMUP):
        call()
    cache.zero_()
    pairs = [(event(), event()) for _ in range(PAIRS)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return fmean(between_us(start, end) for start, end in pairs[1:])


def kernel_means_us(pair: Callable[[], None], align: Callable[[], None]) -> dict[str, float]:
    """test_low_latency.py's `bench_kineto`: mean duration of each of the two kernels."""
    from torch.profiler import ProfilerActivity, profile

    pair()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        for _ in range(2):  # as theirs: a round that is thrown away, then the one that counts
            torch.cuda._sleep(DELAY_CYCLES)
            align()
            for _ in range(PROFILED):
                pair()
            torch.cuda.synchronize()
    durations: dict[str, list[float]] = {"dispatch": [], "combine": []}
    for entry in recorded.events():
        for name, found in durations.items():
            if f"::{name}<" in entry.name and entry.device_type == torch.autograd.DeviceType.CUDA:
                found.append(entry.time_range.elapsed_us())
    counted = {name: found[PROFILED:] for name, found in durations.items()}
    return {f"{name} {kind}": rule(found) for name, found in counted.items() for kind, rule in RULES.items()}


def phase(session: Session, name: str) -> Callable[[], None]:
    return next(found.fn for found in session.phases if found.name == name)


def measure(group: Group) -> list[tuple[str, str, float]]:
    align, _ = device_barrier(group)
    rows = []
    for dtype in ("bf16", "fp8"):
        variant = Variant("deepep_ht+cached", "deepep", "", "ht", dtype, "bf16", 24, handle="cached")
        session = bind(group, HT, variant)
        rows.append(
            (f"test_intranode dispatch {dtype}", "events", event_mean_us(phase(session, "dispatch"), group.device))
        )
        if dtype == "bf16":
            rows.append(("test_intranode combine", "events", event_mean_us(phase(session, "combine"), group.device)))
    session = bind(group, LL, Variant("deepep_ll", "deepep", "", "ll", "fp8", "bf16"))
    dispatch, combine = phase(session, "dispatch"), phase(session, "combine")

    def pair() -> None:
        dispatch()
        combine()

    rows.append(("test_low_latency dispatch + combine", "events", event_mean_us(pair, group.device)))
    for name, mean in kernel_means_us(pair, align).items():
        rows.append((f"test_low_latency {name}", "kernel", mean))
    for phase_name, mean in profile_session(session, make_tools(group, cold=False)).by_phase.items():
        rows.append((f"kernel_us pass, {phase_name}", "aligned", mean))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="CSV to write (rank 0)")
    out = parser.parse_args().out
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world != HT.world:
        sys.stderr.write(
            f"deepep_agreement: needs {HT.world} ranks, one a GPU, this is {world}; start it with torchrun\n"
        )
        return 2
    group = cuda_group(rank, world, int(os.environ["LOCAL_RANK"]), 1, datetime.timedelta(seconds=TIMEOUT_S))
    rows = measure(group)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, rows, group=group.host_pg)
    rows = [
        (f"{name} (rank {number})", rule, mean) for number, part in enumerate(everyone) for name, rule, mean in part
    ]
    if rank == 0:
        for name, rule, mean in rows:
            sys.stdout.write(f"{name:48} {rule:8} {mean:10.2f} us\n")
        if out is not None:
            with out.open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(["what", "rule", "mean_us"])
                writer.writerows((name, rule, f"{mean:.3f}") for name, rule, mean in rows)
    torch.cuda.synchronize()
    sys.stdout.flush()
    os._exit(0)  # three buffers of two modes are open: their tear-down order is not what this tool is for


if __name__ == "__main__":
    raise SystemExit(main())
