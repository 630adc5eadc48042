"""Which experts each token of each rank chooses, and with which gate weights.

Everything is made on the host from raw 64-bit words of numpy's Philox and integer arithmetic of our own: a
Generator's streams may change between numpy versions, raw words may not. So a routing is the same bytes on every
rank, device and version, and its hash says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lib.problem import Problem, stream_seed
from lib.routing_spec import FILE_LAW, MAX_GROUPS, RoutingSpec, check_routing, check_routing_file, parse_routing

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_INDEX_BITS = np.uint64(0xFFFF)  # of a score word, that carry the expert's number: it breaks ties
_WEIGHT_FLOOR = 1 << 18
_WEIGHT_SPAN = (1 << 20) - _WEIGHT_FLOOR
_ZIPF_TOTAL = (1 << 31) - 1
_DECIMAL = Context(prec=50)


@dataclass(frozen=True, eq=False)
class Routing:
    """The routing of all ranks at one point.

    topk_idx int64 [R, T, K], -1 = masked · topk_weights float32 [R, T, K], 0 where masked, the others positive with
    sum 1 in a row · sha, `r` and 7 hex digits over both · load_max_over_mean, selections that the busiest rank's
    experts get over the mean of all ranks, None where nothing is selected · empty, the rank without tokens (its rows
    are all -1) or None.
    """

    topk_idx: Ints
    topk_weights: npt.NDArray[np.float32]
    sha: str
    load_max_over_mean: float | None
    empty: int | None = None

    def tokens_of(self, rank: int) -> int:
        return 0 if rank == self.empty else int(self.topk_idx.shape[1])


def make_routing(problem: Problem) -> Routing:
    """The routing that `problem.routing` names, for all ranks; the laws are documented in docs/method.md.

    Raises ValueError with one sentence where the text, the file or the shape does not allow it.
    """
    spec = parse_routing(problem.routing)
    trouble = check_routing(spec, problem.world, problem.nodes, problem.num_experts, problem.topk)
    if spec.law == FILE_LAW:
        trouble = trouble or check_routing_file(
            spec.path, problem.world, problem.tokens, problem.num_experts, problem.topk
        )
    if trouble:
        raise ValueError(trouble)
    topk_idx = np.empty((problem.world, problem.tokens, problem.topk), np.int64)
    topk_weights = np.empty(topk_idx.shape, np.float32)
    for rank in range(problem.world):
        topk_idx[rank] = rank_topk(problem, spec, rank)
        topk_weights[rank] = _gate_weights(topk_idx[rank], problem, rank)
    load = expert_loads(topk_idx, problem.num_experts).reshape(problem.world, -1).sum(1)
    skew = float(load.max() / load.mean()) if load.any() else None
    return Routing(topk_idx, topk_weights, _hash(topk_idx, topk_weights), skew, spec.empty)


def uneven(routing: Routing) -> Routing:
    """The same routing with each gate weight times 1/2, 1 or 2, by its expert: exact, and the same on every rank.

    Weights that sum to 1 make sum(w * x) = x where experts are the identity: a combine that gives its input back would
    be right. `sha` stays that of the routing law.
    """
    factor = np.where(routing.topk_idx >= 0, np.exp2(routing.topk_idx % 3 - 1.0), 1.0).astype(np.float32)
    return replace(routing, topk_weights=routing.topk_weights * factor)


def rank_topk(problem: Problem, spec: RoutingSpec, rank: int) -> Ints:
    """The experts of one rank's tokens, int64 [T, K], -1 = masked; the caller has checked `spec` against the shape."""
    return _masked(_LAWS[spec.law](problem, spec, rank), problem, spec, rank)


def grouped_topk(order: Words, nodes: int, topk: int) -> Ints:
    """The K best experts a token, int64 [T, K], in its best groups; a group is one node's experts, MAX_GROUPS at most.

    order uint64 [T, E]: the higher the better; a group ranks by its best expert. The low 16 bits are replaced by
    65535 - e: nothing ties, and where it would the lower expert wins.
    """
    tokens, experts = order.shape
    scores = (order & ~_INDEX_BITS) | (_INDEX_BITS - np.arange(experts, dtype=np.uint64))
    grouped = scores.reshape(tokens, nodes, experts // nodes)
    best = grouped.max(axis=2)
    kept = min(nodes, MAX_GROUPS)
    threshold = np.sort(best, axis=1)[:, nodes - kept]
    scores = np.where((best >= threshold[:, None])[:, :, None], grouped, np.uint64(0)).reshape(scores.shape)
    top = np.sort(np.partition(scores, experts - topk, axis=1)[:, experts - topk :], axis=1)[:, ::-1]
    return (_INDEX_BITS - (top & _INDEX_BITS)).astype(np.int64)


def expert_loads(topk_idx: Ints, num_experts: int) -> Ints:
    """Selections per expert, int64 [E]; masked entries count for nobody."""
    return np.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).astype(np.int64)


def _words(problem: Problem, rank: int, purpose: str, shape: tuple[int, ...]) -> Words:
    """Raw Philox words of one named stream; fewer tokens get a prefix of what more tokens get."""
    philox = np.random.Philox(key=stream_seed("routing", purpose, problem.seed, rank))
    return np.asarray(philox.random_raw(int(np.prod(shape))), np.uint64).reshape(shape)


def _below(words: Words, limit: int | Ints) -> Ints:
    """floor(word * limit / 2**64), so uniform in 0..limit-1 within limit / 2**64; limit < 2**32."""
    count = np.asarray(limit, np.uint64)
    return (((words >> _HALF) * count + ((words & _LOW) * count >> _HALF)) >> _HALF).astype(np.int64)


