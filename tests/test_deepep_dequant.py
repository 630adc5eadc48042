"""What deepep_ll fp8 puts between dispatch and combine: received slots to bf16. The kernel itself is in test_gpu.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.backends import deepep_dequant
from bench.backends.deepep_dequant import Dequantizer
from tests.dequant_inputs import HIDDEN, SLOTS, UNTOUCHED, dequant_inputs

COUNTS = [3, 0, 7, 1]


def test_the_used_slots_are_the_float32_product_rounded_once() -> None:
    rows, scales, counts, out = dequant_inputs(COUNTS, "cpu")
    dequantizer = Dequantizer(rows, scales, counts, out)
    dequantizer(rows, scales, counts, out)
    assert dequantizer.made_by == "torch"
    for expert, count in enumerate(COUNTS):
        blocks = rows[expert, :count].double().view(count, HIDDEN // 128, 128) * scales[expert, :count].unsqueeze(2)
        assert torch.equal(out[expert, :count], blocks.float().view(count, HIDDEN).to(torch.bfloat16))
    beyond = out[:, max(COUNTS) :]
    assert beyond.shape[1] == SLOTS - max(COUNTS)
    assert (beyond == UNTOUCHED).all()


def loaded(kernel: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepep_dequant, "load_kernel", lambda device: (kernel, "triton 3.6.0"))


def test_a_kernel_is_compiled_at_once_and_gets_the_counts_of_each_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    loaded(lambda rows, scales, counts, out: seen.append(counts.tolist()), monkeypatch)
    rows, scales, counts, out = dequant_inputs(COUNTS, "cpu")
    dequantizer = Dequantizer(rows, scales, counts, out)
    dequantizer(rows, scales, counts + 1, out)
    assert (dequantizer.made_by, seen) == ("triton 3.6.0", [COUNTS, [4, 1, 8, 2]])


def test_where_the_kernel_does_not_compile_pytorch_does_it_and_the_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*tensors: torch.Tensor) -> None:
        raise RuntimeError("Failed to find C compiler")

    loaded(no_compiler, monkeypatch)
    rows, scales, counts, out = dequant_inputs(COUNTS, "cpu")
    dequantizer = Dequantizer(rows, scales, counts, out)
    dequantizer(rows, scales, counts, out)
    assert dequantizer.made_by == "torch (RuntimeError in triton)"
    assert (out[0, :3] != UNTOUCHED).any()
