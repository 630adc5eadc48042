"""The vLLM adapters without a GPU: verdicts, memory, versions, environment, small pieces.

The fake's signatures are those of the wheels of 0.20.0, 0.25.1 and 0.33.0 (tests/signatures).
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace

import pytest
import torch
from knob_helpers import BLACKWELL, CPU, HOPPER, parsed
from machine_helpers import b200_quad, cpu, h200_pair, machine

from bench import split, vllm_mega
from bench.backends import vllm_layer, vllm_limits, vllm_sessions
from bench.backends import vllm_mega as mega_adapter
from bench.backends.vllm_limits import split_slots, version_label
from bench.backends.vllm_sessions import InputQuantisation, unpacked_scales
from bench.backends.vllm_split import SplitBackend
from lib import formats
from lib.contract import Group, Missing, Phase, Session, Support, Unsupported
from lib.knobs import MachineFacts
from lib.machine import Machine
from lib.plan import Section, base_problem, make_plan
from lib.problem import Problem
from lib.rows import cell
from tests import fake_vllm
from tests.fake_vllm_mega import unpacked
from tests.recorded import recorded_api
from tests.vllm_ranks import VARIANTS

V3 = Problem(world=2, nodes=1, tokens=128, num_experts=256, topk=8, hidden=7168, inter=2048, seed=0, routing="uniform")
EVERYTHING = ("vllm", "deep_ep", "flashinfer")
ABSENT_VLLM, ABSENT_DEEPEP = "vLLM (pip install vllm)", "DeepEP (https://github.com/deepseek-ai/DeepEP)"
HT, LL = "deepep_ht+deepgemm", "deepep_ll+deepgemm"


def verdicts(section: Section, found: Machine, facts: MachineFacts = HOPPER, **env: str) -> dict[str, Support]:
    knobs = parsed(facts, **env)
    problem = base_problem(knobs)
    return {
        variant.name: backend.supports(variant, found, problem, knobs)
        for backend in section.backends(knobs)
        for variant in backend.variants(knobs)
    }


def verdict(name: str, found: Machine | None = None, **env: str) -> Support:
    """Of one variant on two H200s that have everything, unless told else."""
    env = {"GPUS": "2", "ALGO": "ht ll", "EXPERTS_LIST": "deepgemm triton trtllm", **env}
    found = found or h200_pair(*EVERYTHING)
    return verdicts(split.SECTION, found, BLACKWELL if found.sm == (10, 0) else HOPPER, **env)[name]


# -- variants


def test_variants_are_experts_by_algo_and_each_has_its_layout() -> None:
    knobs = parsed(HOPPER, ALGO="ht ll", EXPERTS_LIST="deepgemm triton")
    made = [variant for name in knobs.experts_list for variant in SplitBackend(name).variants(knobs)]
    assert [(v.name, v.compute_kernel, v.algo, v.layout) for v in made] == [
        ("deepep_ht+deepgemm", "deepgemm", "ht", "token_major"),
        ("deepep_ll+deepgemm", "deepgemm", "ll", "expert_major"),
        ("deepep_ht+triton", "triton", "ht", "token_major"),
        ("deepep_ll+triton", "triton", "ll", "expert_major"),
    ]
    assert {(v.comm, v.dispatch_dtype, v.combine_dtype) for v in made} == {("deepep", "fp8", "bf16")}


def test_an_empty_experts_list_is_the_default_one() -> None:
    names = [variant.name for b in split.SECTION.backends(parsed(EXPERTS_LIST="")) for variant in b.variants(parsed())]
    assert names == ["deepep_ht+deepgemm", "deepep_ht+trtllm"]


# -- verdicts


def test_what_two_h200s_with_both_libraries_can_run_is_planned() -> None:
    assert {name for name in VARIANTS if name.startswith("deepep") and verdict(name).ok} == {
        "deepep_ht+deepgemm",
        "deepep_ll+deepgemm",
        "deepep_ht+triton",
        "deepep_ll+triton",
    }
    assert verdict("deepep_ht+trtllm").reason == "needs sm_10x, this is sm_90"


def test_a_b200_runs_trtllm_with_ht_and_not_with_ll() -> None:
    there = b200_quad(*EVERYTHING)
    assert verdict("deepep_ht+trtllm", there, GPUS="4").ok
    reason = "ALGO=ll delivers batched experts, which trtllm does not take"
    assert verdict("deepep_ll+trtllm", there, GPUS="4") == Support("unsupported", reason)


REFUSED = [
    (HT, {"HIDDEN": "2880"}, "HIDDEN=2880: 128 x 128 block scales need a multiple of 128"),
    (LL, {"HIDDEN": "2880"}, "HIDDEN=2880: 128 x 128 block scales need a multiple of 128"),
    (LL, {"HIDDEN": "2304"}, "HIDDEN=2304: ll is compiled for 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192"),
    (HT, {"INTER": "112"}, "INTER=112: 128 x 128 block scales need a multiple of 128"),
    (LL, {"TOKENS": "449"}, "TOKENS=449 takes 512 slots, ll has 511 (NVSHMEM_QP_DEPTH=1024 / 2 - 1)"),
    (LL, {"TOKENS": "1024"}, "TOKENS=1024 takes 1024 slots, ll has 511 (NVSHMEM_QP_DEPTH=1024 / 2 - 1)"),
    (LL, {"TOPK": "12"}, "TOPK=12: ll takes at most 11"),
    (HT, {"GPUS": "1"}, "ht on one node takes 2, 4, 8 ranks, this is 1"),
]


@pytest.mark.parametrize(("name", "env", "reason"), REFUSED)
def test_what_a_library_would_refuse_is_refused_in_words(name: str, env: dict[str, str], reason: str) -> None:
    assert verdict(name, **env) == Support("unsupported", reason)
    assert cell(reason) == reason


@pytest.mark.parametrize(
    ("name", "env"), [(LL, {"TOKENS": "448"}), (LL, {"TOKENS": "0"}), (LL, {"GPUS": "1"}), (HT, {"TOKENS": "8192"})]
)
def test_what_the_libraries_take_is_planned(name: str, env: dict[str, str]) -> None:
    assert verdict(name, **env).ok


@pytest.mark.parametrize(
    ("installed", "absent"),
    [((), f"{ABSENT_VLLM}, {ABSENT_DEEPEP}"), (("vllm",), ABSENT_DEEPEP), (("deep_ep",), ABSENT_VLLM)],
)
def test_each_package_is_named_without_which_it_cannot_run(installed: tuple[str, ...], absent: str) -> None:
    assert verdict(HT, h200_pair(*installed)) == Support("missing", f"not installed: {absent}")
    hidden = verdict(HT, h200_pair(*installed), HIDDEN="2880")
    assert hidden.status == "unsupported"
    assert hidden.reason.endswith(f"; not installed: {absent}")


def test_other_machines_are_told_what_is_needed() -> None:
    for name, reason in ((HT, "sm_90 or newer"), (LL, "sm_90 or newer"), ("deepep_ht+trtllm", "sm_10x")):
        assert verdict(name, machine(8, (8, 0), installed=EVERYTHING)).reason == f"needs {reason}, this is sm_80"
        assert verdict(name, cpu()).reason.startswith(
            "needs an NVIDIA GPU, this machine has no GPU; not installed: vLLM"
        )
    twelve = machine(8, (12, 0), installed=EVERYTHING)
    assert verdict(HT, twelve).reason == "DeepGEMM's fp8 products need sm_90 or sm_10x, this is sm_120"
    assert verdict("deepep_ht+triton", twelve).ok


@pytest.mark.parametrize(("version", "status"), [("0.19.2", "missing"), ("0.20.0", "ok"), ("0.40.0", "ok")])
def test_a_vllm_that_is_too_old_is_missing_and_a_newer_one_runs(
    version: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_limits, "package_version", lambda name: version)
    found = verdict(HT)
    assert found.status == status
    too_old = "vLLM 0.19.2 is too old: 0.20 or newer (pip install -U vllm)"
    assert found.reason == ("" if status == "ok" else too_old)


@pytest.mark.parametrize(
    ("version", "label"),
    [("0.25.1", "0.25.1"), ("0.33.9", "0.33.9"), ("0.34.0rc1", "0.34.0rc1(untested)"), ("main", "main(untested)")],
)
def test_a_vllm_outside_the_compared_versions_says_so(version: str, label: str) -> None:
    assert version_label(version) == label


def test_the_mega_kernel_is_for_sm_10x_and_the_verdict_comes_before_anything_is_built() -> None:
    def of(found: Machine, **env: str) -> Support:
        facts = BLACKWELL if found.sm == (10, 0) else HOPPER if found.gpus else CPU
        return verdicts(vllm_mega.SECTION, found, facts, **env)["vllm_deep_gemm_mega"]

    assert of(h200_pair("vllm")) == Support("unsupported", "needs sm_10x, this is sm_90")
    assert of(b200_quad("vllm")).ok
    reason = "HIDDEN=2880: the mega kernel's tiles need a multiple of 128"
    assert of(b200_quad("vllm"), HIDDEN="2880") == Support("unsupported", reason)
    assert of(b200_quad()) == Support("missing", f"not installed: {ABSENT_VLLM}")
    assert of(cpu(), VLLM_MEGA="0") == Support("skipped", "VLLM_MEGA=0")
    assert of(cpu(), VLLM_MEGA="0", SECTION="vllm_mega").status == "unsupported"


def test_too_little_memory_is_a_verdict_with_the_figures() -> None:
    knobs = parsed(HOPPER, GPUS="2", TOKENS="8192", EXPERTS_LIST="deepgemm")
    small = machine(2, (9, 0), free_gb=8, installed=EVERYTHING)
    (case,) = make_plan(split.SECTION, knobs, small, sweep=False)
    assert case.support.status == "unsupported"
    assert "GB a rank, 8.0 GB is free (TOKENS=8192 NUM_EXPERTS=256" in case.support.reason
    enough = machine(2, (9, 0), free_gb=140, installed=EVERYTHING)
    (case,) = make_plan(split.SECTION, knobs, enough, sweep=False)
    assert case.support.ok


def test_ll_says_that_exclude_quant_cannot_take_its_quantisation_out() -> None:
    asked = {"SECTION": "vllm_split", "EXCLUDE_QUANT": "1"}
    assert any("ll quantises inside" in notice for notice in parsed(HOPPER, ALGO="ht ll", **asked).notices)
    assert not any("ll quantises" in notice for notice in parsed(HOPPER, ALGO="ht", **asked).notices)


# -- memory and slots


@pytest.mark.parametrize(
    ("world", "tokens", "slots"), [(2, 0, 64), (2, 8, 64), (2, 65, 128), (8, 8, 16), (1, 129, 256)]
)
def test_the_slots_of_all_ranks_fill_whole_tiles(world: int, tokens: int, slots: int) -> None:
    assert split_slots(replace(V3, world=world, tokens=tokens)) == slots
    assert slots * world % 128 == 0
    assert slots >= tokens


def test_memory_is_what_hand_arithmetic_says() -> None:
    ll = SplitBackend("deepgemm").variants(parsed(HOPPER, ALGO="ll"))[0]
    ht = SplitBackend("deepgemm").variants(parsed(HOPPER, ALGO="ht"))[0]
    weights = int(128 * 3 * 2048 * 7168 * (1 + 4 / 128**2))
    making = 6 * 2 * 2048 * 7168 * 4
    rows = 128 * 2 * 128  # 128 local experts, 2 ranks, 128 slots
    held = rows * 7168 * (1 + 4 / 128) * 2 + rows * (7168 * 2 + 2048 * (2 + 1 + 4 / 128))
    assert SplitBackend("deepgemm").memory_bytes(ll, V3) == int(weights + making + 1_908_408_320 + held)
    copies = 2 * 128
    rows = copies * 8 + 128 * 128
    between = rows * (7168 + 7168) * 2 + rows * (7168 + 2048) * (1 + 4 / 128)
    received = copies * (7168 * (1 + 4 / 128) + 8 * 16) * 2 + 128 * 7168 * 2 * 3
    total = weights + making + (1 << 30) + between + received
    assert math.isclose(SplitBackend("deepgemm").memory_bytes(ht, V3), total, abs_tol=4)
    trtllm = SplitBackend("trtllm")
    assert trtllm.memory_bytes(replace(ht, compute_kernel="trtllm"), V3) > weights * 2


# -- small pieces


def test_four_bit_elements_are_packed_as_the_kernel_unpacks_them() -> None:
    generator = torch.Generator().manual_seed(0)
    quantized = formats.quantize("mxfp4", torch.randn(6, 128, generator=generator))
    assert quantized.scales is not None
    codes = mega_adapter.packed_fp4(quantized.values)
    assert codes.shape == (6, 64)
    again = unpacked(codes, mega_adapter.scale_exponents(quantized.scales))
    assert torch.equal(again, formats.dequantize(quantized))
    one = torch.tensor([[0.5, -6.0]])
    assert mega_adapter.packed_fp4(one).tolist() == [[1 | (0xF << 4)]]


def test_packed_exponents_of_ll_are_unpacked_lowest_first() -> None:
    packed = torch.tensor([[[127 | 128 << 8 | 126 << 16 | 120 << 24]]], dtype=torch.int32)
    assert unpacked_scales(packed).tolist() == [[[1.0, 2.0, 0.5, 2.0**-7]]]
    plain = torch.ones(1, 1, 2)
    assert unpacked_scales(plain) is plain


def test_the_environment_is_set_over_the_shells_and_a_tuned_folder_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*vllm_limits.KERNEL_ENVIRONMENT, vllm_limits.E8M0, *vllm_limits.UNSET]:
        monkeypatch.setenv(name, "7")
    for name in vllm_limits.QUIET:
        monkeypatch.setenv(name, "kept")
    chosen = vllm_limits.set_environment(power_of_two_scales=False)
    assert chosen["VLLM_USE_DEEP_GEMM_E8M0"] == "0"
    assert {name: os.environ[name] for name in chosen} == chosen
    assert "VLLM_TUNED_CONFIG_FOLDER" not in os.environ
    assert os.environ["VLLM_LOGGING_LEVEL"] == "kept"


def test_a_vllm_without_the_name_to_step_in_for_is_missing() -> None:
    with pytest.raises(Missing, match="moe_kernel_quantize_input"):
        InputQuantisation(sys)


@pytest.mark.parametrize(
    ("local_rank", "expected"),
    [
        (0, "meet dispatch meet experts meet meet meet combine meet"),
        (1, "meet dispatch meet meet experts meet meet combine meet"),
    ],
)
def test_the_experts_compile_between_meetings_the_leader_first(
    local_rank: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank is in a collective of DeepEP's while another compiles: that would time out."""
    events: list[str] = []
    monkeypatch.setattr(vllm_sessions, "settle", lambda group: events.append("meet"))
    session = Session()
    session.phases = [Phase(name, lambda name=name: events.append(name)) for name in ("dispatch", "experts", "combine")]  # type: ignore[misc]
    vllm_sessions.first_run(session, Group(local_rank, 2, local_rank, 1, torch.device("cpu"), pg=None, host_pg=None))
    assert " ".join(events) == expected


