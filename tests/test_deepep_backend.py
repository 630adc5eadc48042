"""The DeepEP adapter without a GPU: its verdicts here, and its calls on two ranks against a Buffer that enforces them.

The fake's signatures are those of the wheel that was measured (tests/signatures); tests/test_record_signatures.py is
about the tool that wrote them down.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from knob_helpers import HOPPER, parsed
from machine_helpers import cpu, machine

from bench.backends.deepep import DeepEPBackend, DeepEPSession, ht_buffer_bytes, ll_buffer_bytes, ll_slots
from lib.check import Checker
from lib.contract import Group, Missing, Support, Variant
from lib.knobs import COMM_BACKENDS, MEGA_BACKENDS, REF_BACKENDS, SM90_MEGA_BACKENDS
from lib.problem import Inputs, Problem, token_payload
from lib.routing import make_routing
from lib.timing import run_phases
from tests import fake_deep_ep
from tests.recorded import recorded

CPU = torch.device("cpu")
BACKEND = DeepEPBackend()
V3 = Problem(world=8, nodes=1, tokens=128, num_experts=256, topk=8, hidden=7168, inter=2048, seed=0, routing="uniform")
PAIR = replace(V3, world=2, tokens=6, num_experts=8, topk=3, hidden=2048, inter=128)
VARIANTS = {
    f"{variant.name} {variant.dispatch_dtype}": variant
    for variant in BACKEND.variants(parsed(HOPPER, ALGO="ht ll", DISPATCH_DTYPE="bf16 fp8", NUM_SMS="24"))
}
HT, CACHED, LL = (next(v for v in VARIANTS.values() if v.name == f"deepep_{n}") for n in ("ht", "ht+cached", "ll"))
FAULTS = {"ht": ("corrupt_row", "swap_slots"), "ll": ("corrupt_row", "swap_slots", "skip_weights")}
SHAPES: dict[str, dict[str, Any]] = {
    "masks and an empty rank": {"routing": "uniform,mask=0.4,empty=1"},
    "zipf": {"routing": "zipf:1.2"},
    "all to one rank": {"routing": "onehot"},
    "odd tokens, the first rank empty": {"routing": "zipf:1.2,mask=0.2,empty=0", "tokens": 5},
    "all masked": {"routing": "uniform,mask=1"},
    "no tokens": {"tokens": 0},
}


def verdict(
    variant: Variant, installed: bool = True, gpus: int = 8, sm: tuple[int, int] = (9, 0), **shape: Any
) -> Support:
    found = machine(gpus, sm, installed=("deep_ep",) if installed else ()) if gpus else cpu()
    return BACKEND.supports(variant, found, replace(V3, **shape), parsed(HOPPER))


# -- variants


def test_variants_are_algo_by_dtype_by_sm_budget_and_ll_has_no_budget() -> None:
    knobs = parsed(HOPPER, ALGO="ht ll", DISPATCH_DTYPE="bf16 fp8", NUM_SMS="0 24")
    found = [(v.name, v.dispatch_dtype, v.num_sms, v.layout, v.handle) for v in BACKEND.variants(knobs)]
    expected = []
    for dtype in ("bf16", "fp8"):
        for sms in (0, 24):
            expected.append(("deepep_ht", dtype, sms, "token_major", ""))
            expected.append(("deepep_ht+cached", dtype, sms, "token_major", "cached"))
    expected += [("deepep_ll", dtype, None, "expert_major", "") for dtype in ("bf16", "fp8")]
    assert found == expected
    assert {(v.comm, v.combine_dtype, v.compute_kernel) for v in BACKEND.variants(knobs)} == {("deepep", "bf16", "")}


@pytest.mark.parametrize(("algo", "names"), [("ht", ["deepep_ht", "deepep_ht+cached"]), ("ll", ["deepep_ll"])])
def test_algo_chooses_the_mode(algo: str, names: list[str]) -> None:
    assert [variant.name for variant in BACKEND.variants(parsed(HOPPER, ALGO=algo))] == names


# -- verdicts


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 12, 16])
def test_ht_takes_two_four_or_eight_ranks_and_ll_any_number_that_the_buffer_takes(world: int) -> None:
    shape = {"world": world, "num_experts": 48 * world}
    assert verdict(HT, **shape).ok == verdict(CACHED, **shape).ok == (world in (2, 4, 8))
    assert verdict(LL, **shape).ok == (world != 12)
    assert world in (2, 4, 8) or verdict(HT, **shape).reason == f"ht on one node takes 2, 4, 8 ranks, this is {world}"


REFUSED = [
    (LL, {"tokens": 512}, "TOKENS=512 takes 512 slots, ll has 511 (NVSHMEM_QP_DEPTH=1024 / 2 - 1)"),
    (LL, {"world": 2, "tokens": 511}, "TOKENS=511 takes 512 slots, ll has 511 (NVSHMEM_QP_DEPTH=1024 / 2 - 1)"),
    (LL, {"hidden": 2880}, "HIDDEN=2880: ll is compiled for 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192"),
    (LL, {"topk": 12}, "TOPK=12: ll takes at most 11"),
    (LL, {"world": 12, "num_experts": 96}, "ll takes fewer than 8 ranks or a multiple of it, this is 12"),
    (HT, {"topk": 33}, "TOPK=33: ht takes at most 32"),
    (replace(HT, num_sms=23), {}, "NUM_SMS=23: ht takes an even number of SMs (half send, half receive)"),
    (replace(HT, dispatch_dtype="fp8"), {"hidden": 2880}, "HIDDEN=2880: fp8 needs a multiple of 128"),
    (HT, {"hidden": 2872}, "HIDDEN=2872: ht takes rows of 32, 64, .. 16368 bytes, this is 5744"),
    (HT, {"hidden": 8192}, "HIDDEN=8192: ht takes rows of 32, 64, .. 16368 bytes, this is 16384"),
    (LL, {"gpus": 0}, "needs an NVIDIA GPU, this machine has no GPU"),
    (HT, {"gpus": 0}, "needs an NVIDIA GPU, this machine has no GPU"),
    (HT, {"sm": (8, 0)}, "needs sm_90 or newer, this is sm_80"),
    (LL, {"sm": (8, 0)}, "needs sm_90 or newer, this is sm_80"),
]
ACCEPTED = [
    (LL, {"tokens": 511}),
    (LL, {"world": 2, "tokens": 510}),
    (LL, {"hidden": 3072}),
    (LL, {"topk": 11}),
    (LL, {"tokens": 0}),
    (LL, {"sm": (10, 0)}),
    (HT, {"topk": 32}),
    (HT, {"hidden": 2880}),
    (HT, {"tokens": 8192}),
    (replace(HT, num_sms=132), {}),
    (replace(HT, num_sms=0), {}),
    (replace(HT, dispatch_dtype="fp8"), {"hidden": 8192}),
]


@pytest.mark.parametrize(("variant", "shape", "reason"), REFUSED)
def test_what_the_library_would_refuse_is_refused_in_words(
    variant: Variant, shape: dict[str, Any], reason: str
) -> None:
    assert verdict(variant, **shape) == Support(
        "unsupported", reason if shape.get("gpus") != 0 else f"{reason}; {ABSENT}"
    )


@pytest.mark.parametrize(("variant", "shape"), ACCEPTED)
def test_what_the_library_takes_is_planned(variant: Variant, shape: dict[str, Any]) -> None:
    assert verdict(variant, **shape) == Support()


ABSENT = "not installed: DeepEP (https://github.com/deepseek-ai/DeepEP)"


@pytest.mark.parametrize(("variant", "shape", "reason"), REFUSED)
def test_an_absent_package_is_named_whatever_else_is_wrong(
    variant: Variant, shape: dict[str, Any], reason: str
) -> None:
    assert verdict(variant, installed=False, **shape) == Support("unsupported", f"{reason}; {ABSENT}")


def test_an_absent_package_alone_is_missing() -> None:
    assert verdict(HT, installed=False) == verdict(LL, installed=False) == Support("missing", ABSENT)


def test_a_deeper_queue_holds_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "2048")
    assert verdict(LL, tokens=1023).ok
    told = "TOKENS=1024 takes 1024 slots, ll has 1023 (NVSHMEM_QP_DEPTH=2048 / 2 - 1)"
    assert verdict(LL, tokens=1024).reason == told


def test_planning_touches_no_variable_and_asks_for_none() -> None:
    before = dict(os.environ)
    for variant in VARIANTS.values():
        verdict(variant)
        BACKEND.memory_bytes(variant, V3)
        assert BACKEND.env(variant, V3, parsed(HOPPER)) == {}
    assert dict(os.environ) == before


# -- memory


def test_memory_is_what_hand_arithmetic_says() -> None:
    # ll: 2 * 256 experts * 128 tokens * 2 sides * (7168 * 2 + 56 * 4) bytes; then 32 experts * 1024 slots, three times
    assert ll_buffer_bytes(V3) == 1_908_408_320
    assert BACKEND.memory_bytes(LL, V3) == 1_908_408_320 + 32 * 1024 * 14_336 * 3 == 3_317_694_464
    assert BACKEND.memory_bytes(HT, V3) == (1 << 30) + 8 * 128 * 14_336 * 4 == 1_132_462_080
    # 66 channels * 8 ranks * 256 slots * (14336 + 2057) bytes
    assert ht_buffer_bytes(V3, 132) == 66 * 8 * 256 * 16_393 == 2_215_809_024


@pytest.mark.parametrize(
    ("world", "tokens", "slots"), [(1, 0, 4), (2, 1, 2), (2, 6, 6), (3, 5, 8), (4, 1, 1), (6, 7, 8)]
)
def test_ll_rounds_its_capacity_up_to_slots_in_fours(world: int, tokens: int, slots: int) -> None:
    assert ll_slots(replace(V3, world=world, tokens=tokens)) == slots


def test_the_ll_buffer_is_the_librarys_own_hint_up_to_its_signals() -> None:
    hint = fake_deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 1, 256)
    assert hint == 1_908_410_496, "what the real library answered for this shape"
    signals = 2 * 256 * 4
    assert hint - ll_buffer_bytes(V3) == signals + fake_deep_ep.ALIGNMENT


@pytest.mark.parametrize("sms", [20, 62, 96, 132])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_ht_buffer_covers_the_librarys_own_hint(world: int, sms: int) -> None:
    row_and_meta = 7168 * 2 + 8 + 128 * (8 + 4 + 4)  # csrc/config.hpp, get_nvl_buffer_size_hint
    hint = sms // 2 * world * (5 * 4 + 256 * row_and_meta)
    assert ht_buffer_bytes(replace(V3, world=world), sms) >= -(-hint // 128) * 128
    assert ht_buffer_bytes(replace(V3, world=world), sms) % 128 == 0


# -- the library is not there


def test_a_module_that_does_not_import_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    group = Group(0, 2, 0, 1, CPU, pg=None, host_pg=None)
    with pytest.raises(Missing, match="deep_ep does not import"):
        BACKEND.open(group, HT, PAIR, parsed(HOPPER))


# -- the fake takes the recorded calls and no others


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda buffer: buffer.get_dispatch_config(), "missing a required argument: 'num_ranks'"),
        (lambda buffer: buffer.get_dispatch_config(ranks=2), "'num_ranks'"),
        (lambda buffer: buffer.dispatch(None, None, num_sms=24), "got an unexpected keyword argument 'num_sms'"),
        (lambda buffer: buffer.low_latency_dispatch(None, None, None, 128), "missing a required argument"),
        (lambda buffer: buffer.combine(None), "missing a required argument"),
        (lambda buffer: buffer(None, num_bytes=0), "got an unexpected keyword argument 'num_bytes'"),
    ],
)
def test_a_call_that_the_recorded_class_would_refuse_is_refused(call: Any, words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        call(fake_deep_ep.Buffer)


def test_a_recorded_method_that_the_fake_lacks_says_so() -> None:
    with pytest.raises(NotImplementedError, match="is_sm90_compiled"):
        fake_deep_ep.Buffer.is_sm90_compiled()


def test_an_odd_sm_budget_is_refused_by_the_library_too() -> None:
    with pytest.raises(AssertionError, match="must be even"):
        fake_deep_ep.Buffer.set_num_sms(23)


def test_every_recorded_default_reads_as_a_literal() -> None:
    signature, static = recorded(fake_deep_ep.SIGNATURES)["low_latency_dispatch"]
    assert not static
    assert signature.parameters["use_fp8"].default is True
    assert signature.parameters["use_ue8m0"].default is False
    assert signature.parameters["cumulative_local_expert_recv_stats"].default is None
    assert recorded(fake_deep_ep.SIGNATURES)["set_num_sms"][1]


# -- two ranks, started once; each saves what it found


def inputs_of(problem: Problem, rank: int) -> tuple[Any, Inputs]:
    routing = make_routing(problem)
    count = routing.tokens_of(rank)
    ids, weights = (torch.from_numpy(a[rank, :count].copy()) for a in (routing.topk_idx, routing.topk_weights))
    return routing, Inputs(token_payload(problem, rank, count, 0, CPU), ids, weights)


def checked(engine: Any, group: Group, problem: Problem, fault: str = "", stale: str = "") -> str:
    """What lib/measure.py does around the timing: check, replay what may be captured, check again."""
    routing, inputs = inputs_of(problem, group.rank)
    session = engine.bind(problem, inputs)
    run_phases(session)
    session.call()
    fake_deep_ep.Buffer.fault = fault
    if stale:
        setattr(session, stale, lambda: None)
    checker = Checker(session, inputs, problem, routing, group)
    found = checker.before(1)
    if not found:
        session.call()
        checker.between_series(None if session.capturable else session.call)
        run_phases(session)
        found = checker.after(1)
    fake_deep_ep.Buffer.fault = ""
    session.close()
    return found


def described(session: DeepEPSession) -> dict[str, Any]:
    return {
        "phases": [(phase.name, phase.timed, phase.blocks_host) for phase in session.phases],
        "capturable": session.capturable,
        "deterministic": session.deterministic,
        "quant_included": session.quant_included,
        "staging_included": session.staging_included,
        "formats": (session.dispatch_format, session.combine_format),
        "transport": session.transport(),
    }


def calls_of_one_call(session: DeepEPSession) -> list[tuple[str, dict[str, Any]]]:
    fake_deep_ep.Buffer.calls.clear()
    session.call()
    return list(fake_deep_ep.Buffer.calls)


def slots_and_limits(engine: Any, group: Group) -> dict[str, Any]:
    """The fake's own rules, on a Buffer that an ll engine made."""
    _, inputs = inputs_of(PAIR, group.rank)
    ask = (inputs.x, inputs.topk_idx, 6, PAIR.num_experts, None, None, False)
    held = [engine.buffer.low_latency_dispatch(*ask) for _ in range(2)]
    found: dict[str, Any] = {"orders": [result[2][0].tolist() for result in held]}
    found["ranges"] = [result[2][1].tolist() for result in held]
    refusals = {"a third result": lambda: engine.buffer.low_latency_dispatch(*ask)}
    refusals["an early end"] = dist.destroy_process_group
    for name, call in refusals.items():
        with pytest.raises(AssertionError) as caught:
            call()
        found[name] = str(caught.value).partition("\n")[0]
    return found


