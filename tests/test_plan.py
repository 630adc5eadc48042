"""The plan: every case once, in an order that shares worker groups, under keys that say what was measured."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from knob_helpers import BLACKWELL, CPU, HOPPER, parsed, swept, write_routing
from machine_helpers import GB, PACKAGES, b200_quad, cpu, h200_pair, machine

from bench import comm, fi_mega, ref, split, vllm_mega
from lib import plan, provenance
from lib.contract import OK, Backend, Support, Variant, unsupported
from lib.knobs import Knobs, MachineFacts, parse_knobs
from lib.machine import Machine
from lib.plan import Case, Section, groups, make_plan, needs_packages
from lib.problem import Problem

SECTIONS = {module.SECTION.name: module.SECTION for module in (ref, split, vllm_mega, fi_mega, comm)}
LARGE = {
    "ALGO": "ht ll",
    "DISPATCH_DTYPE": "bf16 fp8",
    "NUM_SMS": "0 24",
    "TIMING": "e2e e2e_pipelined",
    "MEGA_TIMING": "e2e kernel",
    "EXPERTS_LIST": "deepgemm trtllm triton",
}


def case_of(section: Section, found: Machine, knobs: Knobs, variant: str = "torch") -> Case:
    return next(case for case in make_plan(section, knobs, found, False) if case.variant.name == variant)


# -- what is in it


def test_every_asked_case_is_in_the_plan_exactly_once() -> None:
    knobs = swept(CPU, SEQ_LENS="1 8 64", TIMING="e2e e2e_pipelined", REF_LIST="torch torch_fp8")
    cases = make_plan(ref.SECTION, knobs, cpu(), sweep=True)
    asked = [
        (variant, timing, tokens)
        for variant in ("torch", "torch_fp8")
        for timing in ("e2e", "e2e_pipelined")
        for tokens in (1, 8, 64)
    ]
    assert [(case.variant.name, case.timing, case.problem.tokens) for case in cases] == asked


def test_lists_multiply_where_the_backend_has_them() -> None:
    cases = make_plan(comm.SECTION, swept(CPU, SEQ_LENS="1 8", **LARGE), cpu(), sweep=True)
    count = Counter(case.variant.name for case in cases)
    points_and_timings = 4
    assert count == {
        "torch": 2 * points_and_timings,  # dtypes; no SM budget
        "symm_ht": 4 * points_and_timings,
        "symm_ht+cached": 4 * points_and_timings,
        "symm_ht+weighted": 4 * points_and_timings,
        "symm_ll": 4 * points_and_timings,
        "deepep_ht": 4 * points_and_timings,  # dtypes x budgets
        "deepep_ht+cached": 4 * points_and_timings,
        "deepep_ll": 2 * points_and_timings,
        "deepep_v2": 4 * points_and_timings,
        "deepep_v2+cached": 4 * points_and_timings,
        "deepep_v2+expert_major": 4 * points_and_timings,
        "deepep_v2+expert_major+cached": 4 * points_and_timings,
        "nccl_ep_ht": 4 * points_and_timings,
        "nccl_ep_ht+cached": 4 * points_and_timings,
        "nccl_ep_ht+expert_major": 4 * points_and_timings,
        "nccl_ep_ht+expert_major+cached": 4 * points_and_timings,
        "nccl_ep_ll": 4 * points_and_timings,
        "nccl_ep_ll+rank_major": 4 * points_and_timings,
        "flashinfer": 2 * points_and_timings,  # dtypes; no SM budget
        "mscclpp_ht": 2 * points_and_timings,  # bf16 alone, budgets
        "mscclpp_ht+cached": 2 * points_and_timings,
        "mscclpp_ht+rank_major": 2 * points_and_timings,
        "mscclpp_ht+rank_major+cached": 2 * points_and_timings,
        "mscclpp_ll": 4 * points_and_timings,
        "mscclpp_ll+direct_send": 4 * points_and_timings,
        "mscclpp_ll+rank_major": 2 * points_and_timings,
        "mscclpp_ll+rank_major+direct_send": 2 * points_and_timings,
        "mori+intranode": 2 * points_and_timings,
        "mori+v1": 2 * points_and_timings,
        "mori+v1_ll": 2 * points_and_timings,
        "mori+async_ll": 2 * points_and_timings,
    }


def test_no_two_cases_of_a_run_share_a_key() -> None:
    knobs = swept(BLACKWELL, SEQ_LENS="0 1 8", **LARGE)
    keys = [case.key for section in SECTIONS.values() for case in make_plan(section, knobs, b200_quad(), True)]
    assert len(keys) > 100
    assert len(set(keys)) == len(keys)
    assert all(key.startswith("k") for key in keys)


def test_run_sh_plans_tokens_and_a_sweep_plans_its_points() -> None:
    env = {"TOKENS": "16", "SEQ_LENS": "1 2", "REF_LIST": "torch"}
    assert [case.problem.tokens for case in make_plan(ref.SECTION, parsed(CPU, **env), cpu(), sweep=False)] == [16]
    assert [case.problem.tokens for case in make_plan(ref.SECTION, swept(CPU, **env), cpu(), sweep=True)] == [1, 2]


def test_mega_sections_have_a_timing_knob_of_their_own() -> None:
    knobs = parsed(CPU, **LARGE)
    mega = {"e2e", "kernel"}
    for name, timings in {"comm": {"e2e", "e2e_pipelined"}, "fi_mega": mega, "vllm_mega": mega}.items():
        assert {case.timing for case in make_plan(SECTIONS[name], knobs, cpu(), False)} == timings


def test_only_mega_cases_may_go_unchecked() -> None:
    knobs = parsed(CPU, MEGA_ACC="0")
    checked = {name: {case.checked for case in make_plan(s, knobs, cpu(), False)} for name, s in SECTIONS.items()}
    assert checked == {"ref": {True}, "vllm_split": {True}, "comm": {True}, "vllm_mega": {False}, "fi_mega": {False}}


# -- the order, and what one worker group serves


def test_all_points_and_timings_of_a_variant_are_one_group() -> None:
    lists = {"TIMING": "e2e e2e_pipelined", "DISPATCH_DTYPE": "bf16 fp8", "COMM_LIST": "torch deepep"}
    knobs = swept(CPU, SEQ_LENS="1 8 64", **lists)
    cases = make_plan(comm.SECTION, knobs, cpu(), sweep=True)
    found = [
        [(case.variant.dispatch_dtype, case.timing, case.problem.tokens) for case in group] for group in groups(cases)
    ]
    points = [(timing, tokens) for timing in ("e2e", "e2e_pipelined") for tokens in (1, 8, 64)]
    assert found == [[(dtype, *point) for point in points] for dtype in ("bf16", "fp8")]


def test_a_case_that_cannot_run_is_left_out_of_its_group() -> None:
    cases = make_plan(ref.SECTION, swept(CPU, SEQ_LENS="1 8 64", REF_LIST="torch"), cpu(), sweep=True)
    cases[1] = replace(cases[1], support=unsupported("too many"))
    assert [[case.problem.tokens for case in group] for group in groups(cases)] == [[1, 64]]
    assert list(groups([])) == []
    assert list(groups(make_plan(fi_mega.SECTION, parsed(), cpu(), False))) == []


def test_groups_hold_every_runnable_case_once() -> None:
    cases = make_plan(comm.SECTION, swept(CPU, SEQ_LENS="1 8", **LARGE), cpu(), sweep=True)
    served = [case.key for group in groups(cases) for case in group]
    assert served == [case.key for case in cases if case.support.ok]
    assert served


# -- verdicts


@pytest.mark.parametrize("timing", ["kernel", "graph"])
def test_a_cpu_has_no_timing_that_needs_a_gpu(timing: str) -> None:
    case = case_of(ref.SECTION, cpu(), parsed(CPU, TIMING=timing))
    assert case.support == unsupported(f"TIMING={timing} needs a GPU; on a CPU there are e2e, e2e_pipelined, none")


def test_more_memory_than_there_is_gets_a_verdict_in_gb() -> None:
    knobs = parsed(CPU, TOKENS="1000000", SECTION="ref")
    case = case_of(ref.SECTION, cpu(host_gb=16), knobs)
    assert case.support.status == "unsupported"
    need = f"{case.memory_bytes / GB:.1f}"
    assert case.support.reason.startswith(f"needs {need} GB a rank, 8.0 GB is free (TOKENS=1000000 NUM_EXPERTS=32 ")
    assert case_of(ref.SECTION, cpu(host_gb=100_000), knobs).support == OK


def test_a_rank_needs_its_backends_memory_and_the_harnesss() -> None:
    case = case_of(ref.SECTION, cpu(), parsed(CPU, TOKENS="10"))
    backend = ref.SECTION.find("torch", parsed(CPU))
    harness = 10 * 512 * 4 * plan.HARNESS_COPIES + 3 * 512 * 256 * 4 + 10 * 32 * 8  # payloads, an expert, the routing
    assert case.memory_bytes == backend.memory_bytes(case.variant, case.problem) + harness


class Hungry(Backend):
    """Runs anywhere, on 100 GB a rank."""

    name = family = "hungry"

    def supports(self, variant: Variant, machine: Machine, problem: Problem, knobs: Knobs) -> Support:
        return OK

    def memory_bytes(self, variant: Variant, problem: Problem) -> int:
        return 100 * GB


def test_memory_is_that_of_one_gpu_and_not_of_all() -> None:
    knobs = parsed(HOPPER, GPUS="2")

    def status(free_gb: float) -> str:
        found = machine(2, free_gb=free_gb)
        return plan.verdict(Hungry(), Variant("hungry"), plan.base_problem(knobs), "e2e", knobs, found).status

    assert status(80) == "unsupported"
    assert status(141) == "ok"


def test_a_gpu_has_all_timings() -> None:
    knobs = parsed(HOPPER, GPUS="2")
    for timing in ("e2e", "e2e_pipelined", "kernel", "graph"):
        found = plan.verdict(Hungry(), Variant("hungry"), plan.base_problem(knobs), timing, knobs, h200_pair())
        assert found == OK


def test_shape_and_timing_come_before_a_missing_package_which_is_named_all_the_same() -> None:
    bare = replace(cpu(), modules={"torch": False, "numpy": True})
    absent = "not installed: torch (pip install torch)"
    assert case_of(ref.SECTION, bare, parsed()).support == Support("missing", absent)
    timing = case_of(ref.SECTION, bare, parsed(TIMING="graph")).support
    assert timing.status == "unsupported"
    assert timing.reason.endswith(f"on a CPU there are e2e, e2e_pipelined, none; {absent}")
    memory = case_of(ref.SECTION, bare, parsed(TOKENS="10000000")).support
    assert memory.status == "unsupported"
    assert memory.reason.endswith(f"INTER=256); {absent}")
    shape = case_of(comm.SECTION, bare, parsed(DISPATCH_DTYPE="fp8", HIDDEN="144")).support
    assert shape.status == "unsupported"
    assert shape.reason.endswith(f"; {absent}")


def test_what_a_knob_leaves_out_is_skipped_whatever_else_is_wrong() -> None:
    knobs = parsed(CPU, VLLM_MEGA="0", MEGA_TIMING="kernel", TOKENS="100000000")
    (case,) = make_plan(vllm_mega.SECTION, knobs, cpu(), False)
    assert case.support == Support("skipped", "VLLM_MEGA=0")


def test_every_package_that_is_not_installed_is_named() -> None:
    packages = {"vllm": "vLLM (pip install vllm)", "deep_ep": "DeepEP (url)", "flashinfer": "FlashInfer (url)"}
    found = h200_pair("deep_ep")
    absent = "not installed: vLLM (pip install vllm), FlashInfer (url)"
    why = unsupported("needs sm_10x")
    assert needs_packages(found, packages) == Support("missing", absent)
    assert needs_packages(found, packages, why) == unsupported(f"needs sm_10x; {absent}")
    assert needs_packages(h200_pair(*PACKAGES), packages) == OK
    assert needs_packages(h200_pair(*PACKAGES), packages, why) == why


# -- keys

KEY_KNOBS = {
    "HIDDEN": "256",
    "INTER": "128",
    "TOKENS": "9",
    "NUM_EXPERTS": "16",
    "TOPK": "2",
    "GPUS": "1",
    "SEED": "1",
    "ROUTING": "zipf:1",
    "TIMING": "e2e_pipelined",
    "WARMUP": "3",
    "ITERS": "51",
    "ITERS_PER_GRAPH": "10",
    "CHECK_REPEATS": "3",
    "L2": "cold",
    "TRACE": "1",
    "PEAKS": "off",
}
OTHER_KNOBS = {
    "OUT_DIR": "elsewhere",
    "DEBUG": "1",
    "TIMEOUT_S": "7",
    "SETUP_TIMEOUT_S": "7",
    "SECTION": "ref",
    "REF_LIST": "torch",
    "KEEP": "6",
    "SEQ_LENS": "1 2",
}


@pytest.mark.parametrize(("name", "value"), KEY_KNOBS.items())
def test_what_changes_the_measurement_changes_the_key(name: str, value: str) -> None:
    assert case_of(ref.SECTION, cpu(), parsed(CPU, **{name: value})).key != case_of(ref.SECTION, cpu(), parsed()).key


@pytest.mark.parametrize(("name", "value"), OTHER_KNOBS.items())
def test_what_does_not_change_the_measurement_leaves_the_key(name: str, value: str) -> None:
    assert case_of(ref.SECTION, cpu(), parsed(CPU, **{name: value})).key == case_of(ref.SECTION, cpu(), parsed()).key


def test_the_key_is_of_the_code_the_device_and_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    key = case_of(ref.SECTION, cpu(), parsed()).key
    assert case_of(ref.SECTION, replace(cpu(), cpu="Other CPU"), parsed()).key != key
    assert case_of(comm.SECTION, cpu(), parsed()).key != key
    monkeypatch.setattr(plan, "source_hash", lambda: "s0123")
    assert case_of(ref.SECTION, cpu(), parsed()).key != key


def test_the_key_is_of_the_packages_and_of_what_tunes_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "NCCL_PROTO"):
        monkeypatch.delenv(name, raising=False)
    keys = {case_of(ref.SECTION, cpu(), parsed()).key}
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    keys.add(case_of(ref.SECTION, cpu(), parsed()).key)
    monkeypatch.setenv("NCCL_PROTO", "LL128")
    keys.add(case_of(ref.SECTION, cpu(), parsed()).key)
    monkeypatch.setattr(plan, "software", lambda: {"torch": "9.9.9"})
    keys.add(case_of(ref.SECTION, cpu(), parsed()).key)
    assert len(keys) == 4


def test_where_caches_lie_and_which_interface_is_used_leave_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = case_of(ref.SECTION, cpu(), parsed()).key
    for name in ("TRITON_CACHE_DIR", "CUDA_HOME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "VLLM_CACHE_ROOT"):
        monkeypatch.setenv(name, "x")
    assert case_of(ref.SECTION, cpu(), parsed()).key == key


def test_another_routing_in_a_file_of_the_same_name_is_another_case(tmp_path: Path) -> None:
    path, knobs = tmp_path / "r.npy", parsed(TOKENS="8")
    keys = []
    for first in (0, 4):
        np.save(path, np.broadcast_to(np.arange(first, first + 4), (2, 8, 4)).astype(np.int64))
        provenance.file_digest.cache_clear()  # a run reads a file once; here are two runs
        keys.append(case_of(ref.SECTION, cpu(), replace(knobs, routing=str(path))).key)
    assert keys[0] != keys[1]


def test_a_point_of_a_sweep_has_the_key_of_the_single_run() -> None:
    (single,) = make_plan(ref.SECTION, parsed(CPU, TOKENS="64", REF_LIST="torch"), cpu(), sweep=False)
    points = make_plan(ref.SECTION, swept(CPU, SEQ_LENS="8 64", REF_LIST="torch"), cpu(), sweep=True)
    assert single.key == points[1].key


# -- repro


def reproduced(line: str, facts: MachineFacts, found: Machine) -> set[str]:
    """Keys of the plan that the line makes."""
    *assignments, command = shlex.split(line)
    assert command == "./run.sh"
    env = dict(assignment.split("=", 1) for assignment in assignments)
    knobs = parse_knobs(env, facts)
    (name,) = knobs.sections
    return {case.key for case in make_plan(SECTIONS[name], knobs, found, sweep=False)}


MACHINES = {
    "cpu": (CPU, cpu()),
    "hopper": (HOPPER, h200_pair(*PACKAGES)),
    "blackwell": (BLACKWELL, b200_quad()),
}
GIVEN = {
    "plain": {},
    "lists": LARGE,
    "ikr": {"MEGA_IKR": "1", "MEGA_LIST": "deep_gemm_mega mxfp8_cutedsl nvfp4_cutedsl"},
    "wire": {"MEGA_COMBINE_DTYPE": "nvfp4", "MEGA_KNOBS": '{"flag_batch": 4}', "MEGA_ACC": "0"},
    "setting": {
        "ROUTING": "zipf:1.2,mask=0.25,empty=1",
        "SEED": "7",
        "WARMUP": "0",
        "ITERS": "3",
        "CHECK_REPEATS": "2",
        "EXCLUDE_QUANT": "0",
        "TRACE": "library",
        "PEAKS": "off",
        "HIDDEN": "256",
        "ITERS_PER_GRAPH": "5",
        "TIMEOUT_S": "0.5",
    },
    "cold": {"L2": "cold", "TIMING": "e2e kernel", "MEGA_TIMING": "kernel"},
}


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("place", MACHINES)
def test_the_repro_line_of_every_case_makes_that_case(section: str, given: str, place: str) -> None:
    facts, found = MACHINES[place]
    knobs = swept(facts, GPUS="2", SEQ_LENS="0 8 64", **GIVEN[given])
    cases = make_plan(SECTIONS[section], knobs, found, sweep=True)
    assert cases
    lines = {case.repro: case.key for case in cases}
    for line, key in lines.items():
        assert key in reproduced(line, facts, found), line
        assert "\n" not in line


def test_the_repro_line_keeps_the_devices_as_they_were_given() -> None:
    knobs = parsed(HOPPER, CUDA_VISIBLE_DEVICES="", GPUS="2", REF_LIST="torch")
    case = case_of(ref.SECTION, cpu(), knobs)
    assert " CUDA_VISIBLE_DEVICES= " in case.repro
    assert case.key in reproduced(case.repro, HOPPER, cpu())
    two = case_of(ref.SECTION, h200_pair(), parsed(HOPPER, CUDA_VISIBLE_DEVICES="3,1", GPUS="2"))
    assert " CUDA_VISIBLE_DEVICES=3,1 " in two.repro
    assert two.key in reproduced(two.repro, HOPPER, h200_pair())
    assert "CUDA_VISIBLE_DEVICES" not in case_of(ref.SECTION, cpu(), parsed()).repro


def test_a_routing_file_survives_blanks_and_quotes_in_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    write_routing(folder / "routing file.npy", world=2, tokens=8, topk=4)
    case = case_of(ref.SECTION, cpu(), parsed(CPU, ROUTING=str(folder / "routing file.npy")))
    assert case.key in reproduced(case.repro, CPU, cpu())


def test_the_repro_line_names_the_interpreter_only_if_the_user_did() -> None:
    assert "PYTHON" not in case_of(ref.SECTION, cpu(), parsed()).repro
    assert " PYTHON=/bin/sh " in case_of(ref.SECTION, cpu(), parsed(CPU, PYTHON="/bin/sh")).repro
