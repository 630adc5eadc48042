"""Dispatch of backend `symm`: the plan, and one-sided pushes of rows over NVLink."""

from __future__ import annotations

import triton
import triton.language as tl

from bench.backends.symm_device import (
    COUNTS,
    DISPATCHES,
    DONE,
    GROUP,
    IDS,
    READY,
    ROWS,
    SCALES,
    SOURCE,
    WEIGHTS,
    at,
    finish,
    signal,
    wait,
)

FRESH, CACHED, UNPLANNED = (tl.constexpr(plan) for plan in range(3))
FP8_MAX = tl.constexpr(448.0)
AMAX_FLOOR = tl.constexpr(1e-4)  # lib/formats.py: the scale of a row of zeros

# mypy: disable-error-code="no-untyped-def"
# Triton decides an `if` of a constexpr while it compiles, and only if nothing else is in it.
# ruff: noqa: SIM102, RET505


@triton.jit
def _wait_for_all(table, rank, epoch, world: tl.constexpr):
    """Until every rank has begun this dispatch, and so has read all that it got from the one before."""
    for peer in tl.static_range(world):
        wait(at(table, READY, rank, world, tl.int32) + peer, epoch)


@triton.jit
def _or(left, right):
    return left | right


@triton.jit
def _destinations(
    topk_idx, tokens, first, local_experts: tl.constexpr, topk: tl.constexpr, count: tl.constexpr, lanes: tl.constexpr
):
    """Bit r of element i: token first + i goes to rank r. int32 [count]; 0 from `tokens` on."""
    token = first + tl.arange(0, count)
    choice = tl.arange(0, lanes)
    there = (token[:, None] < tokens) & (choice[None, :] < topk)
    expert = tl.load(topk_idx + token[:, None].to(tl.int64) * topk + choice[None, :], mask=there, other=-1).to(tl.int32)
    bit = tl.where(expert >= 0, 1 << (tl.maximum(expert, 0) // local_experts), 0)
    return tl.reduce(bit, 1, _or)


@triton.jit
def _sum_before(values, count: tl.constexpr):
    """Element i of the first axis becomes the sum of those before it; int32 [count, lanes].

    Not tl.cumsum: where a thread's neighbours hold copies of its row, Triton 3.6 adds from the wrong lanes (symm.md).
    """
    place = tl.arange(0, count)
    earlier = place[None, :] < place[:, None]
    return tl.sum(tl.where(earlier[:, :, None], values[None, :, :], 0), 1)


@triton.jit
def _ordinals(
    topk_idx, tokens, first, local_experts: tl.constexpr, topk: tl.constexpr,
    count: tl.constexpr, lanes: tl.constexpr, rank_lanes: tl.constexpr, scan: tl.constexpr,
):  # fmt: skip
    """Of tokens first..first+count-1 and every rank: does the copy go there, and how many of this rank's went before.

    Two int32 [count, rank_lanes]. Each program counts all earlier tokens for itself: 256 KB of ids at 4096 x 8.
    """
    ranks = tl.arange(0, rank_lanes)
    sums = tl.zeros([scan, rank_lanes], tl.int32)
    for start in range(0, first, scan):
        bits = _destinations(topk_idx, tl.minimum(first, tokens), start, local_experts, topk, scan, lanes)
        sums += (bits[:, None] >> ranks[None, :]) & 1
    bits = _destinations(topk_idx, tokens, first, local_experts, topk, count, lanes)
    goes = (bits[:, None] >> ranks[None, :]) & 1
    return goes, tl.sum(sums, 0)[None, :] + _sum_before(goes, count)


@triton.jit
def _store_counts(table, totals, rank, world: tl.constexpr, rank_lanes: tl.constexpr):
    """How many rows each rank gets from this one, to all ranks: `totals` int32 [rank_lanes]."""
    ranks = tl.arange(0, rank_lanes)
    for peer in tl.static_range(world):
        tl.store(at(table, COUNTS, peer, world, tl.int32) + rank * rank_lanes + ranks, totals)


@triton.jit
def _publish(table, totals, rank, epoch, world: tl.constexpr, rank_lanes: tl.constexpr):
    _store_counts(table, totals, rank, world, rank_lanes)
    for peer in tl.static_range(world):
        signal(at(table, READY, peer, world, tl.int32) + rank, epoch)


@triton.jit
def _keep_slots(slots, capacity, tokens, token, goes, ordinal, world: tl.constexpr, rank_lanes: tl.constexpr):
    """slots [R, T] int32: which of this rank's rows on rank r is token t; -1 = none."""
    ranks = tl.arange(0, rank_lanes)
    there = (ranks[None, :] < world) & (token[:, None] < tokens)
    tl.store(slots + ranks[None, :] * capacity + token[:, None], tl.where(goes == 1, ordinal, -1), mask=there)


@triton.jit
def symm_plan(
    topk_idx, tokens, slots, table, state, rank, capacity,
    world: tl.constexpr, local_experts: tl.constexpr, topk: tl.constexpr,
    count: tl.constexpr, lanes: tl.constexpr, rank_lanes: tl.constexpr, scan: tl.constexpr,
):  # fmt: skip
    """The slots of all tokens, `count` a program; the last program tells every rank how many rows to expect."""
    block = tl.program_id(0)
    first = block * count
    goes, ordinal = _ordinals(topk_idx, tokens, first, local_experts, topk, count, lanes, rank_lanes, scan)
    _keep_slots(slots, capacity, tokens, first + tl.arange(0, count), goes, ordinal, world, rank_lanes)
    if block == tl.num_programs(0) - 1:
        totals = tl.max(ordinal + goes, 0)
        _publish(table, totals, rank, tl.load(state + DISPATCHES) + 1, world, rank_lanes)


@triton.jit
def _pick(vector, place, lanes: tl.constexpr):
    """One element of a vector in registers."""
    return tl.sum(tl.where(tl.arange(0, lanes) == place, vector, 0), 0)


@triton.jit
def _quantized(value, fp8: tl.constexpr):
    """lib/formats.py's `fp8` of a tile [rows, groups, 128]: the values on the wire and their scales [rows, groups]."""
    wide = value.to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(wide), 2), AMAX_FLOOR)
    if fp8:
        top = tl.full(amax.shape, FP8_MAX, tl.float32)
        scaled = wide * tl.div_rn(top, amax)[:, :, None]
        value = tl.minimum(tl.maximum(scaled, -FP8_MAX), FP8_MAX).to(tl.float8e4nv)
        return value, tl.div_rn(amax, top)
    else:
        return value, amax


