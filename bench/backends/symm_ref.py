"""Backend `symm` of section ref: the experts of `torch` between dispatch and combine of `symm_ht`.

The received rows are read where dispatch left them and the experts' results are what combine pushes back, so against
`torch` the exchange alone differs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bench.backends.symm import BF16_BYTES, SymmBackend, SymmEngine, SymmSession
from bench.backends.torch_a2a import TorchBackend, TorchEngine
from lib.contract import Group, Phase, Variant
from lib.problem import Inputs, Problem, local_weights

if TYPE_CHECKING:
    from lib.knobs import Knobs


class SymmMoeSession(SymmSession):
    """Dispatch, experts and combine. Grouped matmuls take the rows that came, so the host reads how many."""

    kind = "moe"
    capturable = "the host reads the receive counts to size the experts' matmuls"
    kernels = {"call": [""]}  # noqa: RUF012 - the experts are PyTorch's kernels, of many names

    def __init__(self, engine: SymmMoeEngine, problem: Problem, inputs: Inputs) -> None:
        super().__init__(engine, problem, inputs)
        self.torch_engine = engine.torch_engine
        self.phases = [
            Phase("dispatch", self._dispatch),
            Phase("experts", self._identity, blocks_host=True),
            Phase("combine", self._combine),
        ]

    def call(self) -> None:
        self._dispatch()
        self._identity()
        self._combine()

    def _identity(self) -> None:
        import torch

        rows, views = self.arrived(), self.arena.views
        staged = self.place(torch.Size((len(views["rows"]), self.problem.hidden)))
        staged[rows] = self.torch_engine.experts(views["rows"][rows], views["ids"][rows].long(), views["weights"][rows])

    def poison(self) -> None:
        super().poison()
        if self.staged is not None:
            self.staged.fill_(float("nan"))


class SymmMoeEngine(SymmEngine):
    """The arena, and this rank's weights as `torch` keeps them."""

    def __init__(self, group: Group, variant: Variant, capacity: Problem) -> None:
        super().__init__(group, variant, capacity)
        weights = local_weights(capacity, group.rank, group.device)
        self.torch_engine = TorchEngine(group, variant, weights, capacity.local_experts)

    def bind(self, problem: Problem, inputs: Inputs) -> SymmMoeSession:
        return SymmMoeSession(self, problem, inputs)


class SymmMoeBackend(SymmBackend):
    def variants(self, knobs: Knobs) -> list[Variant]:
        base = Variant("symm", comm="symm", compute_kernel="torch_grouped_mm", algo="ht", layout="token_major")
        return [replace(base, dispatch_dtype="bf16", combine_dtype="bf16")]

    def memory_bytes(self, variant: Variant, problem: Problem) -> int:
        experts = TorchBackend(with_experts=True)
        row = problem.world * problem.tokens * problem.hidden * BF16_BYTES
        return super().memory_bytes(variant, problem) + experts.memory_bytes(variant, problem) - 4 * row

    def open(self, group: Group, variant: Variant, capacity: Problem, knobs: Knobs) -> SymmMoeEngine:
        return SymmMoeEngine(group, variant, capacity)
