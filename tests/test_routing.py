"""Every law makes legal choices, the same bytes everywhere, and the load that its name promises."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from lib.problem import Problem
from lib.routing import expert_loads, make_routing, uneven, zipf_weights
from lib.routing_spec import RoutingSpec, canonical, check_routing, check_routing_file, parse_routing

PROBLEM = Problem(world=4, nodes=2, tokens=200, num_experts=32, topk=4, hidden=64, inter=32, seed=7, routing="uniform")
LAWS = ["uniform", "balanced", "zipf:1.2", "onehot", "deepep"]
ALL = pytest.mark.parametrize("law", LAWS)


def routed(routing: str, **changes: int) -> Problem:
    return replace(PROBLEM, routing=routing, **changes)


# -- the knob's text


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("", RoutingSpec()),
        ("uniform", RoutingSpec()),
        (" balanced , mask = 0.25 ", RoutingSpec("balanced", mask=Fraction(1, 4))),
        ("mask=0.1", RoutingSpec(mask=Fraction(1, 10))),
        ("empty=3,mask=1", RoutingSpec(mask=Fraction(1), empty=3)),
        ("zipf", RoutingSpec("zipf", exponent="1")),
        ("zipf:1.20,empty=0", RoutingSpec("zipf", exponent="1.20", empty=0)),
        ("./a,b.npy,mask=.5", RoutingSpec("file", path="./a,b.npy", mask=Fraction(1, 2))),
        ("/data/mask=3/ids.npy", RoutingSpec("file", path="/data/mask=3/ids.npy")),
    ],
)
def test_a_routing_text_means(text: str, spec: RoutingSpec) -> None:
    assert parse_routing(text) == spec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gauss", "there is no routing law 'gauss': use uniform"),
        ("unifrom", "did you mean uniform?"),
        ("zipf:0", "above 0"),
        ("zipf:x", "above 0"),
        ("zipf:-1", "above 0"),
        ("zipf:", "above 0"),
        ("zipf:nan", "above 0"),
        ("onehot:2", "takes no :2"),
        ("mask=1.01", "0..1"),
        ("mask=-0.1", "0..1"),
        ("mask=inf", "0..1"),
        ("mask=", "0..1"),
        ("empty=-1", "must be a rank"),
        ("empty=one", "must be a rank"),
        ("mask=0.1,mask=0.2", "mask is given twice"),
        ("uniform,maks=0.1", "'maks=0.1' is not understood"),
        ("mask=0.1,uniform", "not understood"),
        ("uniform,", "not understood"),
    ],
)
def test_a_wrong_routing_text_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        parse_routing(text)
    assert words in str(caught.value)
    assert "ROUTING" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        ("", "uniform"),
        ("zipf", "zipf:1"),
        ("zipf:1.20 , empty=1, mask=0.50", "zipf:1.2,mask=0.5,empty=1"),
        ("mask=0", "uniform"),
        ("mask=1", "uniform,mask=1"),
        ("mask=0.123456789", "uniform,mask=0.123456789"),
        ("./x.npy,empty=0", "./x.npy,empty=0"),
    ],
)
def test_a_routing_has_one_spelling_that_means_the_same(text: str, spelling: str) -> None:
    assert canonical(parse_routing(text)) == spelling
    assert canonical(parse_routing(spelling)) == spelling


def test_what_a_shape_does_not_allow_is_one_sentence() -> None:
    deepep = parse_routing("deepep")
    assert check_routing(parse_routing("empty=3"), 4, 1, 32, 4) == ""
    assert "0..3" in check_routing(parse_routing("empty=4"), 4, 1, 32, 4)
    assert "divide" in check_routing(deepep, 4, 3, 32, 4)
    assert "top-10" in check_routing(deepep, 6, 6, 12, 10)
    with pytest.raises(ValueError, match=r"0\.\.3"):
        make_routing(routed("empty=4"))


# -- files


def saved(tmp_path: Path, ids: np.ndarray) -> str:
    np.save(tmp_path / "ids.npy", ids)
    return str(tmp_path / "ids.npy")


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_file_gives_the_first_rows_of_each_rank(tmp_path: Path, dtype: type) -> None:
    ids = make_routing(routed("mask=0.1")).topk_idx
    path = saved(tmp_path, ids.astype(dtype))
    assert check_routing_file(path, 4, 200, 32, 4) == ""
    assert np.array_equal(make_routing(routed(path, tokens=150)).topk_idx, ids[:, :150])


def test_a_file_may_be_wrong_where_it_is_not_used(tmp_path: Path) -> None:
    ids = make_routing(PROBLEM).topk_idx
    ids[:, 150:] = 99
    assert check_routing_file(saved(tmp_path, ids), 4, 150, 32, 4) == ""


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda ids: ids.astype(np.float32), "int32 or int64"),
        (lambda ids: ids.astype(">i8"), "little-endian"),
        (np.asfortranarray, "C order"),
        (lambda ids: ids[:3], "shape"),
        (lambda ids: ids[:, :199], "shape"),
        (lambda ids: ids[:, :, :3], "shape"),
        (lambda ids: np.where(ids == 5, 32, ids), "outside -1..31"),
        (lambda ids: np.where(ids == 5, -2, ids), "outside -1..31"),
        (lambda ids: np.zeros_like(ids), "twice for token 0 of rank 0"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, spoil: object, words: str) -> None:
    path = saved(tmp_path, spoil(make_routing(PROBLEM).topk_idx))  # type: ignore[operator]
    assert words in check_routing_file(path, 4, 200, 32, 4)
    with pytest.raises(ValueError, match=r"ids\.npy"):
        make_routing(routed(path))


def test_a_file_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    path = Path(saved(tmp_path, make_routing(PROBLEM).topk_idx))
    whole = path.read_bytes()
    for content, words in [
        (whole[:-8], "cut short in the rows of rank 3"),
        (whole[:20], "not a .npy file"),
        (b"", "not a .npy file"),
        (b"PK" + whole, "not a .npy file"),
        (whole[:10] + b"{" * 100 + whole[110:], "header is broken"),
    ]:
        path.write_bytes(content)
        assert words in check_routing_file(str(path), 4, 200, 32, 4)
    assert "can't be read" in check_routing_file(str(tmp_path / "none.npy"), 4, 200, 32, 4)
    os.mkfifo(tmp_path / "pipe.npy")  # opening it would wait for ever
    for odd in (tmp_path, tmp_path / "pipe.npy"):
        assert "is not a regular file" in check_routing_file(str(odd), 4, 200, 32, 4)


# -- laws


@pytest.mark.parametrize("text", [*LAWS, "mask=0.3", "deepep,mask=0.5,empty=1"])
def test_ids_are_distinct_and_weights_sum_to_one(text: str) -> None:
    routing = make_routing(routed(text))
    ids, weights = routing.topk_idx, routing.topk_weights
    assert (ids.shape, ids.dtype, weights.dtype) == ((4, 200, 4), np.int64, np.float32)
    assert ids.min() >= -1
    assert ids.max() < 32
    for row in ids.reshape(-1, 4):
        chosen = row[row >= 0]
        assert len(set(chosen)) == len(chosen)
    assert ((weights > 0) == (ids >= 0)).all()
    full = (ids >= 0).any(2)
    assert np.allclose(weights.sum(2)[full], 1, atol=1e-6)
    assert (weights.sum(2)[~full] == 0).all()
    assert np.where(weights > 0, weights, 1).min(2)[full].min() > 0.05  # none so light that its loss would not show


GOLDEN = {
    "uniform": "r46c039a",
    "balanced": "r4704095",
    "zipf:1.2": "r550df59",
    "onehot": "r6710e4a",
    "deepep": "r18bb532",
    "zipf:0.5,mask=0.3": "r45125e5",
    "uniform,mask=0.1,empty=1": "r96be6e8",
}


@pytest.mark.parametrize(("text", "sha"), GOLDEN.items())
def test_a_routing_is_the_same_bytes_on_every_machine(text: str, sha: str) -> None:
    assert make_routing(routed(text)).sha == sha


@pytest.mark.parametrize("law", ["uniform", "zipf:1.2", "deepep"])
def test_another_seed_or_rank_gives_another_routing(law: str) -> None:
    routing = make_routing(routed(law))
    assert routing.sha != make_routing(routed(law).with_seed(8)).sha
    assert not np.array_equal(routing.topk_idx[0], routing.topk_idx[1])


@pytest.mark.parametrize("text", ["uniform,mask=0.2", "zipf:1.2", "onehot", "deepep"])
def test_fewer_tokens_get_the_first_rows_of_more(text: str) -> None:
    long, short = make_routing(routed(text)), make_routing(routed(text).at(50))
    assert np.array_equal(long.topk_idx[:, :50], short.topk_idx)
    assert np.array_equal(long.topk_weights[:, :50], short.topk_weights)


@pytest.mark.parametrize("law", ["uniform", "deepep"])
def test_even_laws_load_all_experts_alike_within_chance(law: str) -> None:
    problem = routed(law, tokens=4000)
    load = expert_loads(make_routing(problem).topk_idx, 32)
    assert load.sum() == 4 * 4000 * 4
    assert np.abs(load - 2000).max() < 5 * 2000**0.5


def test_uniform_takes_every_pair_of_experts_alike() -> None:
    ids = make_routing(Problem(1, 1, 20000, 5, 2, 64, 32, 0, "uniform")).topk_idx[0]
    pairs = np.bincount(ids[:, 0] * 5 + ids[:, 1], minlength=25).reshape(5, 5)
    assert (np.diagonal(pairs) == 0).all()
    assert np.abs(pairs[~np.eye(5, dtype=bool)] - 1000).max() < 5 * 1000**0.5


@pytest.mark.parametrize("empty", ["", ",empty=1"])
def test_balanced_loads_are_equal_and_a_token_spreads_over_the_ranks(empty: str) -> None:
    routing = make_routing(routed(f"balanced{empty}"))
    load = expert_loads(routing.topk_idx, 32)
    assert load.min() == load.max()
    assert routing.load_max_over_mean == 1
    used = routing.topk_idx[0]
    assert all(len(set(row // 8)) == 4 for row in used)


def test_zipf_weights_follow_the_power_law_in_integers() -> None:
    weights = zipf_weights(256, "1.2")
    assert weights.sum() < 2**31
    assert np.allclose(weights / weights[0], np.arange(1, 257) ** -1.2, rtol=1e-5)
    total = sum(Fraction(1, n * n) for n in (1, 2, 3, 4))
    assert zipf_weights(4, "2").tolist() == [int((2**31 - 5) / (n * n * total)) for n in (1, 2, 3, 4)]
    assert zipf_weights(4, "400").tolist() == [2**31 - 5, 1, 1, 1]


def test_zipf_draws_without_replacement_from_what_is_left() -> None:
    problem = Problem(1, 1, 40000, 3, 2, 64, 32, 0, "zipf:1")
    ids = make_routing(problem).topk_idx[0]
    p = np.array([6, 3, 2]) / 11
    for first in range(3):
        for second in {0, 1, 2} - {first}:
            expected = 40000 * p[first] * p[second] / (1 - p[first])
            assert abs(((ids == [first, second]).all(1)).sum() - expected) < 5 * expected**0.5


def test_zipf_makes_expert_0_and_its_rank_the_hottest() -> None:
    routing = make_routing(routed("zipf:1.2"))
    assert expert_loads(routing.topk_idx, 32).argmax() == 0
    assert routing.load_max_over_mean is not None
    assert routing.load_max_over_mean > 1.5


def test_onehot_puts_everything_on_the_first_experts() -> None:
    routing = make_routing(routed("onehot"))
    assert (routing.topk_idx == [0, 1, 2, 3]).all()
    assert routing.load_max_over_mean == 4


def test_deepep_reaches_at_most_four_nodes_and_its_best_groups() -> None:
    problem = Problem(8, 8, tokens=500, num_experts=64, topk=8, hidden=64, inter=32, seed=0, routing="deepep")
    ids = make_routing(problem).topk_idx
    reached = np.array([len(set(row // 8)) for row in ids.reshape(-1, 8)])
    assert reached.max() == 4
    ungrouped = make_routing(replace(problem, nodes=1)).topk_idx
    assert max(len(set(row // 8)) for row in ungrouped.reshape(-1, 8)) > 4
    assert (ids[..., 0] == ungrouped[..., 0]).all()  # the best expert is in the best group


# -- mask, empty, edges


def test_a_masked_share_is_masked_and_the_rest_is_as_without() -> None:
    plain, masked = make_routing(routed("uniform", tokens=5000)), make_routing(routed("mask=0.3", tokens=5000))
    gone = masked.topk_idx == -1
    assert abs(gone.mean() - 0.3) < 5 * (0.21 / gone.size) ** 0.5
    assert np.array_equal(masked.topk_idx[~gone], plain.topk_idx[~gone])


def test_mask_0_and_1_are_exact() -> None:
    assert make_routing(routed("mask=0")).sha == make_routing(PROBLEM).sha
    routing = make_routing(routed("mask=1"))
    assert (routing.topk_idx == -1).all()
    assert (routing.topk_weights == 0).all()
    assert routing.load_max_over_mean is None


@ALL
def test_an_empty_rank_has_no_tokens(law: str) -> None:
    routing = make_routing(routed(f"{law},empty=2"))
    assert [routing.tokens_of(rank) for rank in range(4)] == [200, 200, 0, 200]
    assert (routing.topk_idx[2] == -1).all()
    assert (routing.topk_weights[2] == 0).all()
    assert (routing.topk_idx[[0, 1, 3]] >= 0).all()


@ALL
def test_no_tokens_and_all_experts_are_legal(law: str) -> None:
    nothing = make_routing(routed(law, tokens=0))
    assert nothing.topk_idx.shape == (4, 0, 4)
    assert nothing.load_max_over_mean is None
    everything = make_routing(routed(law, num_experts=8, topk=8, tokens=3))
    assert (np.sort(everything.topk_idx, axis=2) == np.arange(8)).all()


@ALL
def test_a_large_routing_takes_under_three_seconds(law: str) -> None:
    start = time.perf_counter()
    make_routing(Problem(8, 2, 8192, 256, 8, 7168, 2048, 0, f"{law},mask=0.1"))
    assert time.perf_counter() - start < 3


def test_uneven_weights_differ_by_expert_are_exact_and_leave_the_rest() -> None:
    """With weights that sum to 1, identity experts would make the input a right output."""
    even = make_routing(routed("uniform,mask=0.2", topk=4))
    other = uneven(even)
    chosen = even.topk_idx >= 0
    ratio = other.topk_weights[chosen] / even.topk_weights[chosen]
    assert np.array_equal(ratio, np.exp2(even.topk_idx[chosen] % 3 - 1.0).astype(np.float32))
    assert not other.topk_weights[~chosen].any()
    assert (other.sha, other.topk_idx is even.topk_idx) == (even.sha, True)
    sums = other.topk_weights.sum(2)[chosen.any(2)]
    assert np.mean(np.abs(sums - 1) < 0.03) < 0.2  # nearly every token tells a copy of the input from the sum
