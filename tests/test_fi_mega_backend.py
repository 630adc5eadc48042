"""The fi_mega adapters without a GPU: verdicts here, and their calls on two ranks against a fake that enforces them.

The fake takes the calls and config fields recorded from the real wheels 0.6.18.post1 and 0.7.4 (tests/signatures), and
lib/measure.py runs each case through its device methods on a host clock, so what is left to a GPU is the kernels.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from knob_helpers import BLACKWELL, HOPPER, parsed
from machine_helpers import PACKAGES, b200_quad, cpu, h200_pair, machine

from bench import fi_mega
from bench.backends import fi_cutedsl, fi_limits
from bench.backends.fi_mega import built, one_line_errors
from lib import mega_knobs
from lib.contract import Group, Missing, Support, Unsupported
from lib.formats import roundtrip
from lib.machine import Machine
from lib.plan import make_plan
from lib.problem import Problem
from tests import fake_flashinfer
from tests.fi_ranks import CPU, EVERY, FAULTS, NEW, OLD, PAIR, SHAPED, SHAPES, TIMINGS, rank_main
from tests.recorded import recorded_dataclass

V3 = Problem(world=2, nodes=1, tokens=128, num_experts=256, topk=8, hidden=7168, inter=2048, seed=0, routing="uniform")
HERE = {"SECTION": "fi_mega", "GPUS": "2", "MEGA_LIST": EVERY}


def verdicts(found: Machine, env: dict[str, str] | None = None, **shape: Any) -> dict[str, Support]:
    knobs, problem = parsed(HOPPER, **HERE, **(env or {})), replace(V3, **shape)
    return {
        backend.name: backend.supports(variant, found, problem, knobs)
        for backend in fi_mega.SECTION.backends(knobs)
        for variant in backend.variants(knobs)
    }


# -- variants


def test_a_suffix_stands_in_the_variant_and_in_the_kernel_of_those_that_have_the_option() -> None:
    def made(**env: str) -> dict[str, tuple[str, str, str]]:
        knobs = parsed(BLACKWELL, SECTION="fi_mega", MEGA_LIST=EVERY, **env)
        found = [variant for backend in fi_mega.SECTION.backends(knobs) for variant in backend.variants(knobs)]
        return {v.name: (v.compute_kernel, v.dispatch_dtype, v.combine_dtype) for v in found}

    plain = made()
    assert {name: row[1:] for name, row in plain.items()} == {
        "deep_gemm_mega": ("mxfp8", "bf16"),
        "mxfp8_cutedsl": ("mxfp8", "bf16"),
        "nvfp4_cutedsl": ("nvfp4", "bf16"),
        "sm90_push_fp8": ("fp8", "fp8"),
        "sm90_pull_fp8": ("fp8", "bf16"),
    }
    assert all(name == row[0] for name, row in plain.items())
    ikr = {"mxfp8_cutedsl+ikr", "nvfp4_cutedsl+ikr", "sm90_pull_fp8+ikr"}
    assert set(made(MEGA_IKR="1")) == {"deep_gemm_mega", "sm90_push_fp8"} | ikr
    wire = made(MEGA_COMBINE_DTYPE="mxfp8")
    assert wire.pop("nvfp4_cutedsl+combine_mxfp8") == ("nvfp4_cutedsl+combine_mxfp8", "nvfp4", "mxfp8")
    assert wire == {name: row for name, row in plain.items() if name != "nvfp4_cutedsl"}


def test_the_option_is_in_the_repro_line() -> None:
    knobs = parsed(BLACKWELL, SECTION="fi_mega", MEGA_COMBINE_DTYPE="nvfp4", MEGA_LIST="nvfp4_cutedsl")
    (case,) = make_plan(fi_mega.SECTION, knobs, b200_quad(*PACKAGES), sweep=False)
    assert case.support.ok
    assert "MEGA_COMBINE_DTYPE=nvfp4" in case.repro


# -- verdicts, before anything is allocated or imported


def test_a_kernel_is_of_one_gpu_generation() -> None:
    hopper = verdicts(h200_pair(*PACKAGES))
    for name in ("deep_gemm_mega", "mxfp8_cutedsl", "nvfp4_cutedsl"):
        assert hopper[name] == Support("unsupported", "needs sm_100, this is sm_90")
    assert hopper["sm90_push_fp8"] == hopper["sm90_pull_fp8"] == Support()
    blackwell = verdicts(b200_quad(*PACKAGES))
    assert blackwell["deep_gemm_mega"] == blackwell["mxfp8_cutedsl"] == blackwell["nvfp4_cutedsl"] == Support()
    assert blackwell["sm90_push_fp8"] == Support("unsupported", "needs sm_90, this is sm_100")
    for support in verdicts(cpu()).values():
        assert support.reason.startswith("needs an NVIDIA GPU, this machine has no GPU; not installed: FlashInfer (pip")


@pytest.mark.parametrize(
    ("shape", "name", "reason"),
    [
        ({"topk": 3}, "sm90_push_fp8", "TOPK=3: takes 1, 2, 4, 6, 8"),
        ({"hidden": 2880}, "sm90_push_fp8", "HIDDEN=2880: must be a multiple of 128; 2816 or 2944 would do"),
        ({"hidden": 2880}, "sm90_pull_fp8", "HIDDEN=2880: must be a multiple of 128; 2816 or 2944 would do"),
        ({"inter": 64}, "sm90_pull_fp8", "INTER=64: must be a multiple of 128; 128 would do"),
        ({"inter": 16512}, "sm90_push_fp8", "INTER=16512: takes at most 16384 unless fuse_fc1_epilogue is set"),
        ({"tokens": 1 << 28}, "sm90_push_fp8", "TOKENS=268435456: 4294967296 routes a rank, at most 2147483647"),
        ({"world": 64}, "sm90_push_fp8", "takes at most 32 ranks, this is 64"),
    ],
)
def test_what_the_library_would_refuse_is_refused_in_words(shape: dict[str, Any], name: str, reason: str) -> None:
    found = verdicts(h200_pair(*PACKAGES), **shape)[name]
    assert found.status == "unsupported"
    assert found.reason.startswith(reason)


def test_blackwell_takes_widths_in_64s_where_its_kernels_do() -> None:
    found = verdicts(b200_quad(*PACKAGES), hidden=2880, inter=2880)
    assert found["mxfp8_cutedsl"] == found["nvfp4_cutedsl"] == Support()
    assert found["deep_gemm_mega"].reason.startswith("HIDDEN=2880: must be a multiple of 128")


def test_a_fused_epilogue_takes_a_wider_expert() -> None:
    env = {"MEGA_KNOBS": '{"fuse_fc1_epilogue": true}'}
    assert verdicts(h200_pair(*PACKAGES), env, inter=16512)["sm90_push_fp8"] == Support()


@pytest.mark.parametrize("routing", ["uniform,empty=1", "uniform"])
def test_in_kernel_reduce_needs_tokens_on_every_rank(routing: str) -> None:
    """hopper_fp8_mega_moe returns without a launch there, and the other ranks would wait for it."""
    tokens = 0 if routing == "uniform" else 8
    found = verdicts(h200_pair(*PACKAGES), {"MEGA_IKR": "1"}, routing=routing, tokens=tokens)
    assert found["sm90_pull_fp8"] == Support("unsupported", fi_limits.IKR_EMPTY)
    assert verdicts(h200_pair(*PACKAGES), {}, routing=routing, tokens=tokens)["sm90_pull_fp8"] == Support()


def test_packages_are_named_and_versions_are_told_as_found_and_needed() -> None:
    bare = verdicts(h200_pair())
    flashinfer = "not installed: FlashInfer (pip install flashinfer-python)"
    assert bare["sm90_push_fp8"] == Support("missing", flashinfer)
    assert bare["sm90_pull_fp8"].reason == (
        f"{flashinfer}, CUTLASS DSL (pip install nvidia-cutlass-dsl), NVSHMEM's Python (pip install nvshmem4py-cu13)"
    )
    assert bare["mxfp8_cutedsl"].reason.startswith("needs sm_100, this is sm_90; not installed: FlashInfer")
    old = replace(h200_pair(*PACKAGES), versions={"flashinfer-python": "0.6.9", "nvidia-cutlass-dsl": "4.4.0"})
    for name in ("sm90_push_fp8", "sm90_pull_fp8"):
        told = Support("missing", "needs flashinfer-python 0.6.18 or newer, found 0.6.9")
        assert verdicts(old)[name] == told
    dsl = replace(h200_pair(*PACKAGES), versions={"flashinfer-python": "0.7.4", "nvidia-cutlass-dsl": "4.4.0"})
    assert verdicts(dsl)["sm90_pull_fp8"] == Support("missing", "needs nvidia-cutlass-dsl 4.5.0 or newer, found 4.4.0")
    assert verdicts(dsl)["sm90_push_fp8"] == Support()
    unnamed = machine(2, installed=("flashinfer", "cutlass", "nvshmem"))
    without = replace(unnamed, versions={"flashinfer-python": "", "nvidia-cutlass-dsl": ""})
    assert verdicts(without)["sm90_push_fp8"] == Support(
        "missing", "needs flashinfer-python 0.6.18 or newer (flashinfer.moe_ep), found one without it"
    )


def test_memory_is_what_hand_arithmetic_says() -> None:
    knobs = parsed(HOPPER, **HERE)
    push, pull = (b for b in fi_mega.SECTION.backends(knobs) if b.name.startswith("sm90"))
    weights = 128 * 3 * 2048 * 7168  # elements
    assert push.memory_bytes(push.variants(knobs)[0], V3) == weights * 6, "bf16 twice and fp8 twice while converting"
    large = replace(V3, tokens=1 << 17)
    routes = 2 * (1 << 17) * 8
    row = 7168 + 56 * 4
    window = 2 * (1 << 17) * row * 2 + routes * 16
    assert push.memory_bytes(push.variants(knobs)[0], large) == (
        weights + window + routes * (row + 4 * 2048 + 2048 + 2 * 7168 + 20)
    )
    assert pull.memory_bytes(pull.variants(knobs)[0], V3) == weights * 6
    too_many = parsed(HOPPER, **(HERE | {"MEGA_LIST": "sm90_pull_fp8", "NUM_EXPERTS": "4096"}))
    (case,) = make_plan(fi_mega.SECTION, too_many, h200_pair(*PACKAGES), sweep=False)
    assert case.support.reason.startswith("needs ")
    assert "GB is free" in case.support.reason


def test_planning_asks_for_its_variables_and_keeps_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = parsed(HOPPER, **HERE)
    backends = {backend.name: backend for backend in fi_mega.SECTION.backends(knobs)}
    pull, push = backends["sm90_pull_fp8"], backends["sm90_push_fp8"]
    cache = {"FLASHINFER_MOE_EP_KNOB_CACHE": "off"}
    assert push.env(push.variants(knobs)[0], V3, knobs) == cache
    monkeypatch.delenv("NVSHMEM_REMOTE_TRANSPORT", raising=False)
    assert pull.env(pull.variants(knobs)[0], V3, knobs) == cache | {"NVSHMEM_REMOTE_TRANSPORT": "none"}
    monkeypatch.setenv("NVSHMEM_REMOTE_TRANSPORT", "ibrc")
    assert pull.env(pull.variants(knobs)[0], V3, knobs)["NVSHMEM_REMOTE_TRANSPORT"] == "ibrc"


# -- the library is not there, or not as expected


def test_a_module_that_does_not_import_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    group = Group(0, 2, 0, 1, CPU, pg=None, host_pg=None)
    knobs = parsed(HOPPER, **HERE)
    for backend in fi_mega.SECTION.backends(knobs):
        with pytest.raises(Missing, match=r"flashinfer\.moe_ep does not import"):
            backend.open(group, backend.variants(knobs)[0], PAIR, knobs)


def test_a_config_takes_the_renamed_field_of_its_version_and_refuses_what_it_lacks() -> None:
    name = fake_flashinfer.CONFIGS[fake_flashinfer.NVFP4]
    old, new = (recorded_dataclass(file, name) for file in fake_flashinfer.FILES.values())
    wanted = {"intermediate_size": 128, "top_k": 2, "in_kernel_fc2_reduce": True}
    assert built(old, wanted).in_kernel_fc2_reduce
    assert built(new, wanted).enable_in_kernel_fc2_reduce
    with pytest.raises(Unsupported, match="has no field swap_ab in this version"):
        built(old, wanted | {"swap_ab": True})


def test_a_broken_build_is_one_line_with_the_compilers_last_word() -> None:
    with (
        pytest.raises(
            RuntimeError, match=r"^the build: Ninja build failed\. .* \.\.\. ops\.cu\(7\): error: no such"
        ) as told,
        one_line_errors("the build"),
    ):
        raise RuntimeError(fake_flashinfer.NINJA)
    assert "\n" not in str(told.value)
    with pytest.raises(Unsupported, match="needs more"), one_line_errors("the build"):
        raise Unsupported("needs more")


def test_weights_are_brought_where_a_bare_e4m3_scale_can_hold_them() -> None:
    """Upstream's nvfp4 has no fp32 scale: block scales of weights of std H**-0.5 would lose most of their bits."""
    torch.manual_seed(0)
    weight = torch.randn(64, 7168) * 7168**-0.5
    factor = fi_cutedsl.power_of_two(7168)
    assert factor == 64.0
    scaled = fake_flashinfer.plain_nvfp4(weight * factor) / factor
    assert torch.equal(scaled, roundtrip("nvfp4_pow2", weight)), "the operand of the reference"
    bare = fake_flashinfer.plain_nvfp4(weight)
    assert (bare - weight).norm() > 1.2 * (scaled - weight).norm()


