"""The bandwidth calculator's counts against the reference script's values, torch's own draws, and identities."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bw_helpers import SMALL, SMALL_GOLDEN, Shape, answer_json, case, command, counts

import lib.routing
from lib.problem import Problem
from lib.routing import Ints
from lib.traffic import SourceCopies, count_source
from tools import bw_counts
from tools.bw_counts import count_tokens

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT.parent / "shared" / "golden"
CASES = ("n1g8_t4096_h7168_e256_k8", "n2g8_t4096_h7168_e256_k8", "n2g4_t128_h2048_e64_k4", "n4g8_t4096_h7168_e256_k8")

# Printed by the MORI-EP benchmark document's script, run unmodified with torch 2.13, as SMALL_GOLDEN is.
TWO_NODES: Shape = (2, 8, 4096, 7168, 256, 8)
TWO_NODES_ALGO = "8163 8157 8163 8166 8152 8168 8159 8166 8168 8168 8165 8169 8160 8162 8164 8167"
TWO_NODES_PHYSICAL = "4081 4080 4082 4083 4079 4083 4077 4077 4085 4083 4082 4081 4075 4081 4079 4083"


CAPPED: Shape = (8, 1, 64, 128, 64, 6)  # more nodes and more top-k than groups: only then the cap binds


# ru_maxrss of a child starts at what its parent held when it forked; the kernel's own mark starts anew with exec.
WITH_PEAK = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    sys.stderr.write(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


# -- exactly the reference script's values


def test_the_small_case_equals_what_the_reference_script_printed() -> None:
    assert counts(SMALL) == SMALL_GOLDEN


def test_the_documents_own_case_equals_its_script_within_time_and_memory() -> None:
    words = [sys.executable, "-S", "-c", WITH_PEAK, str(ROOT / "tools" / "bw_values.py"), *command(TWO_NODES, "--json")]
    site = str(Path(np.__file__).parent.parent)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/", env={"PYTHONPATH": site})
    assert process.stdout is not None
    assert process.stderr is not None
    out = json.loads(process.stdout.read())
    peak_kb = int(process.stderr.read().split()[-2])
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = status
    assert status == 0
    ranks = out["ranks"]
    assert [r["num_rdma_token_sent_algo"] for r in ranks] == [int(n) for n in TWO_NODES_ALGO.split()]
    assert [r["num_rdma_token_sent_physical"] for r in ranks] == [int(n) for n in TWO_NODES_PHYSICAL.split()]
    assert out["total"]["recv_num_tokens"] == 427267
    assert used.ru_utime + used.ru_stime < 4  # 1.1 s alone; twice the 2 s that it may take, for a loaded machine
    assert peak_kb < 200_000  # 40 MB alone


@pytest.mark.skipif(not GOLDEN.exists(), reason="the recorded values are not here")
@pytest.mark.parametrize("name", CASES)
def test_every_recorded_value_is_reproduced(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    entry = json.loads((GOLDEN / "bw_full" / f"{name}.json").read_text())
    columns = json.loads((GOLDEN / "bw_values.json").read_text())[name]
    ours = answer_json(capsys, *entry["args"].split())
    assert ours["config"].items() >= entry["config"].items()
    assert [r["num_rdma_token_sent_algo"] for r in ours["ranks"]] == columns["algo"]
    assert [r["num_rdma_token_sent_physical"] for r in ours["ranks"]] == columns["physical"]
    assert [r["recv_num_tokens"] for r in ours["ranks"]] == columns["recv"]
    for ours_rank, rank in zip(ours["ranks"], entry["ranks"], strict=True):
        bf16, fp8 = rank.pop("bf16"), rank.pop("fp8")
        same = {
            "dispatch_bf16_rdma_send_algo_bytes": bf16["dispatch_rdma_send_algo"],
            "dispatch_bf16_rdma_send_physical_bytes": bf16["dispatch_rdma_send_physical_exact"],
            "dispatch_bf16_nvl_recv_bytes": bf16["dispatch_nvl_recv"],
            "combine_bf16_rdma_recv_algo_bytes": bf16["combine_rdma_recv_algo"],
            "combine_bf16_nvl_send_bytes": bf16["combine_nvl_send"],
            "dispatch_fp8_rdma_send_algo_bytes": fp8["dispatch_rdma_send_algo"],
            "dispatch_fp8_nvl_recv_bytes": fp8["dispatch_nvl_recv"],
            "num_tokens_sent": rank.pop("num_tokens"),
            **{key: value for key, value in rank.items() if "printed" not in key and "print_off" not in key},
        }
        assert {key: ours_rank[key] for key in same} == same
    total, totals = ours["total"], entry["totals"]
    assert total["recv_num_tokens"] == totals["recv"]
    assert total["num_rdma_token_sent_physical"] == totals["physical"]
    if entry["config"]["num_nodes"] > 1:
        assert total["max_abs_deviation_tokens"] == totals["max_abs_dev_tokens"]
        assert total["max_rel_deviation"] == totals["max_rel_dev"]
        assert total["num_ranks_where_formula_exact"] == len(totals["ranks_where_formula_exact"])


def by_torch(shape: Shape) -> tuple[list[int], list[int], list[int]]:
    """The same by torch's own generator and top-k, counted with Python sets."""
    torch = pytest.importorskip("torch")
    nodes, gpus, tokens, hidden, experts, topk = shape
    algo, physical, received = [], [], [0] * (nodes * gpus)
    for rank in range(nodes * gpus):
        torch.manual_seed(rank)
        torch.randn((tokens, hidden), dtype=torch.bfloat16)
        scores = torch.randn((tokens, experts)).abs() + 1
        best = scores.view(tokens, nodes, -1).amax(2).topk(min(nodes, 4), dim=1).indices
        kept = torch.zeros(tokens, nodes).scatter_(1, best, 1.0).repeat_interleave(experts // nodes, dim=1)
        chosen = (scores * kept).topk(topk, dim=1).indices.tolist()
        places = [{expert * nodes * gpus // experts for expert in row} for row in chosen]
        reached = [{place // gpus for place in row} for row in places]
        algo.append(sum(map(len, reached)))
        physical.append(sum(len(row - {rank // gpus}) for row in reached))
        for row in places:
            for place in row:
                received[place] += 1
    return algo, physical, received


@pytest.mark.parametrize(
    "shape",
    [
        CAPPED,
        (8, 1, 64, 128, 64, 4),  # more nodes than top-k
        (6, 2, 33, 17, 36, 7),  # neither the input nor the scores a multiple of 16; nodes no power of two
        (3, 1, 16, 1, 3, 1),  # the smallest input; an odd number of experts
        (1, 2, 1, 16, 18, 18),  # one token, every expert chosen, last 16 values made anew
        (2, 2, 1027, 24, 300, 8),  # several parts, the last of them uneven
        (2, 1, 16385, 8, 4, 2),  # a part that ends just below the next
    ],
)
def test_torch_itself_gives_the_same_counts(shape: Shape) -> None:
    assert counts(shape) == by_torch(shape)


def test_hidden_moves_the_scores() -> None:
    assert counts(SMALL) != counts((2, 4, 128, 4096, 64, 4))


# -- teeth


def undeduplicated(topk_idx: Ints, source: int, problem: Problem) -> SourceCopies:
    """The counting rule broken: a copy for each selected expert."""
    right = count_source(topk_idx, source, problem)
    pairs = np.bincount((topk_idx // problem.local_experts).ravel(), minlength=problem.world)
    return replace(right, pairs=pairs, node_algo=right.selection)


def test_a_count_without_deduplication_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bw_counts, "count_source", undeduplicated)
    algo, _, received = counts(SMALL)
    assert algo != SMALL_GOLDEN[0]
    assert received != SMALL_GOLDEN[2]


@pytest.mark.parametrize("cap", [1, 3, 5, 8])
def test_another_group_cap_trips(monkeypatch: pytest.MonkeyPatch, cap: int) -> None:
    right = by_torch(CAPPED)
    monkeypatch.setattr(lib.routing, "MAX_GROUPS", cap)
    assert counts(CAPPED) != right


def test_scores_without_the_inputs_draws_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.bw_routing.math.ceil", lambda _: 0)
    assert counts(SMALL) != SMALL_GOLDEN


# -- identities


@pytest.mark.parametrize("shape", [SMALL, (1, 4, 64, 64, 64, 4), (6, 2, 64, 64, 48, 5), (8, 1, 64, 64, 16, 2)])
def test_identities_of_the_counts(shape: Shape) -> None:
    nodes, _, tokens, _, _, topk = shape
    ranks = count_tokens(case(shape))
    for rank in ranks:
        assert 0 <= rank.physical <= rank.algo <= tokens * min(nodes, topk, 4)
        assert rank.algo - rank.physical <= tokens  # own tokens that touch the own node
        assert rank.selected == tokens * topk
        if nodes == 1:
            assert (rank.algo, rank.physical) == (tokens, 0)
    assert sum(r.received for r in ranks) >= sum(r.algo for r in ranks)


def test_bytes_follow_from_tokens_and_the_total_is_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    out = answer_json(capsys, *command(SMALL))
    for record in [*out["ranks"], out["total"]]:
        for leg, what, count in bw_counts.BYTES:
            bf16, fp8 = (record[f"{leg}_{fmt}_{what}_bytes"] for fmt in ("bf16", "fp8"))
            assert bf16 == record[count] * 2 * 2048
            assert fp8 * 64 == bf16 * 33  # x 0.515625, in integers
            assert isinstance(fp8, int)
    for key, value in out["total"].items():
        if key.endswith("_bytes") or (key.startswith(("num_", "recv_")) and "formula" not in key):
            assert value == sum(record[key] for record in out["ranks"]), key


def test_cost_and_memory_do_not_grow_with_the_ranks() -> None:
    def peak(nodes: int) -> int:
        tracemalloc.start()
        count_tokens(case((nodes, 2, 512, 64, 256, 4)))
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(4)  # the first call also imports
    assert peak(64) < 1.2 * peak(4)
