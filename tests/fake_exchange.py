"""What the fakes of the communication libraries share: the exchange, checks of arguments, and faults."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

FAULTS = ("corrupt_row", "swap_rows", "lost_sum")
fault = ""  # of rank 1, one of FAULTS
peer: Connection | None = None  # the pipe to the other rank
_random = torch.Generator()


def gather(value: Any, group: Any = None) -> list[Any]:
    """Both ranks' values: a collective, over a pipe, since two gloo collectives a call would be most of the tests."""
    assert dist.is_initialized(), "called after its process group"
    assert peer is not None
    packed = tree_map_only(torch.Tensor, lambda t: t.contiguous().numpy(), value)
    rank = dist.get_rank(group)
    if rank == 0:
        peer.send(packed)
    other = peer.recv()
    if rank == 1:
        peer.send(packed)
    values = [packed, other] if rank == 0 else [other, packed]
    return tree_map_only(np.ndarray, torch.from_numpy, values)


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """[n, H] as uint8 [n, bytes], for no row as well."""
    return rows.contiguous().view(torch.uint8) if len(rows) else rows.new_zeros((0, 1), dtype=torch.uint8)


def from_bytes(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Rows [n, H] of the dtype of `like`."""
    return data.view(like.dtype) if len(data) else like.new_zeros((0, like.shape[-1]))


def shuffled(count: int) -> torch.Tensor:
    """An order as atomics hand it out: another one each time, and on each rank."""
    if _random.initial_seed() == torch.Generator().initial_seed():
        _random.manual_seed(dist.get_rank() + 1)
    return torch.randperm(count, generator=_random)


def is_shaped(tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    """The library's checks of one argument: type, shape (-1 = any), contiguous."""
    assert tensor.dtype == dtype, f"{tensor.dtype}, not {dtype}"
    assert len(shape) == tensor.dim(), f"{tensor.dim()} dimensions, not {len(shape)}"
    fits = all(want in (-1, size) for size, want in zip(tensor.shape, shape, strict=True))
    assert fits, f"{list(tensor.shape)}, not {list(shape)}"
    assert tensor.is_contiguous(), "not contiguous"


def no_extras(options: dict[str, Any]) -> None:
    used = {name for name, value in options.items() if value not in (None, False, 0) and not isinstance(value, str)}
    assert not used, f"the fake has no {used}"


def garbage(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        tensor.view(torch.uint8).fill_(0xFF)  # NaN in bf16, e4m3 and fp32
    return tensor


def broken(rows: torch.Tensor, used: list[int]) -> None:
    """The fault on received rows [slots, H], of which those at `used` hold tokens: of the first, and of another one."""
    if dist.get_rank() != 1 or len(used) < 2:
        return
    data = rows.view(torch.uint8)
    if fault == "corrupt_row":
        data[used[0], -1] ^= 1
    elif fault == "swap_rows":
        second = next(slot for slot in used if not torch.equal(data[slot], data[used[0]]))
        data[[used[0], second]] = data[[second, used[0]]]


def summed(total: torch.Tensor) -> torch.Tensor:
    """A combine's float32 sum as it is given back, bf16."""
    if fault == "lost_sum" and dist.get_rank() == 1:
        total = total * 0
    return total.to(torch.bfloat16)


@contextlib.contextmanager
def modules(**made: Any) -> Iterator[None]:
    """`import` gives these (`a__b` stands for a.b); a package is made where only its parts are given."""
    global fault
    fault = ""
    named = {name.replace("__", "."): module for name, module in made.items()}
    before = {name: sys.modules.get(name) for name in named}
    sys.modules.update(named)
    for name, module in named.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(named[parent], last, module)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def module(name: str, **attributes: Any) -> Any:
    made = types.ModuleType(name)
    made.__dict__.update(attributes)
    return made
