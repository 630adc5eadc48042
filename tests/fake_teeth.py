"""Sessions whose result is broken, most of them in a way that one look would miss: what the check has to see."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from bench.backends.torch_a2a import TorchEngine
from lib.contract import Phase
from lib.problem import Inputs, Problem
from tests.fake_session import FakeSession, in_timing

if TYPE_CHECKING:
    import torch


class CorruptsAReceivedRow(FakeSession):
    def _dispatch(self) -> None:
        super()._dispatch()
        if self.rank == 1 and self.rows is not None:
            self.rows.view(_bits(self.rows))[-1, -1] ^= 1


class CorruptsTheOutput(FakeSession):
    def _combine(self) -> None:
        super()._combine()
        if self.rank == 1:
            self.out[0, 20] += 1.0


class ReturnsItsInput(FakeSession):
    """With identity experts and weights that sum to 1, sum(w * x) would be just that."""

    def _combine(self) -> None:
        self.out.copy_(self.inputs.x)


class CombinesOnce(FakeSession):
    """From its second call on the combine leaves what is there, where poison does not reach."""

    combined = False

    def _combine(self) -> None:
        if not self.combined:
            super()._combine()
        self.combined = True

    def poison(self) -> None:
        kept = self.out.clone()
        super().poison()
        self.out.copy_(kept)


class ShowsTheLastOutput(FakeSession):
    """Rank 1 gives the output of the call before, which poison does not reach."""

    shown = latest = None

    def _combine(self) -> None:
        super()._combine()
        self.shown, self.latest = self.latest, self.out.clone()

    def output(self) -> torch.Tensor:
        return self.shown if self.rank == 1 and self.shown is not None else self.out


class ReplaysTheLastDispatch(FakeSession):
    """Rank 1 passes on the rows of the dispatch before: the same counts and ids, the wrong payload."""

    latest: torch.Tensor | None = None

    def _dispatch(self) -> None:
        super()._dispatch()
        assert self.rows is not None
        if self.rank == 1:
            replayed, self.latest = self.latest, self.rows.clone()
            self.rows = self.rows if replayed is None else replayed


class WeighsTwice(FakeSession):
    def _identity(self) -> None:
        super()._identity()
        assert self.results is not None
        self.results *= self.local_weights.sum(1, keepdim=True)

    def _experts(self) -> None:
        self.results = self.engine.experts(self._received_bf16(), self.local_ids, self.local_weights.square())


class SkipsTimedCalls(FakeSession):
    """Honest whenever the check looks, and in the phases; only the calls that give the total do nothing."""

    def call(self) -> None:
        if not in_timing():
            super().call()


class SkipsTimedDispatch(FakeSession):
    """Between dispatch and combine of section comm stands what was staged before, so the output stays right."""

    def _dispatch(self) -> None:
        if not in_timing():
            super()._dispatch()


class SkipsTimedCombine(FakeSession):
    def _combine(self) -> None:
        if not in_timing():
            super()._combine()


class SkipsTimedPhases(FakeSession):
    """The same in the series that gives the phases."""

    def __init__(self, engine: TorchEngine, problem: Problem, inputs: Inputs) -> None:
        super().__init__(engine, problem, inputs)
        self.phases = [Phase(phase.name, self._unless_timed(phase.fn), phase.timed) for phase in self.phases]

    @staticmethod
    def _unless_timed(fn: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            if not in_timing():
                fn()

        return run


class GivesUpOnceTimed(FakeSession):
    """From the first timed call on, every call does nothing."""

    tired = False

    def call(self) -> None:
        self.tired = self.tired or in_timing()
        if not self.tired:
            super().call()


class ChangesInputsInTiming(FakeSession):
    """By one bit of one gate weight, once."""

    changed = False

    def call(self) -> None:
        super().call()
        if in_timing() and self.rank == 1 and not self.changed:
            weights = self.inputs.topk_weights
            weights.view(_bits(weights))[0, 0] ^= 1
            self.changed = True


class DriftsInTiming(FakeSession):
    """One bit of one element differs in whatever is computed while the clock runs."""

    def _combine(self) -> None:
        super()._combine()
        if in_timing() and self.rank == 1:
            self.out.view(_bits(self.out))[0, 0] ^= 1


class PhasesTellAnotherStory(FakeSession):
    """The staged decomposition gives another result than the call that it explains."""

    def __init__(self, engine: TorchEngine, problem: Problem, inputs: Inputs) -> None:
        super().__init__(engine, problem, inputs)
        self.phases[-1] = Phase("combine", self._combine_half)

    def _combine_half(self) -> None:
        self._combine()
        self.out *= 0.5


def _bits(tensor: torch.Tensor) -> torch.dtype:
    """The integer type as wide as the tensor's, to flip a bit."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
