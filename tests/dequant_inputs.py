"""Slots as low_latency_dispatch returns them: e4m3 rows, scales whose last two strides are swapped, counts."""

from __future__ import annotations

import torch

HIDDEN, SLOTS = 2560, 12  # 20 scales a row: no power of two
UNTOUCHED = 7.0  # what an output holds before


def dequant_inputs(
    counts: list[int], device: str, hidden: int = HIDDEN, slots: int = SLOTS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """rows [L, slots, H] of every finite e4m3, scales [L, slots, H/128], counts [L] int32, out [L, slots, H] bf16."""
    made = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (len(counts), slots, hidden), generator=made, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # the two NaN of e4m3
    scales = torch.rand(len(counts), hidden // 128, slots, generator=made) * 0.02
    out = torch.full(codes.shape, UNTOUCHED, dtype=torch.bfloat16)
    counts_there = torch.tensor(counts, dtype=torch.int32)
    rows = codes.view(torch.float8_e4m3fn)
    return rows.to(device), scales.to(device).transpose(1, 2), counts_there.to(device), out.to(device)
