"""Which devices there are, which of them a run sees, and what a record tells of them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from knob_helpers import HOPPER, SECRET, parsed
from machine_helpers import GB, b200_quad, cpu, h200_pair, machine

from lib import machine as machine_module
from lib.machine import detect_facts, detect_machine, fingerprint, visible_gpus

QUAD = b200_quad().gpus


def indices(visible: str | None) -> list[int]:
    return [gpu.index for gpu in visible_gpus(visible, QUAD)]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3,0,1", [3, 0, 1]),
        (" 1 , 2", [1, 2]),
        ("GPU-0002-aaaa", [2]),
        ("GPU-0003,GPU-0001-aa", [3, 1]),
        ("GPU-0003,0", [3, 0]),
        ("0,9,1", [0]),
        ("0,-1,1", [0]),
        ("NoDevFiles", []),
        ("GPU-00,1", []),  # a prefix that four GPUs share names none
        ("0,GPU-ffff,1", [0]),
    ],
)
def test_cuda_visible_devices_names_gpus_in_order_up_to_the_first_unknown_one(
    visible: str | None, expected: list[int]
) -> None:
    assert indices(visible) == expected


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = machine(8).gpus
    gpus = (*gpus[:5], replace(gpus[5], free_bytes=20 * GB), *gpus[6:])
    monkeypatch.setattr(machine_module, "all_gpus", lambda: gpus)


@pytest.mark.usefixtures("eight")
def test_a_run_takes_the_first_gpus_of_the_visible_ones() -> None:
    knobs = parsed(HOPPER, GPUS="2", CUDA_VISIBLE_DEVICES="7,5,0")
    assert [gpu.index for gpu in detect_machine(knobs, {}).gpus] == [7, 5]


@pytest.mark.usefixtures("eight")
def test_the_fullest_gpu_decides_how_much_a_rank_may_take() -> None:
    assert detect_machine(parsed(HOPPER, CUDA_VISIBLE_DEVICES="7,5", GPUS="2"), {}).rank_bytes(2) == 20 * GB
    assert detect_machine(parsed(HOPPER, CUDA_VISIBLE_DEVICES="7,6", GPUS="2"), {}).rank_bytes(2) == 140 * GB


@pytest.mark.usefixtures("eight")
def test_hiding_every_gpu_leaves_a_cpu_machine() -> None:
    found = detect_machine(parsed(HOPPER, CUDA_VISIBLE_DEVICES=""), {})
    assert (found.vendor, found.sm) == ("cpu", None)
    assert found.device.startswith("CPU (")


@pytest.mark.usefixtures("eight")
def test_the_facts_count_every_gpu_and_take_the_ranks_of_a_joined_launcher() -> None:
    facts = detect_facts({"CUDA_VISIBLE_DEVICES": "0"})
    assert (facts.gpu_count, facts.sm, facts.local_world_size) == (8, (9, 0), None)
    assert detect_facts({"RANK": "0", "LOCAL_WORLD_SIZE": "4"}).local_world_size == 4


def test_ranks_on_a_cpu_share_the_hosts_memory() -> None:
    assert cpu(host_gb=12).rank_bytes(4) == 3 * GB


def test_this_machine_is_detected_with_its_own_figures() -> None:
    found = detect_machine(parsed(), {})
    assert 0 < found.available_bytes <= found.memory_bytes
    assert found.cores >= 1
    assert found.has("json")
    assert not found.has("no_such_module_anywhere")
    assert not found.has("no_such_parent.child")


def test_a_bare_interpreter_plans_as_if_torch_were_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert detect_machine(parsed(), {"MOE_EP_BARE": "1"}).has("torch")
    assert not detect_machine(parsed(), {"MOE_EP_BARE": "1"}).has("vllm")
    assert not detect_machine(parsed(), {}).has("torch")


def test_a_missing_package_is_found_out_without_importing_anything() -> None:
    before = set(sys.modules)
    replace(cpu(), modules={}).has("pandas")
    assert "pandas" not in set(sys.modules) - before


def test_the_answer_of_nvidia_smi_is_read_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, GPU-1a2b, 9.0, 143771, 143000, 570.1, 00000000:3B:00.0'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (gpu,) = machine_module._gpus_by_smi()
    assert (gpu.name, gpu.uuid, gpu.sm, gpu.driver) == ("NVIDIA H200", "GPU-1a2b", (9, 0), "570.1")
    assert gpu.bus == "00000000:3B:00.0"
    assert (gpu.memory_bytes, gpu.free_bytes) == (143771 << 20, 143000 << 20)


def test_an_nvidia_smi_that_fails_means_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'no driver'; exit 9\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert machine_module._gpus_by_smi() == []


def test_the_fingerprint_holds_an_allow_list_and_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGA_TOKEN", SECRET)
    monkeypatch.setenv("HOSTNAME", f"host-{SECRET}")
    for name in ("NCCL_SOCKET_IFNAME", "VLLM_API_KEY", "TORCH_HOME", "NCCL_COMM_ID", "VLLM_HOST_IP"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("NCCL_PROTO", "LL128")
    for found in (cpu(), h200_pair()):
        told = fingerprint(found)
        names = "device gpus driver nics cpu cores memory_bytes kernel libc python packages environment"
        assert set(told) == set(names.split())
        assert told["environment"]["NCCL_PROTO"] == "LL128"  # type: ignore[index]
        text = json.dumps(told)
        assert SECRET not in text
        assert "GPU-0000" not in text  # a UUID names one card of one owner
    assert told["driver"] == "580.95"
    assert told["gpus"] == [{"name": "NVIDIA H200", "sm": "9.0", "memory_bytes": 140 * GB}] * 2