@triton.jit
def _tile(x, token, tokens, group, hidden: tl.constexpr):
    """Columns `group` x 128 of some tokens, [tokens, groups, 128] bf16; 0 where there is no such token or column."""
    column = group[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    inside = (token[:, None, None] < tokens) & (group[None, :, None] < hidden // GROUP)
    return tl.load(x + token[:, None, None].to(tl.int64) * hidden + column, mask=inside, other=0.0)


@triton.jit
def _push_choices(
    table, topk_idx, topk_weights, token, there, row, peer, rank, capacity,
    world: tl.constexpr, local_experts: tl.constexpr, topk: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Beside the rows: the peer's local expert ids (-1 = on another rank), their weights, and whose copy it is."""
    choice = tl.arange(0, lanes)
    mask = there[:, None] & (choice[None, :] < topk)
    source = token[:, None].to(tl.int64) * topk + choice[None, :]
    place = row[:, None].to(tl.int64) * topk + choice[None, :]
    expert = tl.load(topk_idx + source, mask=mask, other=-1).to(tl.int32)
    local = expert - peer * local_experts
    here = (expert >= 0) & (local >= 0) & (local < local_experts)
    weight = tl.load(topk_weights + source, mask=mask & here, other=0.0)
    tl.store(at(table, IDS, peer, world, tl.int32) + place, tl.where(here, local, -1), mask=mask)
    tl.store(at(table, WEIGHTS, peer, world, tl.float32) + place, weight, mask=mask)
    tl.store(at(table, SOURCE, peer, world, tl.int32) + row, rank * capacity + token, mask=there)


@triton.jit
def _planned_starts(
    table, starts, arrivals, rank, epoch, program,
    world: tl.constexpr, rank_lanes: tl.constexpr,
):  # fmt: skip
    """Where this rank's rows begin on each rank, int32 [rank_lanes]; rows lie by source rank, without gaps."""
    _wait_for_all(table, rank, epoch, world)
    ranks = tl.arange(0, rank_lanes)
    both = (ranks[:, None] < world) & (ranks[None, :] < world)
    counts = at(table, COUNTS, rank, world, tl.int32) + ranks[:, None] * rank_lanes + ranks[None, :]
    matrix = tl.load(counts, mask=both, other=0, cache_modifier=".cg")  # [source, destination]
    start = tl.sum(tl.where(ranks[:, None] < rank, matrix, 0), 0)
    if program == 0:
        mine = tl.sum(tl.where(ranks[None, :] == rank, matrix, 0), 1)
        tl.store(starts + ranks, start, mask=ranks < world)
        earlier = tl.sum(tl.where(ranks[:, None] < ranks[None, :], mine[:, None], 0), 0)
        tl.store(arrivals + ranks, earlier, mask=ranks < world)
        tl.store(arrivals + world + ranks, mine, mask=ranks < world)
    return start


@triton.jit
def _unplanned_arrivals(table, arrivals, rank, capacity, world: tl.constexpr, rank_lanes: tl.constexpr):
    """Each source has a region of `capacity` rows; how many it filled came with its rows."""
    ranks = tl.arange(0, rank_lanes)
    counts = at(table, COUNTS, rank, world, tl.int32) + ranks * rank_lanes + rank
    mine = tl.load(counts, mask=ranks < world, other=0, cache_modifier=".cg")
    tl.store(arrivals + ranks, ranks * capacity, mask=ranks < world)
    tl.store(arrivals + world + ranks, mine, mask=ranks < world)


@triton.jit
def _push_rows(
    table, value, scale, there, row, group, peer,
    world: tl.constexpr, hidden: tl.constexpr, fp8: tl.constexpr,
):  # fmt: skip
    """A tile [rows, groups, 128], and in fp8 its scales [rows, groups], to a rank's rows `row` where `there`."""
    wire: tl.constexpr = tl.float8e4nv if fp8 else tl.bfloat16
    all_groups: tl.constexpr = hidden // GROUP
    column = group[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    place = row[:, None, None].to(tl.int64) * hidden + column
    fits = there[:, None] & (group[None, :] < all_groups)
    tl.store(at(table, ROWS, peer, world, wire) + place, value, mask=fits[:, :, None])
    if fp8:
        place = row[:, None].to(tl.int64) * all_groups + group[None, :]
        tl.store(at(table, SCALES, peer, world, tl.float32) + place, scale, mask=fits)


@triton.jit
def _begin(
    table, starts, arrivals, rank, capacity, epoch, program,
    world: tl.constexpr, rank_lanes: tl.constexpr, plan: tl.constexpr,
):  # fmt: skip
    """Tell the others that this rank has begun, if its plan has not. Returns where its rows begin on each, int32."""
    ranks = tl.arange(0, rank_lanes)
    start = tl.zeros([rank_lanes], tl.int32) + rank * capacity
    if plan == FRESH:
        start = _planned_starts(table, starts, arrivals, rank, epoch, program, world, rank_lanes)
    else:
        if program == 0:
            for peer in tl.static_range(world):
                signal(at(table, READY, peer, world, tl.int32) + rank, epoch)
        if plan == CACHED:
            start = tl.load(starts + ranks, mask=ranks < world, other=0)
    return start


@triton.jit
def _end(
    table, topk_idx, tokens, arrivals, rank, capacity, epoch, program, programs,
    world: tl.constexpr, local_experts: tl.constexpr, topk: tl.constexpr,
    lanes: tl.constexpr, rank_lanes: tl.constexpr, scan: tl.constexpr, plan: tl.constexpr,
):  # fmt: skip
    """Until the program of this number has finished on every rank: then what it pushed to here is here."""
    if plan == UNPLANNED:
        if program == 0:
            _, ordinal = _ordinals(topk_idx, tokens, tokens, local_experts, topk, 1, lanes, rank_lanes, scan)
            _store_counts(table, tl.sum(ordinal, 0), rank, world, rank_lanes)
    for step in tl.static_range(world):
        peer = (rank + 1 + step) % world
        signal(at(table, DONE, peer, world, tl.int32) + rank * programs + program, epoch)
    for peer in tl.static_range(world):
        wait(at(table, DONE, rank, world, tl.int32) + peer * programs + program, epoch)
    if plan == UNPLANNED:
        if program == 0:
            _unplanned_arrivals(table, arrivals, rank, capacity, world, rank_lanes)


@triton.jit
def symm_dispatch(
    x, topk_idx, topk_weights, tokens, slots, starts, arrivals, table, state, rank, capacity,
    world: tl.constexpr, hidden: tl.constexpr, local_experts: tl.constexpr, topk: tl.constexpr,
    count: tl.constexpr, groups: tl.constexpr, lanes: tl.constexpr, rank_lanes: tl.constexpr, scan: tl.constexpr,
    fp8: tl.constexpr, plan: tl.constexpr,
):  # fmt: skip
    """Every token once to each rank that owns one of its experts: `count` tokens x `groups` x 128 columns an item.

    x [T, H] bf16 · topk_idx [T, K] int64 · topk_weights [T, K] float32 · slots [R, T] · starts [R] · arrivals [2, R]:
    first row and rows by source · state [4], all int32.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(state + DISPATCHES) + 1
    ranks = tl.arange(0, rank_lanes)
    start = _begin(table, starts, arrivals, rank, capacity, epoch, program, world, rank_lanes, plan)
    all_groups: tl.constexpr = hidden // GROUP
    column_blocks: tl.constexpr = (all_groups + groups - 1) // groups
    for item in range(program, tl.cdiv(tokens, count) * column_blocks, programs):
        block = item // column_blocks
        first, column_block = block * count, item - block * column_blocks
        token = first + tl.arange(0, count)
        group = column_block * groups + tl.arange(0, groups)
        value, scale = _quantized(_tile(x, token, tokens, group, hidden), fp8)
        goes = tl.zeros([count, rank_lanes], tl.int32)
        ordinal = goes
        if plan == UNPLANNED:
            goes, ordinal = _ordinals(topk_idx, tokens, first, local_experts, topk, count, lanes, rank_lanes, scan)
            if column_block == 0:
                _keep_slots(slots, capacity, tokens, token, goes, ordinal, world, rank_lanes)
        if plan != FRESH:
            if item == program:  # what was loaded meanwhile came for nothing
                _wait_for_all(table, rank, epoch, world)
        for step in tl.static_range(world):
            peer = (rank + 1 + step) % world  # own rows last
            if plan == UNPLANNED:
                slot = tl.sum(tl.where(ranks[None, :] == peer, tl.where(goes == 1, ordinal, -1), 0), 1)
            else:
                slot = tl.load(slots + peer * capacity + token, mask=token < tokens, other=-1)
            there, row = slot >= 0, _pick(start, peer, rank_lanes) + tl.maximum(slot, 0)
            _push_rows(table, value, scale, there, row, group, peer, world, hidden, fp8)
            if column_block == 0:
                _push_choices(
                    table, topk_idx, topk_weights, token, there, row, peer, rank, capacity,
                    world, local_experts, topk, lanes,
                )  # fmt: skip
    _end(
        table, topk_idx, tokens, arrivals, rank, capacity, epoch, program, programs,
        world, local_experts, topk, lanes, rank_lanes, scan, plan,
    )  # fmt: skip
    finish(state, DISPATCHES, programs)
