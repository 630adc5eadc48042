"""Backend `sm90_push_fp8`: FlashInfer's Hopper kernels that push tokens into their peers' memory (CUDA, no NVSHMEM).

Copy rule: a token once a destination rank (dedup_dispatch), one partial sum a rank back (grouped_combine), both e4m3
with one fp32 scale a 128 columns. Staging already sends, so compute can't run twice on one staging, and there is no
bare kernel: TIMING=kernel replays a CUDA graph of the whole round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.backends.fi_limits import push_bytes, push_reason
from bench.backends.fi_mega import FiMegaBackend, FiMegaSession, given_knobs
from lib.contract import Variant
from lib.problem import Problem

if TYPE_CHECKING:
    from lib.knobs import Knobs


class PushSession(FiMegaSession):
    repeatable = False
    capturable = ""
    replayed_kernel = True
    kernel_note = "a graph replay of the whole round (stage and forward), since the library has no bare kernel"


class PushBackend(FiMegaBackend):
    name = "sm90_push_fp8"
    config_class = "Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig"
    session = PushSession
    dispatch = "fp8"
    number_format = "fp8"
    id_dtype = "int32"
    packages = ("apache-tvm-ffi",)

    def dispatch_dtype(self, knobs: Knobs) -> str:
        return str(given_knobs(self.name, knobs).get("payload_dtype", self.dispatch))

    def combine_dtype(self, knobs: Knobs) -> str:
        return str(given_knobs(self.name, knobs).get("combine_dtype", "fp8"))

    def shape_reason(self, variant: Variant, problem: Problem, knobs: Knobs) -> str:
        return push_reason(problem, fused=bool(given_knobs(self.name, knobs).get("fuse_fc1_epilogue")))

    def buffer_bytes(self, problem: Problem) -> int:
        return push_bytes(problem)

    def config(self, variant: Variant, problem: Problem, knobs: Knobs) -> dict[str, Any]:
        """init_timeout_s becomes the process group's own time-out, so it has to cover what the harness allows."""
        seconds = float(knobs.setup_timeout_s + knobs.timeout_s)
        base = super().config(variant, problem, knobs) | {"init_timeout_s": seconds}
        return base | given_knobs(self.name, knobs)
