"""What each rank of a routing sends and receives, in tokens and bytes, as one record a rank and one for all of them.

Token counts come from lib/traffic.py. The two rule sets differ in two places: what MORI's v1_ll kernel counts between
nodes, and what a row weighs in FP8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lib.problem import Problem
from lib.routing import Ints, rank_topk
from lib.routing_spec import MAX_GROUPS, RoutingSpec, parse_routing
from lib.traffic import copy_bytes, count_source
from tools.bw_routing import CHUNK_SCORES, reference_topk

Record = dict[str, Any]  # name -> int, float or None (does not apply)

REFERENCE = "reference"  # the routing of the document's script; the other names are those of the ROUTING knob
KERNEL_TYPES = ("v0", "v1", "v1_ll", "async_ll")  # MORI's internode kernels, by its bench's names
FORMATS = ("bf16", "fp8")
SENT, RECEIVED = "num_tokens_sent", "recv_num_tokens"
ALGO, PHYSICAL = "num_rdma_token_sent_algo", "num_rdma_token_sent_physical"
EXPECTED, DEVIATION = f"{PHYSICAL}_expected", f"{PHYSICAL}_deviation"
# (leg, what moves, the tokens that it counts); combine takes the dispatch's copies back
BYTES = (
    ("dispatch", "rdma_send_algo", ALGO),
    ("dispatch", "rdma_send_physical", PHYSICAL),
    ("dispatch", "nvl_recv", RECEIVED),
    ("combine", "rdma_recv_algo", ALGO),
    ("combine", "rdma_recv_physical", PHYSICAL),
    ("combine", "nvl_send", RECEIVED),
)


@dataclass(frozen=True)
class Case:
    """What is counted: a shape, whose `routing` is `reference` or a ROUTING text, and the rules. GB/s are 1e9 B/s."""

    problem: Problem
    rules: str = "deepep"  # or mori
    kernel_type: str = "v1"  # MORI's
    total_gbps: float | None = None  # a measured bandwidth a rank, over recv_num_tokens

    @property
    def undeduplicated(self) -> bool:
        """MORI's v1_ll sends every token to every node, whatever its experts are."""
        return self.rules == "mori" and self.kernel_type == "v1_ll"

    @property
    def spec(self) -> RoutingSpec | None:
        """None for the reference routing. Raises ValueError with one sentence for a text that is no routing."""
        return None if self.problem.routing == REFERENCE else parse_routing(self.problem.routing)

    @property
    def groups(self) -> int | None:
        """How many nodes a token may reach at most by the routing law, or None where the law has no such limit."""
        spec = self.spec
        return min(self.problem.nodes, MAX_GROUPS) if spec is None or spec.law == "deepep" else None

    def tokens_of(self, rank: int) -> int:
        spec = self.spec
        return 0 if spec is not None and rank == spec.empty else self.problem.tokens


@dataclass(frozen=True)
class Tokens:
    """Counted tokens of one rank, or sums over ranks. `selected` counts the top-k entries >= 0."""

    sent: int
    selected: int
    masked: int
    received: int
    algo: int
    physical: int


def count_tokens(case: Case) -> list[Tokens]:
    """Count rank by rank, so that only one part of one rank's routing is held at a time. In order of rank."""
    problem = case.problem
    received = np.zeros(problem.world, np.int64)
    counted = []
    for rank in range(problem.world):
        sent, selected, algo, physical = case.tokens_of(rank), 0, 0, 0
        for topk_idx in _topk_parts(case, rank):
            part = count_source(topk_idx, rank, problem)
            received += part.pairs
            selected, algo, physical = selected + part.selection, algo + part.node_algo, physical + part.node_physical
        if case.undeduplicated:
            algo, physical = sent * problem.nodes, sent * (problem.nodes - 1)
        counted.append(Tokens(sent, selected, sent * problem.topk - selected, 0, algo, physical))
    return [replace(tokens, received=int(of_rank)) for tokens, of_rank in zip(counted, received, strict=True)]


