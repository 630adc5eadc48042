"""Section `comm`: dispatch -> combine alone, every EP library under one harness."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.backends.deepep import DeepEPBackend
from bench.backends.mori import MoriBackend
from bench.backends.mscclpp import MscclppBackend
from bench.backends.planned import comm_backends
from bench.backends.torch_a2a import TorchBackend
from lib.contract import Backend
from lib.plan import Section
from lib.section import run_section

if TYPE_CHECKING:
    from lib.knobs import Knobs


def backends(knobs: Knobs) -> list[Backend]:
    every = [TorchBackend(with_experts=False), DeepEPBackend(), MscclppBackend(), MoriBackend(), *comm_backends()]
    return [backend for name in knobs.comm_list for backend in every if backend.name == name]


SECTION = Section("comm", "bench.comm", backends, list_knob="COMM_LIST")

if __name__ == "__main__":
    raise SystemExit(run_section(SECTION))
