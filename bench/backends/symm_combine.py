"""Combine of backend `symm`: rows go back to their sources, which add them up as they come."""

from __future__ import annotations

import triton
import triton.language as tl

from bench.backends.symm_device import ARRIVED, COMBINES, GROUP, RETURNED, STARTED, at, finish, signal, wait

# mypy: disable-error-code="no-untyped-def"
# Triton decides an `if` of a constexpr while it compiles, and only if nothing else is in it.
# ruff: noqa: RET505


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
            signal(at(table, STARTED, (rank + 1 + step) % world, world, tl.int32) + rank, epoch)
    most = 0
    for step in tl.static_range(world - 1):
        peer = (rank + 1 + step) % world
        wait(at(table, STARTED, rank, world, tl.int32) + peer, epoch - 1)
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
    finish(state, COMBINES, programs)


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
        target = at(table, RETURNED, peer, world, tl.bfloat16) + (side + rank) * capacity * hidden
        for tile in range(tiles):
            ordinal = first + tile * count + tl.arange(0, count)
            there = ordinal < rows
            share = _share(y, index, weights, start + ordinal, there, column, fits, hidden, topk, weighted)
            place = ordinal[:, None, None].to(tl.int64) * hidden + column
            tl.store(target + place, share.to(tl.bfloat16), mask=there[:, None, None] & fits)
        signal(at(table, ARRIVED, peer, world, tl.int32) + rank * most_flags + item, epoch)


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
    flags = at(table, ARRIVED, rank, world, tl.int32) + column_block
    whole = first + tl.arange(0, chunk_rows)
    for step in tl.static_range(world - 1):
        peer = (rank + 1 + step) % world
        slot = tl.load(slots + peer * capacity + whole, mask=whole < tokens, other=-1)
        last = tl.max(slot, 0)
        if last >= 0:
            earliest = tl.min(tl.where(slot >= 0, slot, last), 0)
            for chunk in range(earliest // chunk_rows, last // chunk_rows + 1):
                wait(flags + peer * most_flags + chunk * column_blocks, epoch)
    group = column_block * groups + tl.arange(0, groups)
    column = group[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    fits = (group < hidden // GROUP)[None, :, None]
    own_start = tl.load(arrivals + rank)
    returned = at(table, RETURNED, rank, world, tl.bfloat16) + side * capacity * hidden
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
