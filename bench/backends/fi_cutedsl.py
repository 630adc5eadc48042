"""Backends `sm90_pull_fp8`, `mxfp8_cutedsl`, `nvfp4_cutedsl`: FlashInfer's CuTe-DSL kernels over NVSHMEM, one pattern.

One persistent kernel pulls tokens from its peers, multiplies, and brings results back (a row a chosen expert, summed at
the source; with MEGA_IKR=1 added there by atomics as they arrive). Staging quantises into the symmetric buffers, so
compute may run again on it. TIMING=kernel is the library's launch thunk: no argument checks, no output copy; with
MEGA_IKR=1 it sets the output to 0 first, as the kernel requires.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.backends.fi_limits import IKR_EMPTY, cutedsl_bytes, has_empty_rank
from bench.backends.fi_mega import FiMegaBackend, FiMegaSession, given_knobs, imported
from lib.contract import Missing, Variant
from lib.problem import Problem

if TYPE_CHECKING:
    import torch

    from lib.knobs import Knobs

KERNEL_SOURCES = "flashinfer.moe_ep.kernel_src."
SM100_SOURCES = ("cutedsl_megamoe", "sm100.cutedsl_megamoe")  # 0.6.18, 0.7
SM90_SOURCES = ("sm90.pull_style_cutedsl_megakernel",)
# An e4m3 block scale below 2**-6 loses bits. Weights of std H**-0.5 are brought to about 1 by a power of two (exact in
# bf16), which fc1_alpha and fc2_alpha take out again; FC1's output, weighted and so about 1/K, by fc1_norm_const.
FC1_NORM = 16.0


def power_of_two(width: int) -> float:
    """The power of two nearest to sqrt(width)."""
    return float(2 ** round(math.log2(width) / 2))


class CutedslSession(FiMegaSession):
    capturable = ""
    cold_kernel = True  # FlashInfer's published kernel figures: 300 MB written over between launches

    def bare_kernel(self) -> Callable[[], None]:
        self._stage()
        workspace, backend = self.layer._workspace, self.engine.backend
        assert isinstance(backend, CutedslBackend)
        first, second = self.engine.weights[:2]
        thunk = backend.thunk_maker()(first, second, workspace)
        self.out = workspace.output_activation[: self.inputs.x.shape[0]]
        return thunk


class CutedslBackend(FiMegaBackend):
    session = CutedslSession
    packages = ("nvidia-cutlass-dsl", "nvshmem4py-cu13", "nvidia-nvshmem-cu13")
    thunk: str
    sources: tuple[str, ...]

    def thunk_maker(self) -> Any:
        """The launch-thunk function of whichever version is installed."""
        for source in self.sources:
            try:
                module = importlib.import_module(KERNEL_SOURCES + source)
            except ModuleNotFoundError as error:
                if not KERNEL_SOURCES.startswith(str(error.name)) and not (error.name or "").endswith(source):
                    raise
                continue
            return getattr(module, self.thunk)
        raise Missing(f"FlashInfer has no {self.thunk} in {' or '.join(self.sources)}")

    def check_imports(self) -> None:
        imported("nvshmem.core (nvshmem4py)", lambda: importlib.import_module("nvshmem.core"))
        imported("cutlass (nvidia-cutlass-dsl)", lambda: importlib.import_module("cutlass"))

    def shape_reason(self, variant: Variant, problem: Problem, knobs: Knobs) -> str:
        ikr = knobs.mega_ikr and self.name == "sm90_pull_fp8"
        return IKR_EMPTY if ikr and has_empty_rank(problem) else ""

    def buffer_bytes(self, problem: Problem) -> int:
        return cutedsl_bytes(problem)

    def env(self, variant: Variant, problem: Problem, knobs: Knobs) -> dict[str, str]:
        """On one node NVSHMEM needs no NIC; without this it may stop where none is found."""
        transport = os.environ.get("NVSHMEM_REMOTE_TRANSPORT", "none")
        return super().env(variant, problem, knobs) | {"NVSHMEM_REMOTE_TRANSPORT": transport}

    def config(self, variant: Variant, problem: Problem, knobs: Knobs) -> dict[str, Any]:
        base = super().config(variant, problem, knobs)
        if knobs.mega_ikr:
            base["in_kernel_fc2_reduce"] = True
        return base | self.tuning(knobs)

    def tuning(self, knobs: Knobs) -> dict[str, Any]:
        """MEGA_KNOBS as this config takes it: unset = the heuristic (the knob cache is off), auto, or an object.

        From 0.7 the config only permits the in-kernel reduce, and an object decides, so it is named there too.
        """
        if knobs.mega_knobs == "auto":
            return {"knobs": "auto"}
        given = given_knobs(self.name, knobs)
        if given and knobs.mega_ikr:
            given["in_kernel_fc2_reduce"] = True
        return {"knobs": given} if given else {}


class PullBackend(CutedslBackend):
    """Hopper. Scales by blocks, which needs no calibration; per-tensor scales would have to be calibrated offline."""

    name = "sm90_pull_fp8"
    config_class = "Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig"
    thunk, sources = "hopper_fp8_mega_launch_thunk", SM90_SOURCES
    dispatch = "fp8"
    number_format = "fp8_interleaved"

    def config(self, variant: Variant, problem: Problem, knobs: Knobs) -> dict[str, Any]:
        return super().config(variant, problem, knobs) | {"fp8_scale_mode": "blockwise"}

    def tuning(self, knobs: Knobs) -> dict[str, Any]:
        """0.6.18 has no tuner here: the object's names are fields of the config."""
        return given_knobs(self.name, knobs)


class Mxfp8Backend(CutedslBackend):
    name = "mxfp8_cutedsl"
    config_class = "Sm100_Mxfp8_Mxfp8_Bf16_Cutedsl_MegaMoeConfig"
    thunk, sources = "mxfp8_mega_launch_thunk", SM100_SOURCES
    dispatch = number_format = "mxfp8"


class Nvfp4Backend(CutedslBackend):
    name = "nvfp4_cutedsl"
    config_class = "Sm100_Nvfp4_Nvfp4_Bf16_Cutedsl_MegaMoeConfig"
    thunk, sources = "nvfp4_mega_launch_thunk", SM100_SOURCES
    dispatch, number_format = "nvfp4", "nvfp4_pow2"

    def config(self, variant: Variant, problem: Problem, knobs: Knobs) -> dict[str, Any]:
        return super().config(variant, problem, knobs) | {
            "combine_dtype": variant.combine_dtype,
            "fc1_alpha": 1 / power_of_two(problem.hidden),
            "fc1_norm_const": FC1_NORM,
            "fc2_alpha": 1 / (FC1_NORM * power_of_two(problem.inter)),
        }

    def scale_weights(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        w13.mul_(power_of_two(w13.shape[2]))
        w2.mul_(power_of_two(w2.shape[2]))
