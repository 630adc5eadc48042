"""Backends without an adapter yet: their variants, and an honest reason on every kind of machine."""

from __future__ import annotations

import pytest
from knob_helpers import BLACKWELL, CPU, HOPPER, parsed
from machine_helpers import PACKAGES, b200_quad, cpu, h200_pair, machine, mi300

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
    assert names(split.SECTION, EXPERTS_LIST="triton deepgemm") == ["deepep_ht+triton", "deepep_ht+deepgemm"]


@pytest.mark.parametrize(
    ("algo", "nccl_ep"), [("ht", "nccl_ep_ht"), ("ll", "nccl_ep_ll"), ("ht ll", "nccl_ep_ht nccl_ep_ll")]
)
def test_algo_chooses_modes_and_a_backend_without_modes_is_planned_once(algo: str, nccl_ep: str) -> None:
    expected = f"deepep_v2 deepep_v2+cached {nccl_ep} flashinfer"
    assert names(comm.SECTION, ALGO=algo) == expected.split()


def test_the_algo_column_is_blank_where_there_are_no_modes() -> None:
    found = {variant.name: variant.algo for _, variant in planned(comm.SECTION, parsed(ALGO="ht ll"))}
    without = {"deepep_v2", "deepep_v2+cached", "flashinfer"}
    assert {name for name, algo in found.items() if not algo} == without
    assert found["nccl_ep_ht"] == "ht"


def test_a_dtype_and_an_sm_budget_make_a_case_each_where_the_library_has_them() -> None:
    knobs = parsed(DISPATCH_DTYPE="bf16 fp8", NUM_SMS="0 24", ALGO="ht ll", COMM_LIST="mscclpp mori")
    made = [(variant.name, variant.dispatch_dtype, variant.num_sms) for _, variant in planned(comm.SECTION, knobs)]
    expected: list[tuple[str, str, int | None]] = [("mscclpp_ht", "bf16", budget) for budget in (0, 24)]
    expected += [("mscclpp_ll", dtype, budget) for dtype in ("bf16", "fp8") for budget in (0, 24)]
    names = ("mori+intranode", "mori+v1", "mori+v1_ll", "mori+async_ll")
    assert made == expected + [(name, dtype, None) for name in names for dtype in ("bf16", "fp8")]


def test_the_comm_column_names_the_library_alone() -> None:
    found = {variant.comm for _, variant in planned(comm.SECTION, parsed(ALGO="ht ll"))}
    assert found == {"deepep_v2", "nccl_ep", "flashinfer"}


# -- verdicts


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_a_cpu_is_told_what_hardware_and_what_package_is_needed(section: Section) -> None:
    for name, (status, reason) in verdicts(section, cpu(), CPU, ALGO="ht").items():
        assert status == "unsupported", name
        assert "needs an NVIDIA GPU, this machine has no GPU" in reason
        assert ("not installed: " in reason) is (section.name != "ref"), name
        assert cell(reason) == reason


def test_hopper_without_packages_is_told_what_to_install() -> None:
    found = verdicts(split.SECTION, h200_pair(), HOPPER, GPUS="2")
    assert found["deepep_ht+deepgemm"][0] == "unsupported"
    assert found["deepep_ht+deepgemm"][1].startswith(f"{NO_ADAPTER}; not installed: vLLM (pip install vllm), DeepEP")
    status, reason = found["deepep_ht+trtllm"]
    assert status == "unsupported"
    assert reason.startswith(
        f"{NO_ADAPTER}; needs sm_10x, this is sm_90; not installed: vLLM (pip install vllm), DeepEP"
    )
    assert "FlashInfer (pip install flashinfer-python)" in reason


def test_only_what_is_not_installed_is_named() -> None:
    found = verdicts(split.SECTION, h200_pair("vllm"), HOPPER, GPUS="2")
    reason = f"{NO_ADAPTER}; not installed: DeepEP (https://github.com/deepseek-ai/DeepEP)"
    assert found["deepep_ht+deepgemm"] == ("unsupported", reason)


def test_a_newer_gpu_than_the_oldest_that_will_do_is_good_enough() -> None:
    assert verdicts(comm.SECTION, b200_quad(*PACKAGES), BLACKWELL)["mscclpp_ht"] == ("unsupported", NO_ADAPTER)
    ampere = machine(4, (8, 0), installed=PACKAGES)
    too_old = ("unsupported", f"{NO_ADAPTER}; needs sm_90 or newer, this is sm_80")
    assert verdicts(comm.SECTION, ampere, BLACKWELL)["mscclpp_ht"] == too_old


def test_cuda_libraries_do_not_run_on_rocm() -> None:
    status, reason = verdicts(comm.SECTION, mi300(2, *PACKAGES), CPU, GPUS="2")["nccl_ep_ht"]
    assert (status, reason) == ("unsupported", f"{NO_ADAPTER}; needs an NVIDIA GPU, this machine has AMD GPUs")


def test_trtllm_does_not_take_what_ll_delivers() -> None:
    found = verdicts(split.SECTION, b200_quad(*PACKAGES), BLACKWELL, ALGO="ll", EXPERTS_LIST="trtllm deepgemm")
    assert found["deepep_ll+trtllm"][0] == "unsupported"
    assert "ALGO=ll delivers batched experts" in found["deepep_ll+trtllm"][1]
    assert found["deepep_ll+deepgemm"] == ("unsupported", NO_ADAPTER)


def test_vllm_mega_0_skips_it_among_all_and_not_when_it_is_named() -> None:
    assert verdicts(vllm_mega.SECTION, cpu(), CPU, VLLM_MEGA="0") == {"vllm_deep_gemm_mega": ("skipped", "VLLM_MEGA=0")}
    for section in ("vllm_mega", "vllm_mega comm"):
        ((status, _),) = verdicts(vllm_mega.SECTION, cpu(), CPU, VLLM_MEGA="0", SECTION=section).values()
        assert status == "unsupported"


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
    found = {}
    for section in (comm.SECTION, split.SECTION, vllm_mega.SECTION):
        for backend, variant in planned(section, knobs):
            found[variant.name] = backend.memory_bytes(variant, problem)
    assert found["mscclpp_ht"] == buffers
    assert found["deepep_ht+deepgemm"] == weights + buffers
    assert found["vllm_deep_gemm_mega"] == weights // 2 + buffers
