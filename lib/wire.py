"""Cases and knobs as JSON, for the way from the coordinator to its ranks."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lib.contract import Support, Variant
from lib.plan import Case
from lib.problem import Problem

if TYPE_CHECKING:
    from lib.knobs import Knobs


def pack_case(case: Case) -> dict[str, Any]:
    return asdict(case)


def unpack_case(packed: dict[str, Any]) -> Case:
    variant = dict(packed["variant"])
    variant["options"] = tuple((name, value) for name, value in variant["options"])
    parts = {
        "variant": Variant(**variant),
        "problem": Problem(**packed["problem"]),
        "support": Support(**packed["support"]),
    }
    return Case(**(packed | parts))


def pack_knobs(knobs: Knobs) -> dict[str, Any]:
    return asdict(knobs) | {"given": sorted(knobs.given)}


def unpack_knobs(packed: dict[str, Any]) -> Knobs:
    from lib.knobs import Knobs

    tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in packed.items()}
    return Knobs(**(tuples | {"given": frozenset(packed["given"])}))
