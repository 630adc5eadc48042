"""Section `comm`: dispatch -> combine alone, every EP library under one harness."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.backends.deepep import DeepEPBackend
from bench.backends.deepep_v2 import DeepEPV2Backend
from bench.backends.flashinfer_a2a import FlashInferBackend
from bench.backends.mori import MoriBackend
from bench.backends.mscclpp import MscclppBackend
from bench.backends.nccl_ep import NcclEpBackend
from bench.backends.symm import SymmBackend
from bench.backends.torch_a2a import TorchBackend
from lib.contract import Backend
from lib.plan import Section
from lib.section import run_section

if TYPE_CHECKING:
    from lib.knobs import Knobs


def backends(knobs: Knobs) -> list[Backend]:
    every: list[Backend] = [TorchBackend(with_experts=False), SymmBackend(), DeepEPBackend(), DeepEPV2Backend()]
    every += [NcclEpBackend(), FlashInferBackend(), MscclppBackend(), MoriBackend()]
    return [backend for name in knobs.comm_list for backend in every if backend.name == name]


SECTION = Section("comm", "bench.comm", backends, list_knob="COMM_LIST", identity_experts=True)

if __name__ == "__main__":
    raise SystemExit(run_section(SECTION))
