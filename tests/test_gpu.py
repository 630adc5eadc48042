"""On real GPUs (./test.sh --gpu): the check's teeth with CUDA timing, graphs, the kernel column and the clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHAPE = {"HIDDEN": "256", "INTER": "128", "NUM_EXPERTS": "8", "TOPK": "2", "TOKENS": "6"}
QUICK = {"WARMUP": "2", "ITERS": "8", "CHECK_REPEATS": "4", "ITERS_PER_GRAPH": "5"}
LIMIT_S = 280

pytestmark = pytest.mark.gpu


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


Results = dict[tuple[str, str, str], dict[str, str]]


def measured(ranks: int, folder: Path, timing: str) -> Results:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    kept = {name: value for name, value in os.environ.items() if name not in SHAPE | QUICK}
    env = {**kept, **SHAPE, **QUICK, "GPUS": str(ranks), "TIMING": timing}
    env |= {"MOE_EP_FAKE_DIR": str(folder), "MOE_EP_RUN": "gpu-teeth", "MOE_EP_VENDOR": "cuda"}
    command = [sys.executable, *torchrun, "-m", "tests.gpu_ranks"]
    answer = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert answer.returncode == 0, answer.stderr[-3000:]
    lines = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]
    return {(line["kind"], line["fake"], line["asked"]): line for line in lines}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Results:
    if gpus() < 2:
        pytest.skip("needs two GPUs")
    return measured(2, tmp_path_factory.mktemp("teeth"), "e2e")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return measured(1, tmp_path_factory.mktemp("graphs"), "e2e e2e_pipelined graph")


def test_honest_sessions_are_ok_and_have_a_kernel_time(pair: Results) -> None:
    for kind in ("combine", "moe"):
        line = pair[kind, "honest", "e2e"]
        assert line["status"] == "ok", line["reason"]
        assert float(line["kernel_us"]) > 0


def test_every_broken_result_is_wrong_on_gpus_too(pair: Results) -> None:
    broken = {key: line["status"] for key, line in pair.items() if key[1] != "honest"}
    assert len(broken) > 20
    assert {key for key, status in broken.items() if status != "wrong"} == set()


@pytest.mark.parametrize("timing", ["e2e", "e2e_pipelined", "graph"])
def test_a_capturable_session_is_ok_in_every_timing(alone: Results, timing: str) -> None:
    line = alone["combine", "local", timing]
    assert (line["status"], line["timing"]) == ("ok", timing), line["reason"]
    assert line["graph"] == ("captured" if timing == "graph" else "")


def test_an_empty_graph_is_wrong(alone: Results) -> None:
    line = alone["combine", "empty_graph", "graph"]
    assert line["status"] == "wrong"
    assert line["reason"].startswith("after timing: ")


def test_a_graph_that_finds_yesterdays_rows_is_wrong(alone: Results) -> None:
    """Poison does not reach them, so the timed payload's output stays right: only another payload tells."""
    line = alone["combine", "graph_of_combine", "graph"]
    assert line["status"] == "wrong"
    assert "graph replayed on another payload" in line["reason"]


def test_a_failed_capture_is_told_and_not_measured_under_that_name(alone: Results) -> None:
    line = alone["combine", "uncapturable", "graph"]
    assert line["status"] == "NotCaptured"


def test_the_clock_is_right(tmp_path: Path) -> None:
    out = tmp_path / "clock.csv"
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={min(gpus(), 2)}"]
    command = [sys.executable, *torchrun, "-m", "tools.clock_check", "--out", str(out)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert answer.returncode == 0, answer.stdout
