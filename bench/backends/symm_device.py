"""What the Triton kernels of backend `symm` share: where things are on each rank, flags, and the order of memory.

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
GROUP = tl.constexpr(128)  # columns that share an fp8 scale; the last axis of every tile

# mypy: disable-error-code="no-untyped-def"


@triton.jit
def at(table, field: tl.constexpr, rank, world: tl.constexpr, element: tl.constexpr):
    """A field of a rank's arena, as a pointer; every field starts at a multiple of 256 bytes."""
    address = tl.load(table + field * world + rank)
    return tl.multiple_of(address.to(tl.pointer_type(element)), 16)


@triton.jit
def signal(flag, epoch):
    """Release all that this program has stored so far."""
    tl.debug_barrier()
    tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def wait(flag, epoch):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < epoch:
        pass
    tl.debug_barrier()


@triton.jit
def finish(state, place: tl.constexpr, programs):
    """The last program to get here counts the call; by then every program has read the old count."""
    tl.debug_barrier()
    if tl.atomic_add(state + place + 1, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(state + place + 1, 0)
        tl.store(state + place, tl.load(state + place) + 1)
