"""The Triton kernels of backend `symm`: one-sided pushes over NVLink, with flags in symmetric memory.

Each rank's arena has the same fields; `table` [fields, R] int64 holds the address of every field on every rank.

Order of memory: a program stores rows to a peer, joins its threads (debug_barrier), and one thread releases a flag
there at system scope; the peer's thread acquires it, joins its threads, and then they read. A flag holds the number of
the last call (an epoch) that set it and only grows, so nothing is ever reset and a captured graph can be replayed.

Who may write when: rows of a dispatch are free for writing once their owner has begun the next dispatch (READY), since
its stream has then passed all that read them. Returned rows are kept twice, by parity of the combine: what call n wrote
may be overwritten by call n + 2, once its reader has begun call n + 1 (STARTED).

All programs of a launch must be resident at once: a combine's program waits for any program of a peer.
"""

from __future__ import annotations

import triton
import triton.language as tl

# fields of the arena, as rows of the table
ROWS = tl.constexpr(0)
SCALES = tl.constexpr(1)
IDS = tl.constexpr(2)
WEIGHTS = tl.constexpr(3)
SOURCE = tl.constexpr(4)
COUNTS = tl.constexpr(5)  # [R sources, RP destinations]
READY = tl.constexpr(6)  # [R]: the dispatch that a rank has begun
DONE = tl.constexpr(7)  # [R, programs]: the dispatch that a rank's program has finished
RETURNED = tl.constexpr(8)  # [2, R, T, H]
STARTED = tl.constexpr(9)  # [R]: the combine that a rank has begun
ARRIVED = tl.constexpr(10)  # [R, chunks x column blocks]: the combine whose rows are there
DISPATCHES, DISPATCH_TICKET, COMBINES, COMBINE_TICKET = (tl.constexpr(place) for place in range(4))  # of `state`

FRESH, CACHED, UNPLANNED = (tl.constexpr(plan) for plan in range(3))
GROUP = tl.constexpr(128)  # columns that share an fp8 scale; the last axis of every tile
FP8_MAX = tl.constexpr(448.0)
AMAX_FLOOR = tl.constexpr(1e-4)  # lib/formats.py: the scale of a row of zeros

# mypy: disable-error-code="no-untyped-def"
# Triton decides an `if` of a constexpr while it compiles, and only if nothing else is in it.
# ruff: noqa: SIM102, RET505


@triton.jit
def _at(table, field: tl.constexpr, rank, world: tl.constexpr, element: tl.constexpr):
    """A field of a rank's arena, as a pointer; every field starts at a multiple of 256 bytes."""
    address = tl.load(table + field * world + rank)
    return tl.multiple_of(address.to(tl.pointer_type(element)), 16)


@triton.jit
def _signal(flag, epoch):
    """Release all that this program has stored so far."""
    tl.debug_barrier()
    tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def _wait(flag, epoch):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < epoch:
        pass
    tl.debug_barrier()