# -- docs/backends.md


def test_the_documented_limits_and_knob_names_are_those_of_the_code() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "backends.md").read_text()
    text = page.partition("### FlashInfer: ")[2].partition("\n## ")[0]
    tables = [line for line in text.splitlines() if line.startswith("| `")]
    limits, names = tables[:5], tables[5:]
    for line in limits:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        needs = fi_limits.NEEDS[cells[0].strip("`")]
        assert (cells[1], cells[2]) == (f"sm_{needs.sm[0]}{needs.sm[1]}", str(needs.multiple))
        assert needs.dsl in cells[4]
    assert ", ".join(map(str, fi_limits.PUSH_TOPK)) in limits[3]
    assert f"{fi_limits.FLASHINFER} {fi_limits.FLASHINFER_MIN} or newer" in text.replace("\n", " ")
    told = {re.findall("`(.+?)`", line)[0]: re.findall("`(.+?)`", line)[1:] for line in names}
    told["nvfp4_cutedsl"] += told["mxfp8_cutedsl"]
    assert {name: set(found) for name, found in told.items()} == {
        name: set(found) for name, found in mega_knobs.NAMES.items() if found
    }


# -- two ranks, started once; each saves what it found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("pair")
    torch.multiprocessing.spawn(rank_main, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


PLAIN = EVERY.split()


@pytest.mark.parametrize("rank", [0, 1])
def test_every_variant_is_right_in_every_timing(pair: list[dict[str, Any]], rank: int) -> None:
    for version in ("old", "new"):
        for name, found in pair[rank][version].items():
            assert (found["status"], name) == ("ok", name), found["reason"]
            assert found["columns"]["check"] == ("skipped" if "unchecked" in name else "ok")
    expected = {f"plain: {name} {timing}" for name in PLAIN for timing in TIMINGS}
    assert expected <= set(pair[rank]["old"])
    assert {f"ikr: {name}+ikr kernel" for name in ("mxfp8_cutedsl", "nvfp4_cutedsl")} <= set(pair[rank]["new"])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SHAPED)
