"""Each number format rounds to its own grid, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from lib import formats
from lib.traffic import WIRE_FORMATS, copy_bytes

SCALED = [fmt for fmt, spec in formats.FORMATS.items() if spec.scale]


def normal(count: int = 64, width: int = 512) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("x", "rounded"),
    [
        (0.0, 0.0), (0.24, 0.0), (0.25, 0.0), (0.26, 0.5), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0),
        (2.51, 3.0), (3.5, 4.0), (5.0, 4.0), (5.01, 6.0), (6.0, 6.0), (7.0, 6.0), (-0.75, -1.0), (-5.5, -6.0),
    ],
)  # fmt: skip
def test_e2m1_rounds_to_its_eight_sizes_ties_to_even(x: float, rounded: float) -> None:
    assert formats.round_e2m1(torch.tensor([x])).item() == rounded


def test_fp8_has_one_fp32_scale_per_128_which_is_amax_over_448() -> None:
    x = torch.zeros(2, 256)
    x[0, 5], x[0, 6], x[1, 200] = 448.0, 100.0, -0.875
    q = formats.quantize("fp8", x)
    assert q.values.dtype == torch.float8_e4m3fn
    assert q.scales is not None
    assert q.scales[0, 0] == 1
    assert q.scales[1, 1] == 0.875 / 448
    assert q.values[0, 5:7].tolist() == [448.0, 96.0]  # steps of 8 there: a tie goes to even
    assert q.values[1, 200] == -448


def test_fp8_of_zeros_has_the_scale_of_its_floor() -> None:
    q = formats.quantize("fp8", torch.zeros(1, 128))
    assert q.scales is not None
    assert q.scales.item() == pytest.approx(1e-4 / 448, rel=1e-6)


def test_fp8_blocks_of_weights_are_128_by_128_with_ragged_edges() -> None:
    x = torch.ones(130, 300)
    x[129, 299], x[0, 0] = 896.0, 1792.0
    q = formats.quantize("fp8_block", x)
    assert q.scales is not None
    assert q.scales.shape == (2, 3)
    assert (q.scales[0, 0], q.scales[1, 2]) == (4, 2)
    assert q.scales[0, 1].item() == pytest.approx(1 / 448)
    assert torch.equal(formats.dequantize(q)[:128, 128:256], torch.ones(128, 128))


def test_fp8_rowwise_has_one_scale_a_row() -> None:
    q = formats.quantize("fp8_rowwise", torch.tensor([[448.0, 1.0], [896.0, 2.0]]))
    assert q.scales is not None
    assert q.scales.tolist() == [[1.0], [2.0]]
    assert formats.dequantize(q).tolist() == [[448.0, 1.0], [896.0, 2.0]]


@pytest.mark.parametrize(
    ("fmt", "amax", "scale"),
    [
        ("mxfp8", 448.0, 1.0), ("mxfp8", 448.5, 2.0), ("mxfp8", 256.0, 1.0), ("mxfp8", 224.0, 0.5),
        ("mxfp4", 6.0, 1.0), ("mxfp4", 6.1, 2.0), ("mxfp4", 4.0, 1.0), ("mxfp4", 3.0, 0.5), ("mxfp8", 225.0, 1.0),
        ("mxfp8", 0.0, 1.0),
    ],
)  # fmt: skip
def test_mx_scales_are_the_power_of_two_that_just_holds_the_largest(fmt: str, amax: float, scale: float) -> None:
    x = torch.zeros(1, 64)
    x[0, 3] = -amax
    q = formats.quantize(fmt, x)
    assert q.scales is not None
    assert q.scales.tolist() == [[scale, 1.0]]


def test_nvfp4_has_e4m3_scales_per_16_under_one_fp32_scale() -> None:
    x = torch.zeros(1, 48)
    x[0, 0], x[0, 20], x[0, 21] = 2688.0, 6.0, -2.9
    q = formats.quantize("nvfp4", x)
    assert q.scales is not None
    assert q.global_scale is not None
    assert q.global_scale == 1  # 2688 = 448 * 6
    assert q.scales.tolist() == [[448.0, 1.0, 0.0]]
    assert formats.dequantize(q)[0, [0, 20, 21, 40]].tolist() == [2688.0, 6.0, -3.0, 0.0]


def test_the_nvfp4_wire_has_a_bf16_scale_per_16() -> None:
    x = torch.zeros(1, 32)
    x[0, 1], x[0, 17] = 6.0, 1.0
    q = formats.quantize("nvfp4_wire", x)
    assert q.scales is not None
    assert q.scales.tolist() == [[1.0, float(torch.tensor(1 / 6).bfloat16())]]
    assert q.global_scale is None


@pytest.mark.parametrize("fmt", list(formats.FORMATS))
def test_powers_of_two_zeros_and_signs_come_back_exactly(fmt: str) -> None:
    x = torch.zeros(3, 256)
    x[0, ::2], x[1, ::3] = 0.5, -4.0
    if fmt in ("nvfp4_wire", "nvfp4_pow2"):
        x *= 3  # their scales can't hold a power of two over 6, but half of one
    assert torch.equal(formats.roundtrip(fmt, x), x)


@pytest.mark.parametrize("fmt", SCALED)
def test_values_lie_on_the_grid_and_a_second_pass_changes_nothing(fmt: str) -> None:
    q = formats.quantize(fmt, normal())
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]) if formats.FORMATS[fmt].grid == "e2m1" else None
    assert grid is None or torch.isin(q.values.abs(), grid).all()
    assert q.values.float().abs().max() <= formats.FORMATS[fmt].largest
    if formats.FORMATS[fmt].scale == "e8m0":
        once = formats.dequantize(q)
        assert torch.equal(formats.roundtrip(fmt, once), once)


@pytest.mark.parametrize(
    ("fmt", "of_block", "loss_pct"),
    [
        ("bf16", 2**-8, 0.25), ("fp8", 2**-4, 2.7), ("fp8_block", 2**-4, 2.7), ("fp8_rowwise", 2**-4, 2.7),
        ("mxfp8", 2**-4, 2.7), ("mxfp4", 1 / 4, 13), ("nvfp4", 0.18, 10), ("nvfp4_wire", 0.17, 10),
    ],
)  # fmt: skip
def test_the_error_is_within_the_formats_bound(fmt: str, of_block: float, loss_pct: float) -> None:
    """No element is off by more than its share of the block's largest, and the whole by its usual loss."""
    x = normal()
    error = formats.roundtrip(fmt, x) - x
    columns = formats.FORMATS[fmt].columns or 512
    largest = x.abs().view(64, -1, columns).amax(2).repeat_interleave(columns, 1)
    largest = x.abs().amax() if fmt == "fp8_block" else largest
    assert (error.abs() <= of_block * largest).all()
    assert 0.5 * loss_pct < 100 * error.norm() / x.norm() < loss_pct


