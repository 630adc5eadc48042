"""The routing that the MORI-EP benchmark document's reference script makes, with numpy instead of torch.

That script mirrors DeepEP's test_internode.py: on each rank torch.manual_seed(rank), a bf16 input of T x H normals,
then T x E float32 normals as scores, |normal| + 1, grouped top-k. torch's CPU generator is MT19937 with the legacy
integer seeding, which numpy has too; its normals are Box-Muller on groups of 16 draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from lib.problem import Problem
from lib.routing import Ints, Words, grouped_topk

GROUP = 16  # draws that Box-Muller takes together; torch goes another way below 16 values (`too_small`)
CHUNK_SCORES = 1 << 16  # scores held at once: they fit in a core's cache, and memory knows neither ranks nor tokens
_MANTISSA = np.uint64(0xFFFFFF)
_MANTISSA_STEP = np.float32(2.0**-24)
_INDEX_BITS = np.uint64(16)  # `grouped_topk` puts the expert's number into the low 16 bits


def too_small(problem: Problem) -> bool:
    """Is the input or are the scores too small for the draws of 16 that this file reproduces?"""
    return problem.tokens * min(problem.hidden, problem.num_experts) < GROUP


def reference_topk(problem: Problem, rank: int) -> Iterator[Ints]:
    """Expert ids int64 [t, K] of this rank's tokens, in order, in parts of a few hundred tokens.

    The input's draws are skipped, so `hidden` moves the scores: each 16 values, and a last part of them, take 16.
    """
    stream = np.random.MT19937()
    np.random.RandomState(stream).seed(rank)  # the public way to MT19937's legacy seeding
    stream.random_raw(math.ceil(problem.tokens * problem.hidden / GROUP) * GROUP, output=False)
    for tokens, last in _parts(problem):
        normals = _normals(stream, tokens * problem.num_experts, last)
        scores = np.abs(normals) + np.float32(1)
        order = scores.view(np.uint32).astype(np.uint64) << _INDEX_BITS  # positive floats sort as their bits do
        yield grouped_topk(order.reshape(tokens, problem.num_experts), problem.nodes, problem.topk)


def _parts(problem: Problem) -> Iterator[tuple[int, bool]]:
    """(tokens, is it the last?): multiples of 16 tokens but for the last, which has 16 or more unless all are fewer."""
    step = max(GROUP, CHUNK_SCORES // problem.num_experts // GROUP * GROUP)
    left = problem.tokens
    while left >= step + GROUP:
        yield step, False
        left -= step
    yield left, True


def _normals(stream: np.random.MT19937, count: int, last: bool) -> npt.NDArray[np.float32]:
    """The next `count` normals; torch makes the last 16 values of an uneven tensor anew, from 16 more draws."""
    normals = _box_muller(stream.random_raw(count)[: count // GROUP * GROUP])
    if last and count % GROUP:
        normals = np.concatenate([normals, np.empty(count % GROUP, np.float32)])
        normals[-GROUP:] = _box_muller(stream.random_raw(GROUP))
    return normals


def _box_muller(draws: Words) -> npt.NDArray[np.float32]:
    """Standard normals [n] of raw draws [n], n a multiple of 16, rounded to float32 at each step as torch does."""
    uniform = ((draws & _MANTISSA).astype(np.float32) * _MANTISSA_STEP).reshape(-1, 2, GROUP // 2)
    radius = np.sqrt(np.float32(-2) * np.log(np.float32(1) - uniform[:, 0]))
    angle = np.float32(2 * math.pi) * uniform[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)