def _topk_parts(case: Case, rank: int) -> Iterator[Ints]:
    spec = case.spec
    if spec is None:
        yield from reference_topk(case.problem, rank)
        return
    topk_idx = rank_topk(case.problem, spec, rank)
    step = max(1, CHUNK_SCORES // case.problem.world)  # the table of hits is [tokens, ranks]
    for start in range(0, len(topk_idx), step):
        yield topk_idx[start : start + step]


def rank_record(case: Case, rank: int, tokens: Tokens) -> Record:
    """One rank's values: identity, then `values`."""
    gpus = case.problem.world // case.problem.nodes
    return {"rank": rank, "node": rank // gpus, "gpu": rank % gpus, **values(case, tokens)}


def total_record(case: Case, ranks: list[Tokens]) -> Record:
    """Sums over the ranks, and how far the (N-1)/N formula is off on single ranks (None on one node)."""
    columns = [[getattr(tokens, name) for tokens in ranks] for name in Tokens.__dataclass_fields__]
    several = case.problem.nodes > 1
    exact, worst, worst_share = _formula(case, ranks)
    return {
        **values(case, Tokens(*map(sum, columns))),
        "num_ranks_where_formula_exact": exact if several else None,
        "max_abs_deviation_tokens": worst if several else None,
        "max_rel_deviation": worst_share if several else None,
    }


def _formula(case: Case, ranks: list[Tokens]) -> tuple[int, float, float]:
    """(ranks where algo x (N-1)/N is physical, the largest deviation in tokens, the largest as a share)."""
    pairs = [(tokens.physical, expected_physical(case, tokens.algo)) for tokens in ranks]
    gaps = [abs(physical - expected) for physical, expected in pairs]
    shares = [gap / expected for gap, (_, expected) in zip(gaps, pairs, strict=True) if expected]
    nodes = case.problem.nodes
    exact = sum(tokens.physical * nodes == tokens.algo * (nodes - 1) for tokens in ranks)
    return exact, max(gaps), max(shares, default=0.0)


def expected_physical(case: Case, algo: int) -> float:
    """algo x (N-1)/N: what physical is on average if no node is special; it is counted, never taken from here."""
    return algo * (case.problem.nodes - 1) / case.problem.nodes


def values(case: Case, tokens: Tokens) -> Record:
    """Tokens, bytes, and where a bandwidth was given its shares. Counts are exact integers.

    The byte names are `<leg>_<format>_<what>_bytes`; None where the format can't carry such a row.
    """
    record: Record = {
        SENT: tokens.sent,
        RECEIVED: tokens.received,
        "recv_x_numel": tokens.received * case.problem.hidden,
        ALGO: tokens.algo,
        PHYSICAL: tokens.physical,
        EXPECTED: expected_physical(case, tokens.algo),
        DEVIATION: tokens.physical - expected_physical(case, tokens.algo),
        "num_selected": tokens.selected,
        "num_masked": tokens.masked,
    }
    sizes = row_bytes(case)
    for leg, what, count in BYTES:
        for fmt in FORMATS:
            size = sizes[fmt]
            record[f"{leg}_{fmt}_{what}_bytes"] = None if size is None else record[count] * size
    return record | _bandwidths(case, tokens)


def row_bytes(case: Case) -> dict[str, int | None]:
    """Bytes of one row by format. DeepEP's FP8 row brings a scale per 128; MORI counts elements only."""
    hidden = case.problem.hidden
    if case.rules == "mori":
        return {"bf16": copy_bytes("bf16", hidden), "fp8": hidden}
    try:
        return {"bf16": copy_bytes("bf16", hidden), "fp8": copy_bytes("fp8", hidden)}
    except ValueError:  # a row that is no multiple of 128 can't travel as FP8
        return {"bf16": copy_bytes("bf16", hidden), "fp8": None}


def _bandwidths(case: Case, tokens: Tokens) -> Record:
    """RDMA bandwidth = total x RDMA tokens / tokens received: the same time and the same bytes a token.

    ll_gbps is MORI's "LL" column, total x T K / (recv + 1), with recv + 0.01 on one node: a copy per (token, expert).
    """
    if case.total_gbps is None:
        return {}
    applies = case.problem.nodes > 1 and tokens.received > 0
    record: Record = {
        name: case.total_gbps * count / tokens.received if applies else None
        for name, count in (("rdma_algo_gbps", tokens.algo), ("rdma_physical_gbps", tokens.physical))
    }
    if case.rules == "mori":
        guard = 1 if case.problem.nodes > 1 else 0.01
        record["ll_gbps"] = case.total_gbps * tokens.sent * case.problem.topk / (tokens.received + guard)
    return record


def ungrouped_expectation(problem: Problem) -> tuple[float, float]:
    """(algo, received) tokens a rank on average, were each token's K experts drawn from all E alike.

    MORI's own generator does that; its draws come from a GPU and can't be repeated here. A place that holds `own` of
    the E experts is reached with the probability 1 - C(E - own, K) / C(E, K).
    """

    def places(count: int) -> float:
        own = problem.num_experts // count
        missed = math.comb(problem.num_experts - own, problem.topk) / math.comb(problem.num_experts, problem.topk)
        return problem.tokens * count * (1 - missed)

    return places(problem.nodes), places(problem.world)
