"""What DeepEP's dispatch handles tell of the received rows: where each came from (legacy Buffer, v1.2.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def ht_sources(handle: Any, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Source rank and source token, int64 [n], of each row that ht brought to this rank.

    handle[0][s, r] = copies from ranks <= s to rank r; handle[3] = source token of each received row.
    """
    import torch

    ends = handle[0][:, rank].long()
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    sources = torch.arange(len(ends), device=ends.device)
    return torch.repeat_interleave(sources, counts), handle[3].long()


def ll_sources(handle: Any, slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(local expert, slot, source rank, source token), int64 [n], of each slot that ll filled; `slots` an expert.

    handle = (source token [L, slots], range [L, R]: first slot << 32 | count of each source rank, ...).
    """
    import torch

    sources, ranges = handle[0], handle[1].long()
    begins, counts = ranges >> 32, ranges & 0xFFFFFFFF
    slot = torch.arange(slots, device=ranges.device).view(1, 1, -1)
    inside = (slot >= begins.unsqueeze(2)) & (slot < (begins + counts).unsqueeze(2))  # [L, R, slots]
    expert, rank, position = inside.nonzero(as_tuple=True)
    return expert, position, rank, sources[expert, position].long()
