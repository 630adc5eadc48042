"""Backend `deep_gemm_mega`: FlashInfer's moe_ep over DeepGEMM's fused kernel, fp8 activations by fp4 weights (sm_100).

The library shows no launch of its own: TIMING=kernel repeats its compute step after one staging.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from bench.backends.fi_limits import cutedsl_bytes
from bench.backends.fi_mega import FiMegaBackend, FiMegaSession, imported
from lib.contract import Missing
from lib.problem import Problem

KERNEL = "fp8_fp4_mega_moe"


class DeepGemmMegaSession(FiMegaSession):
    capturable = ""
    cold_kernel = True
    kernel_note = "the library call repeated after one staging, since the library has no bare kernel"

    def bare_kernel(self) -> Callable[[], None]:
        self._stage()
        return self._forward


class DeepGemmMegaBackend(FiMegaBackend):
    name = "deep_gemm_mega"
    config_class = "Sm100_Fp8_Fp4_Bf16_Deepgemm_MegaMoeConfig"
    session = DeepGemmMegaSession
    dispatch = "mxfp8"
    number_format = "mxfp8_mxfp4"

    def check_imports(self) -> None:
        deep_gemm = imported("deep_gemm", lambda: importlib.import_module("deep_gemm"))
        if not hasattr(deep_gemm, KERNEL):
            raise Missing(f"deep_gemm has no {KERNEL}: this DeepGEMM is too old or not built for sm_100")

    def buffer_bytes(self, problem: Problem) -> int:
        """As the cutedsl kernels': the same symmetric buffers, [T, K, H] to combine."""
        return cutedsl_bytes(problem)
