"""The number formats of operands and wires: reference quantisation, exact to the grid.

Rounding is to the nearest, ties to even. Division is tensor by tensor throughout: PyTorch on CUDA turns a division by
a Python number into a multiplication by its reciprocal, and the bits would then depend on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

E4M3_MAX = 448.0
E2M1_MAX = 6.0
FP32_SCALE_AMAX_FLOOR = 1e-4  # what DeepEP and DeepGEMM use, so a row of zeros has the scale 1e-4 / 448


@dataclass(frozen=True)
class Format:
    """`rows` x `columns` elements share one scale; 0 columns = the whole row. `scale` is the scale's own format."""

    grid: str  # bf16, e4m3 or e2m1
    scale: str = ""  # fp32, e8m0, bf16, or e4m3 under one scale for the tensor: fp32, or a power of two (e4m3_pow2)
    columns: int = 0
    rows: int = 1

    @property
    def largest(self) -> float:
        return E4M3_MAX if self.grid == "e4m3" else E2M1_MAX


FORMATS: dict[str, Format] = {
    "bf16": Format("bf16"),
    "fp8": Format("e4m3", "fp32", 128),  # activations: scale = amax / 448
    "fp8_block": Format("e4m3", "fp32", 128, 128),  # weights
    "fp8_rowwise": Format("e4m3", "fp32"),
    "fp8_e8m0": Format("e4m3", "e8m0", 128),  # DeepGEMM's operands on sm_10x: activations
    "fp8_block_e8m0": Format("e4m3", "e8m0", 128, 128),  # and weights
    "mxfp8": Format("e4m3", "e8m0", 32),
    "mxfp4": Format("e2m1", "e8m0", 32),  # DeepGEMM's mega weights
    "nvfp4": Format("e2m1", "e4m3", 16),
    "nvfp4_pow2": Format("e2m1", "e4m3_pow2", 16),  # FlashInfer's mega weights: no fp32 scale but an alpha we choose
    "nvfp4_wire": Format("e2m1", "bf16", 16),  # combine wire 16e2m1 x bf16
}


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantised matrix: element [i, j] is values[i, j] * scales[i // rows, j // columns] * global_scale.

    values [M, N]: bfloat16, float8_e4m3fn, or for e2m1 float32 on the grid · scales float32 [blocks down, blocks
    across], already rounded to the scale's format, None for bf16 · global_scale float32 [] of nvfp4, else None.
    """

    format: str
    values: torch.Tensor
    scales: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None


def quantize(fmt: str, x: torch.Tensor) -> Quantized:
    """Quantise a matrix [M, N] of any float dtype; blocks at the edges may be ragged. NaN stays NaN.

    Raises ValueError for an unknown format or another number of dimensions.
    """
    if fmt not in FORMATS:
        raise ValueError(f"there is no number format {fmt!r}: use {', '.join(FORMATS)}")
    if x.dim() != 2:
        raise ValueError(f"a matrix is needed, not {x.dim()} dimensions")
    spec = FORMATS[fmt]
    if spec.grid == "bf16":
        return Quantized(fmt, x.to(torch.bfloat16))
    x = x.float()
    amax = _block_amax(x, spec)
    global_scale = None
    if spec.scale == "fp32":
        amax = amax.clamp(min=FP32_SCALE_AMAX_FLOOR)
        scales, inverse = amax / _like(amax, spec.largest), _like(amax, spec.largest) / amax
    else:
        if spec.scale in ("e4m3", "e4m3_pow2"):
            global_scale = _global_scale(x)
        if spec.scale == "e4m3_pow2":
            global_scale = _power_of_two_scale(_global_scale(x), 1.0)
        scales = _rounded_scale(amax, spec, global_scale)
        full = scales if global_scale is None else scales * global_scale
        # a block of zeros, or one that underflows the scale's format, has the scale 0 and comes out as zeros
        inverse = torch.where(full == 0, torch.zeros_like(full), torch.ones_like(full) / full)
    scaled = (x * _expand(inverse, spec, x.shape)).clamp(-spec.largest, spec.largest)
    values = scaled.to(torch.float8_e4m3fn) if spec.grid == "e4m3" else round_e2m1(scaled)
    return Quantized(fmt, values, scales, global_scale)


def dequantize(quantized: Quantized) -> torch.Tensor:
    """The float32 matrix [M, N] that the quantised one stands for."""
    values = quantized.values.float()
    if quantized.scales is None:
        return values
    scales = quantized.scales if quantized.global_scale is None else quantized.scales * quantized.global_scale
    return values * _expand(scales, FORMATS[quantized.format], values.shape)


def roundtrip(fmt: str, x: torch.Tensor) -> torch.Tensor:
    """What is left of a matrix [M, N] after the format, in float32."""
    return dequantize(quantize(fmt, x))


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign kept, ties to the even code; |x| > 6 becomes 6."""
    size = x.abs().clamp(max=E2M1_MAX)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign(torch.round(size / step) * step, x)


def _like(x: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full_like(x, value)


def _block_amax(x: torch.Tensor, spec: Format) -> torch.Tensor:
    """max |x| of each block, [blocks down, blocks across]."""
    count, width = x.shape
    columns = spec.columns or max(width, 1)
    padded = torch.nn.functional.pad(x.abs(), (0, -width % columns, 0, -count % spec.rows))
    blocks = padded.view(padded.shape[0] // spec.rows, spec.rows, padded.shape[1] // columns, columns)
    return blocks.amax(dim=(1, 3))


def _expand(scales: torch.Tensor, spec: Format, shape: torch.Size) -> torch.Tensor:
    """One scale an element, [M, N]; a single column stays as it is and broadcasts."""
    wide = scales.repeat_interleave(spec.rows, 0)[: shape[0]] if spec.rows > 1 else scales
    return wide.repeat_interleave(spec.columns, 1)[:, : shape[1]] if spec.columns else wide


def _global_scale(x: torch.Tensor) -> torch.Tensor:
    """nvfp4's fp32 scale of a tensor: amax / (448 * 6), so that the largest block scale is e4m3's largest."""
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    return torch.where(amax == 0, torch.ones_like(amax), amax / _like(amax, E4M3_MAX * E2M1_MAX))


def _rounded_scale(amax: torch.Tensor, spec: Format, global_scale: torch.Tensor | None) -> torch.Tensor:
    if spec.scale == "e8m0":
        return _power_of_two_scale(amax, spec.largest)
    scale = amax / _like(amax, spec.largest)
    if global_scale is None:
        return scale.to(torch.bfloat16).float()
    return (scale / global_scale).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()


def _power_of_two_scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """2**ceil(log2(amax / largest)): rounded up, as DeepGEMM, FlashInfer and cuBLAS do, so that nothing saturates.

    From mantissas and exponents, since log2 and pow are not exact everywhere. A block of zeros has the scale 1.
    """
    top_mantissa, top_exponent = math.frexp(largest)
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent.to(torch.int32) - top_exponent + (mantissa > top_mantissa).to(torch.int32)
    exponent = torch.where(amax == 0, torch.zeros_like(exponent), exponent).clamp(-126, 127)
    return ((exponent + 127) << 23).view(torch.float32)
