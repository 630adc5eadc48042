"""Received e4m3 slots to the bf16 that low_latency_combine takes: by a Triton kernel, or PyTorch where that can't be.

Both make the product in float32 and round it once to bf16 (e4m3 is exact there), so the used slots get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from bench.backends.deepep_limits import SCALE_BLOCK

if TYPE_CHECKING:
    import torch

    Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def load_kernel(device: torch.device) -> tuple[Kernel | None, str]:
    """The Triton kernel's launcher and what makes it; None and PyTorch on a CPU and where triton is not installed."""
    if device.type != "cuda":
        return None, "torch"
    try:
        from bench.backends import deepep_triton
    except ImportError:
        return None, "torch"
    return deepep_triton.launcher(device), f"triton {deepep_triton.triton.__version__}"


class Dequantizer:
    """One point's. `made_by` says what does the work, for the row's versions."""

    def __init__(self, rows: torch.Tensor, scales: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> None:
        """A first dispatch's results (see __call__): the routing of a point is fixed, so are an expert's counts."""
        self.used_slots = int(counts.max())
        self.kernel, self.made_by = load_kernel(rows.device)
        if self.kernel is None:
            return
        try:
            self.kernel(rows, scales, counts, out)  # compiled here, not under a clock
        except Exception as error:  # noqa: BLE001 - no C compiler, say: the row is made by PyTorch, and tells
            self.kernel, self.made_by = None, f"torch ({type(error).__name__} in triton)"

    def __call__(self, rows: torch.Tensor, scales: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> None:
        """Fill the first counts[e] slots of each expert in `out`; what is behind them means nothing.

        rows [L, slots, H] e4m3 · scales [L, slots, H/128] float32, of any strides · counts [L] int32, read on the
        device · out [L, slots, H] bf16.
        """
        if self.kernel is not None:
            self.kernel(rows, scales, counts, out)
        else:
            by_pytorch(rows, scales, self.used_slots, out)


def by_pytorch(rows: torch.Tensor, scales: torch.Tensor, used_slots: int, out: torch.Tensor) -> None:
    """The first `used_slots` slots of every expert."""
    import torch

    used = slice(0, used_slots)
    blocks = rows[:, used].to(torch.bfloat16).unflatten(-1, (-1, SCALE_BLOCK))
    place = out[:, used].unflatten(-1, (-1, SCALE_BLOCK))
    torch.mul(blocks, scales[:, used].unsqueeze(-1), out=place)
