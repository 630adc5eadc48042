"""The MORI adapter without an AMD GPU: its verdicts here, and its calls on two ranks against a fake that enforces them.

The fake's signatures are recorded from upstream's source at 624002c8 (tests/signatures).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing
from knob_helpers import HOPPER, parsed
from machine_helpers import h200_pair, machine, mi300

from bench.backends import mori_limits as limits
from bench.backends.mori import NO_PROFILER, MoriBackend, MoriSession, fp8_wire_dtype
from lib.contract import Group, Missing, Support, Variant
from lib.measure import byte_and_rate_columns
from lib.problem import Problem
from lib.routing import make_routing
from tests import fake_mori
from tests.library_ranks import CPU, SHAPES
from tests.mori_ranks import PAIR, SUITE, TWO_NODES, faults_of, rank_main, steps_of

BACKEND = MoriBackend()
VARIANTS = SUITE.variants
V3 = Problem(world=8, nodes=1, tokens=128, num_experts=256, topk=8, hidden=7168, inter=2048, seed=0, routing="uniform")
INTRANODE, V1, V1_LL, ASYNC_LL = (VARIANTS[f"{name} bf16"] for name in limits.KERNELS)
FP8 = VARIANTS["mori+intranode fp8"]
TWO = {"world": 16, "nodes": 2}


def verdict(variant: Variant, *installed: str, **shape: Any) -> Support:
    return BACKEND.supports(variant, mi300(8, *installed), replace(V3, **shape), parsed(HOPPER))


# -- verdicts

ABSENT = "not installed: MORI (https://github.com/ROCm/mori)"
REFUSED = [
    (INTRANODE, TWO, "intranode is for one node, these are 2"),
    (INTRANODE, {"world": 16}, "intranode takes at most 8 ranks, this is 16"),
    (V1, {"world": 12, "nodes": 2, "num_experts": 252}, "GPUS=6: MORI takes a power of two of ranks a node"),
    (ASYNC_LL, {"topk": 64}, "TOPK=64: MORI takes at most 63"),
    (FP8, {"hidden": 2880}, "HIDDEN=2880: fp8 needs a multiple of 128"),
    (
        V1_LL,
        {"routing": "uniform,mask=0.3"},
        "ROUTING=uniform,mask=0.3: v1_ll has no masked entries, it takes -1 for an expert of rank 0",
    ),
    (
        ASYNC_LL,
        {"routing": "zipf:1,mask=0.3"},
        "ROUTING=zipf:1,mask=0.3: async_ll has no masked entries, it takes -1 for an expert of rank 0",
    ),
]
ACCEPTED: list[tuple[Variant, dict[str, Any]]] = [
    (INTRANODE, {"world": 1, "tokens": 0, "topk": 63}),
    (INTRANODE, {"hidden": 2880, "routing": "uniform,mask=0.3,empty=1"}),
    (V1, {**TWO, "routing": "uniform,mask=0.3"}),
    (V1_LL, {"world": 32, "nodes": 4, "routing": "uniform,empty=3"}),
    (ASYNC_LL, {"tokens": 4095}),
]


@pytest.mark.parametrize(("variant", "shape", "reason"), REFUSED)
def test_what_the_library_would_refuse_is_refused_in_words(
    variant: Variant, shape: dict[str, Any], reason: str
) -> None:
    assert verdict(variant, "mori", **shape) == Support("unsupported", reason)
    assert verdict(variant, **shape) == Support("unsupported", f"{reason}; {ABSENT}")


@pytest.mark.parametrize(("variant", "shape"), ACCEPTED)
def test_what_the_library_takes_is_planned(variant: Variant, shape: dict[str, Any]) -> None:
    assert verdict(variant, "mori", **shape) == Support()
    assert verdict(variant, **shape) == Support("missing", ABSENT)


def test_it_needs_an_amd_gpu_and_says_what_is_here() -> None:
    for found, what in ((machine(), "no GPU"), (h200_pair("mori"), "CUDA GPUs")):
        reason = BACKEND.supports(V1, found, V3, parsed(HOPPER)).reason
        assert reason.startswith(f"needs an AMD GPU (ROCm), this machine has {what}")


# -- memory and environment


def test_the_heap_is_what_hand_arithmetic_says() -> None:
    message = 7168 * 2 + 8 * 4 + 8 * 4 + 4
    beside = 1024 * (3 * 8 * 4 + 2 * 8 * 4) + 1024 * 32 * 4  # weights, ids, source of a slot
    rows = (1024 + 128) * 14_336
    assert limits.heap_bytes(INTRANODE, V3) == 1024 * message + rows + beside == 31_559_680
    assert limits.heap_bytes(V1, V3) == (1024 + 4 * 128) * message + rows + beside
    assert limits.heap_bytes(ASYNC_LL, V3) == 3 * 1024 * message + rows + beside
    assert limits.heap_bytes(FP8, V3) == limits.heap_bytes(INTRANODE, V3) + 1024 * 56 * 4 * 3
    assert limits.heap_size(INTRANODE, V3) == 2
    staged = 1024 * 14_336
    maps = 1024 * 32 * 4 * 5
    assert BACKEND.memory_bytes(INTRANODE, V3) == (2 << 30) + maps
    assert BACKEND.memory_bytes(V1, V3) == (2 << 30) + maps + staged


@pytest.mark.parametrize("tokens", [1, 128, 4096])
@pytest.mark.parametrize(("world", "nodes"), [(8, 1), (16, 2)])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_heap_holds_what_the_library_allocates(name: str, world: int, nodes: int, tokens: int) -> None:
    variant, problem = VARIANTS[name], replace(V3, world=world, nodes=nodes, tokens=tokens)
    kind = fake_mori.EpDispatchCombineKernelType[limits.KERNELS[variant.name].type_name]
    scales = 7168 // 128 if variant.dispatch_dtype == "fp8" else 0
    config = fake_mori.CONFIG(
        torch.bfloat16, 0, world, 7168, scales, 4, 2, tokens, 256 // world, 8, kernel_type=kind, gpu_per_node=8
    )
    needed = fake_mori.heap_bytes(config)
    assert 0 <= needed - limits.heap_bytes(variant, problem) < 4096, "the signals"
    assert needed < limits.heap_size(variant, problem) << 30


def test_the_environment_is_set_before_the_interpreter_and_yours_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MORI_SHMEM_HEAP_SIZE", "MORI_EP_LAUNCH_CONFIG_MODE", "MORI_ENABLE_SDMA", "ENABLE_PROFILER"):
        monkeypatch.delenv(name, raising=False)
    knobs = parsed(HOPPER)
    tuned = {"MORI_SHMEM_HEAP_SIZE": "2G", "MORI_EP_LAUNCH_CONFIG_MODE": "AUTO"}
    assert BACKEND.env(V1, V3, knobs) == tuned
    assert BACKEND.env(ASYNC_LL, V3, knobs) == {**tuned, "MORI_ENABLE_SDMA": "1"}
    assert BACKEND.env(V1, V3, replace(knobs, trace="library")) == {**tuned, "ENABLE_PROFILER": "ON"}
    monkeypatch.setenv("MORI_SHMEM_HEAP_SIZE", "64G")
    monkeypatch.setenv("MORI_EP_LAUNCH_CONFIG_MODE", "MANUAL")
    wanted = {"MORI_SHMEM_HEAP_SIZE": "64G", "MORI_EP_LAUNCH_CONFIG_MODE": "MANUAL"}
    assert BACKEND.env(V1, V3, knobs) == wanted


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("gfx942:sramecc+:xnack-", torch.float8_e4m3fnuz),
        ("gfx950:sramecc+", torch.float8_e4m3fn),
        ("gfx1250", torch.float8_e4m3fn),
    ],
)
def test_fp8_bytes_travel_under_the_name_that_the_gpu_has_kernels_for(
    monkeypatch: pytest.MonkeyPatch, arch: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Found", (), {"gcnArchName": arch}))
    assert fp8_wire_dtype(torch.device("cuda", 0)) == dtype
    assert fp8_wire_dtype(CPU) == torch.float8_e4m3fn


def test_a_module_that_does_not_import_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mori", None)
    with pytest.raises(Missing, match="mori does not import"):
        BACKEND.open(Group(0, 2, 0, 1, CPU, pg=None, host_pg=None), V1, PAIR, parsed(HOPPER))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fake_mori.CONFIG(rank=0), "missing 9 required positional arguments: 'data_type'"),
        (lambda: fake_mori.EpDispatchCombineOp(), "missing a required argument: 'config'"),
        (lambda: fake_mori.EpDispatchCombineOp.dispatch(None, 1, 2, 3), "missing a required argument: 'indices'"),
        (lambda: fake_mori.EpDispatchCombineOp.dispatch(None, 1, 2, 3, 4, num_sms=1), "keyword argument 'num_sms'"),
        (lambda: fake_mori.EpDispatchCombineOp.combine(None, 1, 2), "missing a required argument: 'indices'"),
    ],
)
def test_a_call_that_the_recorded_library_would_refuse_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        call()


# -- two ranks, started once; each saves what it found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("mori")
    torch.multiprocessing.spawn(rank_main, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("shape", {**SHAPES, **TWO_NODES})
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_copy_and_every_sum_is_exact_or_refused_on_both_ranks(
    pair: list[dict[str, Any]], variant: str, shape: str
) -> None:
    if shape in TWO_NODES and VARIANTS[variant].name == "mori+intranode":
        return
    masked = "mask" in {**SHAPES, **TWO_NODES}[shape].get("routing", "")
    told = [found["wrong"][f"{variant}, {shape}"] for found in pair]
    if masked and not limits.KERNELS[VARIANTS[variant].name].masks:
        assert told[0] == told[1]
        assert re.match(r"refused: ROUTING=.*: \w+_ll has no masked entries, it takes -1", told[0])
    else:
        assert told == ["", ""]


@pytest.mark.parametrize(
    ("variant", "fault"), [(name, fault) for name, made in VARIANTS.items() for fault in faults_of(made)]
)
def test_a_fault_of_the_library_is_seen_by_both_ranks(pair: list[dict[str, Any]], variant: str, fault: str) -> None:
    told = [found["teeth"][f"{variant}, {fault}"] for found in pair]
    assert told[0] == told[1] != ""


@pytest.mark.parametrize(
    ("variant", "step"), [(name, step) for name, made in VARIANTS.items() for step in steps_of(made)]
)
def test_a_step_that_does_nothing_is_seen(pair: list[dict[str, Any]], variant: str, step: str) -> None:
    assert pair[0]["teeth"][f"{variant}, no {step}"] != ""


QUANTIZE, DISPATCH = ("quantize", False, False), ("dispatch", True, False)
IDENTITY, COMBINE = ("identity", False, False), ("combine", True, False)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_session_declares_its_phases_and_what_a_graph_may_hold(pair: list[dict[str, Any]], variant: str) -> None:
    fp8 = VARIANTS[variant].dispatch_dtype == "fp8"
    for found in pair:
        told = found["described"][variant]
        assert told["phases"] == [*([QUANTIZE] if fp8 else []), DISPATCH, IDENTITY, COMBINE]
        assert (told["capturable"], told["deterministic"]) == ("", False)
        assert (told["quant_included"], told["staging_included"]) == (False if fp8 else None, True)
        assert told["formats"] == (VARIANTS[variant].dispatch_dtype, "bf16")
        assert (told["transport"], told["versions"]) == ("xgmi", {"mori": "1.2.4"})


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_point_has_an_op_of_its_own_size_and_leaves_none_behind(pair: list[dict[str, Any]], variant: str) -> None:
    config = dict(pair[0]["calls"][f"{variant} bind"])["config"]
    kernel, fp8 = limits.KERNELS[VARIANTS[variant].name], VARIANTS[variant].dispatch_dtype == "fp8"
    assert config["kernel_type"].startswith(f"<EpDispatchCombineKernelType.{kernel.type_name}:")
    sizes = ("max_num_inp_token_per_rank", "num_experts_per_rank", "num_experts_per_token", "hidden_dim", "scale_dim")
    assert [config[name] for name in sizes] == [6, 4, 3, 256, 2 if fp8 else 0]
    assert (config["scale_type_size"], config["max_token_type_size"], config["gpu_per_node"]) == (4, 2, 2)
    launch = (config["block_num"], config["rdma_block_num"], config["warp_num_per_block"])
    assert launch == (kernel.block_num, kernel.rdma_block_num, kernel.warp_num_per_block)
    assert config["use_external_inp_buf"] == (not kernel.zero_copy)
    assert [found["alive"][variant] for found in pair] == [0, 0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_call_is_dispatch_and_combine_and_the_receive_calls_of_async_ll(
    pair: list[dict[str, Any]], variant: str
) -> None:
    made = [method for method, _ in pair[0]["calls"][variant] if not method.startswith("max_num")]
    both = ["dispatch", "dispatch_recv", "combine", "combine_recv"]
    assert made == (both if "async_ll" in variant else both[::2])
    combine = dict(pair[0]["calls"][variant])["combine"]
    assert combine["weights"] is None
    assert combine["indices"] == "int32[6, 3]"  # this rank's own routing, not the 11 rows that came
    dispatched = dict(pair[0]["calls"][variant])["dispatch"]
    assert dispatched["scales"] == ("float32[6, 2]" if "fp8" in variant else None)


def test_the_fake_is_as_the_library_is(pair: list[dict[str, Any]]) -> None:
    """Counts that add up or are gone after combine, another rank's routing, a heap that ends too early."""
    told = pair[0]["more"]
    assert {found["count after combine"] for found in told.values()} == {0}
    assert {found["rows"] for found in told.values()} == {(11, 12)}
    assert told["mori+intranode bf16"]["another routing"] == "combine() indices has 5 rows (ROCm/mori#475)"
    assert told["mori+intranode bf16"]["dispatched twice"].startswith("dispatched twice without a combine")
    assert told["mori+intranode bf16"]["an early end of the heap"] == "1 ops outlive the symmetric heap"
    assert told["mori+async_ll bf16"]["too early"] == "dispatch has not come yet"