def test_odd_routings_are_right_too(pair: list[dict[str, Any]], name: str, shape: str) -> None:
    for found in pair:
        assert found["shapes"][f"{name}, {shape}"]["status"] == "ok"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", PLAIN)
def test_a_fault_of_the_library_is_seen_by_both_ranks(pair: list[dict[str, Any]], name: str, fault: str) -> None:
    told = [found["shapes"][f"{name}, {fault}"] for found in pair]
    assert [found["status"] for found in told] == ["wrong", "wrong"]
    assert told[0]["reason"] == told[1]["reason"] != ""


@pytest.mark.parametrize("name", PLAIN)
def test_a_call_stages_and_computes_and_forward_is_timed_alone_where_it_can_repeat(
    pair: list[dict[str, Any]], name: str
) -> None:
    push = name == "sm90_push_fp8"
    cases = [f"plain: {name} e2e", *([f"pipelined: {name} e2e_pipelined"] if "sm90" in name else [])]
    for case in cases:
        found = pair[0]["old"][case]
        assert found["call"] == ["stage", "compute"]
        assert found["phases"] == [("stage", True, False), ("forward", True, not push)]
        assert found["alone"] == ([] if push else ["forward"])
        columns = found["columns"]
        assert columns["stage_us"] > 0 < columns["forward_us"]
        assert (columns["staging_included"], columns["quant_included"]) == (True, True)
        assert found["flushed"] == 0
        assert found["reason"] == ""
        assert "rank0_p50_us" in found["samples"]


