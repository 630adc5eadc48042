"""How many copies a routing moves, how many bytes they are, and the bandwidths that follow.

A copy is one token's row to one place. Bases: *selection* = one a chosen expert; *dedup* = one a distinct destination
rank, the own rank included; *wire* = dedup without the own rank. Between nodes: *algo* = one a distinct (token, node),
the own node included, as DeepEP and MORI report it; *physical* = the same without the own node, counted and never
scaled. Each figure names its base, since the same time gives selection GB/s up to K times the wire's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lib.problem import Problem
from lib.routing import expert_loads

Ints = npt.NDArray[np.int64]

# format -> (elements that share a scale, bytes of such a block with its scale)
WIRE_FORMATS: dict[str, tuple[int, int]] = {
    "bf16": (1, 2),
    "fp8": (128, 128 + 4),  # e4m3, one fp32 scale per 128: H + 4 * H / 128
    "mxfp8": (32, 32 + 1),  # e4m3, one e8m0 scale per 32: H + H / 32
    "nvfp4": (16, 8 + 1),  # operand: e2m1, one e4m3 scale per 16: H / 2 + H / 16
    "nvfp4_wire": (16, 8 + 2),  # combine wire 16e2m1 x bf16: H / 2 + 2 * H / 16
}


def copy_bytes(fmt: str, hidden: int) -> int:
    """Bytes of one copy of a row of `hidden` elements, scales included.

    Raises ValueError for an unknown format, or where `hidden` is not a multiple of the format's scale block.
    """
    if fmt not in WIRE_FORMATS:
        raise ValueError(f"there is no wire format {fmt!r}: use {', '.join(WIRE_FORMATS)}")
    block, block_bytes = WIRE_FORMATS[fmt]
    if hidden % block:
        raise ValueError(f"a row of {hidden} can't travel as {fmt}: it must be a multiple of {block}")
    return hidden // block * block_bytes


@dataclass(frozen=True, eq=False)
class Copies:
    """Counted copies of one routing, int64.

    pairs [R, R]: distinct (token, destination rank), row = source rank, column = destination rank · selection [R]: by
    source rank · node_algo, node_physical [R]: by source rank, all 0 on one node, where they do not apply ·
    expert_load [E]: selections by expert.
    """

    pairs: Ints
    selection: Ints
    node_algo: Ints
    node_physical: Ints
    expert_load: Ints

    @property
    def dedup(self) -> Ints:
        """[R] by source rank, own rank included."""
        return self.pairs.sum(axis=1)

    @property
    def wire(self) -> Ints:
        """[R] by source rank: what leaves it."""
        return self.dedup - np.diagonal(self.pairs)

    @property
    def received(self) -> Ints:
        """[R] by destination rank, own rank included."""
        return self.pairs.sum(axis=0)

    @property
    def wire_in(self) -> Ints:
        """[R] by destination rank: what enters it."""
        return self.received - np.diagonal(self.pairs)


@dataclass(frozen=True, eq=False)
class SourceCopies:
    """Counted copies of one source rank's tokens: pairs int64 [R] by destination rank; the others as in Copies.

    Unlike there, on one node node_algo is the tokens that go anywhere, as the counting rule has it.
    """

    pairs: Ints
    selection: int
    node_algo: int
    node_physical: int


def count_source(topk_idx: Ints, source: int, problem: Problem) -> SourceCopies:
    """Count the copies of any tokens topk_idx [t, K] of one source rank (-1 = masked); parts of its tokens add up."""
    hits = _hits(topk_idx, problem)
    ranks_a_node = problem.world // problem.nodes
    node_hits = np.asarray(hits.reshape(-1, problem.nodes, ranks_a_node).any(axis=2))
    algo, own = int(node_hits.sum()), int(node_hits[:, source // ranks_a_node].sum())
    return SourceCopies(hits.sum(axis=0), int((topk_idx >= 0).sum()), algo, algo - own)


def count_copies(topk_idx: Ints, problem: Problem) -> Copies:
    """Count the copies of topk_idx [R, T, K] (-1 = masked, counted nowhere)."""
    world = problem.world
    pairs, selection = np.zeros((world, world), np.int64), np.zeros(world, np.int64)
    node_algo, node_physical = np.zeros(world, np.int64), np.zeros(world, np.int64)
    for source in range(world):
        counted = count_source(topk_idx[source], source, problem)
        pairs[source], selection[source] = counted.pairs, counted.selection
        if problem.nodes > 1:
            node_algo[source], node_physical[source] = counted.node_algo, counted.node_physical
    return Copies(pairs, selection, node_algo, node_physical, expert_loads(topk_idx, problem.num_experts))


def to_every_node(copies: Copies, tokens: Sequence[int], nodes: int) -> Copies:
    """The copies of a library that sends each of a rank's `tokens` to every node, whatever its experts are."""
    if nodes == 1:
        return copies
    sent = np.asarray(tokens, np.int64)
    return replace(copies, node_algo=sent * nodes, node_physical=sent * (nodes - 1))


