"""Every variant of the MSCCL++ adapter on two ranks over the fake library."""

from __future__ import annotations

from typing import Any

import torch

from bench.backends.mscclpp import MscclppBackend
from lib.contract import Group, Variant
from lib.knobs import MachineFacts, parse_knobs
from lib.problem import Problem
from tests import fake_mscclpp
from tests.library_ranks import Suite, refusal, run_rank

KNOBS = parse_knobs(
    {"ALGO": "ht ll", "DISPATCH_DTYPE": "bf16 fp8", "NUM_SMS": "24"}, MachineFacts(gpu_count=8, sm=(9, 0))
)
PAIR = Problem(world=2, nodes=1, tokens=6, num_experts=8, topk=3, hidden=4096, inter=128, seed=0, routing="uniform")


def faults_of(variant: Variant) -> tuple[str, ...]:
    """Weights are the library's in expert-major order; ht's rank-major promises token-major's bits."""
    if variant.handle:
        return ()  # the same session as without
    found = fake_mscclpp.FAULTS[:2]
    if variant.layout == "expert_major":
        return (*found, "skip_weights")
    return (*found, "other_bits") if (variant.algo, variant.layout) == ("ht", "rank_major") else found


def steps_of(variant: Variant) -> tuple[str, ...]:
    """The steps of each session; direct_send in expert-major order has rank_local_reduce's."""
    if variant.handle or variant.name == "mscclpp_ll+direct_send":
        return ()
    staged = variant.layout != "expert_major" or variant.dispatch_dtype == "fp8"
    return ("_dispatch", "_stage", "_combine") if staged else ("_dispatch", "_combine")


SUITE = Suite(
    MscclppBackend(),
    KNOBS,
    PAIR,
    fake_mscclpp.MoECommunicator,
    fake_mscclpp.installed,
    faults_of,
    fake_mscclpp.alive,
    steps_of=steps_of,
)


def more(name: str, session: Any, group: Group) -> dict[str, Any]:
    """The fake's own rules, on a session's communicator; only what no rank has to meet the other for."""
    found: dict[str, Any] = {"graph": session.capturable}
    inputs, moe = session.inputs, session.moe
    if name == "mscclpp_ll bf16":
        results = [moe.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights) for _ in range(2)]
        found["sources"] = [[sorted(r) for r in result[1]._context.src_info.tolist()] for result in results]
        found["stale handle"] = refusal(lambda: moe.combine(results[0][0].tokens, results[0][1]))
    elif name == "mscclpp_ll+rank_major bf16":
        other = torch.zeros_like(session.result.combine_input_buffer)
        found["another buffer"] = refusal(lambda: moe.combine(other, session.handle))
    elif name == "mscclpp_ht+cached bf16":
        copy = inputs.topk_idx.clone()
        _, handle = moe.dispatch(inputs.x, copy, inputs.topk_weights, previous_handle=session.first)
        found["same cache"] = handle._dispatch_cache is session.first._dispatch_cache
    return found


def rank_main(rank: int, folder: str) -> None:
    run_rank(SUITE, rank, 2, folder, more)