def test_kernel_timing_is_the_thunk_or_says_what_it_is(pair: list[dict[str, Any]]) -> None:
    kernel = {name: pair[0]["old"][f"plain: {name} kernel"] for name in PLAIN}
    for name, found in kernel.items():
        push = name == "sm90_push_fp8"
        assert found["flushed"] == (0 if push else 4), "one warm-up and three timed launches, the L2 written over"
        assert found["columns"].get("l2") == (None if push else "cold")
        assert found["columns"]["staging_included"] is push
        assert found["columns"]["graph"] == ("captured" if push else "")
    assert kernel["sm90_push_fp8"]["reason"].startswith("kernel: a graph replay of the whole round")
    assert kernel["deep_gemm_mega"]["reason"].startswith("kernel: the library call repeated after one staging")
    assert kernel["sm90_pull_fp8"]["reason"] == kernel["nvfp4_cutedsl"]["reason"] == ""


def test_the_record_holds_what_was_chosen_and_what_setting_it_up_cost(pair: list[dict[str, Any]]) -> None:
    old = pair[0]["old"]
    facts = old["plain: nvfp4_cutedsl e2e"]["facts"]
    assert facts["max_tokens_per_rank"] == PAIR.tokens
    assert facts["kernel_knobs"]["flag_batch"] == 4
    assert set(facts["setup_s"]) == {"import", "runtime", "weights", "first_forward"}
    assert old["auto: nvfp4_cutedsl e2e"]["facts"]["kernel_knobs"]["flag_batch"] == 8
    assert old["object: nvfp4_cutedsl e2e"]["facts"]["kernel_knobs"]["flag_batch"] == 16
    assert old["ikr: mxfp8_cutedsl+ikr kernel"]["facts"]["kernel_knobs"]["in_kernel_fc2_reduce"] is True
    assert old["plain: sm90_push_fp8 e2e"]["facts"]["kernel_knobs"]["grouped_combine"] is True


