"""The DeepEP 2, NCCL-EP and FlashInfer adapters before anything runs: variants, verdicts, memory, what is missing."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.multiprocessing
from knob_helpers import HOPPER, parsed
from machine_helpers import machine

from bench.backends import deepep_v2, nccl_ep
from bench.backends.nccl_ep_limits import capacity, ht_slots, ll_buffer_bytes
from lib import loaded_nccl
from lib.contract import Backend, Group, Missing, Support, Unsupported, Variant
from lib.problem import Problem
from tests.comm_ranks import CPU, FAKES, PAIR, VARIANTS

V3 = Problem(world=8, nodes=1, tokens=128, num_experts=256, topk=8, hidden=7168, inter=2048, seed=0, routing="uniform")
BACKENDS: dict[str, Backend] = {backend.name: backend for backend, _, _ in FAKES}
V2, NCCL, FI = BACKENDS["deepep_v2"], BACKENDS["nccl_ep"], BACKENDS["flashinfer"]
ELASTIC, FLASH = VARIANTS["deepep_v2 bf16"], VARIANTS["flashinfer bf16"]
HT, HT_EXPERTS, LL, LL_RANKS = (
    VARIANTS[f"nccl_ep_{name} bf16"] for name in ("ht", "ht+expert_major", "ll", "ll+rank_major")
)
MODULES = {"deepep_v2": "deep_ep", "nccl_ep": "nccl.ep", "flashinfer": "flashinfer"}


def fp8(variant: Variant) -> Variant:
    return replace(variant, dispatch_dtype="fp8")


def verdict(
    variant: Variant, installed: bool = True, gpus: int = 8, sm: tuple[int, int] = (9, 0), **shape: Any
) -> Support:
    backend = BACKENDS[variant.comm]
    found = machine(gpus, sm, installed=(MODULES[variant.comm],) if installed else ())
    return backend.supports(variant, found, replace(V3, **shape), parsed(HOPPER))


# -- variants


def test_variants_are_layouts_and_handles_by_dtype_by_sm_budget() -> None:
    knobs = parsed(HOPPER, ALGO="ht ll", NUM_SMS="0 24")
    found = {
        name: [v.name for v in backend.variants(knobs) if v.num_sms in (0, None)] for name, backend in BACKENDS.items()
    }
    plain = "deepep_v2"
    assert found == {
        "deepep_v2": [plain, f"{plain}+cached", f"{plain}+expert_major", f"{plain}+expert_major+cached"],
        "nccl_ep": [
            *("nccl_ep_ht", "nccl_ep_ht+cached", "nccl_ep_ht+expert_major", "nccl_ep_ht+expert_major+cached"),
            *("nccl_ep_ll", "nccl_ep_ll+rank_major"),
        ],
        "flashinfer": ["flashinfer"],
    }
    assert len(V2.variants(knobs)) == 8
    assert len(NCCL.variants(knobs)) == 12
    assert {variant.layout for variant in NCCL.variants(knobs)} == {"flat", "expert_major", "rank_major"}


def test_fp8_is_a_case_of_every_variant() -> None:
    knobs = parsed(HOPPER, ALGO="ht ll", DISPATCH_DTYPE="bf16 fp8")
    for backend in BACKENDS.values():
        made = [(variant.name, variant.dispatch_dtype) for variant in backend.variants(knobs)]
        assert {name for name, dtype in made if dtype == "fp8"} == {name for name, dtype in made if dtype == "bf16"}


@pytest.mark.parametrize("algo", ["ht", "ll"])
def test_algo_chooses_the_mode_of_nccl_ep_and_leaves_the_others_alone(algo: str) -> None:
    knobs = parsed(HOPPER, ALGO=algo)
    assert {variant.algo for variant in NCCL.variants(knobs)} == {algo}
    assert {variant.algo for backend in (V2, FI) for variant in backend.variants(knobs)} == {""}


# -- verdicts

REFUSED: list[tuple[Variant, dict[str, Any], str]] = [
    (ELASTIC, {"hidden": 2880}, "HIDDEN=2880: deepep_v2 takes a multiple of 256"),
    (ELASTIC, {"topk": 33}, "TOPK=33: deepep_v2 takes at most 32"),
    (
        ELASTIC,
        {"world": 2, "num_experts": 1024},
        "NUM_EXPERTS=1024, 512 a rank: deepep_v2 takes at most 2048, 256 a rank",
    ),
    (ELASTIC, {"nodes": 2}, "this version drives deepep_v2 on one node, this is 2"),
    (HT, {"world": 5, "num_experts": 260}, "ht on one node takes 2, 4, 8 ranks, this is 5"),
    (HT, {"tokens": 8193}, "TOKENS=8193: ht takes at most 8192"),
    (HT, {"topk": 33}, "TOPK=33: ht takes at most 32"),
    (HT, {"world": 2, "num_experts": 6, "topk": 2}, "NUM_EXPERTS=6: ht takes a multiple of 4"),
    (HT, {"hidden": 2884}, "HIDDEN=2884: ht takes a multiple of 8"),
    (fp8(HT), {"hidden": 2944}, "HIDDEN=2944: ht in fp8 takes a multiple of 512"),
    (HT_EXPERTS, {"num_experts": 288}, "36 experts a rank: ht by expert takes a power of two, at most 256"),
    (LL, {"hidden": 2880}, "HIDDEN=2880: ll takes a multiple of 512"),
    (LL_RANKS, {"topk": 33}, "TOPK=33: ll takes at most 32"),
    (replace(LL, num_sms=3), {}, "NUM_SMS=3: ll needs at least 19 SMs for NUM_EXPERTS=256"),
    (replace(LL, num_sms=24), {"topk": 22}, "TOPK=22: ll has 21 warps for the choices at NUM_SMS=24 NUM_EXPERTS=256"),
    (FLASH, {"topk": 3}, "TOPK=3: flashinfer is compiled for 1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22"),
    (FLASH, {"world": 128}, "flashinfer takes at most 64 ranks, this is 128"),
    (fp8(FLASH), {"hidden": 2880}, "HIDDEN=2880: fp8 needs a multiple of 128"),
    *((v, {"gpus": 0}, "needs an NVIDIA GPU, this machine has no GPU") for v in (ELASTIC, HT, LL, FLASH)),
    *((v, {"sm": (8, 0)}, "needs sm_90 or newer, this is sm_80") for v in (ELASTIC, HT, LL, FLASH)),
    *((v, {"nodes": 2}, f"this version drives {v.comm} on one node, this is 2") for v in (HT, LL, FLASH)),
]
ACCEPTED: list[tuple[Variant, dict[str, Any]]] = [
    (ELASTIC, {"world": 5, "num_experts": 260}),
    (replace(ELASTIC, num_sms=3), {}),
    (ELASTIC, {"tokens": 0}),
    (HT, {"world": 2, "tokens": 4095}),
    (HT, {"hidden": 2880}),
    (HT, {"num_experts": 288}),
    (replace(HT, num_sms=3), {}),
    (fp8(HT), {}),
    (LL, {"tokens": 8192}),
    (LL, {"world": 5, "num_experts": 260}),
    (replace(LL, num_sms=0), {"topk": 32}),
    (replace(LL, num_sms=24), {"topk": 21}),
    (FLASH, {"hidden": 2880}),
    (FLASH, {"topk": 16}),
    (FLASH, {"world": 5, "num_experts": 260}),
    *((v, {"sm": (10, 0)}) for v in (ELASTIC, HT, LL, FLASH)),
]


@pytest.mark.parametrize(("variant", "shape", "reason"), REFUSED)
def test_what_the_library_would_refuse_is_refused_in_words(
    variant: Variant, shape: dict[str, Any], reason: str
) -> None:
    assert verdict(variant, **shape) == Support("unsupported", reason)
    absent = verdict(variant, installed=False, **shape)
    assert absent.status == "unsupported"
    assert absent.reason.startswith(f"{reason}; not installed: ")


@pytest.mark.parametrize(("variant", "shape"), ACCEPTED)
def test_what_the_library_takes_is_planned(variant: Variant, shape: dict[str, Any]) -> None:
    assert verdict(variant, **shape) == Support()


@pytest.mark.parametrize(
    ("variant", "what"),
    [
        (ELASTIC, "DeepEP 2 (https://github.com/deepseek-ai/DeepEP)"),
        (LL, "NCCL-EP (pip install nccl-extensions nccl4py)"),
        (FLASH, "FlashInfer (pip install flashinfer-python)"),
    ],
)
def test_an_absent_package_alone_is_missing(variant: Variant, what: str) -> None:
    assert verdict(variant, installed=False) == Support("missing", f"not installed: {what}")


def test_one_node_switches_the_network_off_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EP_DISABLE_GIN", raising=False)
    before = dict(os.environ)
    assert V2.env(ELASTIC, V3, parsed(HOPPER)) == {"EP_DISABLE_GIN": "1"}
    assert NCCL.env(LL, V3, parsed(HOPPER)) == FI.env(FLASH, V3, parsed(HOPPER)) == {}
    assert dict(os.environ) == before
    monkeypatch.setenv("EP_DISABLE_GIN", "0")
    assert V2.env(ELASTIC, V3, parsed(HOPPER)) == {}


# -- memory and capacity


def test_memory_is_what_hand_arithmetic_says() -> None:
    # dispatch's buffer: 8 ranks * 128 tokens * (14336 + 512) bytes; then 8 * 128 rows three times, and the output
    assert V2.memory_bytes(ELASTIC, V3) == 8 * 128 * 14_848 + 8 * 128 * 14_336 * 3 + 128 * 14_336
    # ll by expert: two banks of (256 + 8) * 128 combine messages of 14336 + 56 * 4 bytes, above dispatch's 9 * 128
    assert ll_buffer_bytes(LL, V3) == 2 * 128 * 264 * 14_560 == 984_023_040
    assert NCCL.memory_bytes(LL, V3) == 984_023_040 + 32 * 8 * 128 * 14_336
    assert NCCL.memory_bytes(fp8(LL), V3) - NCCL.memory_bytes(LL, V3) == 32 * 8 * 128 * 14_336
    assert ht_slots(HT, V3) == 8 * 128
    assert ht_slots(HT_EXPERTS, V3) == 8 * 128 * 8
    assert FI.memory_bytes(FLASH, V3) == 2 * 128 * 22 * 4 + 8 * 128 * (2 * 14_336 + 64) + 128 * 14_336


@pytest.mark.parametrize(("tokens", "low", "high"), [(0, 1, 2), (1, 1, 2), (2, 2, 2), (4095, 4095, 4096)])
def test_ht_is_made_for_an_even_number_of_tokens_and_nothing_for_none(tokens: int, low: int, high: int) -> None:
    problem = replace(V3, tokens=tokens)
    assert (capacity(LL, problem), capacity(HT, problem)) == (low, high)


# -- the library is not there, or does not fit


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_does_not_import_is_missing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for adapter in (deepep_v2, nccl_ep):
        monkeypatch.setattr(adapter, "require_nccl", lambda who: "2.30.7")
    for module in ("deep_ep", "nccl", "nccl.core", "nccl.ep", "flashinfer"):
        monkeypatch.setitem(sys.modules, module, None)
    group = Group(0, 2, 0, 1, CPU, pg=None, host_pg=None)
    variant = next(v for v in VARIANTS.values() if v.comm == name)
    with pytest.raises(Missing, match=r"does not import|does not load|no MoeAlltoAll that imports"):
        BACKENDS[name].open(group, variant, PAIR, parsed(HOPPER))


def test_an_older_deepep_is_missing_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepep_v2, "require_nccl", lambda who: "2.30.7")
    monkeypatch.setitem(sys.modules, "deep_ep", type(sys)("deep_ep"))
    group = Group(0, 2, 0, 1, CPU, pg=None, host_pg=None)
    with pytest.raises(Missing, match="has no ElasticBuffer: DeepEP 2 is needed"):
        V2.open(group, ELASTIC, PAIR, parsed(HOPPER))


@pytest.mark.parametrize(
    ("found", "words"),
    [((2, 28, 9), "libnccl 2.28.9 is loaded, x needs 2.30.7"), (None, "no libnccl is loaded, x needs 2.30.7")],
)
def test_a_libnccl_that_is_too_old_is_named_with_the_one_that_is_needed(
    monkeypatch: pytest.MonkeyPatch, found: Any, words: str
) -> None:
    monkeypatch.setattr(loaded_nccl, "loaded_nccl", lambda: found)
    with pytest.raises(Missing, match=words.replace(".", r"\.")):
        loaded_nccl.require_nccl("x")


def test_a_libnccl_that_is_new_enough_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_nccl, "loaded_nccl", lambda: (2, 31, 2))
    assert loaded_nccl.require_nccl("x") == "2.31.2"


def test_the_loaded_libnccl_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_nccl, "_mapped", lambda: ["0", "/lib/x86_64/libc.so.6", "/opt/nvidia/libnccl.so.2"])
    asked: list[str] = []

    class Library:
        def __init__(self, path: str) -> None:
            asked.append(path)

        def ncclGetVersion(self, number: Any) -> int:  # noqa: N802 - the library's own name
            number._obj.value = 23007
            return 0

    monkeypatch.setattr(loaded_nccl.ctypes, "CDLL", Library)
    assert loaded_nccl.loaded_nccl() == (2, 30, 7)
    assert asked == ["/opt/nvidia/libnccl.so.2"]
    monkeypatch.setattr(loaded_nccl, "_mapped", lambda: ["0", "/lib/x86_64/libc.so.6"])
    assert loaded_nccl.loaded_nccl() is None


def test_more_sms_than_the_gpu_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    group = Group(0, 2, 0, 1, torch.device("cuda", 0), pg=None, host_pg=None)
    with pytest.raises(Unsupported, match="NUM_SMS=133: this GPU has 132 SMs"):
        nccl_ep.check_sms(group, replace(HT, num_sms=133), V3)
    with pytest.raises(Unsupported, match="NUM_SMS=132: ll needs at least 147 SMs for NUM_EXPERTS=2048"):
        nccl_ep.check_sms(group, replace(LL, num_sms=0), replace(V3, num_experts=2048))
    nccl_ep.check_sms(group, replace(LL, num_sms=0), V3)
