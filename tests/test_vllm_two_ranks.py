"""The vLLM adapters on two ranks over the fake library of three versions: right results, faults, and the calls made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.multiprocessing

from tests import fake_deep_ep
from tests.fake_vllm_experts import FAULTS
from tests.vllm_ranks import (
    BROKEN,
    IN_OTHER_VERSIONS,
    LL_PAIR,
    MAIN,
    OTHER_VERSIONS,
    SHAPES,
    VARIANTS,
    rank_main,
)

HT, LL = BROKEN


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("vllm_pair")
    torch.multiprocessing.spawn(rank_main, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("shape", ["uniform", *SHAPES])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_dispatch_is_exact_and_every_moe_within_its_limits(
    pair: list[dict[str, Any]], name: str, shape: str
) -> None:
    assert [found[f"{MAIN} {name}"]["wrong"][shape] for found in pair] == ["", ""]


@pytest.mark.parametrize("version", sorted(OTHER_VERSIONS))
@pytest.mark.parametrize("name", IN_OTHER_VERSIONS)
def test_older_and_newer_versions_are_driven_by_the_same_adapter(
    pair: list[dict[str, Any]], name: str, version: str
) -> None:
    for found in pair:
        told = found[f"{version} {name}"]
        assert told["wrong"] == {"uniform": ""}
        assert told["described"]["versions"]["vllm"] == version


@pytest.mark.parametrize("fault", [*FAULTS, "corrupt_row"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_of_one_rank_is_seen_by_both(pair: list[dict[str, Any]], name: str, fault: str) -> None:
    told = [found[f"{MAIN} {name}"]["teeth"][fault] for found in pair]
    assert told[0] == told[1] != ""


QUANT, DISPATCH, COMBINE = ("quant", True, False), ("dispatch", True, True), ("combine", True, False)
EXPERTS, LL_DISPATCH = ("experts", True, False), ("dispatch", True, False)
DECLARED = {  # phases (name, timed, blocks the host), quant_included
    HT: ([("quant", False, False), DISPATCH, EXPERTS, COMBINE], False),
    LL: ([LL_DISPATCH, EXPERTS, COMBINE], True),
    "deepep_ll+triton": ([LL_DISPATCH, ("experts", True, True), COMBINE], True),
    "vllm_deep_gemm_mega": ([("stage", True, False), ("forward", True, False)], True),
}


@pytest.mark.parametrize("name", DECLARED)
def test_a_session_declares_its_phases_and_its_quantisation(pair: list[dict[str, Any]], name: str) -> None:
    told = pair[0][f"{MAIN} {name}"]["described"]
    assert (told["phases"], told["quant_included"]) == DECLARED[name]
    mega = name.startswith("vllm")
    assert told["formats"] == (("mxfp8", "bf16", "mxfp8_mxfp4") if mega else ("fp8", "bf16", "fp8"))
    assert told["bare"] is mega
    assert (told["capturable"] == "") is (VARIANTS[name][1].algo == "ll")


def test_what_chooses_kernels_is_in_the_versions(pair: list[dict[str, Any]]) -> None:
    told = pair[0][f"{MAIN} {HT}"]["described"]["versions"]
    assert (told["vllm"], told["deep_gemm"]) == ("0.25.1", "2.5.0 (vendored)")
    assert {name: told[name] for name in told if name.isupper()} == {
        "VLLM_USE_DEEP_GEMM": "1",
        "VLLM_MOE_USE_DEEP_GEMM": "1",
        "VLLM_USE_DEEP_GEMM_E8M0": "0",
        "VLLM_BATCH_INVARIANT": "0",
        "VLLM_MOE_SKIP_PADDING": "0",
    }


STEPS = [f"FusedMoEKernelModularImpl.{name}" for name in ("_prepare", "_fused_experts", "_finalize")]


def test_a_call_is_the_public_apply_and_the_phases_are_its_steps(pair: list[dict[str, Any]]) -> None:
    for name in (HT, LL):
        told = pair[0][f"{MAIN} {name}"]
        mine = [step for step in told["call"] if step.startswith("FusedMoEKernel")]
        assert mine == ["FusedMoEKernel.apply", *STEPS]
        staged = {phase: [step for step in made if "Impl" in step] for phase, made in told["phases"].items()}
        assert staged | {"quant": []} == {
            "quant": [],
            "dispatch": STEPS[:1],
            "experts": STEPS[1:2],
            "combine": STEPS[2:],
        }


def test_the_quantisation_is_in_the_call_or_out_of_it_as_asked_and_always_a_phase(pair: list[dict[str, Any]]) -> None:
    quantise = "moe_kernel_quantize_input"
    without, within = pair[0][f"{MAIN} {HT}"], pair[0]["quantisation included"]
    assert quantise not in without["call"]
    assert within["call"].count(quantise) == 1
    for told in (without, within):
        assert told["phases"]["quant"] == [quantise]
        assert quantise not in told["phases"]["dispatch"]
    assert (within["described"]["phases"][0], within["described"]["quant_included"]) == (QUANT, True)
    assert within["wrong"] == {"uniform": "", "no tokens": ""}


def test_ll_has_the_metadata_that_serving_sets_and_leaves_none_behind(pair: list[dict[str, Any]]) -> None:
    for found in pair:
        for name in (LL, "deepep_ll+triton"):
            told = found[f"{MAIN} {name}"]
            assert told["expected_m"] == [2 * LL_PAIR.tokens] * 2  # once in the call, once in the staged experts
            assert not told["context after"]
            assert not told["workspace after"]


def test_power_of_two_scales_are_a_format_of_their_own(pair: list[dict[str, Any]]) -> None:
    told = pair[0]["power of two"]
    assert told["wrong"] == {"uniform": ""}
    assert told["described"]["formats"][2] == "fp8_e8m0"
    assert told["described"]["versions"]["VLLM_USE_DEEP_GEMM_E8M0"] == "1"


def test_a_buffer_is_opened_as_vllms_managers_open_theirs(pair: list[dict[str, Any]]) -> None:
    ht = dict(pair[0][f"{MAIN} {HT}"]["open"])
    assert ht["set_num_sms"] == {"new_num_sms": 20}
    assert (ht["__init__"]["num_nvl_bytes"], ht["__init__"]["num_qps_per_rank"]) == (1 << 30, 1)
    ll = dict(pair[0][f"{MAIN} {LL}"]["open"])
    hint = fake_deep_ep.Buffer.get_low_latency_rdma_size_hint(64, LL_PAIR.hidden, 2, LL_PAIR.num_experts)
    assert (ll["__init__"]["num_rdma_bytes"], ll["__init__"]["low_latency_mode"]) == (hint, True)
    assert ll["__init__"]["num_qps_per_rank"] == LL_PAIR.local_experts
