"""MEGA_*: which backends have an option, and which names and values a MEGA_KNOBS object may hold.

A library may drop names that it does not know without a word, so the object is checked here, before anything starts.
Standard library only. An error is a sentence `NAME=value: what is wrong and what works`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lib.knob_types import did_you_mean, or_list, shown

if TYPE_CHECKING:
    from lib.knobs import Knobs

IKR_BACKENDS = ("mxfp8_cutedsl", "nvfp4_cutedsl", "sm90_pull_fp8")
COMBINE_DTYPE_BACKENDS = ("nvfp4_cutedsl",)
TUNER_BACKENDS = ("mxfp8_cutedsl", "nvfp4_cutedsl")  # those whose library tunes itself at the first forward
HEURISTIC_BACKENDS = TUNER_BACKENDS  # those in which an object replaces a heuristic, and does not add to it

# FlashInfer 0.6.18 and 0.7.4, moe_ep: cutedsl_megamoe/shim/tuner.py (values, is_valid), shim/nvfp4.py (epi_flag_batch
# 1..32, flag_batch >= 1), the sm90 backends' config.py; tiles of sm90 pull: its shim/hopper_fp8.py.
TOKEN_BACK = ("epi_warps", "standalone_warps", "reuse_dispatch_warps")
LOAD_BALANCE = ("static", "atomic_counter")
EPI_BATCH_MAX = 32
NVFP4_TILES = ((128, 128, 256), (128, 256, 256), (256, 128, 256), (256, 256, 256), (256, 64, 256))
CLUSTERS = ((1, 1, 1), (2, 1, 1), (4, 1, 1))
PULL_TILES = tuple((64, n, 128) for n in (128, 256))
PULL_SWAPPED_TILES = tuple((m, n, 128) for m in (128, 256) for n in (16, 32, 64, 128))

Rule = Callable[[Any], str]  # "" or what the value must be


def _types(value: Any) -> list[type]:
    """Of a value or of each part: 1 equals true and 1.0, and is neither."""
    return [type(part) for part in value] if isinstance(value, tuple) else [type(value)]


def one_of(*values: Any) -> Rule:
    """Lists stand for tuples; 1 is not true."""

    def rule(value: Any) -> str:
        given = tuple(value) if isinstance(value, list) else value
        if any(given == legal and _types(given) == _types(legal) for legal in values):
            return ""
        return f"must be {or_list([json.dumps(legal) for legal in values])}"

    return rule


def epi_batch(value: Any) -> str:
    pair = value if isinstance(value, list) else []
    good = len(pair) == 2 and all(type(part) is int and 1 <= part <= EPI_BATCH_MAX for part in pair)
    return "" if good else f"must be a pair of whole numbers 1..{EPI_BATCH_MAX}, such as [2, 4]"


def positive_or_null(value: Any) -> str:
    return "" if value is None or (type(value) is int and value > 0) else "must be null or a whole number > 0"


def share(value: Any) -> str:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
    return "" if good else "must be a number above 0 and at most 1"


FLAG = one_of(False, True)
CUTEDSL: dict[str, Rule] = {
    "cluster_shape_mnk": one_of(*CLUSTERS),
    "group_hint": positive_or_null,
    "flag_batch": one_of(1, 2, 4, 8, 16),
    "epi_flag_batch": epi_batch,
    "token_back_mode": one_of(*TOKEN_BACK),
    "load_balance_mode": one_of(*LOAD_BALANCE),
}
NAMES: dict[str, dict[str, Rule]] = {
    "deep_gemm_mega": {},
    "mxfp8_cutedsl": CUTEDSL,
    "nvfp4_cutedsl": CUTEDSL | {"mma_tiler_mnk": one_of(*NVFP4_TILES), "non_ubulk_fc2_store": FLAG},
    "sm90_push_fp8": {
        "capacity_factor": share,
        "dedup_dispatch": FLAG,
        "grouped_combine": FLAG,
        "fuse_fc1_epilogue": FLAG,
        "payload_dtype": one_of("fp8", "bf16"),
        "combine_dtype": one_of("fp8", "bf16"),
    },
    "sm90_pull_fp8": {
        "swap_ab": FLAG,
        "mma_tiler_mnk": one_of(*PULL_TILES, *PULL_SWAPPED_TILES),
        "load_balance_mode": one_of(*LOAD_BALANCE),
        "token_back_by_dispatch": FLAG,
        "fp8_accum_mode": one_of("1xacc", "2xacc"),
    },
}
OWN_KNOB = {"in_kernel_fc2_reduce": "MEGA_IKR=1", "enable_in_kernel_fc2_reduce": "MEGA_IKR=1"}


def missing_names(backend: str, given: dict[str, Any]) -> list[str]:
    """The names of an object that a backend does not have; one that lacks any runs unchanged."""
    return [name for name in given if name not in NAMES[backend]]


def takes_object(backend: str, knobs: Knobs) -> bool:
    given = knobs.mega_knobs
    return isinstance(given, dict) and bool(given) and not missing_names(backend, given)


def text_for(backend: str, knobs: Knobs) -> str:
    """MEGA_KNOBS as a case of this backend has to be given it again, "" where it leaves the backend alone."""
    if knobs.mega_knobs == "auto":
        return "auto" if backend in TUNER_BACKENDS else ""
    return json.dumps(knobs.mega_knobs) if takes_object(backend, knobs) else ""


def object_errors(knobs: Knobs) -> Iterator[str]:
    """What is wrong with a MEGA_KNOBS object by itself: names of no listed backend, values, values that exclude."""
    given = knobs.mega_knobs
    assert isinstance(given, dict)
    if not given:
        yield "MEGA_KNOBS={}: names nothing; name at least one, or leave it unset for the library's heuristic"
        return
    known = sorted({name for backend in knobs.mega_list for name in NAMES[backend]})
    unknown = [name for name in given if name not in known]
    for name in unknown:
        yield f"MEGA_KNOBS: {_unknown(name, known, knobs)}"
    if unknown:
        return
    takers = [backend for backend in knobs.mega_list if not missing_names(backend, given)]
    if not takers:
        yield f"MEGA_KNOBS: no one backend in MEGA_LIST={' '.join(knobs.mega_list)} has all of {', '.join(given)}"
    for backend in takers:
        problems = [(name, NAMES[backend][name](value)) for name, value in given.items()]
        wrong = [f"{name} {problem}, not {shown(json.dumps(given[name]))}" for name, problem in problems if problem]
        for sentence in wrong or excluded(backend, {name: _tuples(value) for name, value in given.items()}, knobs):
            yield f"MEGA_KNOBS: {sentence} ({backend})"


def _unknown(name: str, known: list[str], knobs: Knobs) -> str:
    if name in OWN_KNOB:
        return f"{name} is not given here; set {OWN_KNOB[name]}"
    owners = [backend for backend in NAMES if name in NAMES[backend]]
    if owners:
        return f"{name} belongs to {or_list(owners)}, which MEGA_LIST={' '.join(knobs.mega_list)} does not name"
    near = did_you_mean(name, known)
    return f"there is no '{shown(name)}'{near} (choose from: {' '.join(known) or 'nothing, no listed backend has any'})"


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def excluded(backend: str, given: dict[str, Any], knobs: Knobs) -> Iterator[str]:
    """Values that are legal each and not together: upstream's is_valid, and its configs' own checks."""
    if backend in TUNER_BACKENDS:
        yield from _cutedsl_excluded(backend, given, knobs)
    elif backend == "sm90_push_fp8":
        if given.get("combine_dtype", "fp8") != "fp8" and given.get("grouped_combine", True):
            yield 'combine_dtype "bf16" needs grouped_combine false'
    elif backend == "sm90_pull_fp8":
        tile, swapped = given.get("mma_tiler_mnk"), given.get("swap_ab", False)
        legal = PULL_SWAPPED_TILES if swapped else PULL_TILES
        if tile is not None and tile not in legal:
            yield f"with swap_ab {json.dumps(swapped)} mma_tiler_mnk {one_of(*legal)(tile)}"
        if given.get("token_back_by_dispatch") and knobs.mega_ikr:
            yield "token_back_by_dispatch excludes MEGA_IKR=1"


def _cutedsl_excluded(backend: str, given: dict[str, Any], knobs: Knobs) -> Iterator[str]:
    wire = knobs.mega_combine_dtype if backend in COMBINE_DTYPE_BACKENDS else "bf16"
    # what is not given takes the raw default; on a quantised wire the library itself starts from reuse_dispatch_warps
    mode = given.get("token_back_mode", "epi_warps" if wire == "bf16" else "reuse_dispatch_warps")
    ubulk = not given.get("non_ubulk_fc2_store", True)
    if wire != "bf16" and mode != "reuse_dispatch_warps":
        yield f'MEGA_COMBINE_DTYPE={wire} needs token_back_mode "reuse_dispatch_warps"'
    if ubulk and (mode != "epi_warps" or wire == "nvfp4"):
        yield f'non_ubulk_fc2_store false needs token_back_mode "epi_warps" and no nvfp4 wire (this is "{mode}")'
    if given.get("mma_tiler_mnk", (128,))[0] == 256 and given.get("cluster_shape_mnk", (1,))[0] % 2:
        yield "an mma_tiler_mnk of M = 256 needs an even cluster_shape_mnk, such as [2, 1, 1]"
    if backend == "mxfp8_cutedsl":
        if given.get("cluster_shape_mnk", (2,))[0] % 2:
            yield "its tile is 256 x 256, so cluster_shape_mnk must be even, such as [2, 1, 1]"
        if knobs.mega_ikr and mode != "epi_warps":
            yield 'MEGA_IKR=1 needs token_back_mode "epi_warps"'


def options(knobs: Knobs) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(knob as set, the backends that have it) of each option that is on; a MEGA_KNOBS object is not among them."""
    if knobs.mega_ikr:
        yield "MEGA_IKR=1", IKR_BACKENDS
    if knobs.mega_combine_dtype != "bf16":
        yield f"MEGA_COMBINE_DTYPE={knobs.mega_combine_dtype}", COMBINE_DTYPE_BACKENDS
    if knobs.mega_knobs == "auto":
        yield "MEGA_KNOBS=auto", TUNER_BACKENDS


