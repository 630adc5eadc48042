"""Backends without an adapter yet: their variants, and an honest reason on every kind of machine."""

from __future__ import annotations

import pytest
from knob_helpers import BLACKWELL, CPU, HOPPER, parsed
from machine_helpers import PACKAGES, b200_quad, cpu, h200_pair, machine

from bench import comm, fi_mega, ref, split, vllm_mega
from bench.backends.planned import NO_ADAPTER, PlannedBackend
from lib.contract import Unsupported, Variant
from lib.knobs import Knobs, MachineFacts
from lib.machine import Machine
from lib.plan import Section, base_problem
from lib.rows import cell

SECTIONS = [ref.SECTION, split.SECTION, vllm_mega.SECTION, fi_mega.SECTION, comm.SECTION]


def planned(section: Section, knobs: Knobs) -> list[tuple[PlannedBackend, Variant]]:
    backends = [backend for backend in section.backends(knobs) if isinstance(backend, PlannedBackend)]
    return [(backend, variant) for backend in backends for variant in backend.variants(knobs)]


def names(section: Section, facts: MachineFacts = CPU, **env: str) -> list[str]:
    return [variant.name for _, variant in planned(section, parsed(facts, **env))]


def verdicts(section: Section, found: Machine, facts: MachineFacts, **env: str) -> dict[str, tuple[str, str]]:
    knobs = parsed(facts, **env)
    problem = base_problem(knobs)
    made = {}
    for backend, variant in planned(section, knobs):
        support = backend.supports(variant, found, problem, knobs)
        made[variant.name] = (support.status, support.reason)
    return made


# -- names


def test_every_name_of_a_backend_knob_has_one_backend() -> None:
    """A name without a backend would vanish from the plan without a word."""
    everything = parsed(HOPPER, EXPERTS_LIST="deepgemm trtllm triton")
    lists = {
        "ref": everything.ref_list,
        "comm": everything.comm_list,
        "vllm_split": everything.experts_list,
        "fi_mega": everything.mega_list,
    }
    for section in SECTIONS:
        found = [backend.name for backend in section.backends(everything)]
        assert found == list(lists.get(section.name, ("vllm_deep_gemm_mega",)))


def test_the_knobs_lists_choose_and_order_the_backends() -> None:
    assert [backend.name for backend in comm.SECTION.backends(parsed(COMM_LIST="mori torch"))] == ["mori", "torch"]
    split_backends = split.SECTION.backends(parsed(EXPERTS_LIST="triton deepgemm"))
    assert [backend.name for backend in split_backends] == ["triton", "deepgemm"]


@pytest.mark.parametrize(
    ("algo", "nccl_ep", "mscclpp", "mori"),
    [
        ("ht", "nccl_ep_ht", "mscclpp_ht", ""),
        ("ll", "nccl_ep_ll", "mscclpp_ll", "mori+v1_ll mori+async_ll"),
        ("ht ll", "nccl_ep_ht nccl_ep_ll", "mscclpp_ht mscclpp_ll", "mori+v1_ll mori+async_ll"),
    ],
)
def test_algo_chooses_modes_and_a_backend_without_modes_is_planned_once(
    algo: str, nccl_ep: str, mscclpp: str, mori: str
) -> None:
    once = ("deepep_v2 deepep_v2+cached", "flashinfer", "mori+intranode mori+v1")
    expected = f"{once[0]} {nccl_ep} {once[1]} {mscclpp} {once[2]} {mori}"
    assert names(comm.SECTION, ALGO=algo) == expected.split()


def test_the_algo_column_is_blank_where_there_are_no_modes() -> None:
    found = {variant.name: variant.algo for _, variant in planned(comm.SECTION, parsed(ALGO="ht ll"))}
    without = {"deepep_v2", "deepep_v2+cached", "flashinfer", "mori+intranode", "mori+v1"}
    assert {name for name, algo in found.items() if not algo} == without
    assert found["mori+v1_ll"] == "ll"
    assert found["nccl_ep_ht"] == "ht"


def test_a_dtype_and_an_sm_budget_make_a_case_each_where_the_library_has_them() -> None:
    knobs = parsed(DISPATCH_DTYPE="bf16 fp8", NUM_SMS="0 24", ALGO="ht ll", COMM_LIST="deepep_v2 nccl_ep flashinfer")
    made = [(variant.name, variant.dispatch_dtype, variant.num_sms) for _, variant in planned(comm.SECTION, knobs)]
    settings = [(dtype, budget) for dtype in ("bf16", "fp8") for budget in (0, 24)]
    assert made == [
        *(("deepep_v2", *setting) for setting in settings),
        *(("deepep_v2+cached", *setting) for setting in settings),
        ("nccl_ep_ht", "bf16", None),
        ("nccl_ep_ll", "bf16", None),
        ("nccl_ep_ll", "fp8", None),
        ("flashinfer", "bf16", None),
    ]


