"""The MSCCL++ adapter without a GPU: its verdicts here, and its calls on two ranks against a fake that enforces them.

The fake's signatures are recorded from upstream's source at 3d02152b (tests/signatures).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from knob_helpers import HOPPER, parsed
from machine_helpers import machine, mi300

from bench.backends import mscclpp_limits as limits
from bench.backends.mscclpp import ONE_EPOCH, MscclppBackend
from bench.backends.mscclpp_sessions import BLOCKS, ExpertMajorSession, RankMajorSession, ThroughputSession
from lib.contract import Group, Missing, Support, Variant
from lib.problem import Problem
from tests import fake_mscclpp
from tests.library_ranks import CPU, SHAPES
from tests.mscclpp_ranks import PAIR, SUITE, faults_of, rank_main, steps_of

BACKEND = MscclppBackend()
VARIANTS = SUITE.variants
V3 = Problem(world=8, nodes=1, tokens=128, num_experts=256, topk=8, hidden=7168, inter=2048, seed=0, routing="uniform")
LL, LL_DIRECT, LL_RANK, LL_RANK_DIRECT, LL_FP8 = (
    VARIANTS[f"mscclpp_ll{name}"]
    for name in (" bf16", "+direct_send bf16", "+rank_major bf16", "+rank_major+direct_send bf16", " fp8")
)
HT, HT_CACHED, HT_RANK = (VARIANTS[f"mscclpp_ht{name} bf16"] for name in ("", "+cached", "+rank_major"))


def verdict(
    variant: Variant, installed: tuple[str, ...] = ("mscclpp", "cupy"), sm: tuple[int, int] = (9, 0), **shape: Any
) -> Support:
    found = machine(8, sm, installed=installed)
    return BACKEND.supports(replace(variant, num_sms=shape.pop("sms", 0)), found, replace(V3, **shape), parsed(HOPPER))


# -- variants


def test_variants_are_layouts_by_combine_modes_or_by_handles_by_dtype_by_budget() -> None:
    knobs = parsed(HOPPER, ALGO="ht ll", DISPATCH_DTYPE="bf16 fp8", NUM_SMS="0 24")
    found = [(v.name, v.dispatch_dtype, v.num_sms) for v in BACKEND.variants(knobs)]
    ht = [f"mscclpp_ht{name}" for name in ("", "+cached", "+rank_major", "+rank_major+cached")]
    ll = [("", "bf16"), ("", "fp8"), ("+direct_send", "bf16"), ("+direct_send", "fp8")]
    ll += [("+rank_major", "bf16"), ("+rank_major+direct_send", "bf16")]
    expected = [(name, "bf16", sms) for name in ht for sms in (0, 24)]
    assert found == [*expected, *((f"mscclpp_ll{name}", dtype, sms) for name, dtype in ll for sms in (0, 24))]


def test_a_variants_columns_say_its_layout_its_handle_and_its_mode() -> None:
    for name, variant in VARIANTS.items():
        assert (variant.comm, variant.combine_dtype, variant.compute_kernel) == ("mscclpp", "bf16", "")
        default = "expert_major" if variant.algo == "ll" else "token_major"
        assert variant.layout == ("rank_major" if "+rank_major" in name else default)
        assert variant.handle == ("cached" if "+cached" in name else "")
        mode = "direct_send" if "+direct_send" in name else "rank_local_reduce"
        assert variant.option("combine_mode") == ("" if variant.algo == "ht" else mode)


# -- verdicts

REFUSED = [
    (LL, {"hidden": 2048}, "HIDDEN=2048: ll's combine is compiled for 4096, 4352, 6656, 7168, 8192, 8704, 9216"),
    (LL, {"topk": 10}, "TOPK=10: ll's combine takes at most 9"),
    (LL_RANK, {"world": 128, "num_experts": 128}, "ll takes at most 64 ranks, this is 128"),
    (LL, {"sms": 9}, "NUM_SMS=9: ll takes 10..130 blocks here (one a rank, 2 more to schedule)"),
    (LL, {"sms": 131}, "NUM_SMS=131: ll takes 10..130 blocks here (one a rank, 2 more to schedule)"),
    (LL, {"sms": 3, "world": 2}, "NUM_SMS=3: ll takes 4..130 blocks here (one a rank, 2 more to schedule)"),
    (HT, {"world": 5, "num_experts": 260}, "ht takes 2, 4, 8, 16 ranks, this is 5"),
    (HT, {"topk": 33}, "TOPK=33: ht takes at most 32"),
    (HT, {"num_experts": 1032}, "NUM_EXPERTS=1032: ht takes at most 128 a rank, this is more"),
    (HT, {"hidden": 2884}, "HIDDEN=2884: ht takes a multiple of 8"),
    (HT, {"tokens": 0}, "TOKENS=0: ht needs a token on every rank, its combine asserts one"),
    (
        HT_RANK,
        {"routing": "uniform,empty=1"},
        "ROUTING=uniform,empty=1: ht needs a token on every rank, its combine asserts one",
    ),
    (HT_RANK, {"tokens": 8193}, "TOKENS=8193 takes 65544 rows, ht's receive pool has 65536"),
    (HT_RANK, {"tokens": 8192, "hidden": 16384}, "TOKENS=8192 takes 65536 rows, ht's receive pool has 32768"),
    (HT, {"sm": (8, 0)}, "needs sm_90 or newer, this is sm_80"),
]
ACCEPTED = [
    (LL, {"topk": 9, "hidden": 9216, "tokens": 8192}),
    (LL, {"tokens": 0, "routing": "uniform,mask=0.3,empty=0"}),
    (LL, {"sms": 10}),
    (LL, {"sms": 130, "world": 1}),
    (LL_FP8, {"world": 6, "num_experts": 252, "sm": (10, 0)}),
    (HT, {"topk": 32, "hidden": 2880, "num_experts": 1024, "world": 8}),
    (HT, {"sms": 3, "tokens": 65536}),  # what comes is not known before the routing is made
    (HT_RANK, {"tokens": 8192, "world": 8, "routing": "onehot"}),
]
ABSENT = (
    "not installed: MSCCL++ with mscclpp.ep (https://github.com/microsoft/mscclpp, branch feature/ep), "
    "CuPy (pip install cupy-cuda12x or cupy-cuda13x), which MSCCL++ imports"
)


@pytest.mark.parametrize(("variant", "shape", "reason"), REFUSED)
def test_what_the_library_would_refuse_is_refused_in_words(
    variant: Variant, shape: dict[str, Any], reason: str
) -> None:
    assert verdict(variant, **shape) == Support("unsupported", reason)
    assert verdict(variant, installed=(), **shape) == Support("unsupported", f"{reason}; {ABSENT}")


@pytest.mark.parametrize(("variant", "shape"), ACCEPTED)
def test_what_the_library_takes_is_planned(variant: Variant, shape: dict[str, Any]) -> None:
    assert verdict(variant, **shape) == Support()


def test_the_platform_and_what_is_absent_are_named() -> None:
    assert verdict(LL, installed=()) == Support("missing", ABSENT)
    assert verdict(LL, installed=("mscclpp",)).reason.startswith("not installed: CuPy (pip install cupy-cuda12x")
    for found, what in ((machine(), "no GPU"), (mi300(8), "AMD GPUs")):
        reason = BACKEND.supports(HT, found, V3, parsed(HOPPER)).reason
        assert reason.startswith(f"needs an NVIDIA GPU, this machine has {what}; not installed: ")


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ((), f"the installed mscclpp has no mscclpp.ep: {limits.BUILD_HINT}"),
        (("ep/__init__.py",), f"the installed mscclpp was built without its EP extension: {limits.BUILD_HINT}"),
        (("ep/__init__.py", "mscclpp_ep_cpp.cpython-312-x86_64-linux-gnu.so"), ""),
    ],
)
def test_a_build_without_ep_is_missing_and_is_not_imported_to_find_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: tuple[str, ...], reason: str
) -> None:
    for name in ("__init__.py", *files):
        path = tmp_path / "mscclpp" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert verdict(LL) == (Support("missing", reason) if reason else Support())
    assert "mscclpp" not in sys.modules


def test_what_the_routing_decides_is_told_by_the_rank_and_its_count() -> None:
    def reason(layout: str, sent: list[int], received: list[int]) -> str:
        return limits.routed_reason(layout, replace(V3, world=2), sent, received)

    assert reason("rank_major", [3, 0], [3, 2]).startswith("rank 1 has no token: ht needs one on every rank")
    assert reason("token_major", [3, 3], [0, 6]).startswith("rank 0 gets no row: ht in token-major order needs one")
    assert reason("rank_major", [3, 3], [0, 6]) == ""
    too_many = "rank 1 gets 65537 rows, ht's receive pool has 65536"
    assert reason("token_major", [1, 65536], [1, 65537]) == too_many
    assert reason("token_major", [1, 65536], [1, 65536]) == ""


# -- memory


def test_memory_is_what_hand_arithmetic_says() -> None:
    # ll, expert-major: 256 experts * 128 tokens * 14336 bytes, three times (received, to combine, output)
    slots = 256 * 128 * 14_336
    assert limits.ll_buffer_bytes(V3, "expert_major", "direct_send") == 3 * slots == 1_409_286_144
    # rank-major: 1024 rows of 14336 bytes, or of a staged payload: 14336 + 8 * 8 + 4, in steps of 32 and of 128 bytes
    payload = 8 * 264 + 64 + 1024 * 14_464  # counts in steps of 128 bytes
    direct = 2176 + 2 * 1024 * 8 * 4 + 1024 * 14_336
    assert limits.ll_buffer_bytes(V3, "rank_major", "rank_local_reduce") == max(payload, direct) == 14_813_312
    routes = 1024 * 14_336 * 8
    assert limits.ll_buffer_bytes(V3, "rank_major", "direct_send") == 14_813_312 + routes
    # ht: 65536 rows of 16384 bytes and 768 bytes beside; positions of 8 ranks
    assert limits.ht_pool_bytes(V3) == 65536 * (16_384 + 768 + 32) == 1_126_170_624
    once = 1_126_170_624 + 1024 * (14_336 + 8 * 12) + 128 * 14_336
    assert (BACKEND.memory_bytes(HT, V3), BACKEND.memory_bytes(HT_RANK, V3)) == (once, 2 * once)
    assert BACKEND.memory_bytes(LL, V3) == 3 * slots + 128 * 14_336 + 256 * 128 * 4
    assert BACKEND.memory_bytes(LL_FP8, V3) - BACKEND.memory_bytes(LL, V3) == 256 * 128 * (14_336 + 56 * 4)
    assert BACKEND.memory_bytes(LL_RANK_DIRECT, V3) == 14_813_312 + routes + 128 * 14_336
    assert BACKEND.memory_bytes(LL_RANK, V3) == 14_813_312 + 128 * 14_336 + 1024 * 14_336


# -- the library is not there, or refuses


def test_a_module_that_does_not_import_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mscclpp", None)
    with pytest.raises(Missing, match=r"mscclpp.ep does not import"):
        BACKEND.open(Group(0, 2, 0, 1, CPU, pg=None, host_pg=None), HT, PAIR, parsed(HOPPER))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fake_mscclpp.MoECommunicator(None, None), "too many positional arguments"),
        (lambda: fake_mscclpp.MoECommunicator(num_sms=3), "got an unexpected keyword argument 'num_sms'"),
        (lambda: fake_mscclpp.MoECommunicator.dispatch(None), "missing a required argument: 'input'"),
        (lambda: fake_mscclpp.MoECommunicator.dispatch(None, 1, 2, 3, 4, 5), "too many positional arguments"),
        (lambda: fake_mscclpp.MoECommunicator.combine(None, 1), "missing a required argument: 'handle'"),
        (lambda: fake_mscclpp.CommGroup(group=1), "got an unexpected keyword argument 'group'"),
        (lambda: fake_mscclpp.QuantConfig(dtype=1), "got an unexpected keyword argument 'dtype'"),
    ],
)
def test_a_call_that_the_recorded_library_would_refuse_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        call()


# -- two ranks, started once; each saves what it found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("mscclpp")
    torch.multiprocessing.spawn(rank_main, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


NO_TOKEN = "refused: rank {} has no token: ht needs one on every rank, its combine asserts one"
NO_ROW = "refused: rank {} gets no row: ht in token-major order needs one on every rank"
HT_REFUSALS = {"masks and an empty rank": NO_TOKEN.format(1), "no tokens": NO_TOKEN.format(0)}
TOKEN_MAJOR_REFUSALS = HT_REFUSALS | {"all to one rank": NO_ROW.format(1)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_copy_and_every_sum_is_exact_or_refused_on_both_ranks(
    pair: list[dict[str, Any]], variant: str, shape: str
) -> None:
    algo, layout = VARIANTS[variant].algo, VARIANTS[variant].layout
    refusals = {} if algo == "ll" else TOKEN_MAJOR_REFUSALS if layout == "token_major" else HT_REFUSALS
    assert [found["wrong"][f"{variant}, {shape}"] for found in pair] == [refusals.get(shape, "")] * 2


@pytest.mark.parametrize(
    ("variant", "fault"), [(name, fault) for name, made in VARIANTS.items() for fault in faults_of(made)]
)
def test_a_fault_of_the_library_is_seen_by_both_ranks(pair: list[dict[str, Any]], variant: str, fault: str) -> None:
    told = [found["teeth"][f"{variant}, {fault}"] for found in pair]
    assert told[0] == told[1] != ""


def test_rank_major_that_sums_to_other_bits_than_token_major_is_wrong(pair: list[dict[str, Any]]) -> None:
    words = "rank 1: rank-major combined to other bits than token-major, which the library promises"
    assert [found["teeth"]["mscclpp_ht+rank_major bf16, other_bits"] for found in pair] == [words, words]


@pytest.mark.parametrize(
    ("variant", "step"), [(name, step) for name, made in VARIANTS.items() for step in steps_of(made)]
)
def test_a_step_that_does_nothing_is_seen(pair: list[dict[str, Any]], variant: str, step: str) -> None:
    assert pair[0]["teeth"][f"{variant}, no {step}"] != ""


DISPATCH, IDENTITY, COMBINE = ("dispatch", True, False), ("identity", False, False), ("combine", True, False)
FRESH, DEQUANTIZE = ("dispatch", True, True), ("dequantize", False, False)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_session_declares_its_phases_and_what_a_graph_may_hold(pair: list[dict[str, Any]], variant: str) -> None:
    made = VARIANTS[variant]
    fresh, fp8 = made.algo == "ht" and not made.handle, made.dispatch_dtype == "fp8"
    middle = [DEQUANTIZE] if fp8 else [] if made.layout == "expert_major" else [IDENTITY]
    for found in pair:
        told = found["described"][variant]
        assert told["phases"] == [FRESH if fresh else DISPATCH, *middle, COMBINE]
        assert told["capturable"] == (BLOCKS if fresh else "")
        assert (told["quant_included"], told["staging_included"]) == (True if fp8 else None, bool(middle))
        assert told["formats"] == (made.dispatch_dtype, "bf16")
        assert (told["deterministic"], told["transport"]) == (True, "nvlink")
        assert told["versions"] == {"mscclpp": "0.9.0 3d02152b"}


def test_a_graph_of_one_iteration_would_find_its_own_epochs() -> None:
    with fake_mscclpp.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["mscclpp"], "CommGroup", lambda torch_group: None)
        group = Group(0, 2, 0, 1, CPU, pg=None, host_pg=None)
        for iterations, reason in (("1", ONE_EPOCH), ("2", "")):
            engine = BACKEND.open(group, LL, PAIR, parsed(HOPPER, ITERS_PER_GRAPH=iterations))
            assert engine.ll_capturable == reason


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_point_has_a_communicator_of_its_own_size_and_leaves_none_behind(
    pair: list[dict[str, Any]], variant: str
) -> None:
    made = VARIANTS[variant]
    config = dict(pair[0]["calls"][f"{variant} bind"])["config"]
    assert (config["max_tokens_per_rank"], config["num_experts"], config["topk"]) == (6, 8, 3)
    assert config["num_blocks"] == 24
    modes = {"ll": "<MoEMode.LATENCY: 0>", "ht": "<MoEMode.THROUGHPUT: 1>"}
    assert config["mode"] == modes[made.algo]
    assert made.layout.upper() in config["output_layout"]
    assert ("combine_mode" in config) == (made.algo == "ll")
    assert ("quant" in config) == (made.dispatch_dtype == "fp8")
    assert [found["alive"][variant] for found in pair] == [0, 0]


def test_buffers_are_mapped_before_the_first_call_and_a_call_is_dispatch_and_combine(
    pair: list[dict[str, Any]],
) -> None:
    for name in VARIANTS:
        bind = [method for method, _ in pair[0]["calls"][f"{name} bind"]]
        assert bind[:4] == ["__init__", "config", "is_available", "initialize"]
        assert [method for method, _ in pair[0]["calls"][name]] == ["dispatch", "combine"]
    cached = dict(pair[0]["calls"]["mscclpp_ht+cached bf16"])
    assert cached["dispatch"]["previous_handle"] is not None
    assert dict(pair[0]["calls"]["mscclpp_ht bf16"])["dispatch"]["previous_handle"] is None
    assert "out" not in cached["combine"]
    assert dict(pair[0]["calls"]["mscclpp_ll+rank_major+direct_send bf16"])["combine"]["expert_output"].endswith(
        "[12, 3, 4096]"
    )


def test_the_fake_is_as_the_library_is(pair: list[dict[str, Any]]) -> None:
    """A stale handle, another buffer, and a handle of other ids: refused, refused, and ignored without a word."""
    told = pair[0]["more"]
    assert told["mscclpp_ll bf16"]["stale handle"] == "the handle is of an earlier dispatch"
    assert told["mscclpp_ll+rank_major bf16"]["another buffer"].startswith("RANK_MAJOR combine requires")
    assert told["mscclpp_ht+cached bf16"]["same cache"] is False


@pytest.mark.parametrize(
    ("session", "kernels"),
    [
        (ExpertMajorSession, ["expertMajorDispatchKernel", "rankLocalReduceCombineKernel"]),
        (RankMajorSession, ["rankMajorDispatchKernel", "directSendCombineKernel"]),
        (
            ThroughputSession,
            "prepareThroughputKernel exchangeThroughputCountsKernel publishCachedThroughputPrefixKernel "
            "throughputDispatchKernel throughputReduceCombineKernel".split(),
        ),
    ],
)
def test_the_kernels_of_upstreams_source_have_a_phase(session: Any, kernels: list[str]) -> None:
    for kernel in kernels:
        (phase,) = [phase for phase, patterns in session.kernels.items() if any(re.search(p, kernel) for p in patterns)]
        assert phase == ("combine" if "Combine" in kernel else "dispatch"), kernel


def test_the_documented_limits_are_those_of_the_adapter() -> None:
    pages = (Path(__file__).resolve().parent.parent / "docs" / "backends.md").read_text()
    text = " ".join(pages.partition("### `mscclpp`")[2].partition("\n### ")[0].split())
    assert ", ".join(map(str, limits.LL_HIDDEN)) in text
    assert f"top-k at most {limits.LL_MAX_TOPK}" in text
    assert f"top-k at most {limits.HT_MAX_TOPK}" in text
    assert f"{limits.HT_POOL_ROWS} rows" in text
    assert f"R + {limits.LL_RESERVED_BLOCKS} to {limits.LL_MAX_BLOCKS}" in text