def _uniform(problem: Problem, spec: RoutingSpec, rank: int) -> Ints:
    """K distinct experts, all alike: the first K steps of a Fisher-Yates shuffle."""
    words = _words(problem, rank, "uniform", (problem.tokens, problem.topk))
    deck = np.tile(np.arange(problem.num_experts, dtype=np.int64), (problem.tokens, 1))
    token = np.arange(problem.tokens)
    for step in range(problem.topk):
        drawn = step + _below(words[:, step], problem.num_experts - step)
        card = deck[token, drawn]
        deck[token, drawn] = deck[:, step]
        deck[:, step] = card
    return deck[:, : problem.topk]


def _balanced(problem: Problem, spec: RoutingSpec, rank: int) -> Ints:
    """A strided deal over all tokens: selection s goes to rank s mod R, so a token reaches min(K, R) ranks."""
    seat = rank - (spec.empty is not None and spec.empty < rank)  # an empty rank leaves no gap in the deal
    token = seat * problem.tokens + np.arange(problem.tokens, dtype=np.int64)
    deal = (token[:, None] * problem.topk + np.arange(problem.topk, dtype=np.int64)) % problem.num_experts
    return (deal % problem.world) * problem.local_experts + deal // problem.world


@lru_cache(maxsize=1)  # the same on every rank: 2048 experts take 75 ms
def zipf_weights(num_experts: int, exponent: str) -> Ints:
    """Integer weights int64 [E], at least 1 each, sum < 2**31, proportional to (e + 1)**-s: expert 0 is the hottest.

    By the decimal module, whose exp and ln are correctly rounded: libm's pow differs between platforms.
    """
    power = _DECIMAL.minus(Decimal(exponent))
    terms = [_DECIMAL.exp(_DECIMAL.multiply(power, _DECIMAL.ln(Decimal(e + 1)))) for e in range(num_experts)]
    total = Decimal(0)
    for term in terms:
        total = _DECIMAL.add(total, term)
    scale = _DECIMAL.divide(Decimal(_ZIPF_TOTAL - num_experts), total)
    weights = np.array([max(1, int(_DECIMAL.multiply(scale, term))) for term in terms], np.int64)
    weights.flags.writeable = False  # shared by all callers
    return weights


def _zipf(problem: Problem, spec: RoutingSpec, rank: int) -> Ints:
    """K distinct experts one after the other, each drawn from the weights of those that are left.

    The draw counts over what is left, then steps over the chosen experts' ranges in ascending order: this equals a
    cumulative sum over the remaining weights, without making one a token.
    """
    weights = zipf_weights(problem.num_experts, spec.exponent)
    ends = np.cumsum(weights)
    words = _words(problem, rank, "zipf", (problem.tokens, problem.topk))
    chosen = np.empty((problem.tokens, problem.topk), np.int64)
    left = np.full(problem.tokens, ends[-1], np.int64)
    for step in range(problem.topk):
        point = _below(words[:, step], left)
        for taken in np.sort(chosen[:, :step], axis=1).T:
            point += np.where(point >= ends[taken] - weights[taken], weights[taken], 0)
        chosen[:, step] = np.searchsorted(ends, point, side="right")
        left -= weights[chosen[:, step]]
    return chosen


def _onehot(problem: Problem, spec: RoutingSpec, rank: int) -> Ints:
    """Every token takes experts 0..K-1: the worst load there is."""
    return np.tile(np.arange(problem.topk, dtype=np.int64), (problem.tokens, 1))


def _deepep(problem: Problem, spec: RoutingSpec, rank: int) -> Ints:
    """DeepEP's test law. Only the order of the scores matters, so uniform integers stand for DeepEP's |normal| + 1."""
    scores = _words(problem, rank, "deepep", (problem.tokens, problem.num_experts))
    return grouped_topk(scores, problem.nodes, problem.topk)


def _file(problem: Problem, spec: RoutingSpec, rank: int) -> Ints:
    """The first T rows of each rank in a .npy file [R, T or more, K]."""
    stored = np.load(spec.path, mmap_mode="r", allow_pickle=False)
    return np.asarray(stored[rank, : problem.tokens], np.int64)


_LAWS: dict[str, Callable[[Problem, RoutingSpec, int], Ints]] = {
    "uniform": _uniform,
    "balanced": _balanced,
    "zipf": _zipf,
    "onehot": _onehot,
    "deepep": _deepep,
    FILE_LAW: _file,
}


def _masked(ids: Ints, problem: Problem, spec: RoutingSpec, rank: int) -> Ints:
    """-1 for every entry of the empty rank, else with the probability floor(p * 2**32) / 2**32 exactly."""
    if rank == spec.empty:
        return np.full_like(ids, -1)
    if not spec.mask:
        return ids
    threshold = int(spec.mask * (1 << 32))
    words = _words(problem, rank, "mask", ids.shape)
    return np.where((words >> _HALF) < np.uint64(threshold), np.int64(-1), ids)


def _gate_weights(ids: Ints, problem: Problem, rank: int) -> npt.NDArray[np.float32]:
    """Integers in 2**18..2**20-1 over their sum: none weighs under a quarter of another, so that a lost one shows."""
    raw = _WEIGHT_FLOOR + _below(_words(problem, rank, "weights", ids.shape), _WEIGHT_SPAN)
    raw = np.where(ids >= 0, raw, 0)
    return (raw / np.maximum(raw.sum(axis=1, keepdims=True), 1)).astype(np.float32)


def _hash(topk_idx: Ints, topk_weights: npt.NDArray[np.float32]) -> str:
    digest = hashlib.blake2b(np.array(topk_idx.shape, "<i8").tobytes(), digest_size=8)
    digest.update(topk_idx.astype("<i8", copy=False).tobytes())
    digest.update(topk_weights.astype("<f4", copy=False).tobytes())
    return "r" + digest.hexdigest()[:7]