def test_v1_ll_alone_sends_a_token_to_every_node(pair: list[dict[str, Any]]) -> None:
    every = {name for name, found in pair[0]["more"].items() if found["every node"]}
    assert every == {"mori+v1_ll bf16", "mori+v1_ll fp8"}


@pytest.mark.parametrize(("every_node", "tokens"), [(True, 6 * 2), (False, 6)])
def test_a_rows_bytes_between_nodes_are_tokens_times_nodes_if_every_node_gets_all(
    every_node: bool, tokens: int
) -> None:
    """One hot expert is on one node: a kernel that looks at the routing sends there alone."""
    problem = replace(PAIR, nodes=2, routing="onehot", topk=1)
    case, row = SimpleNamespace(problem=problem), problem.hidden * 2
    session = SimpleNamespace(every_node=every_node, dispatch_format="bf16", combine_format="bf16", kind="combine")
    times = {"lat_us_p50": 1.0}
    columns = byte_and_rate_columns(case, session, make_routing(problem), times, None)  # type: ignore[arg-type]
    assert columns["node_bytes_algo"] == tokens * row
    assert columns["node_bytes_physical"] == (6 * row if every_node else 3 * row)


def test_its_own_profiler_forgets_what_was_before_and_names_this_kernels_slots(pair: list[dict[str, Any]]) -> None:
    for found in pair:
        assert found["more"]["mori+intranode bf16"]["written"] == "slots of intranode, 1 events"
        assert {found["more"][name]["profiler"] for name in VARIANTS} == {NO_PROFILER}


