"""Who may import what: a coordinator runs where only the standard library is certain, lib names no library."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("ref", "split", "vllm_mega", "fi_mega", "comm")
HEAVY = ("torch", "numpy", "pandas", "matplotlib", "jinja2")
LIBRARIES = "vllm deep_ep deep_gemm flashinfer mscclpp mori nccl".split()
SECTIONS = "ref vllm_split vllm_mega fi_mega comm".split()
# The knob table and its help are where every section's and backend's name is a legal value.
NAMES_ALLOWED_IN = ("knobs.py", "knob_types.py", "knob_checks.py", "knob_help.py")


def modules_after(statement: str) -> set[str]:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {statement}; print(*sys.modules)"
    # -S: no site-packages, as in an interpreter that has nothing
    answer = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    return set(answer.stdout.split())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_sections_coordinator_needs_the_standard_library_only(script: str) -> None:
    assert not modules_after(f"import bench.{script}, lib.summary").intersection(HEAVY)


def test_knobs_plan_rows_stats_and_the_gate_import_no_torch() -> None:
    statement = "import lib.knobs, lib.plan, lib.rows, lib.stats, lib.gate, lib.nightly"
    assert not modules_after(statement).intersection(HEAVY)


def test_workers_need_torch_and_numpy_beside_the_standard_library() -> None:
    for path in [*(ROOT / "lib").glob("*.py"), *(ROOT / "bench").rglob("*.py")]:
        imported = set(re.findall(r"^\s*(?:import|from)\s+([A-Za-z_]\w*)", path.read_text(), re.M))
        known = sys.stdlib_module_names | {"lib", "bench", "torch", "numpy", "rich", "pynvml"}
        in_backends = "backends" in path.parts
        assert imported <= known or in_backends, f"{path.name} imports {imported - known}"


def test_lib_never_imports_bench_and_names_no_library() -> None:
    for path in (ROOT / "lib").glob("*.py"):
        text = path.read_text()
        assert not re.search(r"^\s*(?:import|from)\s+bench\b", text, re.M), path.name
        if path.name in NAMES_ALLOWED_IN:
            continue
        for name in [*LIBRARIES, "fi_mega", "vllm_split", "vllm_mega"]:
            assert not re.search(rf"['\"]{name}\b", text), f"{path.name} names {name}"


def test_adapters_import_their_library_inside_functions() -> None:
    for path in (ROOT / "bench").rglob("*.py"):
        at_top = set(re.findall(r"^(?:import|from)\s+([A-Za-z_]\w*)", path.read_text(), re.M))
        assert not at_top.intersection([*LIBRARIES, "torch", "numpy"]), f"{path.name}: {at_top}"
