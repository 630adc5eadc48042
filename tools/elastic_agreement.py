"""Our DeepEP 2 sessions timed by the rule of DeepEP 2's own tests/elastic/test_ep.py, to be laid beside what it prints.

    python -m torch.distributed.run --standalone --nproc-per-node=2 -m tools.elastic_agreement [--out agreement.csv]
    python tests/elastic/test_ep.py --num-processes 2 --num-topk 8 --num-sms 24 --allow-hybrid-mode 0 --test-first-only

Its rule: 30 calls under PyTorch's profiler, thrown away, then 30 that count; before each the L2 is written over, a
delay kernel runs and the buffer's own barrier; a kernel's figure is its mean. Main kernels and epilogues are told
apart. Its combine also carries the top-k weights, ours does not.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from bench.backends.deepep_v2 import DeepEPV2Backend, DeepEPV2Session
from lib.contract import Group, Variant
from lib.device import cuda_group
from lib.knobs import MachineFacts, parse_knobs
from lib.problem import TIMED_PAYLOAD, Inputs, Problem, token_payload
from lib.routing import make_routing
from lib.timing import run_phases

PROFILED, ROUNDS = 30, 2
FLUSH_BYTES = 256_000_000
DELAY_CYCLES = 20_000_000  # about 10 ms: longer than the enqueue of a call
TIMEOUT_S = 300
SHAPE = Problem(2, 1, 4096, 256, 8, 7168, 2048, 0, "uniform")
KERNELS = {
    "dispatch": ("dispatch_impl", "dispatch_copy_epilogue_impl"),
    "combine": ("combine_impl", "combine_reduce_epilogue_impl"),
}
Row = tuple[str, float]


def kernel_means_us(call: Callable[[], None], buffer: Any, names: tuple[str, ...]) -> list[float]:
    """Mean duration of each kernel, by `bench_kineto`'s rule."""
    from torch.profiler import ProfilerActivity, profile

    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        for _ in range(ROUNDS):
            for _ in range(PROFILED):
                flush.zero_()
                torch.cuda._sleep(DELAY_CYCLES)
                buffer.barrier()
                call()
            torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    means = []
    for name in names:
        found = [
            entry.time_range.elapsed_us()
            for entry in recorded.events()
            if entry.device_type == device and name in entry.name
        ]
        means.append(fmean(found[-PROFILED:]) if found else float("nan"))
    return means


def bind(group: Group, variant: Variant) -> DeepEPV2Session:
    routing = make_routing(SHAPE)
    ids = torch.from_numpy(routing.topk_idx[group.rank].copy()).to(group.device)
    weights = torch.from_numpy(routing.topk_weights[group.rank].copy()).to(group.device)
    x = token_payload(SHAPE, group.rank, SHAPE.tokens, TIMED_PAYLOAD, group.device)
    engine = DeepEPV2Backend().open(group, variant, SHAPE, None)  # type: ignore[arg-type]  # it reads no knob
    session = engine.bind(SHAPE, Inputs(x, ids, weights))
    run_phases(session)
    return session


def measure(group: Group) -> list[Row]:
    facts = MachineFacts(gpu_count=SHAPE.world, sm=(9, 0))
    knobs = parse_knobs({"GPUS": "2", "DISPATCH_DTYPE": "fp8 bf16", "NUM_SMS": "24"}, facts)
    rows: list[Row] = []
    for variant in DeepEPV2Backend().variants(knobs):
        session = bind(group, variant)
        for phase in session.phases:
            names = KERNELS.get(phase.name, ())
            means = kernel_means_us(phase.fn, session.buffer, names) if names else []
            for name, mean in zip(names, means, strict=True):
                rows.append((f"{variant.name} {variant.dispatch_dtype} {name}", mean))
        session.engine.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="CSV to write (rank 0)")
    out = parser.parse_args().out
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world != SHAPE.world:
        said = f"needs {SHAPE.world} ranks, one a GPU, this is {world}; start it with torchrun"
        sys.stderr.write(f"elastic_agreement: {said}\n")
        return 2
    os.environ.setdefault("EP_DISABLE_GIN", "1")
    group = cuda_group(rank, world, int(os.environ["LOCAL_RANK"]), 1, datetime.timedelta(seconds=TIMEOUT_S))
    rows = measure(group)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, rows, group=group.host_pg)
    if rank == 0:
        told = [(f"{name} (rank {number})", mean) for number, part in enumerate(everyone) for name, mean in part]
        for name, mean in told:
            sys.stdout.write(f"{name:72} {mean:10.2f} us\n")
        if out is not None:
            with out.open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(["what", "mean_us"])
                writer.writerows((name, f"{mean:.3f}") for name, mean in told)
    sys.stdout.flush()
    os._exit(0)  # the profiler and the process group need no tear-down here


if __name__ == "__main__":
    raise SystemExit(main())
