"""Speed of light by hand arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from lib.contract import Session
from lib.problem import Problem
from lib.roofline import Peaks, floors_us, sol_columns
from lib.traffic import count_copies

PROBLEM = Problem(world=2, nodes=1, tokens=2, num_experts=4, topk=2, hidden=128, inter=64, seed=0, routing="uniform")
# rank 0's tokens choose experts 0+2 and 2+3, rank 1's 2+3 and 0+1; rank 0 owns 0, 1
IDS = np.array([[[0, 2], [2, 3]], [[2, 3], [0, 1]]])
PEAKS = Peaks(wire_gbps=100.0, hbm_gbps=1000.0, matmul_tflops={"bf16": 1.0, "fp8": 2.0}, barrier_us=0.001, source="x")
ROW = 2 * 128


class Moe(Session):
    kind = "moe"


def test_the_wire_floor_is_of_the_busiest_rank_both_legs() -> None:
    """Rank 0 sends 2 copies and gets 1, rank 1 sends 1 and gets 2: two rows a leg."""
    floors = floors_us(PROBLEM, count_copies(IDS, PROBLEM), Session(), PEAKS)
    assert floors["wire"] == pytest.approx(2 * (2 * ROW) / 100 / 1e3)
    assert floors["hbm"] == pytest.approx(2 * ((3 + 2) * ROW) / 1000 / 1e3)  # rank 1 gets 3 copies, has 2 tokens
    assert "math" not in floors


def test_a_moe_reads_every_touched_experts_weights_once() -> None:
    floors = floors_us(PROBLEM, count_copies(IDS, PROBLEM), Moe(), PEAKS)
    weights = 2 * 3 * 64 * 128 * 2  # both experts of a rank, w13 and w2, bf16
    assert floors["hbm"] == pytest.approx((2 * 5 * ROW + weights) / 1000 / 1e3)
    assert floors["math"] == pytest.approx(2 * 3 * 64 * 128 * 5 / 1.0 / 1e6)  # rank 1's experts get 5 of 8 selections


def test_the_largest_floor_is_the_bound() -> None:
    columns = sol_columns(PROBLEM, count_copies(IDS, PROBLEM), Session(), PEAKS, p50_us=1.0)
    assert columns["sol_bound"] == "wire"
    assert columns["sol_pct"] == pytest.approx(100 * columns["sol_us"])
    assert columns["peak_source"] == "x"


def test_one_gpu_has_no_wire_and_no_barrier() -> None:
    alone = Peaks(None, 1000.0, {"bf16": 1.0}, None, "x")
    assert set(floors_us(PROBLEM, count_copies(IDS, PROBLEM), Session(), alone)) == {"hbm"}


def test_without_peaks_or_tokens_nothing_is_said() -> None:
    copies = count_copies(IDS, PROBLEM)
    assert sol_columns(PROBLEM, copies, Session(), None, 1.0) == {}
    assert sol_columns(PROBLEM.at(0), copies, Session(), PEAKS, 1.0) == {}
