"""CSVs of rows for the report's tests: a few by hand, or thousands that look like a year of nights."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from pathlib import Path

from lib.rows import HEADER, csv_line

STAMP = "20261130T190000Z"
SHAPE: Mapping[str, object] = {
    "schema": 1, "stamp": STAMP, "section": "comm", "variant": "torch", "comm": "torch", "timing": "graph",
    "status": "ok", "check": "ok", "world": 2, "nodes": 1, "tokens": 128, "num_experts": 256, "topk": 8, "hidden": 7168,
    "inter": 2048, "dispatch_dtype": "bf16", "combine_dtype": "bf16", "routing": "uniform", "seed": 0, "warmup": 20,
    "iters": 50, "iters_per_graph": 50, "l2": "warm", "device": "NVIDIA H200", "git": "g0123abc",
    "versions": "python 3.12.3; torch 2.11.0+cu130", "repro": "SECTION=comm COMM_LIST=torch TOKENS=128 ./run.sh",
}  # fmt: skip
FIGURES: Mapping[str, object] = {
    "lat_us_p50": 100.0, "lat_us_p90": 104.0, "dispatch_us": 45.0, "combine_us": 50.0, "dispatch_wire_gbps": 120.0,
    "combine_wire_gbps": 110.0, "sol_us": 30.0, "sol_pct": 30.0, "sol_bound": "wire",
}  # fmt: skip


def row(**columns: object) -> dict[str, object]:
    """An ok row with figures; any other status has none, as in a real file."""
    ok = columns.get("status", "ok") == "ok"
    return {**SHAPE, **(FIGURES if ok else {"check": None}), **columns}


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> Path:
    path.write_text(HEADER + "".join(csv_line(each) for each in rows))
    return path


def night(number: int) -> str:
    return f"{datetime(2026, 1, 1) + timedelta(days=number):%Y%m%dT%H%M%SZ}"  # noqa: DTZ001 - stamps are UTC


def many_rows(count: int) -> list[dict[str, object]]:
    """Nights of 12 variants x 14 tokens x 3 timings x 2 formats: the full comm sweep, with its share of failures."""
    noise = random.Random(0)
    variants = [f"library{each}{kind}" for each in range(6) for kind in ("_ht", "_ll")]
    points = list(itertools.product(variants, ("e2e", "e2e_pipelined", "graph"), ("bf16", "fp8"), range(14)))
    made = []
    for number, (variant, timing, dtype, power) in zip(range(count), itertools.cycle(points), strict=False):
        tokens = 2**power
        us = (20 + tokens / (4 + variants.index(variant))) * noise.gauss(1, 0.02)
        columns = {"stamp": night(number // len(points)), "variant": variant, "timing": timing, "tokens": tokens}
        columns |= {"dispatch_dtype": dtype, "iters_per_graph": 50 if timing == "graph" else None}
        columns["repro"] = (
            f"SECTION=comm GPUS=2 COMM_LIST={variant} TOKENS={tokens} DISPATCH_DTYPE={dtype} TIMING={timing} ./run.sh"
        )
        if number % 50 == 7:
            made.append(row(**columns, status="failed", reason=f"rank {number % 2} died in phase time"))
        elif power > 9 and variant.endswith("_ll"):
            made.append(
                row(**columns, status="unsupported", reason=f"TOKENS={tokens} takes {tokens} slots, ll has 511")
            )
        else:
            figures = {"lat_us_p50": us, "lat_us_p90": us * 1.04, "dispatch_us": us * 0.45, "combine_us": us * 0.5}
            figures |= {
                "dispatch_wire_gbps": tokens * 14.3 / us,
                "combine_wire_gbps": tokens * 14.0 / us,
                "sol_pct": 1e3 / us,
            }
            made.append(row(**columns, **figures))
    return made
