"""The DeepEP 2, NCCL-EP and FlashInfer adapters without a GPU: calls on two ranks against fakes.

The fakes' signatures are those of the wheels in tests/signatures. The last part holds docs/backends.md to the code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from bench.backends import deepep_v2, flashinfer_a2a, nccl_ep_limits
from bench.backends.flashinfer_a2a import routed, widest_load
from bench.backends.session import weighted
from lib.formats import dequantize, quantize
from tests.comm_ranks import VARIANTS, cases, faults_of, rank_main, shapes_of

# -- pieces


def test_a_masked_choice_travels_with_another_one_of_its_token_and_a_masked_token_stays() -> None:
    ids = torch.tensor([[5, -1, 2, -1], [-1, -1, -1, 7], [-1, -1, -1, -1], [0, 1, 2, 3]])
    assert routed(ids, own_expert=4).tolist() == [[5, 5, 2, 5], [7, 7, 7, 7], [4, 4, 4, 4], [0, 1, 2, 3]]
    assert routed(ids, own_expert=4).dtype == torch.int32
    assert routed(ids[:0], own_expert=4).shape == (0, 4)


@pytest.mark.parametrize(
    ("columns", "dtype", "load"),
    [
        (8, torch.int32, 16),
        (6, torch.int32, 8),
        (17, torch.float32, 4),
        (2880, torch.bfloat16, 16),
        (3, torch.bfloat16, 2),
    ],
)
def test_the_loads_of_a_payload_are_as_wide_as_its_rows_allow(columns: int, dtype: torch.dtype, load: int) -> None:
    assert widest_load(torch.zeros(2, columns, dtype=dtype)) == load


def test_staging_rounds_a_weighted_row_once() -> None:
    x, weights = torch.randn(5, 256), torch.rand(5, 1)
    out = torch.zeros(5, 256, dtype=torch.bfloat16)
    weighted(x.to(torch.bfloat16), weights, None, out)
    assert torch.equal(out, (x.to(torch.bfloat16).float() * weights).to(torch.bfloat16))
    quantized = quantize("fp8", x)
    assert quantized.scales is not None
    weighted(quantized.values, weights, quantized.scales, out)
    exact = dequantize(quantized) * weights
    assert torch.allclose(out.float(), exact, rtol=2**-8, atol=0)
    weighted(quantized.values, None, quantized.scales, out)
    assert torch.equal(out, dequantize(quantized).to(torch.bfloat16))


# -- two ranks, started once; each saves what it found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("pair")
    pipes = torch.multiprocessing.get_context("spawn").Pipe()
    torch.multiprocessing.spawn(rank_main, args=(str(folder), pipes), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(("variant", "shape"), [(name, shape) for name in VARIANTS for shape in shapes_of(name)])
def test_every_copy_and_every_sum_is_exact(pair: list[dict[str, Any]], variant: str, shape: str) -> None:
    assert [found["wrong"][f"{variant}, {shape}"] for found in pair] == ["", ""]


@pytest.mark.parametrize(("variant", "fault"), [(name, fault) for name in VARIANTS for fault in faults_of(name)])
def test_a_fault_of_the_library_is_seen_by_both_ranks(pair: list[dict[str, Any]], variant: str, fault: str) -> None:
    told = [found["teeth"][f"{variant}, {fault}"] for found in pair]
    assert told[0] == told[1] != ""


MOVING = [
    name
    for name in VARIANTS
    if name
    in {  # slots move from dispatch to dispatch
        f"{variant} {dtype}"
        for dtype in ("bf16", "fp8")
        for variant in (
            "deepep_v2",
            "deepep_v2+expert_major",
            "nccl_ep_ht+expert_major",
            "nccl_ep_ll+rank_major",
            "flashinfer",
        )
    }
    | {"nccl_ep_ll fp8"}
]


@pytest.mark.parametrize("variant", MOVING)
def test_rows_staged_from_an_earlier_dispatch_are_seen(pair: list[dict[str, Any]], variant: str) -> None:
    """Why the staging is inside the call there: it is wrong outside."""
    assert pair[0]["teeth"][f"{variant}, stale staging"].startswith("rank 0: the ")


def test_staging_is_inside_the_call_only_where_slots_move(pair: list[dict[str, Any]]) -> None:
    included = {name for name, told in pair[0]["described"].items() if told["staging_included"]}
    assert included == set(MOVING)


COUNTS = "dispatch waits on the host for the receive counts"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_session_declares_its_phases_and_what_a_graph_may_hold(pair: list[dict[str, Any]], variant: str) -> None:
    declared, told = VARIANTS[variant], pair[0]["described"][variant]
    waits = declared.comm == "deepep_v2" and not declared.handle
    blocks = waits or (declared.algo == "ht" and declared.layout == "flat")
    in_library = declared.algo == "ll" and declared.dispatch_dtype == "fp8"
    phases = [("dispatch", True, blocks), ("identity", False, False), ("combine", True, False)]
    if declared.algo == "ll" and declared.layout == "expert_major":
        phases[1:2] = [("dequantize", False, False)] if in_library else []
    if declared.dispatch_dtype == "fp8" and not in_library:
        phases.insert(0, ("quantize", False, False))
    assert told["phases"] == phases
    assert told["capturable"] == (COUNTS if waits else "")
    assert told["quant_included"] == (None if declared.dispatch_dtype == "bf16" else in_library)
    assert told["formats"] == (declared.dispatch_dtype, "bf16")
    assert told["transport"].startswith("nvlink")
    assert told["versions"]


def test_a_call_of_each_variant_is_the_documented_sequence(pair: list[dict[str, Any]]) -> None:
    for name, _, variant in cases():
        sequence = ["dispatch", "combine"]
        if variant.algo == "ht" and not variant.handle:
            sequence = ["update", *sequence]
        assert [method for method, _ in pair[0]["calls"][name]] == sequence, name


def test_the_buffers_are_opened_with_the_documented_settings(pair: list[dict[str, Any]]) -> None:
    calls = pair[0]["calls"]
    opened = dict(calls["deepep_v2 fp8 open"])["__init__"]
    assert opened["allow_hybrid_mode"] == 0
    assert (opened["num_max_tokens_per_rank"], opened["num_topk"], opened["use_fp8_dispatch"]) == (6, 4, 1)
    assert dict(calls["deepep_v2 bf16"])["dispatch"]["num_sms"] == 24
    assert set(dict(calls["deepep_v2+cached bf16"])["dispatch"]) == {"x", "handle", "num_sms", "do_expand"}
    flash = dict(calls["flashinfer fp8"])["dispatch"]
    assert (flash["invalid_token_expert_id"], flash["runtime_max_tokens_per_rank"]) == (-1, 6)
    assert dict(calls["flashinfer bf16"])["combine"]["payload_in_workspace"] == 1


# -- docs/backends.md

BACKENDS_MD = (Path(__file__).resolve().parent.parent / "docs" / "backends.md").read_text()


def section(name: str) -> str:
    return " ".join(BACKENDS_MD.partition(f"### `{name}`")[2].partition("\n### ")[0].split())


def test_the_documented_limits_are_those_of_the_adapters() -> None:
    elastic, nccl, flash = section("deepep_v2"), section("nccl_ep"), section("flashinfer")
    assert f"a multiple of {deepep_v2.HIDDEN_STEP}" in elastic
    assert f"top-k at most {deepep_v2.MAX_TOPK}" in elastic
    assert f"{deepep_v2.DEFAULT_SMS} SMs" in elastic
    assert f"a multiple of {nccl_ep_limits.LL_HIDDEN_STEP}" in nccl
    assert f"at most {nccl_ep_limits.HT_MAX_TOKENS} tokens" in nccl
    assert f"top-k one of {', '.join(map(str, flashinfer_a2a.TOPK))}" in flash
    assert f"at most {flashinfer_a2a.MAX_RANKS} ranks" in flash
    for text in (elastic, nccl, flash):
        assert "contract-tested only" in text or "verified" in text


@pytest.mark.parametrize("name", sorted({variant.name for variant in VARIANTS.values()}))
def test_every_variant_is_documented(name: str) -> None:
    assert f"`{name}`" in section(VARIANTS[f"{name} bf16"].comm)
