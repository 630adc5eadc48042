"""A right combine and a right MoE pass; what is wrong trips, one element, term or weight at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from lib import formats, oracle
from lib.problem import Problem, expert_weights, token_payload
from lib.routing import make_routing

CPU = torch.device("cpu")
PROBLEM = Problem(world=2, nodes=1, tokens=24, num_experts=8, topk=3, hidden=256, inter=64, seed=3, routing="mask=0.2")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """OpenMP's threads spin while they wait: with the cores shared, 7 s of tests took 40 s."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- combine


def combined(wire: str = "bf16") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A right combine: each rank's partial sum rounded to bf16 and through the wire, summed, rounded."""
    routing = make_routing(PROBLEM)
    x = token_payload(PROBLEM, 0, PROBLEM.tokens, 0, CPU)
    weights, ids = torch.from_numpy(routing.topk_weights[0]), torch.from_numpy(routing.topk_idx[0])
    total = torch.zeros(x.shape)
    for rank in range(PROBLEM.world):
        own = torch.where(ids // PROBLEM.local_experts == rank, weights, 0).sum(1, keepdim=True)
        total += formats.roundtrip(wire, (x.float() * own).bfloat16())
    return total.bfloat16(), x, weights


@pytest.mark.parametrize("wire", ["bf16", "mxfp8", "nvfp4_wire"])
def test_a_right_combine_passes_and_one_wrong_element_trips(wire: str) -> None:
    out, x, weights = combined(wire)
    assert oracle.check_combine(out, x, weights, wire) == ""
    out[7, 11] += float(oracle.COMBINE_LIMITS[wire] * 1.7 * x[7].abs().max())
    assert "token 7 has at column 11" in oracle.check_combine(out, x, weights, wire)


@pytest.mark.parametrize(
    "spoil", [lambda out: out.zero_(), lambda out: out.fill_(float("nan")), lambda out: out.copy_(out.roll(1, 0))]
)
def test_a_combine_that_does_nothing_or_is_poisoned_or_shifted_trips(spoil: Callable[[torch.Tensor], None]) -> None:
    out, x, weights = combined()
    spoil(out)
    assert oracle.check_combine(out, x, weights) != ""


def test_a_lost_contribution_trips_on_the_bf16_wire() -> None:
    out, x, weights = combined()
    row = int(weights.amax(1).argmax())
    kept = weights.clone()
    kept[row, int(weights[row].argmax())] = 0
    out[row] = oracle.expected_combine(x, kept)[row].bfloat16()
    assert f"token {row}" in oracle.check_combine(out, x, weights)


def test_a_token_masked_whole_must_come_back_as_exact_zeros() -> None:
    out, x, weights = combined()
    weights[3], out[3] = 0, 0
    assert oracle.check_combine(out, x, weights) == ""
    out[3, 0] = 1e-3
    assert "token 3" in oracle.check_combine(out, x, weights)


# -- MoE

MOE = Problem(world=2, nodes=1, tokens=48, num_experts=16, topk=4, hidden=512, inter=256, seed=0, routing="uniform")
FORMATS = list(oracle.OPERANDS)


def layer(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    routing = make_routing(problem)
    x = token_payload(problem, 0, problem.tokens, 0, CPU)
    return x, torch.from_numpy(routing.topk_idx[0]), torch.from_numpy(routing.topk_weights[0])


@lru_cache(maxsize=256)
def operand_weights(problem: Problem, expert: int, fmt: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    w13, w2 = expert_weights(problem, expert, device)
    return oracle.through_weights(oracle.OPERANDS[fmt], w13, w2)


@lru_cache(maxsize=32)
def reference_of(problem: Problem, fmt: str) -> torch.Tensor:
    return oracle.moe_reference(problem, *layer(problem), CPU, operand_format=fmt)


def simulated_kernel(
    problem: Problem,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    fmt: str,
    wire: str = "bf16",
    grouped: bool = False,
) -> torch.Tensor:
    """What a correct kernel does in `fmt`: bf16 after each GEMM and after the activation, the intermediate quantised
    again, each expert's contribution (grouped: each rank's partial sum) on the combine wire, partial sums of each rank
    in bf16, bf16 out."""
    of_activations = oracle.OPERANDS[fmt][0]
    operand = formats.roundtrip(of_activations, x)
    partial = torch.zeros(problem.world, *x.shape, device=x.device)
    for expert in ids[ids >= 0].unique().tolist():
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        w13, w2 = operand_weights(problem, expert, fmt, x.device)
        gate, up = (operand[rows] @ w13.T).bfloat16().float().chunk(2, dim=1)
        middle = formats.roundtrip(of_activations, (torch.nn.functional.silu(gate) * up).bfloat16())
        y = formats.roundtrip("bf16" if grouped else wire, (middle @ w2.T).bfloat16()) * weights[rows, slots, None]
        partial[expert // problem.local_experts].index_add_(0, rows, y)
    if grouped:
        partial = torch.stack([formats.roundtrip(wire, rows) for rows in partial])
    return partial.bfloat16().float().sum(0).bfloat16()


def test_the_reference_is_the_formula_token_by_token() -> None:
    small = Problem(2, 1, 5, 8, 3, 64, 32, 1, "mask=0.3")
    x, ids, weights = layer(small)
    expected = torch.zeros(5, 64, dtype=torch.float64)
    for token in range(5):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            if expert >= 0:
                w13, w2 = (w.double() for w in expert_weights(small, expert, CPU))
                gate, up = w13[:32] @ x[token].double(), w13[32:] @ x[token].double()
                expected[token] += weight * (w2 @ (gate / (1 + torch.exp(-gate)) * up))
    out = oracle.moe_reference(small, x, ids, weights, CPU)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_reference_makes_only_the_experts_that_were_chosen() -> None:
    x, ids, weights = layer(MOE)
    made: list[int] = []

    def make(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        made.append(expert)
        return expert_weights(MOE, expert, CPU)

    ids = torch.where(ids < 6, ids, -1)
    oracle.moe_reference(MOE, x, ids, weights, CPU, weights=make)
    assert made == sorted(set(ids[ids >= 0].tolist()))


def test_the_reference_restores_the_precision_that_it_found() -> None:
    x, ids, weights = layer(MOE)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        oracle.moe_reference(MOE, x[:1], ids[:1], weights[:1], CPU)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def headroom(out: torch.Tensor, reference: torch.Tensor, fmt: str, wire: str = "bf16") -> float:
    """The largest share of a limit that is used up."""
    limits, error = oracle.LIMITS[fmt].with_wire(oracle.WIRE_LIMITS[wire]), out.float() - reference
    energy = reference.square().mean(1)
    return max(
        float((error.abs().amax(1) / energy.sqrt()).max()) / limits.largest,
        float((error.square().mean(1) / energy).sqrt().max()) / limits.rms,
        float(((error * reference).mean(1) / energy).abs().max()) / limits.gain(out.shape[1]),
    )


@pytest.mark.parametrize(
    ("fmt", "wire"),
    [(fmt, "bf16") for fmt in FORMATS]
    + [("fp8", "fp8"), ("mxfp8", "mxfp8"), ("nvfp4", "mxfp8"), ("nvfp4", "nvfp4_wire")],
)
def test_a_correct_kernel_uses_at_most_half_of_each_limit(fmt: str, wire: str) -> None:
    for problem in (MOE, replace(MOE, topk=1), replace(MOE, num_experts=8, topk=2, hidden=128, inter=64)):
        x, ids, weights = layer(problem)
        reference = reference_of(problem, fmt)
        out = simulated_kernel(problem, x, ids, weights, fmt, wire)
        assert oracle.check_moe(out, reference, fmt, wire) == ""
        assert headroom(out, reference, fmt, wire) <= 0.5


def swapped(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The expert of least weight is another one that the token did not choose."""
    row, slot = 5, int(weights[5].argmin())
    ids[row, slot] = next(e for e in range(MOE.num_experts) if e not in ids[row].tolist())
    return ids, weights


def dropped(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token loses its strongest expert."""
    ids[5, int(weights[5].argmax())] = -1
    return ids, weights


def dropped_weakest_everywhere(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ids.scatter(1, weights.argmin(1, keepdim=True), -1), weights


def wrong_weight_everywhere(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's largest gate weight is 10 % too large."""
    slot = weights.argmax(1, keepdim=True)
    return ids, weights.scatter(1, slot, 1.1 * weights.gather(1, slot))


Fault = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def verdict_with(fault: Fault, fmt: str, problem: Problem = MOE) -> str:
    x, ids, weights = layer(problem)
    reference = reference_of(problem, fmt)
    return oracle.check_moe(simulated_kernel(problem, x, *fault(ids.clone(), weights.clone()), fmt), reference, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("fault", [swapped, dropped, dropped_weakest_everywhere])
def test_a_wrong_expert_and_a_lost_term_trip_in_every_format(fault: Fault, fmt: str) -> None:
    assert "of its rms" in verdict_with(fault, fmt)


@pytest.mark.parametrize("grouped", [False, True])
def test_partial_sums_of_a_rank_on_an_fp8_wire_stay_in_half_of_the_limit(grouped: bool) -> None:
    x, ids, weights = layer(MOE)
    out, reference = simulated_kernel(MOE, x, ids, weights, "fp8", "fp8", grouped), reference_of(MOE, "fp8")
    assert headroom(out, reference, "fp8", "fp8") <= 0.5


@pytest.mark.parametrize(("kernel", "plain"), [("fp8_interleaved", "fp8"), ("nvfp4_pow2", "nvfp4")])
def test_weights_that_were_cut_into_other_blocks_are_another_operand(kernel: str, plain: str) -> None:
    """Two roundings of one weight are independent noises: against the wrong one a right kernel would nearly trip."""
    x, ids, weights = layer(MOE)
    out = simulated_kernel(MOE, x, ids, weights, kernel)
    assert (
        headroom(out, reference_of(MOE, plain), plain) > 0.75 > 0.5 >= headroom(out, reference_of(MOE, kernel), kernel)
    )


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if not fmt.startswith("nvfp4")])
def test_a_gate_weight_that_is_off_by_a_tenth_trips(fmt: str) -> None:
    assert verdict_with(wrong_weight_everywhere, fmt) != ""


def test_four_bits_hide_a_tenth_of_a_gate_weight_in_short_rows_but_not_in_long_ones() -> None:
    assert verdict_with(wrong_weight_everywhere, "nvfp4", replace(MOE, hidden=128)) == ""
    long_rows = replace(MOE, tokens=16, hidden=4096, inter=128)
    assert "scaled by" in verdict_with(wrong_weight_everywhere, "nvfp4", long_rows)


@pytest.mark.parametrize("fmt", FORMATS)
def test_one_element_and_nan_and_a_stale_output_trip(fmt: str) -> None:
    x, ids, weights = layer(MOE)
    reference = reference_of(MOE, fmt)
    out = simulated_kernel(MOE, x, ids, weights, fmt)
    spoilt = out.clone()
    spoilt[9, 17] += 1.6 * oracle.LIMITS[fmt].largest * reference[9].square().mean().sqrt()
    assert "token 9" in oracle.check_moe(spoilt, reference, fmt)
    spoilt[9, 17] = float("nan")
    assert "not finite" in oracle.check_moe(spoilt, reference, fmt)
    assert oracle.check_moe(out.roll(1, 0), reference, fmt) != ""
    assert oracle.check_moe(torch.zeros_like(out), reference, fmt) != ""
    assert "shape" in oracle.check_moe(out[:-1], reference, fmt)
    assert "not finite" in oracle.check_moe(out, reference * float("nan"), fmt)


def test_operands_of_another_format_than_the_kernels_trip() -> None:
    x, ids, weights = layer(MOE)
    out = simulated_kernel(MOE, x, ids, weights, "fp8")
    assert oracle.check_moe(out, reference_of(MOE, "mxfp8"), "bf16") != ""
    assert oracle.check_moe(out, reference_of(MOE, "nvfp4"), "fp8") != ""


def test_a_token_masked_whole_must_be_zero_and_no_row_is_divided_by_zero() -> None:
    x, ids, weights = layer(MOE)
    ids[2], weights[2] = -1, 0
    reference = oracle.moe_reference(MOE, x, ids, weights, CPU, operand_format="bf16")
    out = simulated_kernel(MOE, x, ids, weights, "bf16")
    assert oracle.check_moe(out, reference, "bf16") == ""
    out[2, 3] = 1e-30
    assert "token 2 is masked whole" in oracle.check_moe(out, reference, "bf16")


def test_no_tokens_pass_and_unknown_formats_are_sentences() -> None:
    nothing = torch.zeros(0, 512)
    assert oracle.check_moe(nothing, nothing, "fp8") == ""
    assert oracle.check_combine(nothing.bfloat16(), nothing.bfloat16(), torch.zeros(0, 4)) == ""
    one = torch.ones(1, 512)
    assert "no tolerance" in oracle.check_moe(one, one, "fp9")
    assert "no tolerance" in oracle.check_combine(one, one, torch.ones(1, 1), "fp9")
    with pytest.raises(ValueError, match="fp9"):
        oracle.moe_reference(MOE, *layer(MOE), CPU, operand_format="fp9")


@pytest.mark.parametrize(
    ("fmt", "low", "high"), [("bf16", 0.2, 0.6), ("fp8", 5.5, 7), ("mxfp8", 6, 7), ("nvfp4", 22, 25)]
)
def test_the_accuracy_loss_is_that_of_the_format(fmt: str, low: float, high: float) -> None:
    x, ids, weights = layer(MOE)
    masters = oracle.moe_reference(MOE, x, ids, weights, CPU)
    out = simulated_kernel(MOE, x, ids, weights, fmt)
    half = MOE.tokens // 2
    parts = [(out[:half], masters[:half]), (out[half:], masters[half:])]
    terms = [oracle.acc_loss_pct_terms(*part) for part in parts]
    loss = oracle.acc_loss_pct(sum(num for num, _ in terms), sum(den for _, den in terms))
    assert loss == pytest.approx(100 * float((out.float() - masters).norm() / masters.norm()), rel=1e-5)
    assert low < loss < high


def test_there_is_no_accuracy_loss_without_a_reference() -> None:
    assert oracle.acc_loss_pct(0.0, 0.0) is None
