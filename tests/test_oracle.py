"""The verdicts pass what is right and trip on what is wrong, one element at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lib import formats, oracle
from lib.contract import Received
from lib.problem import Problem, expert_weights, token_payload
from lib.routing import Routing, make_routing

CPU = torch.device("cpu")
PROBLEM = Problem(world=2, nodes=1, tokens=24, num_experts=8, topk=3, hidden=256, inter=64, seed=3, routing="mask=0.2")
SALT = 5


# -- the encoded payload


def test_a_payload_row_says_whose_it_is() -> None:
    ranks, tokens = torch.tensor([0, 7, 4095]), torch.tensor([0, 8191, 262143])
    rank, token = oracle.decode_rows(oracle.encoded_rows(ranks, tokens, 256, SALT))
    assert (rank.tolist(), token.tolist()) == (ranks.tolist(), tokens.tolist())


def test_any_rank_regenerates_any_slice_of_the_payload() -> None:
    whole = oracle.encoded_payload(PROBLEM, 1, 24, SALT, CPU)
    part = oracle.encoded_payload(PROBLEM, 1, 4, SALT, CPU, first_token=20)
    assert torch.equal(whole[20:], part)
    assert whole.dtype == torch.bfloat16
    assert whole.abs().max() == oracle_max()


def oracle_max() -> int:
    from lib.dispatch_oracle import PAYLOAD_MAX

    return PAYLOAD_MAX


def test_the_payload_has_these_values_on_every_machine() -> None:
    row = oracle.encoded_rows(torch.tensor([3]), torch.tensor([77]), 32, SALT)[0]
    assert row.tolist()[:10] == [3, 0, 0, 0, 5, 1, 1, 0, 0, 0]
    assert row.int().tolist()[10:] == GOLDEN_PATTERN


GOLDEN_PATTERN = [0] * 22


def test_another_salt_rank_or_token_changes_most_of_the_row() -> None:
    one = torch.tensor([1])
    base = oracle.encoded_rows(one, one, 4096, SALT)
    for other in (
        oracle.encoded_rows(one, one, 4096, SALT + 1),
        oracle.encoded_rows(one + 1, one, 4096, SALT),
        oracle.encoded_rows(one, one + 1, 4096, SALT),
    ):
        assert (base != other).float().mean() > 0.8


@pytest.mark.parametrize("fmt", ["fp8", "fp8_rowwise", "mxfp8"])
def test_the_payload_survives_eight_bit_formats_without_loss(fmt: str) -> None:
    rows = oracle.encoded_payload(PROBLEM, 1, 24, SALT, CPU)
    assert torch.equal(formats.roundtrip(fmt, rows), rows.float())


# -- dispatch


def arrived(rank: int, per_selection: bool = False, fmt: str = "bf16", routing: Routing | None = None) -> Received:
    """What a right dispatch brings to `rank`, by a loop; in reverse order, since no order is promised."""
    routing = routing or make_routing(PROBLEM)
    low, high = rank * PROBLEM.local_experts, (rank + 1) * PROBLEM.local_experts
    copies: list[tuple[int, int, list[int], list[float]]] = []
    for source in range(PROBLEM.world):
        for token in range(PROBLEM.tokens):
            here = [
                (int(e), float(w))
                for e, w in zip(routing.topk_idx[source, token], routing.topk_weights[source, token], strict=True)
                if low <= e < high
            ]
            if per_selection:
                copies += [(source, token, [e], [w]) for e, w in here]
            elif here:
                padded = here + [(-1, 0.0)] * (PROBLEM.topk - len(here))
                copies.append((source, token, [e for e, _ in padded], [w for _, w in padded]))
    copies.reverse()
    ranks, tokens = torch.tensor([c[0] for c in copies]), torch.tensor([c[1] for c in copies])
    sent = formats.quantize(fmt, oracle.encoded_rows(ranks, tokens, PROBLEM.hidden, SALT))
    experts, weights = torch.tensor([c[2] for c in copies]), torch.tensor([c[3] for c in copies])
    return Received(sent.values, ranks, tokens, experts, weights, sent.scales, fmt)


def verdict(received: Received, rank: int = 1, salt: int = SALT) -> str:
    return oracle.check_dispatch(received, make_routing(PROBLEM), PROBLEM, rank, salt)


def without(received: Received, row: int, again: int | None = None) -> Received:
    """The same without one row, or with another one in its place."""
    index = [i for i in range(len(received.rows)) if i != row] + ([again] if again is not None else [])
    fields = ("rows", "source_rank", "source_token", "experts", "weights", "scales")
    picked = {name: getattr(received, name) for name in fields}
    return replace(received, **{name: None if t is None else t[index] for name, t in picked.items()})


LAYOUTS = pytest.mark.parametrize("per_selection", [False, True], ids=["once a rank", "once a selection"])


@LAYOUTS
@pytest.mark.parametrize("fmt", ["bf16", "fp8", "mxfp8"])
def test_a_right_dispatch_passes(per_selection: bool, fmt: str) -> None:
    for rank in range(PROBLEM.world):
        assert verdict(arrived(rank, per_selection, fmt), rank) == ""


def test_a_right_dispatch_passes_without_source_tokens_and_weights() -> None:
    assert verdict(replace(arrived(1, fmt="fp8"), source_token=None, weights=None)) == ""


def test_a_library_that_shows_no_tokens_cannot_swap_two_rows() -> None:
    received = replace(arrived(1), source_token=None)
    received.rows[[0, 1]] = received.rows[[1, 0]]
    assert verdict(received) != ""


@LAYOUTS
def test_a_missing_copy_is_named(per_selection: bool) -> None:
    received = arrived(1, per_selection)
    assert received.source_token is not None
    lost = f"token {int(received.source_token[4])} of rank {int(received.source_rank[4])}"
    assert lost in verdict(without(received, 4))
    assert "did not come" in verdict(without(received, 4))


@LAYOUTS
def test_a_copy_that_came_twice_trips(per_selection: bool) -> None:
    received = arrived(1, per_selection)
    doubled = without(received, len(received.rows), again=3)
    assert "came twice" in verdict(doubled)


def test_a_copy_meant_for_another_rank_trips() -> None:
    assert "which is not here" in verdict(arrived(0), rank=1)


def test_a_copy_that_nobody_chose_trips() -> None:
    routing = make_routing(PROBLEM)
    local = (routing.topk_idx >= PROBLEM.local_experts).any(axis=2)
    source, token = (int(i[0]) for i in (~local).nonzero())
    received = arrived(1)
    assert received.source_token is not None
    received.source_rank[0], received.source_token[0] = source, token
    assert f"token {token} of rank {source} came uninvited" in verdict(without(received, len(received.rows), again=1)) or (
        "did not come" in verdict(received)
    )


@LAYOUTS
@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
@pytest.mark.parametrize("column", [0, 100, 255])
def test_one_corrupted_element_trips(per_selection: bool, fmt: str, column: int) -> None:
    received = arrived(1, per_selection, fmt)
    bits = received.rows.view(torch.int16 if fmt == "bf16" else torch.uint8)
    bits[2, column] ^= 1
    assert f"at value {column}" in verdict(received)


def test_one_corrupted_scale_trips() -> None:
    received = arrived(1, fmt="fp8")
    assert received.scales is not None
    received.scales[0, 1] *= 1 + 2**-20
    assert "at scale 1" in verdict(received)


def test_yesterdays_payload_trips() -> None:
    assert "at value" in verdict(arrived(1), salt=SALT + 1)


def test_poison_trips() -> None:
    received = arrived(1)
    received.rows[1, 30] = float("nan")
    assert "nan" in verdict(received)


@LAYOUTS
def test_a_wrong_weight_trips_to_the_last_bit(per_selection: bool) -> None:
    received = arrived(1, per_selection)
    assert received.weights is not None
    received.weights.view(torch.int32)[0, 0] ^= 1
    assert "weight" in verdict(received)


def test_a_wrong_expert_trips() -> None:
    received = arrived(1)
    experts = received.experts[0]
    absent = next(e for e in range(PROBLEM.local_experts, PROBLEM.num_experts) if e not in experts.tolist())
    received.experts[0, int((experts >= 0).nonzero()[0, 0])] = absent
    assert "came for the experts" in verdict(received)


@pytest.mark.parametrize("source", [-1, PROBLEM.world])
def test_a_source_that_does_not_exist_trips(source: int) -> None:
    received = arrived(1)
    received.source_rank[0] = source
    assert "does not exist" in verdict(received)


def test_shapes_dtypes_and_scales_that_do_not_fit_are_sentences() -> None:
    received = arrived(1, fmt="fp8")
    assert "without scales" in verdict(replace(received, scales=None))
    assert "the received values are" in verdict(replace(received, rows=received.rows.float()))
    assert "shape" in verdict(replace(received, experts=received.experts[:-1]))
    assert "unknown format" in verdict(replace(received, format="fp9"))


def test_nothing_sent_and_nothing_received_passes() -> None:
    empty = Problem(2, 1, 0, 8, 3, 256, 64, 3, "uniform")
    received = Received(
        torch.empty(0, 256, dtype=torch.bfloat16),
        torch.empty(0, dtype=torch.int64),
        torch.empty(0, dtype=torch.int64),
        torch.empty(0, 3, dtype=torch.int64),
        torch.empty(0, 3),
    )
    assert oracle.check_dispatch(received, make_routing(empty), empty, 0, SALT) == ""


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


def simulated_kernel(
    problem: Problem, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, fmt: str, wire: str = "bf16"
) -> torch.Tensor:
    """What a correct kernel does in `fmt`: bf16 after each GEMM and after the activation, the intermediate quantised
    again, each expert's contribution on the combine wire, partial sums of each rank in bf16, bf16 out."""
    of_activations, of_weights = oracle.OPERANDS[fmt]
    operand = formats.roundtrip(of_activations, x)
    partial = torch.zeros(problem.world, *x.shape, device=x.device)
    for expert in ids[ids >= 0].unique().tolist():
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        w13, w2 = (formats.roundtrip(of_weights, w) for w in expert_weights(problem, expert, x.device))
        gate, up = (operand[rows] @ w13.T).bfloat16().float().chunk(2, dim=1)
        middle = formats.roundtrip(of_activations, (torch.nn.functional.silu(gate) * up).bfloat16())
        y = formats.roundtrip(wire, (middle @ w2.T).bfloat16()) * weights[rows, slots, None]
        partial[expert // problem.local_experts].index_add_(0, rows, y)
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


def headroom(out: torch.Tensor, reference: torch.Tensor, fmt: str) -> float:
    """The largest share of a limit that is used up."""
    limits, error = oracle.LIMITS[fmt], out.float() - reference
    energy = reference.square().mean(1)
    return max(
        float((error.abs().amax(1) / energy.sqrt()).max()) / limits.largest,
        float((error.square().mean(1) / energy).sqrt().max()) / limits.rms,
        float(((error * reference).mean(1) / energy).abs().max()) / limits.gain(out.shape[1]),
    )
