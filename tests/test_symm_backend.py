"""The backend `symm` without a GPU: two ranks under Triton's interpreter, and what the compiler makes for sm_90.

The interpreter runs the kernels' own code, so indices, masks, flags and sums are tested; races and speed are not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

pytest.importorskip("triton")

from bench.backends.symm import SymmBackend
from bench.backends.symm_launch import MAX_TILE, tiling
from bench.backends.symm_memory import ALIGNMENT, fields, most_flags, rank_lanes
from tests.library_ranks import SHAPES
from tests.machine_helpers import h200_pair, machine
from tests.symm_ranks import KNOBS, PAIR, SUITE, faults_of, rank_main, shapes_of, steps_of

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = SUITE.variants
THREADS, REGISTERS = 32, 65536  # of a warp, of an SM


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("symm")
    torch.multiprocessing.spawn(rank_main, args=(2, str(folder)), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(
    ("variant", "shape"),
    [(name, shape) for name, variant in VARIANTS.items() for shape in {**SHAPES, **shapes_of(variant)}],
)
def test_every_copy_and_every_sum_is_right(pair: list[dict[str, Any]], variant: str, shape: str) -> None:
    assert [found["wrong"][f"{variant}, {shape}"] for found in pair] == ["", ""]


@pytest.mark.parametrize(
    ("variant", "fault"),
    [(name, fault) for name, variant in VARIANTS.items() for fault in faults_of(variant)]
    + [(name, f"no {step}") for name, variant in VARIANTS.items() for step in steps_of(variant)],
)
def test_a_fault_in_the_launches_is_seen_by_both_ranks(pair: list[dict[str, Any]], variant: str, fault: str) -> None:
    told = [found["teeth"][f"{variant}, {fault}"] for found in pair]
    assert told[0] == told[1] != ""


@pytest.mark.parametrize("variant", VARIANTS)
def test_calls_and_lone_combines_repeat_bit_by_bit(pair: list[dict[str, Any]], variant: str) -> None:
    assert [found["more"][variant]["same"] for found in pair] == [True, True]


@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith("symm ")])
def test_a_graph_may_hold_the_staged_steps(pair: list[dict[str, Any]], variant: str) -> None:
    assert [found["more"][variant]["waits"] for found in pair] == [[], []]


@pytest.mark.parametrize("variant", VARIANTS)
def test_ht_leaves_no_gap_between_the_sources_and_ll_gives_each_a_region(
    pair: list[dict[str, Any]], variant: str
) -> None:
    for found in pair:
        starts, counts = found["more"][variant]["starts"], found["more"][variant]["counts"]
        assert starts == ([0, counts[0]] if VARIANTS[variant].algo == "ht" else [0, 20])


def test_a_plan_is_launched_by_a_fresh_ht_dispatch_alone(pair: list[dict[str, Any]]) -> None:
    calls = {name: pair[0]["calls"][name] for name in VARIANTS}
    assert calls["symm_ht bf16"] == calls["symm bf16"] == ["plan", "dispatch", "combine"]
    assert calls["symm_ht+cached bf16"] == calls["symm_ll bf16"] == ["dispatch", "combine"]


# -- sizes and limits


def test_fields_are_aligned_and_do_not_overlap() -> None:
    made = fields(PAIR, 20, True, 2)
    assert all(field.offset % ALIGNMENT == 0 for field in made)
    assert all(first.end <= second.offset for first, second in pairwise(made))


def test_the_flags_are_enough_for_the_smallest_chunks() -> None:
    for tokens in (1, 8, 128, 4096):
        for hidden in (128, 640, 7168):
            problem = replace(PAIR, tokens=tokens, hidden=hidden)
            cut = tiling(problem, 132, MAX_TILE["ht", "bf16"])
            chunks = -(-tokens // cut.rows) * -(-hidden // (cut.groups * 128))
            assert chunks <= most_flags(4096, hidden)


@pytest.mark.parametrize(("tokens", "rows", "warps"), [(0, 1, 4), (8, 1, 4), (128, 8, 32), (4096, 32, 32)])
def test_tiles_grow_with_the_tokens(tokens: int, rows: int, warps: int) -> None:
    cut = tiling(replace(PAIR, tokens=tokens, hidden=7168), 132, MAX_TILE["ht", "bf16"])
    assert (cut.rows, cut.groups, cut.warps) == (rows, 8, warps)


def test_a_rank_needs_at_least_two_lanes() -> None:
    assert [rank_lanes(world) for world in (1, 2, 3, 4, 8)] == [2, 2, 4, 4, 8]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden": 2880}, "HIDDEN=2880: symm takes a multiple of 128"),
        ({"topk": 33}, "TOPK=33: symm takes at most 32"),
        ({"world": 16}, "GPUS=16: symm takes at most 8, one NVLink domain"),
        ({"nodes": 2}, "symm reaches the GPUs of one node, this is 2 nodes"),
    ],
)
def test_limits_are_named(changes: dict[str, Any], reason: str) -> None:
    backend = SymmBackend()
    verdict = backend.supports(backend.variants(KNOBS)[0], h200_pair(), replace(PAIR, **changes), KNOBS)
    assert (verdict.status, verdict.reason.partition(";")[0]) == ("unsupported", reason)


def test_fp8_needs_ada_or_newer_and_bf16_ampere() -> None:
    backend = SymmBackend()
    by_dtype = {variant.dispatch_dtype: variant for variant in backend.variants(KNOBS)}
    ampere = machine(2, (8, 0), installed=("triton",))
    assert backend.supports(by_dtype["bf16"], ampere, PAIR, KNOBS).ok
    assert "fp8 needs sm_89, this is sm_80" in backend.supports(by_dtype["fp8"], ampere, PAIR, KNOBS).reason


def test_memory_holds_the_arena_and_what_is_staged() -> None:
    backend = SymmBackend()
    made = {variant.name: variant for variant in backend.variants(KNOBS) if variant.dispatch_dtype == "bf16"}
    large = replace(PAIR, tokens=4096, hidden=7168, topk=8, num_experts=256)
    row, received = 7168 * 2, 2 * 4096
    arena = fields(large, 4096, False, 2)[-1].end
    assert arena > received * row + 2 * received * row
    assert backend.memory_bytes(made["symm_ht"], large) > arena + received * row
    plain, weighted = (backend.memory_bytes(made[name], large) for name in ("symm_ht", "symm_ht+weighted"))
    assert weighted - plain == 7 * received * row


# -- what the compiler makes of the kernels


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    where = {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(ROOT)}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | where
    answer = subprocess.run(
        [sys.executable, "-m", "tests.symm_compile"], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    return dict(json.loads(answer.stdout))


def test_no_kernel_spills_and_each_fits_an_sm(kernels: dict[str, Any]) -> None:
    assert len(kernels) == 19
    for name, made in kernels.items():
        assert made["STACK"] == made["LOCAL"] == 0, name
        assert made["REG"] * made["warps"] * THREADS <= REGISTERS, name


def test_no_kernel_scans(kernels: dict[str, Any]) -> None:
    """Triton 3.6 compiles tl.cumsum wrongly where neighbouring threads hold copies of one element (docs/symm.md)."""
    assert {name: made["scans"] for name, made in kernels.items() if made["scans"]} == {}


def test_rows_move_sixteen_bytes_at_a_time(kernels: dict[str, Any]) -> None:
    for name, made in kernels.items():
        if name == "plan":
            continue
        assert "ld.global.v4.b32" in made["ptx"], name
        assert "st.global.v4.b32" in made["ptx"] or ("fp8" in name and "st.global.v2.b32" in made["ptx"]), name


def test_flags_are_released_and_acquired_at_system_scope(kernels: dict[str, Any]) -> None:
    for name, made in kernels.items():
        assert "sys.release" in made["ptx"] or "release.sys" in made["ptx"], name
        waits = "sys.acquire" in made["ptx"] or "acquire.sys" in made["ptx"]
        assert waits == (name != "plan"), name
