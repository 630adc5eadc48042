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
LOOSE_BARRIER_US = 200  # a device barrier ends within a few us on all ranks; much more is no alignment

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
    env |= {"TRACE": "1", "OUT_DIR": str(folder)}
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


def test_a_trace_has_phases_over_the_kernels_of_each_stream_and_ranks_on_one_time_line(pair: Results) -> None:
    from tools.analyze_ep_trace import analyze_file
    from tools.trace_analysis import alignment

    for kind, phases in (("combine", {"dispatch", "identity", "combine"}), ("moe", {"dispatch", "experts", "combine"})):
        paths = pair[kind, "honest", "e2e"]["traces"].split()
        assert len(paths) == 2, pair[kind, "honest", "e2e"]["reason"]
        analyses = [analyze_file(Path(path), None) for path in paths]
        for analysis in analyses:
            assert len(analysis.windows.start_us) == int(QUICK["ITERS"])
            assert {bar.name for bar in analysis.bars(0) if bar.lane == 0} == phases
            streams = [lane for lane in analysis.spans.lanes if lane.startswith("stream ")]
            assert streams
            assert len(streams) == len(analysis.spans.lanes) - 1
        on, residual_us = alignment(analyses)  # type: ignore[misc]
        assert on == "barrier"
        assert residual_us < LOOSE_BARRIER_US


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


@pytest.mark.parametrize(
    ("hidden", "counts"),
    [(7168, [8, 0, 3, 16, 1, 0]), (2560, [0, 0, 5]), (2048, [16]), (4096, [0, 0])],
)
def test_triton_dequantises_the_used_slots_to_the_bits_of_pytorch(hidden: int, counts: list[int]) -> None:
    import torch

    from bench.backends.deepep_dequant import Dequantizer, by_pytorch
    from tests.dequant_inputs import UNTOUCHED, dequant_inputs

    pytest.importorskip("triton")
    rows, scales, there, out = dequant_inputs(counts, "cuda", hidden, slots=16)
    dequantizer = Dequantizer(rows, scales, there, out)
    assert dequantizer.made_by.startswith("triton ")
    expected = torch.full_like(out, UNTOUCHED)
    by_pytorch(rows, scales, 16, expected)
    for expert, count in enumerate(counts):
        assert torch.equal(out[expert, :count].view(torch.int16), expected[expert, :count].view(torch.int16))
        assert (out[expert, count:] == UNTOUCHED).all(), "a slot that is not used was written"


def test_a_captured_dequantisation_reads_the_counts_of_its_replay() -> None:
    import torch

    from bench.backends.deepep_dequant import Dequantizer
    from tests.dequant_inputs import UNTOUCHED, dequant_inputs

    pytest.importorskip("triton")
    rows, scales, counts, out = dequant_inputs([2, 5], "cuda")
    dequantizer = Dequantizer(rows, scales, counts, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dequantizer(rows, scales, counts, out)
    out.fill_(UNTOUCHED)
    counts.copy_(torch.tensor([4, 0], dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    written = (out != UNTOUCHED).any(2).sum(1)
    assert written.tolist() == [4, 0]


def test_the_clock_is_right(tmp_path: Path) -> None:
    out = tmp_path / "clock.csv"
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={min(gpus(), 2)}"]
    command = [sys.executable, *torchrun, "-m", "tools.clock_check", "--out", str(out)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert answer.returncode == 0, answer.stdout
