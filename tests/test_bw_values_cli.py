"""The bandwidth calculator's options, outputs, routing files, MORI's rules, and what bad input gets."""

from __future__ import annotations

import csv
import io
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bw_helpers import OPTIONS, SMALL, SMALL_GOLDEN, Shape, answer, answer_json, case, command

from lib.problem import Problem
from lib.routing import make_routing
from lib.traffic import count_copies
from tools import bw_values
from tools.bw_counts import Tokens, ungrouped_expectation, values

ROOT = Path(__file__).resolve().parent.parent

# -- the options


def test_the_json_has_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    out = answer_json(capsys, *command(SMALL))
    assert list(out) == ["config", "ranks", "total"]
    asked = dict(zip((name[2:].replace("-", "_") for name in OPTIONS), SMALL, strict=True))
    assert out["config"].items() >= {**asked, "world_size": 8, "num_topk_groups": 2}.items()
    named = {"rank", "num_tokens_sent", "recv_num_tokens", "num_rdma_token_sent_algo", "num_rdma_token_sent_physical"}
    assert named <= set(out["ranks"][0])
    assert out["ranks"][0]["dispatch_bf16_rdma_send_physical_bytes"] == 503_808  # where the script prints 503,807


def test_the_defaults_are_the_documents(capsys: pytest.CaptureFixture[str]) -> None:
    shape = bw_values._parser().parse_args([])
    assert [getattr(shape, name[2:].replace("-", "_")) for name in OPTIONS] == [1, 8, 4096, 7168, 256, 8]


def test_the_csv_holds_the_ranks_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(io.StringIO(answer(capsys, *command(SMALL, "--csv")))))
    ranks = answer_json(capsys, *command(SMALL))["ranks"]
    assert rows == [{key: "" if value is None else str(value) for key, value in rank.items()} for rank in ranks]


def test_one_rank_is_shown_with_the_total_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    everyone, one = (answer_json(capsys, *command(SMALL, *extra)) for extra in ((), ("--rank", "5")))
    assert one["ranks"] == [everyone["ranks"][5]]
    assert one["total"] == everyone["total"]
    text = answer(capsys, *command(SMALL, "--rank", "5"))
    assert "[rank 5, node 1, GPU 1]" in text
    assert "[rank 4" not in text


def test_the_text_tells_counted_from_expected(capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, *command(SMALL))
    assert "123  counted; expected algo x 1/2 = 122.0, deviation +1.0" in text
    assert "499,712" not in text  # 122 tokens: no byte figure comes from the formula
    assert "on 0 of 8 ranks; the largest deviation is 3.5 tokens, 2.90% at most" in text


def test_one_node_has_no_rdma_figures(capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, *command((1, 4, 64, 128, 64, 4), "--total-gbps", "300"))
    lines = [line for line in text.splitlines() if "RDMA" in line and not line.startswith("rules")]
    assert len(lines) == 5 * 7  # of four ranks and the total: two counts, four byte figures, the bandwidth
    assert all("n/a" in line for line in lines)
    record = answer_json(capsys, *command((1, 4, 64, 128, 64, 4), "--total-gbps", "300"))["total"]
    assert record["rdma_algo_gbps"] is None
    assert record["num_ranks_where_formula_exact"] is None


def test_above_four_nodes_the_group_cap_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    shape: Shape = (8, 1, 64, 128, 64, 4)
    assert "at most 4 of 8 nodes (the group cap is 4)" in answer(capsys, *command(shape))
    assert answer_json(capsys, *command(shape))["config"]["num_topk_groups"] == 4
    assert "group cap is" not in answer(capsys, *command(SMALL))


def test_a_row_that_fp8_can_not_carry_has_no_fp8_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    record = answer_json(capsys, *command((2, 1, 32, 100, 16, 2)))["ranks"][0]
    assert record["dispatch_fp8_nvl_recv_bytes"] is None
    assert record["dispatch_bf16_nvl_recv_bytes"] == record["recv_num_tokens"] * 200
    assert "n/a" in answer(capsys, *command((2, 1, 32, 100, 16, 2)))


# -- routing files and laws


HAND = np.array(  # 2 nodes x 1 GPU, 8 experts: 0..3 on node 0, 4..7 on node 1
    [
        [[0, 1, 2], [0, 4, 5], [-1, -1, 7]],
        [[4, 5, 6], [3, -1, 2], [-1, -1, -1]],
    ]
)


@pytest.fixture
def hand(tmp_path: Path) -> tuple[str, ...]:
    np.save(tmp_path / "hand.npy", HAND)
    return (*command((2, 1, 3, 128, 8, 3)), "--routing", str(tmp_path / "hand.npy"))