def errors(knobs: Knobs) -> Iterator[str]:
    """What section fi_mega can't run with; SECTION=all leaves what no backend has to the notices."""
    if not knobs.all_sections:
        for option, owners in options(knobs):
            if not set(owners) & set(knobs.mega_list):
                listed = " ".join(knobs.mega_list)
                yield f"{option}: no backend in MEGA_LIST={listed} has it; add {or_list(owners)}, or unset it"
    if isinstance(knobs.mega_knobs, dict):
        yield from object_errors(knobs)


def remarks(knobs: Knobs) -> Iterator[str]:
    """Which listed backends an option leaves alone, and what an object really does."""
    for option, owners in options(knobs):
        without = [name for name in knobs.mega_list if name not in owners]
        if without:
            yield f"{option}: {', '.join(without)} does not have it and runs unchanged"
    given = knobs.mega_knobs
    if not isinstance(given, dict):
        return
    for backend in knobs.mega_list:
        if given and (names := missing_names(backend, given)):
            yield f"MEGA_KNOBS: {backend} has no {', '.join(names)} and runs unchanged"
    replaced = [
        backend for backend in knobs.mega_list if backend in HEURISTIC_BACKENDS and takes_object(backend, knobs)
    ]
    if replaced:
        yield (
            f"MEGA_KNOBS: the object replaces the heuristic of {', '.join(replaced)}; a name that it leaves out takes "
            "the kernel's raw default, not the heuristic's choice"
        )
