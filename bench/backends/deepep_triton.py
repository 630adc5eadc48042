"""The Triton kernel of deepep_dequant.py, which imports this file where triton is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from bench.backends.deepep_limits import SCALE_BLOCK

if TYPE_CHECKING:
    import torch

WARPS = 8
PROGRAMS_PER_SM = 4  # as many as fit: 48 registers a thread on sm_90 (ptxas -v, triton 3.7)


@triton.jit
def dequantize_used_slots(  # type: ignore[no-untyped-def]  # a type here would be read by triton
    rows, scales, counts, out, experts, blocks,
    row_expert, row_slot, scale_expert, scale_slot, scale_block, out_expert, out_slot,
    lanes: tl.constexpr, block_lanes: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """A row a step. The used rows of all experts are numbered through, so that the programs share them evenly.

    *_expert, *_slot and *_block are strides in elements; lanes and block_lanes are `experts` and `blocks` (scales of a
    row) rounded up to powers of two; width is the columns of one scale.
    """
    lane = tl.arange(0, lanes)
    count = tl.load(counts + lane, mask=lane < experts, other=0)
    end = tl.cumsum(count, 0)
    block = tl.arange(0, block_lanes)
    there = block < blocks
    column = block[:, None] * width + tl.arange(0, width)[None, :]
    for row in range(tl.program_id(0), tl.sum(count, 0), tl.num_programs(0)):
        before = end <= row  # experts whose rows are all in front of this one
        expert = tl.sum(before.to(tl.int32), 0).to(tl.int64)
        slot = (row - tl.sum(tl.where(before, count, 0), 0)).to(tl.int64)
        scale = tl.load(scales + expert * scale_expert + slot * scale_slot + block * scale_block, mask=there, other=0.0)
        value = tl.load(rows + expert * row_expert + slot * row_slot + column, mask=there[:, None], other=0.0)
        product = value.to(tl.float32) * scale[:, None]
        tl.store(out + expert * out_expert + slot * out_slot + column, product.to(tl.bfloat16), mask=there[:, None])


def launcher(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Enqueues the kernel on the current stream; rows, scales, counts and out as Dequantizer takes them."""
    import torch

    programs = PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count

    def launch(rows: torch.Tensor, scales: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> None:
        experts, blocks = scales.shape[0], scales.shape[2]
        dequantize_used_slots[(programs,)](
            rows, scales, counts, out, experts, blocks,
            *rows.stride()[:2], *scales.stride(), *out.stride()[:2],
            lanes=triton.next_power_of_2(experts), block_lanes=triton.next_power_of_2(blocks), width=SCALE_BLOCK,
            num_warps=WARPS,
        )  # fmt: skip

    return launch
