"""Section `vllm_split`: DeepEP dispatch and combine around local experts, through vLLM's modular kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.backends.vllm_split import SplitBackend
from lib.contract import Backend
from lib.plan import Section
from lib.section import run_section

if TYPE_CHECKING:
    from lib.knobs import Knobs


def backends(knobs: Knobs) -> list[Backend]:
    return [SplitBackend(name) for name in knobs.experts_list]


SECTION = Section("vllm_split", "bench.split", backends, list_knob="EXPERTS_LIST")

if __name__ == "__main__":
    raise SystemExit(run_section(SECTION))