def test_the_kernels_of_upstreams_source_have_a_phase() -> None:
    names = (
        "EpDispatchIntraNodeKernel_bf16 EpDispatchCopyToStaging_bf16 EpDispatchInterNodeV1KernelLowLatency_fp8_fnuz "
    )
    names += (
        "EpDispatchLowLatencyAsyncRecvTransfer_bf16 EpCombineSync_bf16 EpCombineSyncBarrier_bf16 EpCombineAll_bf16 "
    )
    for kernel in f"{names} EpCombineIntraNodeKernel_bf16_p2p EpCombineLowLatencyAsyncSendCopy_bf16".split():
        (phase,) = [p for p, patterns in MoriSession.kernels.items() if any(re.search(x, kernel) for x in patterns)]
        assert phase == ("combine" if "Combine" in kernel else "dispatch"), kernel


def test_the_documented_limits_are_those_of_the_adapter() -> None:
    pages = (Path(__file__).resolve().parent.parent / "docs" / "backends.md").read_text()
    text = " ".join(pages.partition("### `mori`")[2].partition("\n## ")[0].split())
    assert f"at most {limits.INTRANODE_MAX_RANKS} ranks" in text
    assert f"top-k at most {limits.MAX_TOPK}" in text
    for name in limits.KERNELS:
        assert f"`{name}`" in text