def test_a_routing_file_counted_by_hand(hand: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    out = answer_json(capsys, *hand)
    rows = [
        tuple(r[f"num_{name}"] for name in ("rdma_token_sent_algo", "rdma_token_sent_physical", "selected", "masked"))
        for r in out["ranks"]
    ]
    assert rows == [(4, 2, 7, 2), (2, 1, 5, 4)]
    assert [r["recv_num_tokens"] for r in out["ranks"]] == [3, 3]
    assert out["config"]["num_topk_groups"] is None
    text = answer(capsys, *hand)
    assert "no group cap" in text
    assert "top-k entries masked" in text


def test_masked_entries_are_masked_first_under_every_rule(
    hand: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    deepep, mori = answer_json(capsys, *hand), answer_json(capsys, *hand, "--rules", "mori")
    assert [r["num_rdma_token_sent_algo"] for r in mori["ranks"]] == [4, 2]
    assert mori["total"]["num_masked"] == deepep["total"]["num_masked"] == 6


def test_skewed_routing_breaks_the_formula_and_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "skew.npy", np.tile(np.arange(2), (4, 16, 1)))  # all tokens to node 0
    out = answer_json(capsys, *command((2, 2, 16, 128, 8, 2)), "--routing", str(tmp_path / "skew.npy"))
    assert [r["num_rdma_token_sent_physical"] for r in out["ranks"]] == [0, 0, 16, 16]
    assert [r["num_rdma_token_sent_physical_deviation"] for r in out["ranks"]] == [-8, -8, 8, 8]
    assert out["total"]["num_ranks_where_formula_exact"] == 0


def test_a_law_of_the_suite_counts_as_in_the_suite(capsys: pytest.CaptureFixture[str]) -> None:
    problem = Problem(8, 2, 1000, 64, 4, 128, 0, 0, "zipf:1.2,mask=0.1,empty=3")
    copies = count_copies(make_routing(problem).topk_idx, problem)
    out = answer_json(capsys, *command((2, 4, 1000, 128, 64, 4)), "--routing", problem.routing)
    assert [r["recv_num_tokens"] for r in out["ranks"]] == copies.received.tolist()
    assert [r["num_rdma_token_sent_physical"] for r in out["ranks"]] == copies.node_physical.tolist()
    assert [r["num_tokens_sent"] for r in out["ranks"]] == [1000, 1000, 1000, 0, 1000, 1000, 1000, 1000]


# -- MORI's rules and bandwidths


def test_moris_deduplicating_kernels_count_as_deepep_does(capsys: pytest.CaptureFixture[str]) -> None:
    for kernel in ("v0", "v1", "async_ll"):
        out = answer_json(capsys, *command(SMALL, "--rules", "mori", "--kernel-type", kernel))
        assert [r["num_rdma_token_sent_algo"] for r in out["ranks"]] == SMALL_GOLDEN[0]
        assert out["config"]["kernel_type"] == kernel


def test_moris_v1_ll_sends_every_token_to_every_node(capsys: pytest.CaptureFixture[str]) -> None:
    out = answer_json(capsys, *command(SMALL, "--rules", "mori", "--kernel-type", "v1_ll"))
    assert {r["num_rdma_token_sent_algo"] for r in out["ranks"]} == {128 * 2}
    assert {r["num_rdma_token_sent_physical"] for r in out["ranks"]} == {128}
    assert [r["recv_num_tokens"] for r in out["ranks"]] == SMALL_GOLDEN[2]
    assert out["ranks"][0]["dispatch_fp8_nvl_recv_bytes"] == SMALL_GOLDEN[2][0] * 2048  # elements only, no scales


def test_the_rdma_share_of_published_rows() -> None:
    """EP16 has 171 GB/s XGMI beside 52 GB/s RDMA; EP32's 85 beside 46 and 110 beside 61 fit T x nodes."""
    ep16 = case((2, 8, 4096, 7168, 256, 8), rules="mori", total_gbps=171.0)
    record = values(ep16, Tokens(4096, 32768, 0, 26682, 8166, 4083))
    assert record["rdma_algo_gbps"] == 171 * 8166 / 26682
    assert int(record["rdma_algo_gbps"]) == 52
    assert record["rdma_physical_gbps"] == 171 * 4083 / 26682
    assert record["ll_gbps"] == 171 * 4096 * 8 / (26682 + 1)
    for total, rdma in ((85.0, 46.8), (110.0, 60.5)):
        ep32 = case((4, 8, 4096, 7168, 256, 8), total_gbps=total)
        assert round(values(ep32, Tokens(4096, 0, 0, 29765, 4096 * 4, 4096 * 3))["rdma_algo_gbps"], 1) == rdma


def test_moris_ll_column_on_one_node_has_its_own_guard() -> None:
    record = values(case((1, 8, 64, 128, 64, 4), rules="mori", total_gbps=300.0), Tokens(64, 256, 0, 200, 64, 0))
    assert record["ll_gbps"] == 300 * 64 * 4 / 200.01


def test_a_rank_that_receives_nothing_has_no_bandwidth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "none.npy", np.full((2, 16, 2), -1))
    words = [*command((2, 1, 16, 128, 8, 2)), "--routing", str(tmp_path / "none.npy"), "--total-gbps", "9"]
    assert answer_json(capsys, *words)["ranks"][0]["rdma_algo_gbps"] is None
    assert "RDMA n/a" in answer(capsys, *words)


