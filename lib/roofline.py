"""Speed of light: the least time that this machine's measured peaks allow for what a row must do, whatever the library.

sol_us = max(barrier, wire, HBM, math), each over the busiest rank: wire = the larger of sent and received bytes of each
leg over the push bandwidth; HBM = every operand read once and every result written once; math = the routed experts'
flops. It is a bound, not a target: a library that must also write metadata or pad will not reach it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lib.traffic import copy_bytes

if TYPE_CHECKING:
    from lib.contract import Session
    from lib.problem import Problem
    from lib.traffic import Copies

BF16_BYTES = 2
# Bytes of one element of the expert weights, block scales included (docs/method.md, "Number formats").
WEIGHT_BYTES = {
    "bf16": 2.0,
    "fp8": 1 + 4 / 128**2,
    "fp8_interleaved": 1 + 4 / 128**2,
    "fp8_rowwise": 1.0,
    "fp8_e8m0": 1 + 1 / 128**2,
    "mxfp8": 1 + 1 / 32,
    "mxfp8_mxfp4": 1 / 2 + 1 / 32,
    "nvfp4": 1 / 2 + 1 / 16,
    "nvfp4_pow2": 1 / 2 + 1 / 16,
}
MATH_OF = {"bf16": "bf16"}  # number format -> which matmul peak bounds it; every other format multiplies in 8 bits here
FLOPS_PER_WEIGHT = 2


@dataclass(frozen=True)
class Peaks:
    """What one GPU of this machine was measured to reach. `wire_gbps` is None on a single GPU."""

    wire_gbps: float | None
    hbm_gbps: float
    matmul_tflops: dict[str, float]
    barrier_us: float | None
    source: str

    @classmethod
    def read(cls, record: dict[str, Any]) -> Peaks:
        return cls(**{name: record[name] for name in cls.__dataclass_fields__})


def leg_wire_bytes(copies: Copies, row_bytes: int) -> int:
    """The busiest rank's bytes on the wire in one direction: the larger of what it sends and what it receives."""
    busiest = np.maximum(copies.wire, copies.wire_in)
    return int(busiest.max()) * row_bytes


def floors_us(problem: Problem, copies: Copies, session: Session, peaks: Peaks) -> dict[str, float]:
    """The least time by each ceiling."""
    dispatch_row = copy_bytes(session.dispatch_format, problem.hidden)
    combine_row = copy_bytes(session.combine_format, problem.hidden)
    floors: dict[str, float] = {}
    if peaks.barrier_us is not None:
        floors["barrier"] = peaks.barrier_us
    if peaks.wire_gbps is not None:
        wire = leg_wire_bytes(copies, dispatch_row) + leg_wire_bytes(copies, combine_row)
        floors["wire"] = wire / peaks.wire_gbps / 1e3
    rows = int((copies.received + problem.tokens).max())
    hbm = rows * dispatch_row + rows * combine_row
    if session.kind == "moe":
        hbm += touched_weight_bytes(problem, copies, session.number_format)
        flops = FLOPS_PER_WEIGHT * 3 * problem.inter * problem.hidden * routed_max(problem, copies)
        peak = peaks.matmul_tflops.get(MATH_OF.get(session.number_format, "fp8"))
        if peak:
            floors["math"] = flops / peak / 1e6
    floors["hbm"] = hbm / peaks.hbm_gbps / 1e3
    return floors


def routed_max(problem: Problem, copies: Copies) -> int:
    """Selections on the busiest rank's experts."""
    return int(copies.expert_load.reshape(problem.world, -1).sum(1).max())


def touched_weight_bytes(problem: Problem, copies: Copies, number_format: str) -> int:
    """Weights of the experts that at least one token reaches, on the rank that has most of them."""
    touched = int((copies.expert_load.reshape(problem.world, -1) > 0).sum(1).max())
    return int(touched * 3 * problem.inter * problem.hidden * WEIGHT_BYTES[number_format])


def sol_columns(
    problem: Problem, copies: Copies, session: Session, peaks: Peaks | None, p50_us: float
) -> dict[str, Any]:
    """sol_us, sol_pct (100 = at the bound; above it something was not measured right), sol_bound, peak_source."""
    if peaks is None or not problem.tokens:
        return {}
    floors = floors_us(problem, copies, session, peaks)
    bound = max(floors, key=floors.__getitem__)
    return {
        "sol_us": floors[bound],
        "sol_pct": 100 * floors[bound] / p50_us,
        "sol_bound": bound,
        "peak_source": peaks.source,
    }
