"""Ground truth and verdicts: is what came out of a library what should have come out?

Every check returns "" or one sentence that names the first difference; NaN never passes. docs/method.md explains
the tolerances and shows the figures behind them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from lib import formats
from lib.dispatch_oracle import check_dispatch, decode_rows, encoded_payload, encoded_rows
from lib.problem import Problem, expert_weights

__all__ = [
    "COMBINE_LIMITS",
    "LIMITS",
    "OPERANDS",
    "WIRE_LIMITS",
    "MoeLimits",
    "acc_loss_pct",
    "acc_loss_pct_terms",
    "check_combine",
    "check_dispatch",
    "check_moe",
    "decode_rows",
    "encoded_payload",
    "encoded_rows",
    "expected_combine",
    "moe_reference",
]

COMBINE_ABSOLUTE = 0.02
# Share of the row's scale that sum(w * x) may be off. bf16: eight roundings of 2**-8, partial sums included. A wire
# adds half its grid's coarsest step: 2**-4 of the largest element (e4m3), 1 of 6 (e2m1).
COMBINE_LIMITS: dict[str, float] = {
    "bf16": 8 * 2**-8,
    "fp8": 2**-4 + 8 * 2**-8,
    "mxfp8": 2**-4 + 8 * 2**-8,
    "nvfp4_wire": 1 / 6 + 8 * 2**-8,
}


class Operands(NamedTuple):
    """Formats of activations and weights, names of lib/formats.py.

    gate_up_rows: w13's gate and up rows stand in turn, so many at a time, before its scale blocks are cut; 0 = halves.
    """

    activations: str
    weights: str
    gate_up_rows: int = 0


OPERANDS: dict[str, Operands] = {
    "bf16": Operands("bf16", "bf16"),
    "fp8": Operands("fp8", "fp8_block"),
    "fp8_interleaved": Operands("fp8", "fp8_block", 8),  # FlashInfer's sm90 pull: a block holds 64 gate and 64 up rows
    "fp8_e8m0": Operands("fp8_e8m0", "fp8_block_e8m0"),  # fp8 with scales rounded up to powers of two
    "fp8_rowwise": Operands("fp8_rowwise", "fp8_rowwise"),
    "mxfp8": Operands("mxfp8", "mxfp8"),
    "nvfp4": Operands("nvfp4", "nvfp4"),
    "nvfp4_pow2": Operands("nvfp4_pow2", "nvfp4_pow2"),
    "mxfp8_mxfp4": Operands("mxfp8", "mxfp4"),  # DeepGEMM's mega kernel
}


class MoeLimits(NamedTuple):
    """What a row of an MoE's output may be off.

    largest: max |out - ref| over the row's rms (shows a wrong element) · rms: rms of the error over the row's rms (a
    wrong expert, a lost term) · noise_gain: |<out, ref> / <ref, ref> - 1|, times sqrt(H), since rounding noise
    averages out over a row (a wrong gate weight).
    """

    largest: float
    rms: float
    noise_gain: float

    def gain(self, hidden: int) -> float:
        return self.noise_gain * hidden**-0.5

    def with_wire(self, wire: MoeLimits) -> MoeLimits:
        """Two independent noises, so their squares add."""
        return MoeLimits(*(math.hypot(own, more) for own, more in zip(self, wire, strict=True)))


# Twice, rounded up, the largest seen in simulations of a correct kernel (tests/test_oracle.py, simulated_kernel) over
# hidden 128..7168, top-1..8, up to 2048 tokens, and in real bf16 and fp8 kernels on an H200. Seen: bf16 0.034 / 0.007
# / 0.07, fp8 0.14 / 0.032 / 0.32, fp8_rowwise 0.16 / 0.035 / 0.42, mxfp8 0.19 / 0.05 / 0.58, nvfp4 0.50 / 0.134 / 0.9.
LIMITS: dict[str, MoeLimits] = {
    "bf16": MoeLimits(0.08, 0.015, 0.15),
    "fp8": MoeLimits(0.35, 0.07, 0.7),
    "fp8_interleaved": MoeLimits(0.35, 0.07, 0.7),
    "fp8_rowwise": MoeLimits(0.35, 0.07, 0.9),
    "fp8_e8m0": MoeLimits(0.4, 0.1, 1.2),
    "mxfp8": MoeLimits(0.4, 0.1, 1.2),
    "mxfp8_mxfp4": MoeLimits(0.4, 0.1, 1.2),
    "nvfp4": MoeLimits(1.0, 0.27, 1.8),
    "nvfp4_pow2": MoeLimits(1.0, 0.28, 2.2),
}

# What a quantised combine wire adds: each expert's contribution goes through it.
WIRE_LIMITS: dict[str, MoeLimits] = {
    "bf16": MoeLimits(0.0, 0.0, 0.0),
    "fp8": MoeLimits(0.3, 0.06, 0.6),
    "mxfp8": MoeLimits(0.35, 0.07, 1.0),
    "nvfp4_wire": MoeLimits(1.4, 0.2, 2.2),
}

Weights = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


def expected_combine(x: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """sum(w * x) of each row over its unmasked entries (the masked ones weigh 0), float32 [T, H]."""
    return x.float() * topk_weights.float().sum(1, keepdim=True)


def check_combine(out: torch.Tensor, x: torch.Tensor, topk_weights: torch.Tensor, fmt: str = "bf16") -> str:
    """Is out [T, H] sum(w * x) within max(COMBINE_LIMITS[fmt] * the row's scale, 0.02)?

    The row's scale is max |expected|. A row that is masked whole must be exactly 0.
    """
    expected = expected_combine(x, topk_weights)
    if trouble := _comparable(out, expected):
        return trouble
    if fmt not in COMBINE_LIMITS:
        return f"there is no tolerance for the combine wire {fmt!r}"
    scale = expected.abs().amax(1, keepdim=True)
    limit = torch.where(scale > 0, (COMBINE_LIMITS[fmt] * scale).clamp(min=COMBINE_ABSOLUTE), 0.0)
    if (wrong := ~((out.float() - expected).abs() <= limit)).any():
        row, column = wrong.nonzero()[0].tolist()
        values = f"{float(out[row, column]):g}, not {float(expected[row, column]):g} within {float(limit[row, 0]):.3g}"
        return f"the combined token {row} has at column {column} {values}"
    return ""


def moe_reference(
    problem: Problem,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    device: torch.device,
    operand_format: str = "",
    weights: Weights | None = None,
) -> torch.Tensor:
    """The MoE of this rank's tokens in float32 [T, H]: y = sum_k w_k * W2_e (silu(gate) * up), gate rows first in w13.

    x and the experts' weights first go through `operand_format` (a key of OPERANDS) and back; "" takes them as they
    are. `weights(expert)` gives w13 [2I, H] and w2 [H, I], by default the problem's own. Only experts that a token
    chose are made, one at a time; TF32 is off meanwhile. Raises ValueError for an unknown format.
    """
    if operand_format and operand_format not in OPERANDS:
        raise ValueError(f"there is no operand format {operand_format!r}: use {', '.join(OPERANDS)}")
    operands = OPERANDS.get(operand_format, Operands("", ""))
    x = _through(operands.activations, x.to(device))
    topk_idx, topk_weights = topk_idx.to(device), topk_weights.to(device).float()
    out = torch.zeros(x.shape, dtype=torch.float32, device=device)
    with _full_fp32():
        for expert in topk_idx[topk_idx >= 0].unique().tolist():
            w13, w2 = weights(expert) if weights else expert_weights(problem, expert, device)
            rows, slots = (topk_idx == expert).nonzero(as_tuple=True)
            w13, w2 = through_weights(operands, w13.to(device), w2.to(device))
            gate, up = (x[rows] @ w13.T).chunk(2, dim=1)
            y = (torch.nn.functional.silu(gate) * up) @ w2.T
            out.index_add_(0, rows, topk_weights[rows, slots, None] * y)
    return out


def check_moe(out: torch.Tensor, reference: torch.Tensor, fmt: str, combine_format: str = "bf16") -> str:
    """Is out [T, H], row by row, the reference over operands in `fmt` within LIMITS[fmt] and the wire's WIRE_LIMITS?

    A row whose reference is 0 throughout (masked whole) must be exactly 0.
    """
    if trouble := _comparable(out, reference):
        return trouble
    if fmt not in LIMITS or combine_format not in WIRE_LIMITS:
        return f"there is no tolerance for the number format {fmt!r} with the combine wire {combine_format!r}"
    out, limits = out.float(), LIMITS[fmt].with_wire(WIRE_LIMITS[combine_format])
    energy = reference.square().mean(1)
    silent = energy == 0
    if (wrong := silent & (out != 0).any(1)).any():
        return f"token {_first(wrong)} is masked whole, so its output must be 0"
    rms = torch.where(silent, 1.0, energy.sqrt())
    error = out - reference
    gain = (error * reference).mean(1) / rms.square()
    measures = {
        "off by {:.3g} of its rms at one element": (error.abs().amax(1) / rms, limits.largest),
        "off by {:.3g} of its rms": (error.square().mean(1).sqrt() / rms, limits.rms),
        "scaled by 1 +- {:.3g}": (gain.abs(), limits.gain(out.shape[1])),
    }
    for text, (measure, limit) in measures.items():
        if (wrong := ~(measure <= limit)).any():
            row = int(measure.argmax())
            said = text.format(float(measure[row]))
            return f"token {row} is {said}, limit {limit:.3g} for {fmt} ({int(wrong.sum())} such)"
    return ""


def acc_loss_pct_terms(out: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Sums of squares (of the error, of the reference) in float64: add them over ranks, then `acc_loss_pct`."""
    error = out.double() - reference.double()
    return float(error.square().sum()), float(reference.double().square().sum())


def acc_loss_pct(num: float, den: float) -> float | None:
    """100 * ||out - ref|| / ||ref|| from the sums of squares; None where the reference is 0, so no loss is defined."""
    return 100 * (num / den) ** 0.5 if den > 0 else None


def _comparable(out: torch.Tensor, expected: torch.Tensor) -> str:
    if out.shape != expected.shape:
        return f"the output has the shape {list(out.shape)}, not {list(expected.shape)}"
    for name, tensor in (("output", out), ("reference", expected)):
        if (wrong := ~tensor.isfinite()).any():
            return f"the {name} of token {_first(wrong)} is not finite ({int(wrong.sum())} elements)"
    return ""


def through_weights(operands: Operands, w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert's w13 [2I, H] and w2 [H, I] through their format and back, float32, in the order they came in."""
    if not operands.gate_up_rows:
        return _through(operands.weights, w13), _through(operands.weights, w2)
    pairs = w13.unflatten(0, (2, -1, operands.gate_up_rows)).transpose(0, 1)  # [I / rows, 2, rows, H]
    back = _through(operands.weights, pairs.flatten(0, 2)).view(pairs.shape)
    return back.transpose(0, 1).flatten(0, 2), _through(operands.weights, w2)


def _through(fmt: str, x: torch.Tensor) -> torch.Tensor:
    return formats.roundtrip(fmt, x) if fmt else x.float()


@contextmanager
def _full_fp32() -> Iterator[None]:
    """float32 products in full precision, the caller's setting restored.

    PyTorch has two interfaces for it and refuses to read one after the other was set; a library may have set either.
    """
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        matmul = torch.backends.cuda.matmul
        kept, matmul.fp32_precision = matmul.fp32_precision, "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = kept
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _first(wrong: torch.Tensor) -> int:
    """The first row with a True."""
    return int(wrong.nonzero()[0, 0])
