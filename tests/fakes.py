"""The real torch adapter with one thing broken each, chosen by the backend's name; and the honest one, as a control.

FAULTS break a run, TEETH break a result. A fake breaks at the token counts that it names, so that the points of one
variant meet one fault after the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.backends.torch_a2a import TorchBackend, TorchEngine, TorchSession
from lib import guard
from lib.contract import Group, Variant
from lib.problem import Inputs, Problem
from tests import fake_faults as faults
from tests import fake_profiler as profiler
from tests import fake_teeth as teeth
from tests.fake_session import FakeSession, folder

if TYPE_CHECKING:
    from lib.knobs import Knobs

LIST = "MOE_EP_FAKES"  # the fakes of a run, by name
BOUND = "bound.jsonl"  # a line a session that was bound


def _nothing(group: Group) -> None:
    """What an honest open and close do beside their work."""


@dataclass(frozen=True)
class Fake:
    """`at` {tokens: session} breaks those points only; `always` is every other point's session."""

    name: str
    always: type[TorchSession] = FakeSession
    at: Mapping[int, type[TorchSession]] = field(default_factory=dict)
    opening: Callable[[Group], None] = _nothing
    closing: Callable[[Group], None] = _nothing
    isolation: str = "variant"
    family: str = "torch"


TEETH = {
    "corrupts_a_received_row": teeth.CorruptsAReceivedRow,
    "corrupts_the_output": teeth.CorruptsTheOutput,
    "returns_its_input": teeth.ReturnsItsInput,
    "combines_once": teeth.CombinesOnce,
    "shows_the_last_output": teeth.ShowsTheLastOutput,
    "replays_the_last_dispatch": teeth.ReplaysTheLastDispatch,
    "weighs_twice": teeth.WeighsTwice,
    "skips_timed_calls": teeth.SkipsTimedCalls,
    "skips_timed_combine": teeth.SkipsTimedCombine,
    "skips_timed_dispatch": teeth.SkipsTimedDispatch,
    "skips_timed_phases": teeth.SkipsTimedPhases,
    "gives_up_once_timed": teeth.GivesUpOnceTimed,
    "changes_inputs_in_timing": teeth.ChangesInputsInTiming,
    "drifts_in_timing": teeth.DriftsInTiming,
    "phases_tell_another_story": teeth.PhasesTellAnotherStory,
}
FAULTS = [
    Fake("honest"),
    Fake("picky", at={1: faults.RaisesUnsupportedInBind}),
    Fake(
        "deadly",
        at={
            1: faults.DiesBesideACollective,
            2: faults.DiesBesideSleepers,
            3: faults.RaisesInTiming,
            4: teeth.CorruptsTheOutput,
        },
    ),
    Fake(
        "clinging",
        at={1: faults.RaisesInClose, 2: faults.HangsInClose, 3: faults.DiesInClose},
        closing=faults.raise_in_engine_close,
    ),
    Fake("stuck", at={1: faults.HangsInPython, 2: faults.HangsInC}),
    Fake("slow", at={2: faults.IsSlow}),
    Fake("far", at={1: faults.HangsInPython, 2: faults.DiesBesideACollective}),
    Fake("raises_in_open", opening=faults.raise_in_open),
    Fake("unsupported", opening=faults.raise_unsupported),
    Fake("missing", opening=faults.raise_missing),
    Fake("hangs_in_open", opening=faults.hang_in_open),
    Fake("swaps_the_routing", at={2: faults.SwapsTheRoutingFile}),
    Fake("isolated", isolation="point"),
    Fake("of_another_family", family="another"),
    Fake(
        "profiled",
        at={1: profiler.HasAProfiler, 2: profiler.HasABrokenProfiler, 3: profiler.BuiltWithoutProfiler}
        | {5: profiler.DiesInItsProfiler},
    ),
]
FAKES = {fake.name: fake for fake in [*FAULTS, *(Fake(name, always=session) for name, session in TEETH.items())]}


class FakeEngine(TorchEngine):
    fake: Fake

    @classmethod
    def like(cls, engine: TorchEngine, fake: Fake) -> FakeEngine:
        """The adapter's own engine, whatever it is made of, under this class."""
        made = cls.__new__(cls)
        vars(made).update(vars(engine), fake=fake, isolation=fake.isolation)
        return made

    def bind(self, problem: Problem, inputs: Inputs) -> TorchSession:
        say_bound(self.fake.name, problem.tokens, self.group.rank)
        return self.fake.at.get(problem.tokens, self.fake.always)(self, problem, inputs)

    def close(self) -> None:
        self.fake.closing(self.group)


def say_bound(fake: str, tokens: int, rank: int) -> None:
    """One line for the test: who I am, and every process that carries the run's mark beside me."""
    pids = {"pid": os.getpid(), "agent": os.getppid(), "marked": guard.marked_pids(os.environ[guard.RUN_MARK])}
    with (folder() / BOUND).open("a") as file:
        file.write(json.dumps({"fake": fake, "tokens": tokens, "rank": rank, **pids}) + "\n")


class FakeBackend(TorchBackend):
    def __init__(self, fake: Fake, with_experts: bool) -> None:
        super().__init__(with_experts)
        self.fake, self.name, self.family = fake, fake.name, fake.family

    def open(self, group: Group, variant: Variant, capacity: Problem, knobs: Knobs) -> FakeEngine:
        self.fake.opening(group)
        return FakeEngine.like(super().open(group, variant, capacity, knobs), self.fake)