def _hits(topk_idx: Ints, problem: Problem) -> npt.NDArray[np.bool_]:
    """[T, R]: does this token touch an expert of that rank?"""
    hits = np.zeros((topk_idx.shape[0], problem.world + 1), np.bool_)
    destination = np.where(topk_idx >= 0, topk_idx // problem.local_experts, problem.world)  # masked: one past the end
    hits[np.arange(topk_idx.shape[0])[:, None], destination] = True
    return hits[:, : problem.world]


def byte_columns(
    copies: Copies, problem: Problem, dispatch_format: str, combine_format: str
) -> dict[str, int | float | None]:
    """The row's byte columns: the mean over ranks, an int where it is whole, so that bytes / us / 1000 is GB/s a rank.

    Combine moves the same copies back in its own format. node_* are of the dispatch leg, None on one node.
    """
    out = copy_bytes(dispatch_format, problem.hidden)
    back = copy_bytes(combine_format, problem.hidden)
    several = problem.nodes > 1
    return {
        "dispatch_bytes_selection": _mean(copies.selection, out),
        "dispatch_bytes_dedup": _mean(copies.dedup, out),
        "dispatch_bytes_wire": _mean(copies.wire, out),
        "combine_bytes_selection": _mean(copies.selection, back),
        "combine_bytes_dedup": _mean(copies.dedup, back),
        "combine_bytes_wire": _mean(copies.wire, back),
        "node_bytes_algo": _mean(copies.node_algo, out) if several else None,
        "node_bytes_physical": _mean(copies.node_physical, out) if several else None,
    }


def bandwidth_columns(
    copies: Copies,
    problem: Problem,
    dispatch_format: str,
    combine_format: str,
    dispatch_us: float | None,
    combine_us: float | None,
) -> dict[str, int | float | None]:
    """The row's bandwidth columns in GB/s a rank (1e9 bytes), one direction each; None where bytes or time are none.

    wire_gbps_min: the least wire bandwidth of the dispatch leg among ranks that send anything; all ranks share the
    phase's time, so it shows uneven routing. wire_gbps_min_rank: that rank, the first of equals.
    """
    sizes = byte_columns(copies, problem, dispatch_format, combine_format)
    senders = np.flatnonzero(copies.wire)
    slowest = int(senders[copies.wire[senders].argmin()]) if senders.size else None
    least = 0 if slowest is None else int(copies.wire[slowest]) * copy_bytes(dispatch_format, problem.hidden)
    wire_gbps_min = _gbps(least, dispatch_us)
    return {
        "dispatch_dedup_gbps": _gbps(sizes["dispatch_bytes_dedup"], dispatch_us),
        "combine_dedup_gbps": _gbps(sizes["combine_bytes_dedup"], combine_us),
        "dispatch_wire_gbps": _gbps(sizes["dispatch_bytes_wire"], dispatch_us),
        "combine_wire_gbps": _gbps(sizes["combine_bytes_wire"], combine_us),
        "wire_gbps_min": wire_gbps_min,
        "wire_gbps_min_rank": None if wire_gbps_min is None else slowest,
    }


def _mean(counts: Ints, bytes_per_copy: int) -> int | float:
    total, ranks = int(counts.sum()) * bytes_per_copy, len(counts)
    return total // ranks if total % ranks == 0 else total / ranks


def _gbps(size_bytes: int | float | None, time_us: float | None) -> float | None:
    if not size_bytes or time_us is None or not math.isfinite(time_us) or time_us <= 0:
        return None
    return size_bytes / time_us / 1000