@pytest.mark.parametrize("name", [HT, "vllm_deep_gemm_mega"])
def test_a_library_that_does_not_import_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("vllm", "deep_ep"):
        monkeypatch.setitem(sys.modules, module, None)
    for variable in (*vllm_limits.KERNEL_ENVIRONMENT, vllm_limits.E8M0, *vllm_limits.QUIET):
        monkeypatch.setenv(variable, "")  # so that what open sets is undone
    backend, variant = VARIANTS[name]
    group = Group(0, 2, 0, 1, torch.device("cpu"), pg=None, host_pg=None)
    with pytest.raises(Missing):
        backend.open(group, variant, V3, parsed(HOPPER))


def test_scales_that_vllm_will_not_use_are_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_limits.E8M0, "1")
    with fake_vllm.installed("0.25.1") as state:
        assert vllm_layer.loaded_versions(power_of_two_scales=True)["deep_gemm"] == "2.5.0 (vendored)"
        state.refuses_scales = True
        with pytest.raises(Unsupported, match="has power-of-two scales off"):
            vllm_layer.loaded_versions(power_of_two_scales=True)


# -- the fakes take the recorded calls and no others


def test_versions_differ_where_the_adapter_looks() -> None:
    config = f"{fake_vllm.FM}.config:FusedMoEConfig"
    finalize = f"{fake_vllm.FM}.modular_kernel:FusedMoEKernelModularImpl._finalize"
    oldest, newest = (recorded_api(f"vllm_{version}.json") for version in ("0.20.0", "0.33.0"))
    assert "intermediate_size" in newest[config].parameters
    assert "intermediate_size" not in oldest[config].parameters
    assert ("shared_experts" in oldest[finalize].parameters, "shared_experts" in newest[finalize].parameters) == (
        False,
        True,
    )


@pytest.mark.parametrize("version", fake_vllm.VERSIONS)
def test_a_call_that_a_version_would_refuse_is_refused(version: str) -> None:
    with fake_vllm.installed(version):
        make = vllm_layer.attribute(f"{fake_vllm.FM}.config:fp8_w8a8_moe_quant_config")
        with pytest.raises(TypeError, match="block"):
            make(w1_scale=None, w2_scale=None, block=[128, 128])
        parallel = vllm_layer.attribute(f"{fake_vllm.FM}.config:FusedMoEParallelConfig")
        with pytest.raises(TypeError, match="missing 1 required"):
            parallel(*range(11))
        with pytest.raises(Missing, match=f"vLLM {version}"):
            vllm_layer.attribute(f"{fake_vllm.FM}.config:NoSuchConfig")
