"""AMD's GPUs from a pretended sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest
from knob_helpers import parsed
from machine_helpers import cpu, h200_pair, mi300

from lib import machine as machine_module
from lib.machine import all_gpus, detect_facts, fingerprint
from lib.rocm import DRIVER, NODES, RENDERERS, amd_gpus, arch

CPU_NODE = "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\n"
GPU_NODE = "simd_count 1216\ngfx_target_version 90402\ndrm_render_minor {}\nunique_id 1234\n"


@pytest.fixture
def sys_folder(tmp_path: Path) -> Path:
    """Two CPUs, and two GPUs of which the second may not be read, a third with a third of its memory in use."""
    nodes = [CPU_NODE, CPU_NODE, GPU_NODE.format(128), "", GPU_NODE.format(130)]
    for index, text in enumerate(nodes):
        folder = tmp_path / NODES / str(index)
        folder.mkdir(parents=True)
        if text:
            (folder / "properties").write_text(text)
    for minor, used in ((128, 0), (130, 64 << 30)):
        device = tmp_path / RENDERERS / f"renderD{minor}" / "device"
        device.mkdir(parents=True)
        (device / "mem_info_vram_total").write_text(f"{192 << 30}\n")
        (device / "mem_info_vram_used").write_text(f"{used}\n")
    (tmp_path / DRIVER).parent.mkdir(parents=True)
    (tmp_path / DRIVER).write_text("6.10.5\n")
    return tmp_path


def test_gpus_are_told_from_cpus_and_numbered_among_themselves(sys_folder: Path) -> None:
    first, second = amd_gpus(sys_folder)
    assert (first.index, first.name, first.uuid, first.driver) == (0, "AMD gfx942", f"GPU-{1234:016x}", "6.10.5")
    assert (first.memory_bytes, first.free_bytes) == (192 << 30, 192 << 30)
    assert (second.index, second.free_bytes) == (1, 128 << 30)


def test_a_machine_without_the_driver_has_none(tmp_path: Path) -> None:
    assert amd_gpus(tmp_path) == ()


@pytest.mark.parametrize(
    ("version", "name"), [(90402, "gfx942"), (90010, "gfx90a"), (90500, "gfx950"), (120500, "gfx1250")]
)
def test_a_version_is_shown_as_the_compiler_names_it(version: int, name: str) -> None:
    assert arch(version) == name


def test_amd_gpus_are_looked_for_where_there_is_no_nvidia_driver(
    monkeypatch: pytest.MonkeyPatch, sys_folder: Path
) -> None:
    monkeypatch.setattr(machine_module, "NVIDIA_DRIVER_NODE", sys_folder / "nothing")
    monkeypatch.setattr("lib.rocm.amd_gpus", lambda: amd_gpus(sys_folder))
    all_gpus.cache_clear()
    try:
        facts = detect_facts({})
        assert (facts.gpu_count, len(all_gpus())) == (2, 2)
    finally:
        all_gpus.cache_clear()
    assert "sm90" not in " ".join(parsed(facts).mega_list), "no Hopper kernels by default"


def test_a_machine_says_whose_gpus_it_has() -> None:
    told = {found.vendor: found.has_what for found in (cpu(), h200_pair(), mi300(8))}
    assert told == {"cpu": "no GPU", "cuda": "CUDA GPUs", "rocm": "AMD GPUs"}
    assert (mi300(8).sm, mi300(8).device) == (None, "AMD gfx942")
    assert fingerprint(mi300(2))["driver"] == "6.10"
