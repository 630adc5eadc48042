"""Shapes and calls of the bandwidth calculator that its test files share."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lib.problem import Problem
from tools import bw_values
from tools.bw_counts import Case, count_tokens

Shape = tuple[int, int, int, int, int, int]  # nodes, GPUs a node, tokens, hidden, experts, top-k
OPTIONS = ("--num-nodes", "--gpu-per-node", "--num-tokens", "--hidden", "--num-experts", "--num-topk")

# Printed by the MORI-EP benchmark document's script, run unmodified with torch 2.13: algo, physical, received by rank.
SMALL: Shape = (2, 4, 128, 2048, 64, 4)
SMALL_GOLDEN = (
    [244, 236, 247, 246, 245, 243, 231, 241],
    [123, 117, 125, 121, 121, 121, 117, 124],
    [425, 438, 455, 429, 425, 409, 441, 422],
)


def case(shape: Shape, routing: str = "reference", **changes: Any) -> Case:
    nodes, gpus, tokens, hidden, experts, topk = shape
    return Case(Problem(nodes * gpus, nodes, tokens, experts, topk, hidden, 0, 0, routing), **changes)


def counts(shape: Shape) -> tuple[list[int], list[int], list[int]]:
    ranks = count_tokens(case(shape))
    return [r.algo for r in ranks], [r.physical for r in ranks], [r.received for r in ranks]


def command(shape: Shape | None, *extra: str) -> list[str]:
    pairs = zip(OPTIONS, shape, strict=True) if shape else ()
    return [word for name, value in pairs for word in (name, str(value))] + list(extra)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert bw_values.main(list(words)) == 0
    return capsys.readouterr().out


def answer_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(answer(capsys, *words, "--json"))
    return data
