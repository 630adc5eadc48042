"""Section `ref`: the embedded reference, dispatch + experts + combine with plain PyTorch on any machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.backends.symm_ref import SymmMoeBackend
from bench.backends.torch_a2a import TorchBackend
from lib.contract import Backend
from lib.plan import Section
from lib.section import run_section

if TYPE_CHECKING:
    from lib.knobs import Knobs


def backends(knobs: Knobs) -> list[Backend]:
    every: list[Backend] = [
        TorchBackend(with_experts=True),
        TorchBackend(with_experts=True, fp8=True),
        SymmMoeBackend(),
    ]
    return [backend for name in knobs.ref_list for backend in every if backend.name == name]


SECTION = Section("ref", "bench.ref", backends, list_knob="REF_LIST")

if __name__ == "__main__":
    raise SystemExit(run_section(SECTION))
