"""The DeepEP adapter without a GPU: its verdicts here, and its calls on two ranks against a Buffer that enforces them.

The fake's signatures are those of the wheel that was measured (tests/signatures); tests/test_record_signatures.py is
about the tool that wrote them down. The last part holds docs/backends.md to the code.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from knob_helpers import HOPPER, parsed
from machine_helpers import machine

from bench import comm, fi_mega, ref, split, vllm_mega
from bench.backends import deepep_limits
from bench.backends.deepep_limits import ht_buffer_bytes, ll_buffer_bytes, ll_slots
from lib.contract import Group, Missing, Support, Variant
from lib.knobs import COMM_BACKENDS, MEGA_BACKENDS, REF_BACKENDS, SM90_MEGA_BACKENDS
from lib.problem import Problem
from tests import fake_deep_ep
from tests.deepep_ranks import BACKEND, CPU, PAIR, SHAPES, VARIANTS, faults_of, rank_main
from tests.recorded import recorded

V3 = Problem(world=8, nodes=1, tokens=128, num_experts=256, topk=8, hidden=7168, inter=2048, seed=0, routing="uniform")
HT, CACHED, LL = (next(v for v in VARIANTS.values() if v.name == f"deepep_{n}") for n in ("ht", "ht+cached", "ll"))


def verdict(
    variant: Variant, installed: bool = True, gpus: int = 8, sm: tuple[int, int] = (9, 0), **shape: Any
) -> Support:
    found = machine(gpus, sm, installed=("deep_ep",) if installed else ())
    return BACKEND.supports(variant, found, replace(V3, **shape), parsed(HOPPER))


# -- variants


def test_variants_are_algo_by_dtype_by_sm_budget_and_ll_has_no_budget() -> None:
    knobs = parsed(HOPPER, ALGO="ht ll", DISPATCH_DTYPE="bf16 fp8", NUM_SMS="0 24")
    found = [(v.name, v.dispatch_dtype, v.num_sms, v.layout, v.handle) for v in BACKEND.variants(knobs)]
    expected: list[tuple[str, str, int | None, str, str]] = []
    for dtype in ("bf16", "fp8"):
        for sms in (0, 24):
            expected.append(("deepep_ht", dtype, sms, "token_major", ""))
            expected.append(("deepep_ht+cached", dtype, sms, "token_major", "cached"))
    expected += [("deepep_ll", dtype, None, "expert_major", "") for dtype in ("bf16", "fp8")]
    assert found == expected
    assert {(v.comm, v.combine_dtype, v.compute_kernel) for v in BACKEND.variants(knobs)} == {("deepep", "bf16", "")}


@pytest.mark.parametrize(("algo", "names"), [("ht", ["deepep_ht", "deepep_ht+cached"]), ("ll", ["deepep_ll"])])
def test_algo_chooses_the_mode(algo: str, names: list[str]) -> None:
    assert [variant.name for variant in BACKEND.variants(parsed(HOPPER, ALGO=algo))] == names


# -- verdicts


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 12, 16])
def test_ht_takes_two_four_or_eight_ranks_and_ll_any_number_that_the_buffer_takes(world: int) -> None:
    shape: dict[str, Any] = {"world": world, "num_experts": 48 * world}
    assert verdict(HT, **shape).ok == verdict(CACHED, **shape).ok == (world in (2, 4, 8))
    assert verdict(LL, **shape).ok == (world != 12)
    assert world in (2, 4, 8) or verdict(HT, **shape).reason == f"ht on one node takes 2, 4, 8 ranks, this is {world}"


ABSENT = "not installed: DeepEP (https://github.com/deepseek-ai/DeepEP)"
REFUSED = [
    (LL, {"tokens": 512}, "TOKENS=512 takes 512 slots, ll has 511 (NVSHMEM_QP_DEPTH=1024 / 2 - 1)"),
    (LL, {"world": 2, "tokens": 511}, "TOKENS=511 takes 512 slots, ll has 511 (NVSHMEM_QP_DEPTH=1024 / 2 - 1)"),
    (LL, {"hidden": 2880}, "HIDDEN=2880: ll is compiled for 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192"),
    (LL, {"topk": 12}, "TOPK=12: ll takes at most 11"),
    (LL, {"world": 12, "num_experts": 96}, "ll takes fewer than 8 ranks or a multiple of it, this is 12"),
    (HT, {"topk": 33}, "TOPK=33: ht takes at most 32"),
    (replace(HT, num_sms=23), {}, "NUM_SMS=23: ht takes an even number of SMs (half send, half receive)"),
    (replace(HT, dispatch_dtype="fp8"), {"hidden": 2880}, "HIDDEN=2880: fp8 needs a multiple of 128"),
    (HT, {"hidden": 2872}, "HIDDEN=2872: ht takes rows of 32, 64, .. 16368 bytes, this is 5744"),
    (HT, {"hidden": 8192}, "HIDDEN=8192: ht takes rows of 32, 64, .. 16368 bytes, this is 16384"),
    (LL, {"gpus": 0}, "needs an NVIDIA GPU, this machine has no GPU"),
    (HT, {"gpus": 0}, "needs an NVIDIA GPU, this machine has no GPU"),
    (HT, {"sm": (8, 0)}, "needs sm_90 or newer, this is sm_80"),
    (LL, {"sm": (8, 0)}, "needs sm_90 or newer, this is sm_80"),
]
ACCEPTED = [
    (LL, {"tokens": 511}),
    (LL, {"world": 2, "tokens": 510}),
    (LL, {"hidden": 3072}),
    (LL, {"topk": 11}),
    (LL, {"tokens": 0}),
    (LL, {"sm": (10, 0)}),
    (HT, {"topk": 32}),
    (HT, {"hidden": 2880}),
    (HT, {"tokens": 8192}),
    (replace(HT, num_sms=132), {}),
    (replace(HT, num_sms=0), {}),
    (replace(HT, dispatch_dtype="fp8"), {"hidden": 8192}),
]


@pytest.mark.parametrize(("variant", "shape", "reason"), REFUSED)
def test_what_the_library_would_refuse_is_refused_in_words(
    variant: Variant, shape: dict[str, Any], reason: str
) -> None:
    assert verdict(variant, **shape) == Support("unsupported", reason)


@pytest.mark.parametrize(("variant", "shape"), ACCEPTED)
def test_what_the_library_takes_is_planned(variant: Variant, shape: dict[str, Any]) -> None:
    assert verdict(variant, **shape) == Support()


@pytest.mark.parametrize(("variant", "shape", "reason"), REFUSED)
def test_an_absent_package_is_named_whatever_else_is_wrong(
    variant: Variant, shape: dict[str, Any], reason: str
) -> None:
    assert verdict(variant, installed=False, **shape) == Support("unsupported", f"{reason}; {ABSENT}")


def test_an_absent_package_alone_is_missing() -> None:
    assert verdict(HT, installed=False) == verdict(LL, installed=False) == Support("missing", ABSENT)


def test_a_deeper_queue_holds_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "2048")
    assert verdict(LL, tokens=1023).ok
    told = "TOKENS=1024 takes 1024 slots, ll has 1023 (NVSHMEM_QP_DEPTH=2048 / 2 - 1)"
    assert verdict(LL, tokens=1024).reason == told


def test_planning_touches_no_variable_and_asks_for_none() -> None:
    before = dict(os.environ)
    for variant in VARIANTS.values():
        verdict(variant)
        BACKEND.memory_bytes(variant, V3)
        assert BACKEND.env(variant, V3, parsed(HOPPER)) == {}
    assert dict(os.environ) == before


# -- memory


def test_memory_is_what_hand_arithmetic_says() -> None:
    # ll: 2 * 256 experts * 128 tokens * 2 sides * (7168 * 2 + 56 * 4) bytes; then 32 experts * 1024 slots, three times
    assert ll_buffer_bytes(V3) == 1_908_408_320
    assert BACKEND.memory_bytes(LL, V3) == 1_908_408_320 + 32 * 1024 * 14_336 * 3 == 3_317_694_464
    assert BACKEND.memory_bytes(HT, V3) == (1 << 30) + 8 * 128 * 14_336 * 4 == 1_132_462_080
    # 66 channels * 8 ranks * 256 slots * (14336 + 2057) bytes
    assert ht_buffer_bytes(V3, 132) == 66 * 8 * 256 * 16_393 == 2_215_809_024


@pytest.mark.parametrize(
    ("world", "tokens", "slots"), [(1, 0, 4), (2, 1, 2), (2, 6, 6), (3, 5, 8), (4, 1, 1), (6, 7, 8)]
)
def test_ll_rounds_its_capacity_up_to_slots_in_fours(world: int, tokens: int, slots: int) -> None:
    assert ll_slots(replace(V3, world=world, tokens=tokens)) == slots


def test_the_ll_buffer_is_the_librarys_own_hint_up_to_its_signals() -> None:
    hint = fake_deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 1, 256)
    assert hint == 1_908_410_496, "what the real library answered for this shape"
    signals = 2 * 256 * 4
    assert hint - ll_buffer_bytes(V3) == signals + fake_deep_ep.ALIGNMENT


@pytest.mark.parametrize("sms", [20, 62, 96, 132])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_ht_buffer_covers_the_librarys_own_hint(world: int, sms: int) -> None:
    row_and_meta = 7168 * 2 + 8 + 128 * (8 + 4 + 4)  # csrc/config.hpp, get_nvl_buffer_size_hint
    hint = sms // 2 * world * (5 * 4 + 256 * row_and_meta)
    assert ht_buffer_bytes(replace(V3, world=world), sms) >= -(-hint // 128) * 128
    assert ht_buffer_bytes(replace(V3, world=world), sms) % 128 == 0


# -- the library is not there


def test_a_module_that_does_not_import_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    group = Group(0, 2, 0, 1, CPU, pg=None, host_pg=None)
    with pytest.raises(Missing, match="deep_ep does not import"):
        BACKEND.open(group, HT, PAIR, parsed(HOPPER))


# -- the fake takes the recorded calls and no others


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda buffer: buffer.get_dispatch_config(), "missing a required argument: 'num_ranks'"),
        (lambda buffer: buffer.get_dispatch_config(ranks=2), "'num_ranks'"),
        (lambda buffer: buffer.dispatch(None, None, num_sms=24), "got an unexpected keyword argument 'num_sms'"),
        (lambda buffer: buffer.low_latency_dispatch(None, None, None, 128), "missing a required argument"),
        (lambda buffer: buffer.combine(None), "missing a required argument"),
        (lambda buffer: buffer(None, num_bytes=0), "got an unexpected keyword argument 'num_bytes'"),
    ],
)
def test_a_call_that_the_recorded_class_would_refuse_is_refused(call: Any, words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        call(fake_deep_ep.Buffer)


def test_a_recorded_method_that_the_fake_lacks_says_so() -> None:
    with pytest.raises(NotImplementedError, match="is_sm90_compiled"):
        fake_deep_ep.Buffer.is_sm90_compiled()  # type: ignore[attr-defined]


def test_an_odd_sm_budget_is_refused_by_the_library_too() -> None:
    with pytest.raises(AssertionError, match="must be even"):
        fake_deep_ep.Buffer.set_num_sms(23)


def test_every_recorded_default_reads_as_a_literal() -> None:
    signature, static = recorded(fake_deep_ep.SIGNATURES)["low_latency_dispatch"]
    assert not static
    assert signature.parameters["use_fp8"].default is True
    assert signature.parameters["use_ue8m0"].default is False
    assert signature.parameters["cumulative_local_expert_recv_stats"].default is None
    assert recorded(fake_deep_ep.SIGNATURES)["set_num_sms"][1]


# -- two ranks, started once; each saves what it found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("pair")
    torch.multiprocessing.spawn(rank_main, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_copy_and_every_sum_is_exact(pair: list[dict[str, Any]], variant: str, shape: str) -> None:
    assert [found["wrong"][f"{variant}, {shape}"] for found in pair] == ["", ""]


@pytest.mark.parametrize(("variant", "fault"), [(name, fault) for name in VARIANTS for fault in faults_of(name)])
def test_a_fault_of_the_library_is_seen_by_both_ranks(pair: list[dict[str, Any]], variant: str, fault: str) -> None:
    told = [found["teeth"][f"{variant}, {fault}"] for found in pair]
    assert told[0] == told[1] != ""


def test_a_dequantised_copy_of_an_earlier_dispatch_is_seen(pair: list[dict[str, Any]]) -> None:
    """Slots move from dispatch to dispatch, so what was staged for one of them is wrong for the next."""
    assert pair[0]["teeth"]["stale staging"].startswith("rank 0: the combined token ")


def test_slots_move_from_dispatch_to_dispatch(pair: list[dict[str, Any]]) -> None:
    for found in pair:
        first, second = found["rules"]["orders"]
        assert first != second
        assert list(map(sorted, first)) == list(map(sorted, second))


def test_a_third_dispatch_result_is_one_too_many(pair: list[dict[str, Any]]) -> None:
    assert pair[0]["rules"]["a third result"] == "2 dispatch results are still held"


def test_a_buffer_that_outlives_its_process_group_is_seen(pair: list[dict[str, Any]]) -> None:
    assert pair[0]["rules"]["an early end"] == "1 Buffers outlive their process group"


BLOCKS = "dispatch waits on the host for the receive counts"
QUANTIZE, IDENTITY = ("quantize", False, False), ("identity", False, False)
COMBINE = ("combine", True, False)
DECLARED = {  # phases (name, timed, blocks the host), capturable, quant_included, staging_included
    "deepep_ht bf16": ([("dispatch", True, True), IDENTITY, COMBINE], BLOCKS, None, False),
    "deepep_ht+cached bf16": ([("dispatch", True, False), IDENTITY, COMBINE], "", None, False),
    "deepep_ht fp8": ([QUANTIZE, ("dispatch", True, True), IDENTITY, COMBINE], BLOCKS, False, False),
    "deepep_ht+cached fp8": ([QUANTIZE, ("dispatch", True, False), IDENTITY, COMBINE], "", False, False),
    "deepep_ll bf16": ([("dispatch", True, False), COMBINE], "", None, False),
    "deepep_ll fp8": ([("dispatch", True, False), ("dequantize", False, False), COMBINE], "", True, True),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_session_declares_its_phases_and_what_a_graph_may_hold(pair: list[dict[str, Any]], variant: str) -> None:
    phases, capturable, quantised, staged = DECLARED[variant]
    for found in pair:
        told = found["described"][variant]
        assert (told["phases"], told["capturable"]) == (phases, capturable)
        assert (told["quant_included"], told["staging_included"]) == (quantised, staged)
        assert told["formats"] == (VARIANTS[variant].dispatch_dtype, "bf16")
        assert (told["deterministic"], told["transport"]) == (True, "nvlink")


def test_ht_opens_a_buffer_with_the_sm_budget_and_ll_one_of_the_librarys_own_size(pair: list[dict[str, Any]]) -> None:
    calls = pair[0]["calls"]
    ht = dict(calls["deepep_ht bf16 open"])
    assert ht["set_num_sms"] == {"new_num_sms": 24}
    assert (ht["__init__"]["num_nvl_bytes"], ht["__init__"]["explicitly_destroy"]) == (1 << 30, True)
    ll = dict(calls["deepep_ll bf16 open"])
    hint = fake_deep_ep.Buffer.get_low_latency_rdma_size_hint(*ll["get_low_latency_rdma_size_hint"].values())
    assert (ll["__init__"]["num_rdma_bytes"], ll["__init__"]["num_qps_per_rank"]) == (hint, PAIR.local_experts)


def test_a_call_of_each_variant_is_the_documented_sequence(pair: list[dict[str, Any]]) -> None:
    calls = {name: pair[0]["calls"][name] for name in VARIANTS}
    for name, made in calls.items():
        sequence = ["get_dispatch_layout", "dispatch", "combine"]
        if name.startswith("deepep_ht+cached"):
            sequence = ["dispatch", "combine"]
        elif name.startswith("deepep_ll"):
            sequence = ["low_latency_dispatch", "low_latency_combine"]
        assert [method for method, _ in made] == sequence, name
    cached = dict(calls["deepep_ht+cached fp8"])["dispatch"]
    assert cached["x"] == ("float8_e4m3fn[6, 2048]", "float32[6, 16]")
    assert set(cached) == {"x", "handle", "config"}
    assert [dict(calls[f"deepep_ll {dtype}"])["low_latency_dispatch"]["use_fp8"] for dtype in ("bf16", "fp8")] == [0, 1]
    assert dict(calls["deepep_ll fp8"])["low_latency_combine"]["x"] == "bfloat16[4, 12, 2048]"


# -- docs/backends.md

BACKENDS_MD = (Path(__file__).resolve().parent.parent / "docs" / "backends.md").read_text()
OVERVIEW = {
    line.split("|")[1].strip().strip("`"): line
    for line in BACKENDS_MD.partition("## Overview")[2].partition("\n## ")[0].splitlines()
    if line.startswith("| `")
}


def all_backends() -> dict[str, Any]:
    knobs = parsed(HOPPER, EXPERTS_LIST="deepgemm trtllm triton")
    sections = (ref.SECTION, split.SECTION, vllm_mega.SECTION, fi_mega.SECTION, comm.SECTION)
    return {backend.name: backend for section in sections for backend in section.backends(knobs)}


def test_every_backend_has_a_row_and_a_section_in_the_documentation() -> None:
    lists = f"{REF_BACKENDS} {COMM_BACKENDS} {MEGA_BACKENDS} {SM90_MEGA_BACKENDS}".split()
    assert set(OVERVIEW) == set(all_backends()) >= set(lists)
    headings = re.findall(r"^### (.+)$", BACKENDS_MD, re.MULTILINE)
    assert {name for heading in headings for name in re.findall(r"`([^`]+)`", heading)} == set(OVERVIEW)


def test_the_documented_limits_are_those_of_the_adapter() -> None:
    text = " ".join(BACKENDS_MD.partition("### `deepep`")[2].partition("\n### ")[0].split())
    assert f"hidden size one of {', '.join(map(str, deepep_limits.LL_HIDDEN))}" in text
    assert f"rows of at most {deepep_limits.HT_ROW_MAX} bytes" in text
    for limit in (deepep_limits.LL_MAX_TOPK, deepep_limits.HT_MAX_TOPK):
        assert f"top-k at most {limit}" in text
