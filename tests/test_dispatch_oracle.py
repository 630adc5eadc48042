"""A dispatch passes where exactly the right copies came, and trips on any that did not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lib import formats, oracle
from lib.contract import Received
from lib.dispatch_oracle import PAYLOAD_MAX
from lib.problem import Problem
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
    assert whole.abs().max() == PAYLOAD_MAX


def test_the_payload_has_these_values_on_every_machine() -> None:
    row = oracle.encoded_rows(torch.tensor([3]), torch.tensor([77]), 32, SALT)[0]
    assert row.tolist()[:10] == [3, 0, 0, 0, 5, 1, 1, 0, 0, 0]
    assert row.int().tolist()[10:] == [-5, -2, 7, -7, 3, 7, 7, 3, -6, 7, -3, -6, 0, 2, 1, 4, 1, -6, 3, 2, -1, -7]


def test_another_salt_rank_or_token_changes_most_of_the_row() -> None:
    one = torch.tensor([1])
    base = oracle.encoded_rows(one, one, 4096, SALT)
    for other in (
        oracle.encoded_rows(one, one, 4096, SALT + 1),
        oracle.encoded_rows(one + 1, one, 4096, SALT),
        oracle.encoded_rows(one, one + 1, 4096, SALT),
    ):
        assert (base != other).float().mean() > 0.8


@pytest.mark.gpu
def test_a_gpu_makes_the_same_payload() -> None:
    ranks, tokens = torch.arange(512) % 37, torch.arange(512) * 97
    here, there = (oracle.encoded_rows(ranks.to(d), tokens.to(d), 7168, SALT) for d in ("cpu", "cuda"))
    assert torch.equal(here, there.cpu())


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


@LAYOUTS
@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
def test_a_right_dispatch_passes_without_any_source(per_selection: bool, fmt: str) -> None:
    assert verdict(replace(arrived(1, per_selection, fmt), source_rank=None, source_token=None)) == ""


@LAYOUTS
def test_a_library_that_shows_no_source_cannot_lose_double_or_tear_a_row(per_selection: bool) -> None:
    received = replace(arrived(1, per_selection), source_rank=None, source_token=None)
    assert "did not come" in verdict(without(received, 4))
    assert "came twice" in verdict(without(received, len(received.rows), again=3))
    received.rows[2, -1] = -received.rows[2, -1]
    assert "has at value" in verdict(received)


def test_a_row_that_nobody_wrote_is_no_copy_of_a_library_that_shows_no_source() -> None:
    received = replace(arrived(1), source_rank=None, source_token=None)
    received.rows[2] = float("nan")
    assert verdict(received) != ""


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
    extra = without(received, len(received.rows), again=1)
    assert extra.source_token is not None
    extra.source_rank[-1], extra.source_token[-1] = source, token
    assert f"token {token} of rank {source} came uninvited" in verdict(extra)


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