@triton.jit
def _finish(state, place: tl.constexpr, programs):
    """The last program to get here counts the call; by then every program has read the old count."""
    tl.debug_barrier()
    if tl.atomic_add(state + place + 1, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(state + place + 1, 0)
        tl.store(state + place, tl.load(state + place) + 1)


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
    return goes, tl.sum(sums, 0)[None, :] + tl.cumsum(goes, 0) - goes


@triton.jit
def _store_counts(table, totals, rank, world: tl.constexpr, rank_lanes: tl.constexpr):
    """How many rows each rank gets from this one, to all ranks: `totals` int32 [rank_lanes]."""
    ranks = tl.arange(0, rank_lanes)
    for peer in tl.static_range(world):
        tl.store(_at(table, COUNTS, peer, world, tl.int32) + rank * rank_lanes + ranks, totals)


@triton.jit
def _publish(table, totals, rank, epoch, world: tl.constexpr, rank_lanes: tl.constexpr):
    _store_counts(table, totals, rank, world, rank_lanes)
    for peer in tl.static_range(world):
        _signal(_at(table, READY, peer, world, tl.int32) + rank, epoch)


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
    tl.store(_at(table, IDS, peer, world, tl.int32) + place, tl.where(here, local, -1), mask=mask)
    tl.store(_at(table, WEIGHTS, peer, world, tl.float32) + place, weight, mask=mask)
    tl.store(_at(table, SOURCE, peer, world, tl.int32) + row, rank * capacity + token, mask=there)


@triton.jit
def _planned_starts(
    table, starts, arrivals, rank, epoch, program,
    world: tl.constexpr, rank_lanes: tl.constexpr,
):  # fmt: skip
    """Where this rank's rows begin on each rank, int32 [rank_lanes]; rows lie by source rank, without gaps."""
    for peer in tl.static_range(world):
        _wait(_at(table, READY, rank, world, tl.int32) + peer, epoch)
    ranks = tl.arange(0, rank_lanes)
    both = (ranks[:, None] < world) & (ranks[None, :] < world)
    counts = _at(table, COUNTS, rank, world, tl.int32) + ranks[:, None] * rank_lanes + ranks[None, :]
    matrix = tl.load(counts, mask=both, other=0, cache_modifier=".cg")  # [source, destination]
    start = tl.sum(tl.where(ranks[:, None] < rank, matrix, 0), 0)
    if program == 0:
        mine = tl.sum(tl.where(ranks[None, :] == rank, matrix, 0), 1)
        tl.store(starts + ranks, start, mask=ranks < world)
        tl.store(arrivals + ranks, tl.cumsum(mine, 0) - mine, mask=ranks < world)
        tl.store(arrivals + world + ranks, mine, mask=ranks < world)
    return start


@triton.jit
def _unplanned_arrivals(table, arrivals, rank, capacity, world: tl.constexpr, rank_lanes: tl.constexpr):
    """Each source has a region of `capacity` rows; how many it filled came with its rows."""
    ranks = tl.arange(0, rank_lanes)
    counts = _at(table, COUNTS, rank, world, tl.int32) + ranks * rank_lanes + rank
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
    tl.store(_at(table, ROWS, peer, world, wire) + place, value, mask=fits[:, :, None])
    if fp8:
        place = row[:, None].to(tl.int64) * all_groups + group[None, :]
        tl.store(_at(table, SCALES, peer, world, tl.float32) + place, scale, mask=fits)


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
    start = tl.zeros([rank_lanes], tl.int32) + rank * capacity
    if plan == FRESH:
        start = _planned_starts(table, starts, arrivals, rank, epoch, program, world, rank_lanes)
    else:
        if program == 0:
            for peer in tl.static_range(world):
                _signal(_at(table, READY, peer, world, tl.int32) + rank, epoch)
        if plan == CACHED:
            start = tl.load(starts + ranks, mask=ranks < world, other=0)
    all_groups: tl.constexpr = hidden // GROUP
    column_blocks: tl.constexpr = (all_groups + groups - 1) // groups
    for item in range(program, tl.cdiv(tokens, count) * column_blocks, programs):
        block = item // column_blocks
        first, column_block = block * count, item - block * column_blocks
        token = first + tl.arange(0, count)
        group = column_block * groups + tl.arange(0, groups)
        column = group[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
        inside = (token[:, None, None] < tokens) & (group[None, :, None] < all_groups)
        value = tl.load(x + token[:, None, None].to(tl.int64) * hidden + column, mask=inside, other=0.0)
        value, scale = _quantized(value, fp8)
        goes = tl.zeros([count, rank_lanes], tl.int32)
        ordinal = goes
        if plan == UNPLANNED:
            goes, ordinal = _ordinals(topk_idx, tokens, first, local_experts, topk, count, lanes, rank_lanes, scan)
            if column_block == 0:
                _keep_slots(slots, capacity, tokens, token, goes, ordinal, world, rank_lanes)
        if plan != FRESH:
            if item == program:  # what was loaded meanwhile came for nothing
                for peer in tl.static_range(world):
                    _wait(_at(table, READY, rank, world, tl.int32) + peer, epoch)
        for step in tl.static_range(world):
            peer = (rank + 1 + step) % world  # own rows last
            if plan == UNPLANNED:
                slot = tl.sum(tl.where(ranks[None, :] == peer, tl.where(goes == 1, ordinal, -1), 0), 1)
            else:
                slot = tl.load(slots + peer * capacity + token, mask=token < tokens, other=-1)
            row = _pick(start, peer, rank_lanes) + tl.maximum(slot, 0)
            _push_rows(table, value, scale, slot >= 0, row, group, peer, world, hidden, fp8)
            if column_block == 0:
                _push_choices(
                    table, topk_idx, topk_weights, token, slot >= 0, row, peer, rank, capacity,
                    world, local_experts, topk, lanes,
                )  # fmt: skip
    if plan == UNPLANNED:
        if program == 0:
            goes, ordinal = _ordinals(topk_idx, tokens, tokens, local_experts, topk, 1, lanes, rank_lanes, scan)
            _store_counts(table, tl.sum(ordinal, 0), rank, world, rank_lanes)
    for step in tl.static_range(world):
        peer = (rank + 1 + step) % world
        _signal(_at(table, DONE, peer, world, tl.int32) + rank * programs + program, epoch)
    for peer in tl.static_range(world):
        _wait(_at(table, DONE, rank, world, tl.int32) + peer * programs + program, epoch)
    if plan == UNPLANNED:
        if program == 0:
            _unplanned_arrivals(table, arrivals, rank, capacity, world, rank_lanes)
    _finish(state, DISPATCHES, programs)


@triton.jit
def _share(
    y, index, weights, row, there, column, fits,
    hidden: tl.constexpr, topk: tl.constexpr, weighted: tl.constexpr,
):  # fmt: skip
    """This rank's share of the copies `row`, float32 [rows, groups, 128]; 0 where not `there` or no column `fits`.

    Row `row` of y; weighted: the sum over the copy's choices of weight x the row of y that `index` [rows, K] names.
    """
    mask = there[:, None, None] & fits
    if weighted:
        share = tl.zeros([row.shape[0], column.shape[1], column.shape[2]], tl.float32)
        for choice in range(topk):
            place = row.to(tl.int64) * topk + choice
            chosen = tl.load(index + place, mask=there, other=-1)
            weight = tl.load(weights + place, mask=there, other=0.0)
            used = mask & (chosen >= 0)[:, None, None]
            part = tl.load(y + chosen[:, None, None].to(tl.int64) * hidden + column, mask=used, other=0.0)
            share += tl.where(used, weight[:, None, None] * part.to(tl.float32), 0.0)
        return share
    else:
        return tl.load(y + row[:, None, None].to(tl.int64) * hidden + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def symm_combine(
    y, index, weights, out, tokens, slots, arrivals, table, state, rank, capacity, most_flags,
    world: tl.constexpr, hidden: tl.constexpr, topk: tl.constexpr,
    count: tl.constexpr, tiles: tl.constexpr, groups: tl.constexpr, lag: tl.constexpr, weighted: tl.constexpr,
):  # fmt: skip
    """out [T, H] bf16 = for each token the sum of its copies' rows in the order of the ranks, in float32, rounded once.

    Each round a program pushes one chunk (`tiles` x `count` rows x `groups` x 128 columns) to every other rank, and
    reduces the chunk of its own tokens that was pushed to it `lag` rounds ago. A token's ordinal on a rank is at most
    its number, so the chunks that a reduction waits for were pushed in earlier rounds or this one: no circle of waits.
    Rows that a rank returns to itself are read where they are.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(state + COMBINES) + 1
    if program == 0:
        for step in tl.static_range(world - 1):
            _signal(_at(table, STARTED, (rank + 1 + step) % world, world, tl.int32) + rank, epoch)
    most = 0
    for step in tl.static_range(world - 1):
        peer = (rank + 1 + step) % world
        _wait(_at(table, STARTED, rank, world, tl.int32) + peer, epoch - 1)
        most = tl.maximum(most, tl.load(arrivals + world + peer))
    side = (epoch & 1).to(tl.int64) * world
    chunk_rows: tl.constexpr = count * tiles
    all_groups: tl.constexpr = hidden // GROUP
    column_blocks: tl.constexpr = (all_groups + groups - 1) // groups
    to_push = tl.cdiv(most, chunk_rows) * column_blocks
    to_reduce = tl.cdiv(tokens, chunk_rows) * column_blocks
    rounds = tl.maximum(tl.cdiv(to_push, programs), tl.cdiv(to_reduce, programs) + lag)
    for turn in range(rounds):
        item = program + turn * programs
        if item < to_push:
            for step in tl.static_range(world - 1):
                peer = (rank + 1 + step) % world
                _push_chunk(
                    y, index, weights, arrivals, table, rank, peer, side, epoch, item, capacity, most_flags,
                    world, hidden, topk, count, tiles, groups, column_blocks, weighted,
                )  # fmt: skip
        item = program + (turn - lag) * programs
        if (turn >= lag) & (item < to_reduce):
            _reduce_chunk(
                y, index, weights, out, tokens, slots, arrivals, table, rank, side, epoch, item, capacity, most_flags,
                world, hidden, topk, count, tiles, groups, column_blocks, weighted,
            )  # fmt: skip
    _finish(state, COMBINES, programs)


@triton.jit
def _push_chunk(
    y, index, weights, arrivals, table, rank, peer, side, epoch, item, capacity, most_flags,
    world: tl.constexpr, hidden: tl.constexpr, topk: tl.constexpr, count: tl.constexpr, tiles: tl.constexpr,
    groups: tl.constexpr, column_blocks: tl.constexpr, weighted: tl.constexpr,
):  # fmt: skip
    """Rows that came from `peer` go back to it, into the region of this rank."""
    rows = tl.load(arrivals + world + peer)
    chunk = item // column_blocks
    first, column_block = chunk * count * tiles, item - chunk * column_blocks
    group = column_block * groups + tl.arange(0, groups)
    column = group[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    fits = (group < hidden // GROUP)[None, :, None]
    if first < rows:
        start = tl.load(arrivals + peer)
        target = _at(table, RETURNED, peer, world, tl.bfloat16) + (side + rank) * capacity * hidden
        for tile in range(tiles):
            ordinal = first + tile * count + tl.arange(0, count)
            there = ordinal < rows
            share = _share(y, index, weights, start + ordinal, there, column, fits, hidden, topk, weighted)
            place = ordinal[:, None, None].to(tl.int64) * hidden + column
            tl.store(target + place, share.to(tl.bfloat16), mask=there[:, None, None] & fits)
        _signal(_at(table, ARRIVED, peer, world, tl.int32) + rank * most_flags + item, epoch)


@triton.jit
def _reduce_chunk(
    y, index, weights, out, tokens, slots, arrivals, table, rank, side, epoch, item, capacity, most_flags,
    world: tl.constexpr, hidden: tl.constexpr, topk: tl.constexpr, count: tl.constexpr, tiles: tl.constexpr,
    groups: tl.constexpr, column_blocks: tl.constexpr, weighted: tl.constexpr,
):  # fmt: skip
    """Tokens of one chunk, once every copy of theirs is here."""
    chunk_rows: tl.constexpr = count * tiles
    block = item // column_blocks
    first, column_block = block * chunk_rows, item - block * column_blocks
    flags = _at(table, ARRIVED, rank, world, tl.int32) + column_block
    whole = first + tl.arange(0, chunk_rows)
    for step in tl.static_range(world - 1):
        peer = (rank + 1 + step) % world
        slot = tl.load(slots + peer * capacity + whole, mask=whole < tokens, other=-1)
        last = tl.max(slot, 0)
        if last >= 0:
            earliest = tl.min(tl.where(slot >= 0, slot, last), 0)
            for chunk in range(earliest // chunk_rows, last // chunk_rows + 1):
                _wait(flags + peer * most_flags + chunk * column_blocks, epoch)
    group = column_block * groups + tl.arange(0, groups)
    column = group[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    fits = (group < hidden // GROUP)[None, :, None]
    own_start = tl.load(arrivals + rank)
    returned = _at(table, RETURNED, rank, world, tl.bfloat16) + side * capacity * hidden
    for tile in range(tiles):
        token = first + tile * count + tl.arange(0, count)
        total = tl.zeros([count, groups, GROUP], tl.float32)
        for peer in range(world):
            slot = tl.load(slots + peer * capacity + token, mask=token < tokens, other=-1)
            there = slot >= 0
            if peer == rank:
                total += _share(y, index, weights, own_start + slot, there, column, fits, hidden, topk, weighted)
            else:
                row = slot.to(tl.int64) + peer * capacity
                mask = there[:, None, None] & fits
                part = tl.load(
                    returned + row[:, None, None] * hidden + column, mask=mask, other=0.0, cache_modifier=".cg"
                )
                total += part.to(tl.float32)
        written = (token < tokens)[:, None, None] & fits
        tl.store(out + token[:, None, None].to(tl.int64) * hidden + column, total.to(tl.bfloat16), mask=written)
