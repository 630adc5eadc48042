"""Section `vllm_mega`: vLLM's fused mega MoE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.backends.vllm_mega import MegaBackend
from lib.contract import Backend
from lib.plan import Section
from lib.section import run_section

if TYPE_CHECKING:
    from lib.knobs import Knobs


def backends(knobs: Knobs) -> list[Backend]:
    return [MegaBackend()]


SECTION = Section("vllm_mega", "bench.vllm_mega", backends, timing_knob="MEGA_TIMING")

if __name__ == "__main__":
    raise SystemExit(run_section(SECTION))
