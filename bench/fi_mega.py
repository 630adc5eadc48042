"""Section `fi_mega`: FlashInfer's fused mega MoE (flashinfer.moe_ep)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.backends.fi_cutedsl import Mxfp8Backend, Nvfp4Backend, PullBackend
from bench.backends.fi_deepgemm import DeepGemmMegaBackend
from bench.backends.fi_push import PushBackend
from lib.contract import Backend
from lib.plan import Section
from lib.section import run_section

if TYPE_CHECKING:
    from lib.knobs import Knobs


def backends(knobs: Knobs) -> list[Backend]:
    every = [DeepGemmMegaBackend(), Mxfp8Backend(), Nvfp4Backend(), PushBackend(), PullBackend()]
    return [backend for name in knobs.mega_list for backend in every if backend.name == name]


SECTION = Section("fi_mega", "bench.fi_mega", backends, list_knob="MEGA_LIST", timing_knob="MEGA_TIMING")

if __name__ == "__main__":
    raise SystemExit(run_section(SECTION))