@pytest.mark.parametrize("fmt", list(formats.FORMATS))
def test_zeros_stay_zeros_nan_stays_nan_and_nothing_stays_nothing(fmt: str) -> None:
    assert torch.equal(formats.roundtrip(fmt, torch.zeros(2, 256)), torch.zeros(2, 256))
    assert formats.roundtrip(fmt, torch.full((1, 128), float("nan"))).isnan().all()
    assert formats.roundtrip(fmt, torch.zeros(0, 256)).shape == (0, 256)


@pytest.mark.parametrize("fmt", SCALED)
def test_tiny_blocks_beside_large_ones_stay_finite(fmt: str) -> None:
    x = normal(2, 256) * torch.tensor([1e-30] * 128 + [1e4] * 128)
    assert formats.roundtrip(fmt, x).isfinite().all()


@pytest.mark.parametrize("fmt", list(WIRE_FORMATS))
def test_the_bytes_of_a_copy_are_those_of_values_and_scales(fmt: str) -> None:
    """lib/traffic.py counts what lib/formats.py makes."""
    bits = {"bf16": 16, "e4m3": 8, "e2m1": 4}
    spec, q = formats.FORMATS[fmt], formats.quantize(fmt, normal(1, 512))
    scale_bytes = {"": 0, "fp32": 4, "e8m0": 1, "e4m3": 1, "bf16": 2}[spec.scale]
    scales = 0 if q.scales is None else q.scales.numel()
    assert copy_bytes(fmt, 512) == 512 * bits[spec.grid] // 8 + scales * scale_bytes


def test_unknown_formats_and_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="fp9"):
        formats.quantize("fp9", normal())
    with pytest.raises(ValueError, match="matrix"):
        formats.quantize("fp8", normal()[0])


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", list(formats.FORMATS))
def test_a_gpu_quantises_to_the_same_bits(fmt: str) -> None:
    x = normal(300, 7168) * torch.logspace(-6, 4, 300)[:, None]
    here, there = formats.quantize(fmt, x), formats.quantize(fmt, x.cuda())
    assert torch.equal(here.values.view(torch.uint8), there.values.cpu().view(torch.uint8))
    assert here.scales is None or torch.equal(here.scales, there.scales.cpu())
    assert torch.equal(formats.dequantize(here), formats.dequantize(there).cpu())
