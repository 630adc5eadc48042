"""What FlashInfer's mega kernels take, and how much memory. Standard library only: the coordinator plans with it.

Limits are upstream's own checks, read in the wheels 0.6.18.post1 and 0.7.4 (docs/backends.md names the files). Without
a verdict here the library would start NVSHMEM on a GPU that can't run its kernel before it says so (0.6.18).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lib.contract import OK, Support, missing, unsupported
from lib.plan import needs_packages

if TYPE_CHECKING:
    from lib.machine import Machine
    from lib.problem import Problem

FLASHINFER, FLASHINFER_MIN = "flashinfer-python", "0.6.18"  # the first release with these mega kernels
CUTLASS_DSL = "nvidia-cutlass-dsl"
HOW = {
    "flashinfer": "FlashInfer (pip install flashinfer-python)",
    "cutlass": "CUTLASS DSL (pip install nvidia-cutlass-dsl)",
    "nvshmem": "NVSHMEM's Python (pip install nvshmem4py-cu13)",
    "deep_gemm": "DeepGEMM (https://github.com/deepseek-ai/DeepGEMM)",
}
BF16_BYTES, FP32_BYTES = 2, 4
SCALE_BLOCK = 128
PUSH_TOPK = (1, 2, 4, 6, 8)  # Sm90PushPipe: the reduce kernel's instances
PUSH_RANKS_MAX = 32
PUSH_INTER_MAX = 16384  # silu_mul_quant holds a row in shared memory; the fused epilogue does not
PUSH_ROUTES_MAX = 2**31 - 1  # the packed reservation counter
IKR_EMPTY = "MEGA_IKR=1: a rank without tokens does not launch, and the others would wait for it"


@dataclass(frozen=True)
class Needs:
    """One kernel's hardware, packages and shapes; `sm_major` is the only major version that it is built for.

    kept_bytes: bytes an element of the converted weights, scales included · dsl: the oldest CUTLASS DSL.
    """

    sm: tuple[int, int]
    exactly: bool
    modules: tuple[str, ...]
    multiple: int
    kept_bytes: float
    dsl: str = ""

    def verdict(self, machine: Machine, problem: Problem) -> Support:
        """Hardware, then shape; a package that is not there is named in either case; last the versions."""
        packages = {name: HOW[name] for name in self.modules}
        if why := self._hardware(machine) or self._shape(problem):
            return needs_packages(machine, packages, unsupported(why))
        found = needs_packages(machine, packages)
        return found if not found.ok else self._versions(machine)

    def _hardware(self, machine: Machine) -> str:
        if machine.vendor != "cuda":
            return "needs an NVIDIA GPU, this machine has no GPU"
        sm = machine.sm
        if sm is None or (sm == self.sm if self.exactly else sm[0] == self.sm[0]):
            return ""
        return f"needs sm_{self.sm[0]}{self.sm[1]}, this is sm_{sm[0]}{sm[1]}"

    def _shape(self, problem: Problem) -> str:
        if problem.nodes > 1:
            return "is not run over several nodes in this version"
        for name, value in (("HIDDEN", problem.hidden), ("INTER", problem.inter)):
            if value % self.multiple:
                below = value - value % self.multiple
                works = " or ".join(str(v) for v in (below, below + self.multiple) if v)
                return f"{name}={value}: must be a multiple of {self.multiple}; {works} would do"
        return ""

    def _versions(self, machine: Machine) -> Support:
        wanted = [(FLASHINFER, FLASHINFER_MIN), *([(CUTLASS_DSL, self.dsl)] if self.dsl else [])]
        for package, oldest in wanted:
            found = machine.version(package)
            if found and release(found) < release(oldest):
                return missing(f"needs {package} {oldest} or newer, found {found}")
        if not machine.has("flashinfer.moe_ep"):
            found = machine.version(FLASHINFER) or "one without it"
            return missing(f"needs {FLASHINFER} {FLASHINFER_MIN} or newer (flashinfer.moe_ep), found {found}")
        return OK


def release(version: str) -> tuple[int, ...]:
    """The leading whole numbers of a version: 0.6.18.post1 -> (0, 6, 18)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


CUTEDSL = ("flashinfer", "cutlass", "nvshmem")
NEEDS = {
    "deep_gemm_mega": Needs((10, 0), False, ("flashinfer", "deep_gemm"), 128, 1 / 2 + 1 / 32),
    "mxfp8_cutedsl": Needs((10, 0), False, CUTEDSL, 64, 1 + 1 / 32, dsl="4.5.2"),
    "nvfp4_cutedsl": Needs((10, 0), False, CUTEDSL, 64, 1 / 2 + 1 / 16, dsl="4.5.2"),
    "sm90_pull_fp8": Needs((9, 0), True, CUTEDSL, 128, 1, dsl="4.5.0"),
    "sm90_push_fp8": Needs((9, 0), False, ("flashinfer",), 128, 1),
}


def push_reason(problem: Problem, fused: bool = False) -> str:
    """What push refuses beside the common limits, "" if nothing."""
    if problem.topk not in PUSH_TOPK:
        return f"TOPK={problem.topk}: takes {', '.join(map(str, PUSH_TOPK))}"
    if problem.world > PUSH_RANKS_MAX:
        return f"takes at most {PUSH_RANKS_MAX} ranks, this is {problem.world}"
    if problem.inter > PUSH_INTER_MAX and not fused:
        return f"INTER={problem.inter}: takes at most {PUSH_INTER_MAX} unless fuse_fc1_epilogue is set (MEGA_KNOBS)"
    if (routes := problem.world * capacity_of(problem) * problem.topk) > PUSH_ROUTES_MAX:
        return f"TOKENS={problem.tokens}: {routes} routes a rank, at most {PUSH_ROUTES_MAX} can be counted"
    return ""


def capacity_of(problem: Problem) -> int:
    """max_tokens_per_rank of a point: its own tokens, and at least the 1 that the library asks for."""
    return max(problem.tokens, 1)


def has_empty_rank(problem: Problem) -> bool:
    from lib.routing_spec import parse_routing

    return problem.tokens == 0 or parse_routing(problem.routing).empty is not None


def conversion_bytes(problem: Problem, kept_bytes: float) -> int:
    """The most that opening takes: bf16 weights, a re-ordered copy of them, and the converted ones (twice: stacked)."""
    return problem.weight_bytes(2 * BF16_BYTES + 2 * kept_bytes)


def push_bytes(problem: Problem) -> int:
    """Sm90PushPipe's window and Sm90PushMoERunner's buffers by their own arithmetic: every route may come here."""
    tokens, hidden, inter = capacity_of(problem), problem.hidden, problem.inter
    routes = problem.world * tokens * problem.topk
    row = hidden + hidden // SCALE_BLOCK * FP32_BYTES
    window = problem.world * tokens * row + routes * 16 + tokens * problem.world * row
    compute = routes * (row + 2 * inter * BF16_BYTES + inter + hidden * BF16_BYTES + 20)
    return window + compute


def cutedsl_bytes(problem: Problem) -> int:
    """Symmetric buffers: staged rows, a pool for every route, both products' rows, and the combine plane [T, K, H]."""
    tokens, hidden, inter = capacity_of(problem), problem.hidden, problem.inter
    routes = problem.world * tokens * problem.topk
    pool = routes * (hidden * BF16_BYTES + inter * BF16_BYTES)
    return pool + tokens * hidden * (problem.topk * BF16_BYTES + 4 * FP32_BYTES)