def test_the_accuracy_loss_is_that_of_the_format(pair: list[dict[str, Any]]) -> None:
    loss = {name: pair[0]["old"][f"plain: {name} e2e"]["columns"]["acc_loss_pct"] for name in PLAIN}
    assert all(5 < loss[name] < 8 for name in ("mxfp8_cutedsl", "sm90_push_fp8", "sm90_pull_fp8"))
    assert all(18 < loss[name] < 27 for name in ("deep_gemm_mega", "nvfp4_cutedsl"))


def test_the_wires_bytes_are_of_their_formats(pair: list[dict[str, Any]]) -> None:
    old = pair[0]["old"]
    fp8, bf16 = old["plain: sm90_push_fp8 e2e"]["columns"], old["bf16 wires: sm90_push_fp8 e2e"]["columns"]
    assert bf16["dispatch_bytes_dedup"] / fp8["dispatch_bytes_dedup"] == pytest.approx(512 / 264)
    assert bf16["combine_bytes_dedup"] / fp8["combine_bytes_dedup"] == pytest.approx(512 / 264)
    wire = old["wire nvfp4: nvfp4_cutedsl+combine_nvfp4 e2e"]["columns"]
    assert bf16["combine_bytes_dedup"] / wire["combine_bytes_dedup"] == pytest.approx(3.2)


def test_the_fake_refuses_what_the_library_refuses(pair: list[dict[str, Any]]) -> None:
    for found in pair:
        told = found["refusals"]
        assert told["stage twice"].startswith("RuntimeError: stage_inputs called twice for one round")
        assert told["compute before stage"].startswith("RuntimeError: compute() requires a successful stage_inputs()")
        assert told["int64 ids"] == "MoEEpConfigError: topk_ids must be torch.int32, got torch.int64"
        assert told["broken build"].startswith("RuntimeError: the first forward failed: Ninja build failed.")
        assert told["broken build"].endswith("ops.cu(7): error: no such thing")


@pytest.mark.parametrize("version", [OLD, NEW])
def test_the_fake_takes_the_recorded_calls_and_no_others(version: str) -> None:
    with fake_flashinfer.installed(version):
        moe_ep = sys.modules["flashinfer.moe_ep"]
        with pytest.raises(TypeError, match="missing a required argument: 'weights'"):
            moe_ep.MoEEpLayer(None, None)
        with pytest.raises(TypeError, match="in_kernel_fc2_reduced"):
            moe_ep.Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig(128, 2, in_kernel_fc2_reduced=True)
        with pytest.raises(TypeError, match="symm_buffer"):
            fi_cutedsl.PullBackend().thunk_maker()((), ())
