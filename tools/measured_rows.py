#!/usr/bin/env python3
"""The rows of docs/measured, made again on this machine: named sets of runs, each into a dated CSV.

    python -m tools.measured_rows --list
    python -m tools.measured_rows ref comm fi_mega [--out docs/measured] [--keep-runs FOLDER]

A set is a sweep with fixed knobs; interpreters (PYTHON, COMM_PYTHON, FI_PYTHON) and knobs that the set does not name
are the caller's. A set whose rows are not all ok or refused ends the command with 1, after its rows were kept.
Standard library only: it may run where only the measured library's interpreter is.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # started as a file, from any folder

from lib.talk import say, show  # noqa: E402

RED = ("failed", "wrong", "timeout", "interrupted")
OK_EXIT, RED_EXIT, USAGE_EXIT = 0, 1, 2
NOTHING_RAN = 4  # of a sweep: every row says why
COMM_TIMINGS = "e2e e2e_pipelined graph"
PRIVATE = re.compile(r"\b(?:COMM_|FI_)?PYTHON=\S* ")  # in a repro line: it names a path of the measuring machine
SHARED = re.compile(r"\bRANKS_PER_GPU=(\d+)")


@dataclass(frozen=True)
class Sweep:
    """Knobs of one ./run_sweep.sh."""

    about: str
    knobs: Mapping[str, str]


@dataclass(frozen=True)
class Ranks:
    """A module that torchrun starts on the two first GPUs; it writes its own CSV to --out."""

    about: str
    module: str
    python: str = "PYTHON"  # the knob that names its interpreter


SETS: dict[str, Sweep | Ranks] = {
    "clock": Ranks("kernels of known length by every timing method", "tools.clock_check"),
    "ref": Sweep(
        "section ref, with the machine's peaks",
        {"SECTION": "ref", "SEQ_LENS": "8 4096", "TIMING": "e2e e2e_pipelined", "CHECK_REPEATS": "8"},
    ),
    "comm": Sweep(
        "every EP library that is installed, bf16 and fp8",
        {"SECTION": "comm", "ALGO": "ht ll", "DISPATCH_DTYPE": "bf16 fp8", "TIMING": COMM_TIMINGS}
        | {"SEQ_LENS": "8 128 256 4096", "CHECK_REPEATS": "8"},
    ),
    "comm_repeat": Sweep(
        "another start of a part of it",
        {"SECTION": "comm", "COMM_LIST": "deepep", "ALGO": "ht ll", "TIMING": COMM_TIMINGS, "SEQ_LENS": "128 256 4096"}
        | {"CHECK_REPEATS": "2", "PEAKS": "off"},
    ),
    "comm_24sms": Sweep(
        "DeepEP with the SM budget of its own tests",
        {"SECTION": "comm", "COMM_LIST": "deepep", "ALGO": "ht", "DISPATCH_DTYPE": "bf16 fp8", "NUM_SMS": "24"}
        | {"TIMING": "e2e_pipelined graph", "SEQ_LENS": "4096"},
    ),
    "symm": Sweep(
        "the suite's own exchange beside DeepEP's, in one run",
        {"SECTION": "comm", "COMM_LIST": "symm deepep_v2 deepep", "ALGO": "ht ll", "DISPATCH_DTYPE": "bf16 fp8"}
        | {"NUM_SMS": "0 24 64", "TIMING": "graph", "SEQ_LENS": "8 128 4096 8192", "CHECK_REPEATS": "20"},
    ),
    "comm_shared": Sweep(
        "every EP library, two ranks on each GPU: checked, not timed",
        {"SECTION": "comm", "RANKS_PER_GPU": "2", "TIMING": "none", "ALGO": "ht ll", "DISPATCH_DTYPE": "bf16 fp8"}
        | {"SEQ_LENS": "8 128", "ROUTING": "zipf:1.2,mask=0.3,empty=0", "CHECK_REPEATS": "20"},
    ),
    "vllm_split_shared": Sweep(
        "vLLM's modular kernel, two ranks on each GPU: checked, not timed",
        {"SECTION": "vllm_split", "RANKS_PER_GPU": "2", "TIMING": "none", "ALGO": "ht ll", "SEQ_LENS": "8 128"}
        | {"CHECK_REPEATS": "6"},
    ),
    "deepep_agreement": Ranks("DeepEP's legacy buffers by the rules of its own tests", "tools.deepep_agreement"),
    "elastic_agreement": Ranks("DeepEP 2 by the rules of its own test", "tools.elastic_agreement", "COMM_PYTHON"),
    "fi_mega": Sweep(
        "FlashInfer's mega kernels",
        {"SECTION": "fi_mega", "SEQ_LENS": "8 512 4096", "MEGA_TIMING": "e2e e2e_pipelined kernel"}
        | {"CHECK_REPEATS": "6"},
    ),
    "vllm_split_ht": Sweep(
        "vLLM's modular kernel, DeepEP high-throughput",
        {"SECTION": "vllm_split", "ALGO": "ht", "SEQ_LENS": "8 128 1024 4096", "TIMING": "e2e e2e_pipelined"}
        | {"CHECK_REPEATS": "6"},
    ),
    "vllm_split_ll": Sweep(
        "vLLM's modular kernel, DeepEP low-latency",
        {"SECTION": "vllm_split", "ALGO": "ll", "SEQ_LENS": "8 64 128 256", "TIMING": "e2e_pipelined graph"}
        | {"CHECK_REPEATS": "6"},
    ),
}


def machine_of(rows: list[dict[str, str]]) -> str:
    """`NVIDIA H200`, 2 ranks -> h200x2; h200x1 if they share one."""
    device = next((row["device"] for row in rows if row["device"]), "unknown")
    name = re.sub(r"[^a-z0-9]+", "", device.split("(")[0].replace("NVIDIA", "").lower()) or "unknown"
    shared = SHARED.search(rows[0]["repro"])
    gpus = int(rows[0]["world"]) // int(shared[1] if shared else 1)
    return f"{name}x{gpus}"


def keep(rows_file: Path, out: Path, name: str, date: str) -> list[dict[str, str]]:
    """Copy the rows to <out>/<name>_<machine>_<date>.csv, without interpreters' paths; returns them."""
    with rows_file.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        return []
    for row in rows:
        row["repro"] = PRIVATE.sub("", row["repro"])
    path = out / f"{name}_{machine_of(rows)}_{date}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    show([f"{path}: {len(rows)} rows"])
    for peaks in rows_file.parent.glob("peaks_*.json"):
        target = out / f"peaks_{machine_of(rows)}_{date}.json"
        target.write_text(json.dumps(json.loads(peaks.read_text()), indent=1) + "\n")
    return rows


