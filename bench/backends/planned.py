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
            return unsupported(f"needs {needed}, this machine has {machine.has_what}")
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
        if reason := variant.option("skipped"):
            return Support("skipped", reason)
        hardware = self.needs.hardware(machine).reason or variant.option("unsupported")
        reason = f"{NO_ADAPTER}; {hardware}" if hardware else NO_ADAPTER
        return needs_packages(machine, dict(self.needs.packages), unsupported(reason))

    def memory_bytes(self, variant: Variant, problem: Problem) -> int:
        copies = problem.tokens * min(problem.topk, problem.world) + problem.tokens
        return problem.weight_bytes(self.needs.weight_bytes) + copies * problem.hidden * BF16_BYTES * 2

    def open(self, group: Group, variant: Variant, capacity: Problem, knobs: Knobs) -> Engine:
        raise Unsupported(NO_ADAPTER)


DEEPEP = ("deep_ep", "DeepEP (https://github.com/deepseek-ai/DeepEP)")
VLLM = ("vllm", "vLLM (pip install vllm)")
FLASHINFER = ("flashinfer", "FlashInfer (pip install flashinfer-python)")
DEEPGEMM = ("deep_gemm", "DeepGEMM (https://github.com/deepseek-ai/DeepGEMM)")


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




def comm_backends() -> list[Backend]:
    return [
    ]


def split_variants(experts: str, knobs: Knobs) -> list[Variant]:
    found = []
    for algo in knobs.algos:
        refused = (algo, experts) == ("ll", "trtllm")
        options = (("unsupported", "ALGO=ll delivers batched experts, which trtllm does not take"),) if refused else ()
        found.append(Variant(f"deepep_{algo}+{experts}", "deepep", experts, algo, "fp8", "bf16", options=options))
    return found


def split_backends() -> list[Backend]:
    needs = {
        "deepgemm": Needs(packages=(VLLM, DEEPEP), weight_bytes=FP8_BYTES),
        "triton": Needs(packages=(VLLM, DEEPEP), weight_bytes=FP8_BYTES),
        "trtllm": Needs(sm=BLACKWELL, sm_major=10, packages=(VLLM, DEEPEP, FLASHINFER), weight_bytes=FP8_BYTES),
    }
    return [
        PlannedBackend(name, "vllm", need, lambda knobs, name=name: split_variants(name, knobs))  # type: ignore[misc]
        for name, need in needs.items()
    ]


def vllm_mega_variants(knobs: Knobs) -> list[Variant]:
    left_out = not knobs.vllm_mega and knobs.all_sections
    options = (("skipped", "VLLM_MEGA=0"),) if left_out else ()
    return [Variant("vllm_deep_gemm_mega", "vllm", "deep_gemm_mega", "", "fp8", "bf16", options=options)]


def vllm_mega_backends() -> list[Backend]:
    needs = Needs(sm=BLACKWELL, sm_major=10, packages=(VLLM, DEEPGEMM), weight_bytes=FP4_BYTES)
    return [PlannedBackend("vllm_deep_gemm_mega", "vllm", needs, vllm_mega_variants)]