def two_rank_findings(group: Group) -> dict[str, Any]:
    found: dict[str, Any] = {"wrong": {}, "teeth": {}, "described": {}, "calls": {}}
    for name, variant in VARIANTS.items():
        fake_deep_ep.Buffer.calls.clear()
        engine = BACKEND.open(group, variant, PAIR, parsed(HOPPER))
        found["calls"][f"{name} open"] = list(fake_deep_ep.Buffer.calls)
        for shape, changes in SHAPES.items():
            found["wrong"][f"{name}, {shape}"] = checked(engine, group, replace(PAIR, **changes))
        for fault in FAULTS[variant.algo]:
            found["teeth"][f"{name}, {fault}"] = checked(engine, group, PAIR, fault)
        session = engine.bind(PAIR, inputs_of(PAIR, group.rank)[1])
        run_phases(session)
        found["described"][name] = described(session)
        found["calls"][name] = calls_of_one_call(session)
        session.close()
        if name == "deepep_ll fp8":
            found["teeth"]["stale staging"] = checked(engine, group, PAIR, stale="_dequantize")
            found["rules"] = slots_and_limits(engine, group)
        engine.close()
    return found


def rank_main(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    with fake_deep_ep.installed():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        group = Group(rank, 2, rank, 1, CPU, pg=dist.group.WORLD, host_pg=dist.group.WORLD)
        import cProfile, time

        t = time.time()
        pr = cProfile.Profile()
        pr.enable()
        ff = two_rank_findings(group)
        pr.disable()
        pr.dump_stats(f"/tmp/dep-wheel/prof{rank}")
        print("TOOK", time.time() - t, flush=True)
        torch.save(ff, Path(folder) / f"rank{rank}.pt")
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("pair")
    torch.multiprocessing.spawn(rank_main, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def test_show(pair):
    import pprint

    pprint.pprint(pair[0])
    pprint.pprint(pair[1]["rules"])
    assert 0
