"""The arena of backend `symm`: one allocation of symmetric memory a rank, the same fields at the same places on all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.backends.session import SCALE_BLOCK, stand_still
from lib.contract import Group, Unsupported

if TYPE_CHECKING:
    import torch

    from lib.problem import Problem

ITEM_BYTES = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4, "int32": 4}
ALIGNMENT = 256  # bytes; the kernels' widest access is 16
COLUMN_BLOCK = 8  # scale blocks, at least this many columns an item of work except where the row has fewer


@dataclass(frozen=True)
class Field:
    """`name` in the arena: `shape` of torch's type `dtype`, `offset` bytes from its start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * ITEM_BYTES[self.dtype]


def rank_lanes(world: int) -> int:
    """R rounded up to a power of two, as the kernels hold a value a rank; at least 2, for Triton's reductions."""
    return max(2, 1 << (world - 1).bit_length())


def most_flags(capacity: int, hidden: int) -> int:
    """Chunks x column blocks of one rank's returned rows, for the smallest chunk."""
    blocks = max(hidden // SCALE_BLOCK, 1)  # a smaller hidden is refused, after its memory was planned
    return max(capacity, 1) * -(-blocks // min(COLUMN_BLOCK, blocks))


def fields(problem: Problem, capacity: int, fp8: bool, programs: int) -> list[Field]:
    """In the order of the kernels' table (symm_device.py, ROWS to ARRIVED)."""
    world, hidden, topk = problem.world, problem.hidden, problem.topk
    received = world * capacity
    wire = "float8_e4m3fn" if fp8 else "bfloat16"
    shapes: list[tuple[str, str, tuple[int, ...]]] = [
        ("rows", wire, (received, hidden)),
        ("scales", "float32", (received if fp8 else 0, hidden // SCALE_BLOCK)),
        ("ids", "int32", (received, topk)),
        ("weights", "float32", (received, topk)),
        ("source", "int32", (received,)),
        ("counts", "int32", (world, rank_lanes(world))),
        ("ready", "int32", (world,)),
        ("done", "int32", (world, programs)),
        ("returned", "bfloat16", (2, world, capacity, hidden)),
        ("started", "int32", (world,)),
        ("arrived", "int32", (world, most_flags(capacity, hidden))),
    ]
    made: list[Field] = []
    offset = 0
    for name, dtype, shape in shapes:
        made.append(Field(name, dtype, shape, offset))
        offset = -(-made[-1].end // ALIGNMENT) * ALIGNMENT
    return made


@dataclass
class Arena:
    """Views of this rank's fields, and `table` [fields, R] int64: the address of each field on each rank."""

    views: dict[str, torch.Tensor]
    table: torch.Tensor
    keep: Any  # what the addresses belong to


def make_arena(group: Group, made: list[Field]) -> Arena:
    """Collective. All of it is zero when this returns on any rank.

    Raises Unsupported where PyTorch can't reach a peer's memory.
    """
    import torch

    whole, addresses, keep = allocate(group, made[-1].end)
    whole.zero_()
    views = {field.name: view(whole, field) for field in made}
    offsets = torch.tensor([field.offset for field in made], dtype=torch.int64)
    table = (torch.tensor(addresses, dtype=torch.int64).unsqueeze(0) + offsets.unsqueeze(1)).to(group.device)
    stand_still(group)
    return Arena(views, table, (whole, keep))


def view(whole: torch.Tensor, field: Field) -> torch.Tensor:
    import torch

    return whole[field.offset : field.end].view(getattr(torch, field.dtype)).view(field.shape)


def allocate(group: Group, size: int) -> tuple[torch.Tensor, list[int], Any]:
    """`size` bytes on this rank, where each rank's are in this process's address space, and what keeps them mapped."""
    import torch

    if group.world == 1:
        whole = torch.empty(size, dtype=torch.uint8, device=group.device)
        return whole, [whole.data_ptr()], None
    import torch.distributed._symmetric_memory as symmetric

    try:
        whole = symmetric.empty(size, dtype=torch.uint8, device=group.device)
        handle: Any = symmetric.rendezvous(whole, group.pg)
    except RuntimeError as error:
        raise Unsupported(f"PyTorch's symmetric memory: {str(error).splitlines()[0]}") from error
    inside = whole.data_ptr() - int(handle.buffer_ptrs[group.rank])  # of the allocation that was mapped
    return whole, [int(address) + inside for address in handle.buffer_ptrs], handle
