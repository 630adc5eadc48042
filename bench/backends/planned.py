"""Backends that have their place in the plan and no adapter yet: each case becomes a row with an honest reason.

A library's entry leaves this table when its adapter arrives. Hardware needs are those of docs/backends.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lib.contract import OK, Backend, Engine, Group, Support, Unsupported, Variant, unsupported
from lib.plan import needs_packages
from lib.problem import Problem

if TYPE_CHECKING:
    from lib.knobs import Knobs
    from lib.machine import Machine

NO_ADAPTER = "no adapter in this version"
HOPPER, BLACKWELL = (9, 0), (10, 0)
BF16_BYTES, FP8_BYTES, FP4_BYTES = 2, 1, 0.5


@dataclass(frozen=True)
class Needs:
    """Hardware and packages. `sm` = lowest compute capability; `sm_major` = the only major version that will do."""

    vendor: str = "cuda"
    sm: tuple[int, int] = HOPPER
    sm_major: int | None = None
    packages: tuple[tuple[str, str], ...] = ()
    weight_bytes: float = 0  # bytes an element of the expert weights; 0 in section comm

    def hardware(self, machine: Machine) -> Support:
        if machine.vendor != self.vendor:
            needed = "an NVIDIA GPU" if self.vendor == "cuda" else "an AMD GPU (ROCm)"
            return unsupported(f"needs {needed}, this machine has {'CUDA GPUs' if machine.gpus else 'no GPU'}")
        sm = machine.sm
        if sm is not None and (sm < self.sm or (self.sm_major is not None and sm[0] != self.sm_major)):
            wanted = f"sm_{self.sm_major}x" if self.sm_major is not None else f"sm_{self.sm[0]}{self.sm[1]} or newer"
            return unsupported(f"needs {wanted}, this is sm_{sm[0]}{sm[1]}")
        return OK


class PlannedBackend(Backend):
    """`make(knobs)` lists the variants. The reason says first that no adapter is there, then what else is missing."""

    def __init__(self, name: str, family: str, needs: Needs, make: Callable[[Knobs], list[Variant]]) -> None:
        self.name, self.family, self.needs, self.make = name, family, needs, make

    def variants(self, knobs: Knobs) -> list[Variant]:
        return self.make(knobs)

    def supports(self, variant: Variant, machine: Machine, problem: Problem, knobs: Knobs) -> Support:
        hardware = self.needs.hardware(machine).reason
        reason = f"{NO_ADAPTER}; {hardware}" if hardware else NO_ADAPTER
        return needs_packages(machine, dict(self.needs.packages), unsupported(reason))

    def memory_bytes(self, variant: Variant, problem: Problem) -> int:
        copies = problem.tokens * min(problem.topk, problem.world) + problem.tokens
        return problem.weight_bytes(self.needs.weight_bytes) + copies * problem.hidden * BF16_BYTES * 2

    def open(self, group: Group, variant: Variant, capacity: Problem, knobs: Knobs) -> Engine:
        raise Unsupported(NO_ADAPTER)


DEEPEP = ("deep_ep", "DeepEP (https://github.com/deepseek-ai/DeepEP)")
FLASHINFER = ("flashinfer", "FlashInfer (pip install flashinfer-python)")
DEEPGEMM = ("deep_gemm", "DeepGEMM (https://github.com/deepseek-ai/DeepGEMM)")
NCCL_EP = ("nccl.ep", "NCCL-EP (pip install nccl-extensions)")
MSCCLPP = ("mscclpp", "MSCCL++ with mscclpp.ep (https://github.com/microsoft/mscclpp)")
MORI = ("mori", "MORI (https://github.com/ROCm/mori)")
CUTEDSL = ("cutlass", "CUTLASS DSL (pip install nvidia-cutlass-dsl)")


def comm_variants(
    name: str, knobs: Knobs, algo: str = "", fp8: bool = True, sms: bool = True, handle: str = ""
) -> list[Variant]:
    """`name` once a dispatch dtype and SM budget; what the library has no choice of is left as it is."""
    family = name.partition("+")[0]
    comm = family.removesuffix(f"_{algo}") if algo else family
    return [
        Variant(name, comm, "", algo, dtype, "bf16", budget, handle=handle)
        for dtype in (knobs.dispatch_dtype if fp8 else ("bf16",))
        for budget in (knobs.num_sms if sms else (None,))
    ]


def deepep_v2(knobs: Knobs) -> list[Variant]:
    return comm_variants("deepep_v2", knobs) + comm_variants("deepep_v2+cached", knobs, handle="cached")


def nccl_ep(knobs: Knobs) -> list[Variant]:
    found = [comm_variants(f"nccl_ep_{algo}", knobs, algo, fp8=algo == "ll", sms=False) for algo in knobs.algos]
    return [variant for variants in found for variant in variants]


def mscclpp(knobs: Knobs) -> list[Variant]:
    return [v for algo in knobs.algos for v in comm_variants(f"mscclpp_{algo}", knobs, algo, fp8=algo == "ll")]


def mori(knobs: Knobs) -> list[Variant]:
    """`intranode` and `v1` have no two modes; `v1_ll` and `async_ll` belong to ll."""
    found = comm_variants("mori+intranode", knobs, sms=False) + comm_variants("mori+v1", knobs, sms=False)
    for kernel in ("v1_ll", "async_ll") if "ll" in knobs.algos else ():
        found += comm_variants(f"mori+{kernel}", knobs, "ll", sms=False)
    return found


def flashinfer(knobs: Knobs) -> list[Variant]:
    return comm_variants("flashinfer", knobs, fp8=False, sms=False)


def comm_backends() -> list[Backend]:
    return [
        PlannedBackend("deepep_v2", "deepep_v2", Needs(packages=(DEEPEP,)), deepep_v2),
        PlannedBackend("nccl_ep", "nccl_ep", Needs(packages=(NCCL_EP,)), nccl_ep),
        PlannedBackend("flashinfer", "flashinfer", Needs(packages=(FLASHINFER,)), flashinfer),
        PlannedBackend("mscclpp", "mscclpp", Needs(packages=(MSCCLPP,)), mscclpp),
        PlannedBackend("mori", "mori", Needs(vendor="rocm", packages=(MORI,)), mori),
    ]


def fi_mega_variants(name: str, knobs: Knobs) -> list[Variant]:
    """MEGA_IKR is the cutedsl pair's, MEGA_COMBINE_DTYPE nvfp4's; the other backends stay as they are."""
    options: tuple[tuple[str, str], ...] = ()
    suffix, combine = "", "bf16"
    if knobs.mega_ikr and name in ("mxfp8_cutedsl", "nvfp4_cutedsl"):
        suffix, options = "+ikr", (("MEGA_IKR", "1"),)
    elif knobs.mega_combine_dtype != "bf16" and name == "nvfp4_cutedsl":
        combine = knobs.mega_combine_dtype
        suffix, options = f"+combine_{combine}", (("MEGA_COMBINE_DTYPE", combine),)
    dtype = {"mxfp8_cutedsl": "mxfp8", "nvfp4_cutedsl": "nvfp4"}.get(name, "fp8")
    return [Variant(f"{name}{suffix}", "flashinfer", f"{name}{suffix}", "", dtype, combine, options=options)]


def fi_mega_backends() -> list[Backend]:
    needs = {
        "deep_gemm_mega": Needs(sm=BLACKWELL, sm_major=10, packages=(FLASHINFER, DEEPGEMM), weight_bytes=FP4_BYTES),
        "mxfp8_cutedsl": Needs(sm=BLACKWELL, sm_major=10, packages=(FLASHINFER, CUTEDSL), weight_bytes=FP8_BYTES),
        "nvfp4_cutedsl": Needs(sm=BLACKWELL, sm_major=10, packages=(FLASHINFER, CUTEDSL), weight_bytes=FP4_BYTES),
        "sm90_push_fp8": Needs(sm_major=9, packages=(FLASHINFER,), weight_bytes=FP8_BYTES),
        "sm90_pull_fp8": Needs(sm_major=9, packages=(FLASHINFER, CUTEDSL), weight_bytes=FP8_BYTES),
    }
    return [
        PlannedBackend(name, "flashinfer", need, lambda knobs, name=name: fi_mega_variants(name, knobs))  # type: ignore[misc]
        for name, need in needs.items()
    ]
