"""What the fakes of EP libraries share: their exchange over gloo, and a process group that can't end too early."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only


def gather(group: Any, value: Any) -> list[Any]:
    """Every rank's value: a collective, as the library's calls are. No bf16 tensors (numpy has none): view them."""
    assert dist.is_initialized(), "called after its process group"
    values: list[Any] = [None] * dist.get_world_size(group)
    # as arrays, which pickle several times faster than tensors
    dist.all_gather_object(values, tree_map_only(torch.Tensor, lambda t: t.numpy(), value), group=group)
    return tree_map_only(np.ndarray, torch.from_numpy, values)  # type: ignore[no-any-return]


@contextlib.contextmanager
def guarded_end(problem: Callable[[], str]) -> Iterator[None]:
    """The process group refuses to end while `problem` says why."""
    ends_group = dist.destroy_process_group

    def guarded(group: Any = None) -> None:
        found = problem()
        assert not found, found
        ends_group(group)

    dist.destroy_process_group = guarded
    try:
        yield
    finally:
        dist.destroy_process_group = ends_group
