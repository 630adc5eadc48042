"""Copies and bytes against hand counts, closed forms and identities."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lib.problem import Problem
from lib.routing import make_routing
from lib.traffic import Copies, bandwidth_columns, byte_columns, copy_bytes, count_copies, to_every_node

GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "bw_values.json"

# 2 ranks, 3 tokens each, experts 0..3 on rank 0 and 4..7 on rank 1, top-3.
PROBLEM = Problem(world=2, nodes=1, tokens=3, num_experts=8, topk=3, hidden=256, inter=64, seed=0, routing="uniform")
HAND = np.array(
    [
        [[0, 1, 2], [0, 4, 5], [-1, -1, 7]],  # selection 7, ranks touched 1 + 2 + 1, of these own 1 + 1 + 0
        [[4, 5, 6], [3, -1, 2], [-1, -1, -1]],  # selection 5, ranks touched 1 + 1 + 0, of these own 1 + 0 + 0
    ]
)


def of(routing: str, world: int = 4, nodes: int = 1, **changes: int) -> tuple[Copies, Problem]:
    problem = replace(Problem(world, nodes, 500, 64, 8, 256, 64, 0, routing), **changes)
    return count_copies(make_routing(problem).topk_idx, problem), problem


def test_a_routing_counted_by_hand() -> None:
    copies = count_copies(HAND, PROBLEM)
    assert copies.pairs.tolist() == [[2, 2], [1, 1]]
    assert copies.selection.tolist() == [7, 5]
    assert copies.dedup.tolist() == [4, 2]
    assert copies.wire.tolist() == [2, 1]
    assert copies.received.tolist() == [3, 3]
    assert copies.wire_in.tolist() == [1, 2]
    assert copies.expert_load.tolist() == [2, 1, 2, 1, 2, 2, 1, 1]


@pytest.mark.parametrize(
    ("fmt", "size"),
    [
        ("bf16", 14336), ("fp8", 7168 + 4 * 56), ("mxfp8", 7168 + 224), ("nvfp4", 3584 + 448),
        ("nvfp4_wire", 3584 + 2 * 448),
    ],
)  # fmt: skip
def test_the_bytes_of_one_copy_of_7168(fmt: str, size: int) -> None:
    assert copy_bytes(fmt, 7168) == size


def test_quantised_wires_save_less_than_their_element_bits_say() -> None:
    assert round(copy_bytes("bf16", 7168) / copy_bytes("mxfp8", 7168), 2) == 1.94
    assert round(copy_bytes("bf16", 7168) / copy_bytes("nvfp4_wire", 7168), 1) == 3.2
    assert copy_bytes("fp8", 7168) / copy_bytes("bf16", 7168) == 0.515625


def test_a_hidden_size_that_is_not_whole_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        copy_bytes("fp8", 7168 + 64)
    with pytest.raises(ValueError, match="use bf16"):
        copy_bytes("fp9", 7168)


def test_byte_columns_by_hand_each_direction_in_its_own_format() -> None:
    columns = byte_columns(count_copies(HAND, PROBLEM), PROBLEM, "fp8", "bf16")
    assert columns == {
        "dispatch_bytes_selection": 6 * 264,  # mean of 7 and 5, 256 + 4 * 2 bytes each
        "dispatch_bytes_dedup": 3 * 264,
        "dispatch_bytes_wire": 1.5 * 264,
        "combine_bytes_selection": 6 * 512,
        "combine_bytes_dedup": 3 * 512,
        "combine_bytes_wire": 1.5 * 512,
        "node_bytes_algo": None,
        "node_bytes_physical": None,
    }
    assert all(isinstance(value, int) for value in columns.values() if value is not None)


def test_a_mean_that_is_not_whole_is_a_float() -> None:
    problem = replace(PROBLEM, world=3, num_experts=9, tokens=1, hidden=1)
    ids = np.array([[[0, 1, 8]], [[-1, -1, -1]], [[8, -1, -1]]])
    assert byte_columns(count_copies(ids, problem), problem, "bf16", "bf16")["dispatch_bytes_selection"] == 8 / 3


def test_bandwidths_by_hand() -> None:
    columns = bandwidth_columns(count_copies(HAND, PROBLEM), PROBLEM, "bf16", "mxfp8", 2.0, 4.0)
    assert columns == {
        "dispatch_dedup_gbps": 3 * 512 / 2 / 1000,
        "combine_dedup_gbps": 3 * 264 / 4 / 1000,
        "dispatch_wire_gbps": 1.5 * 512 / 2 / 1000,
        "combine_wire_gbps": 1.5 * 264 / 4 / 1000,
        "wire_gbps_min": 1 * 512 / 2 / 1000,
        "wire_gbps_min_rank": 1,
    }


def test_the_slowest_sender_is_sought_among_those_that_send() -> None:
    ids = HAND.copy()
    ids[1] = -1
    columns = bandwidth_columns(count_copies(ids, PROBLEM), PROBLEM, "bf16", "bf16", 1.0, 1.0)
    assert (columns["wire_gbps_min"], columns["wire_gbps_min_rank"]) == (2 * 512 / 1000, 0)


@pytest.mark.parametrize("time_us", [None, 0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_leaves_the_bandwidths_blank(time_us: float | None) -> None:
    columns = bandwidth_columns(count_copies(HAND, PROBLEM), PROBLEM, "bf16", "bf16", time_us, time_us)
    assert set(columns.values()) == {None}


def test_no_bytes_leave_the_bandwidths_blank() -> None:
    nothing, problem = of("uniform", tokens=0)
    assert set(bandwidth_columns(nothing, problem, "bf16", "bf16", 1.0, 1.0).values()) == {None}
    assert byte_columns(nothing, problem, "bf16", "bf16")["dispatch_bytes_dedup"] == 0
    alone, problem = of("uniform", world=1)
    columns = bandwidth_columns(alone, problem, "bf16", "bf16", 1.0, 1.0)
    assert columns["dispatch_dedup_gbps"] is not None
    assert [name for name, value in columns.items() if value is None] == [
        "dispatch_wire_gbps",
        "combine_wire_gbps",
        "wire_gbps_min",
        "wire_gbps_min_rank",
    ]


@pytest.mark.parametrize(("world", "expected"), [(2, 1.993020), (4, 3.614214), (8, 5.294652)])
def test_uniform_routing_reaches_as_many_ranks_as_the_closed_form_says(world: int, expected: float) -> None:
    hit = 1 - math.comb(256 - 256 // world, 8) / math.comb(256, 8)
    assert world * hit == pytest.approx(expected, abs=1e-6)
    copies, problem = of("uniform", world, num_experts=256, tokens=4000)
    assert copies.received.mean() / problem.tokens == pytest.approx(expected, rel=5e-3)
    assert copies.wire.mean() / problem.tokens == pytest.approx((world - 1) * hit, rel=5e-3)


@pytest.mark.parametrize("law", ["uniform", "balanced", "zipf:1.5", "onehot", "deepep", "mask=0.3,empty=1"])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_the_bases_keep_their_order_and_their_sums(law: str, nodes: int) -> None:
    copies, problem = of(law, world=8, nodes=nodes)
    assert (copies.wire <= copies.dedup).all()
    assert (copies.dedup <= copies.selection).all()
    assert copies.dedup.sum() == copies.received.sum() == copies.pairs.sum()
    assert copies.wire.sum() == copies.wire_in.sum()
    assert copies.selection.sum() == copies.expert_load.sum()
    assert (copies.node_physical <= copies.node_algo).all()
    assert (copies.node_algo <= copies.dedup).all()
    assert (copies.node_algo <= problem.tokens * min(nodes, problem.topk)).all()


def test_balanced_reaches_min_k_r_ranks_with_each_token() -> None:
    copies, problem = of("balanced", world=4)
    assert (copies.dedup == problem.tokens * 4).all()


def test_a_masked_entry_moves_no_bytes() -> None:
    plain, _ = of("uniform", tokens=4000)
    masked, _ = of("mask=0.3", tokens=4000)
    selection = masked.selection.sum() / plain.selection.sum()
    dedup = masked.dedup.sum() / plain.dedup.sum()
    assert selection == pytest.approx(0.7, abs=0.01)
    assert selection < dedup < 1


def test_physical_is_counted_and_not_scaled() -> None:
    copies, problem = of("onehot", world=4, nodes=2)  # everything goes to node 0
    assert copies.node_algo.tolist() == [500] * 4
    assert copies.node_physical.tolist() == [0, 0, 500, 500]
    columns = byte_columns(copies, problem, "bf16", "bf16")
    assert (columns["node_bytes_algo"], columns["node_bytes_physical"]) == (500 * 512, 250 * 512)


def reference_script_ids(nodes: int, gpus: int, tokens: int, hidden: int, experts: int, topk: int) -> np.ndarray:
    """Routing of the MORI-EP benchmark document's print_bw_values.py: |normal| + 1 from MT19937, grouped top-k."""
    ids = []
    for rank in range(nodes * gpus):
        state = np.random.RandomState(rank)
        state.bytes(4 * 16 * math.ceil(tokens * hidden / 16))  # it draws the bf16 input first
        words = np.frombuffer(state.bytes(4 * tokens * experts), "<u4")
        uniform = ((words & 0xFFFFFF) * np.float32(2**-24)).astype(np.float32).reshape(-1, 2, 8)
        radius = np.sqrt(-2 * np.log(1 - uniform[:, 0]))
        angle = np.float32(2 * np.pi) * uniform[:, 1]
        normal = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
        scores = (np.abs(normal) + 1).reshape(tokens, nodes, experts // nodes)
        best = np.sort(scores.max(2), axis=1)[:, nodes - min(nodes, 4)]
        scores = np.where((scores.max(2) >= best[:, None])[:, :, None], scores, 0).reshape(tokens, experts)
        ids.append(np.argsort(-scores, axis=1, kind="stable")[:, :topk])
    return np.array(ids, np.int64)


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden values lie outside the repository, and are not here")
def test_the_counts_are_those_that_the_reference_script_printed() -> None:
    expected = json.loads(GOLDEN.read_text())["n2g4_t128_h2048_e64_k4"]
    problem = Problem(world=8, nodes=2, tokens=128, num_experts=64, topk=4, hidden=2048, inter=64, seed=0, routing="")
    copies = count_copies(reference_script_ids(2, 4, 128, 2048, 64, 4), problem)
    assert copies.node_algo.tolist() == expected["algo"]
    assert copies.node_physical.tolist() == expected["physical"]
    assert copies.received.tolist() == expected["recv"]


def test_a_library_that_sends_to_every_node_counts_tokens_times_nodes_and_no_rank_differently() -> None:
    """MORI's v1_ll: as tools/bw_values.py has it, whatever the routing."""
    problem = Problem(world=4, nodes=2, tokens=3, num_experts=8, topk=2, hidden=16, inter=16, seed=0, routing="onehot")
    copies = count_copies(np.zeros((4, 3, 2), np.int64), problem)
    every = to_every_node(copies, [3, 0, 2, 3], 2)
    assert (every.node_algo.tolist(), every.node_physical.tolist()) == ([6, 0, 4, 6], [3, 0, 2, 3])
    assert every.pairs is copies.pairs
    assert to_every_node(copies, [3, 0, 2, 3], 1) is copies