def run_sweep(name: str, sweep: Sweep, out: Path, runs: Path, date: str) -> bool:
    """True if no row is red."""
    folder = runs / name
    environment = {**os.environ, **sweep.knobs, "OUT_DIR": str(folder)}
    code = subprocess.run([str(ROOT / "run_sweep.sh")], env=environment, cwd=ROOT, check=False).returncode
    rows = [row for file in sorted(folder.glob("sweep_*.csv")) for row in keep(file, out, name, date)]
    red = [row for row in rows if row["status"] in RED]
    for row in red:
        say(f"{name}: {row['variant']} {row['timing']} T={row['tokens']}: {row['status']}: {row['reason']}")
    return bool(rows) and not red and code in (OK_EXIT, NOTHING_RAN)


def run_ranks(name: str, ranks: Ranks, out: Path, date: str) -> bool:
    """True if the module's own verdict is good."""
    python = os.environ.get(ranks.python) or sys.executable
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", ranks.module, "--out", str(out / f"{name}_{date}.csv")]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == OK_EXIT


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="measured_rows", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sets", nargs="*", metavar="SET", help="of those that --list names; all of them without a word")
    parser.add_argument("--list", action="store_true", help="name the sets and their knobs, run nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "measured", help="folder of the CSVs")
    parser.add_argument("--keep-runs", type=Path, help="keep whole runs (JSONL, logs) here; else they go")
    options = parser.parse_args(argv)
    if options.list:
        show([f"{name:18} {told.about}: {shown(told)}" for name, told in SETS.items()])
        return OK_EXIT
    if unknown := [name for name in options.sets if name not in SETS]:
        say(f"measured_rows: there is no set {unknown[0]}; choose from: {' '.join(SETS)}")
        return USAGE_EXIT
    date = time.strftime("%Y%m%d", time.gmtime())
    options.out.mkdir(parents=True, exist_ok=True)
    bad = []
    with tempfile.TemporaryDirectory() as scratch:
        runs = (options.keep_runs or Path(scratch)).resolve()
        for name in options.sets or SETS:
            told = SETS[name]
            good = (
                run_sweep(name, told, options.out, runs, date)
                if isinstance(told, Sweep)
                else run_ranks(name, told, options.out, date)
            )
            bad += [] if good else [name]
    if bad:
        say(f"measured_rows: not all good: {' '.join(bad)}")
    return RED_EXIT if bad else OK_EXIT


def shown(told: Sweep | Ranks) -> str:
    if isinstance(told, Ranks):
        return f"torchrun -m {told.module}"
    return " ".join(f'{name}="{value}"' if " " in value else f"{name}={value}" for name, value in told.knobs.items())


if __name__ == "__main__":
    raise SystemExit(main())