def test_the_ungrouped_expectation_of_the_closed_form() -> None:
    two, four, eight = (ungrouped_expectation(case((nodes, 8, 4096, 7168, 256, 8)).problem) for nodes in (2, 4, 8))
    assert [round(mean, 1) for mean in (*two, *four)] == [8163.4, 26719.4, 14803.8, 29764.8]
    assert math.isclose(eight[0] / 4096, 5.29465, abs_tol=1e-5)


# -- bad input


@pytest.mark.parametrize(
    ("words", "named", "remedy"),
    [
        ("--num-experts 101 --num-nodes 2", "--num-experts 101", "96 or 112"),
        ("--num-experts 102 --num-nodes 2 --gpu-per-node 2", "--num-experts 102", "100 or 104"),  # silently wrong there
        ("--num-experts 4", "--num-experts 4", "use 8"),
        ("--num-experts 8 --num-topk 9", "--num-topk 9", "1 to 8"),
        ("--num-nodes 6 --gpu-per-node 1 --num-experts 12 --num-topk 10", "--num-topk 10", "1 to 8"),
        ("--num-tokens 0", "--num-tokens", "1 to"),
        ("--hidden 0", "--hidden", "1 to"),
        ("--num-topk 0", "--num-topk", "1 to"),
        ("--num-nodes -1", "--num-nodes", "1 to"),
        ("--gpu-per-node two", "--gpu-per-node", "whole number"),
        ("--num-tokens 1e3", "--num-tokens", "whole number"),
        ("--num-experts 131072", "--num-experts 131072", "at most 65536"),
        ("--num-tokens 1 --hidden 15", "--num-tokens 1", "16 or more"),
        ("--num-tokens 1 --num-experts 8", "--num-tokens 1", "16 or more"),
        ("--rank 8", "--rank 8", "0 to 7"),
        ("--rank -1", "--rank", "0 to"),
        ("--total-gbps 0", "--total-gbps", "above 0"),
        ("--total-gbps nan", "--total-gbps", "above 0"),
        ("--kernel-type v1_ll", "--kernel-type v1_ll", "add --rules mori"),
        ("--rules nccl", "--rules", "mori"),
        ("--json --csv", "--csv", "--json"),
        ("--nodes 2", "--nodes", "unrecognized"),
        ("--routing gauss", "--routing gauss", "uniform"),
        ("--routing ./no_such.npy", "--routing ./no_such.npy", "can't be read"),
        ("--routing uniform,empty=9", "--routing uniform,empty=9", "0..7"),
        ("--routing deepep --num-nodes 8 --num-topk 129", "--num-topk 129", "1 to 128"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_2(
    words: str, named: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bw_values.main(words.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("bw_values: ")
    assert said.err.count("\n") == 1
    assert named in said.err
    assert remedy in said.err


@pytest.mark.parametrize(
    ("ids", "trouble"),
    [
        (HAND[:, :2], "shape"),
        (HAND + 1, "outside -1..7"),
        (np.zeros_like(HAND), "one expert twice"),
        (HAND.astype(np.float32), "int32 or int64"),
    ],
)
def test_a_wrong_routing_file_is_refused(
    ids: Any, trouble: str, hand: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(hand[-1], ids)
    assert bw_values.main(list(hand)) == 2
    said = capsys.readouterr().err
    assert said.startswith("bw_values: --routing ")
    assert trouble in said


def test_a_reader_that_stops_early_gets_no_traceback() -> None:
    shell = f"{sys.executable} {ROOT / 'tools' / 'bw_values.py'} --num-nodes 32 --num-tokens 16 --hidden 16 | head -1"
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("256 ranks")
    assert done.stderr == ""


def test_it_needs_numpy_only() -> None:
    code = "import sys, tools.bw_values; print(*{name.split('.')[0] for name in sys.modules})"
    names = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "numpy" in names.split()
    assert not {"torch", "pandas", "rich", "scipy"}.intersection(names.split())