def test_the_comm_column_names_the_library_alone() -> None:
    found = {variant.comm for _, variant in planned(comm.SECTION, parsed(ALGO="ht ll"))}
    assert found == {"deepep_v2", "nccl_ep", "flashinfer", "mscclpp", "mori"}


def test_a_suffix_stands_in_the_variant_and_in_the_kernel_of_those_that_have_the_option() -> None:
    knobs = parsed(BLACKWELL, SECTION="fi_mega", MEGA_IKR="1")
    made = {variant.name: variant.compute_kernel for _, variant in planned(fi_mega.SECTION, knobs)}
    assert made == {name: name for name in ("deep_gemm_mega", "mxfp8_cutedsl+ikr", "nvfp4_cutedsl+ikr")}
    knobs = parsed(BLACKWELL, SECTION="fi_mega", MEGA_COMBINE_DTYPE="mxfp8")
    wires = {variant.name: variant.combine_dtype for _, variant in planned(fi_mega.SECTION, knobs)}
    assert wires == {"deep_gemm_mega": "bf16", "mxfp8_cutedsl": "bf16", "nvfp4_cutedsl+combine_mxfp8": "mxfp8"}


# -- verdicts


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_a_cpu_is_told_what_hardware_and_what_package_is_needed(section: Section) -> None:
    for name, (status, reason) in verdicts(section, cpu(), CPU, ALGO="ht").items():
        assert status == "unsupported", name
        needed = "an AMD GPU (ROCm)" if name.startswith("mori") else "an NVIDIA GPU"
        assert f"needs {needed}, this machine has no GPU" in reason
        assert ("not installed: " in reason) is (section.name != "ref"), name
        assert cell(reason) == reason


def test_mega_kernels_are_of_one_generation() -> None:
    hopper = verdicts(fi_mega.SECTION, h200_pair(*PACKAGES), HOPPER, GPUS="2")
    assert hopper["sm90_push_fp8"] == ("unsupported", NO_ADAPTER)
    assert hopper["mxfp8_cutedsl"] == ("unsupported", f"{NO_ADAPTER}; needs sm_10x, this is sm_90")
    everything = "deep_gemm_mega sm90_push_fp8 sm90_pull_fp8"
    blackwell = verdicts(fi_mega.SECTION, b200_quad(*PACKAGES), BLACKWELL, MEGA_LIST=everything)
    assert blackwell["deep_gemm_mega"] == ("unsupported", NO_ADAPTER)
    assert blackwell["sm90_pull_fp8"] == ("unsupported", f"{NO_ADAPTER}; needs sm_9x, this is sm_100")


def test_a_newer_gpu_than_the_oldest_that_will_do_is_good_enough() -> None:
    assert verdicts(comm.SECTION, b200_quad(*PACKAGES), BLACKWELL)["nccl_ep_ht"] == ("unsupported", NO_ADAPTER)
    ampere = machine(4, (8, 0), installed=PACKAGES)
    too_old = ("unsupported", f"{NO_ADAPTER}; needs sm_90 or newer, this is sm_80")
    assert verdicts(comm.SECTION, ampere, BLACKWELL)["nccl_ep_ht"] == too_old


def test_rocm_libraries_do_not_run_on_cuda() -> None:
    status, reason = verdicts(comm.SECTION, h200_pair("mori"), HOPPER, GPUS="2")["mori+v1"]
    assert (status, reason) == ("unsupported", f"{NO_ADAPTER}; needs an AMD GPU (ROCm), this machine has CUDA GPUs")


def test_a_backend_that_is_opened_all_the_same_says_that_it_cannot() -> None:
    for section in SECTIONS:
        knobs = parsed(ALGO="ht ll")
        for backend, variant in planned(section, knobs):
            with pytest.raises(Unsupported, match="no adapter"):
                backend.open(None, variant, base_problem(knobs), knobs)  # type: ignore[arg-type]


def test_memory_is_weights_in_their_format_and_buffers() -> None:
    knobs = parsed(BLACKWELL, TOKENS="100")
    problem = base_problem(knobs)
    buffers = (100 * 4 + 100) * 7168 * 2 * 2  # min(TOPK, 4 ranks) copies and the own rows, bf16, sent and received
    weights = 64 * 3 * 2048 * 7168  # elements of 256 / 4 experts
    made = [pair for section in (comm.SECTION, fi_mega.SECTION) for pair in planned(section, knobs)]
    found = {variant.name: backend.memory_bytes(variant, problem) for backend, variant in made}
    assert found["deepep_v2"] == buffers
    assert found["mxfp8_cutedsl"] == weights + buffers
    assert found["deep_gemm_mega"] == weights // 2 + buffers
