"""The real torch adapter with one thing broken each, chosen by the backend's name; and the honest one, as a control.

FAULTS break a run: what the coordinator has to survive. TEETH break a result: what the check has to see. A fake breaks
at the token counts that it names, so that one variant's points meet one fault after the other.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench.backends.torch_a2a import TorchBackend, TorchEngine, TorchSession
from lib import guard, timing
from lib.contract import Engine, Group, Missing, Phase, Unsupported, Variant
from lib.problem import Inputs, Problem

if TYPE_CHECKING:
    import torch

    from lib.knobs import Knobs

LIST = "MOE_EP_FAKES"  # the fakes of a run, by name
FOLDER = "MOE_EP_FAKE_DIR"  # where fakes leave words for the test, and find the test's
BOUND, SLOW, GO = "bound.jsonl", "slow", "go"  # who was bound when; "I am in mid timing"; "be slow no more"
ASLEEP_S = 600.0
POLL_S = 0.02


def folder() -> Path:
    return Path(os.environ[FOLDER])


def in_timing(*methods: str) -> bool:
    """Whether a timing method (one of these) is on the stack: what a cheat would find out by counting calls."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_globals["__name__"] == timing.__name__ and frame.f_code.co_name in (methods or timing.METHODS):
            return True
    return False


class FakeSession(TorchSession):
    """Honest; the fakes below change one method each."""

    @property
    def rank(self) -> int:
        return self.engine.group.rank


# --- faults of a session ----------------------------------------------------------------------------------------------


class DiesBesideACollective(FakeSession):
    """Rank 1 is killed while its peers wait for it in a collective."""

    def call(self) -> None:
        if in_timing() and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().call()


class DiesBesideSleepers(FakeSession):
    """Rank 1 is killed while its peers are in no collective: nothing but the agent's TERM tells them."""

    def call(self) -> None:
        if in_timing():
            if self.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(ASLEEP_S)
        super().call()


class RaisesInTiming(FakeSession):
    def call(self) -> None:
        if in_timing() and self.rank == 1:
            raise RuntimeError("the wire is cut\nand this line is for the log")
        super().call()


class RaisesUnsupportedInBind(FakeSession):
    def __init__(self, engine: TorchEngine, problem: Problem, inputs: Inputs) -> None:
        raise Unsupported(f"TOKENS={problem.tokens}: this library knows no such number")


class HangsInPython(FakeSession):
    """Rank 1 sleeps in Python, so the others wait for it in a collective."""

    def call(self) -> None:
        if in_timing() and self.rank == 1:
            hang_in_python()
        super().call()


class HangsInACollective(FakeSession):
    """Every rank waits for what the next one never sends."""

    def call(self) -> None:
        if in_timing():
            self.wait_for_what_never_comes()
        super().call()

    def wait_for_what_never_comes(self) -> None:
        import torch.distributed as dist

        dist.recv(self.out, src=(self.rank + 1) % self.problem.world, group=self.engine.group.pg)


class IsSlow(FakeSession):
    """Says so in a file, and takes forever, until it finds the file `go`."""

    def call(self) -> None:
        if in_timing():
            (folder() / f"{SLOW}_{self.rank}").touch()
            while not (folder() / GO).exists():
                time.sleep(POLL_S)
        super().call()


class RaisesInClose(FakeSession):
    def close(self) -> None:
        if self.rank == 1:
            raise RuntimeError("the session would not let go")


class HangsInClose(FakeSession):
    def close(self) -> None:
        if self.rank == 1:
            hang_in_python()


class DiesInClose(FakeSession):
    def close(self) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def hang_in_python() -> None:
    while True:
        time.sleep(ASLEEP_S)


# --- faults of open and of the engine's close -------------------------------------------------------------------------


def raise_in_open(group: Group) -> None:
    import torch.distributed as dist

    if group.rank == 1:
        raise OSError("no such device: fabric0\nand this line is for the log")
    dist.barrier(group=group.pg)


def raise_unsupported(group: Group) -> None:
    raise Unsupported("the fabric has no multicast")


def raise_missing(group: Group) -> None:
    raise Missing("libfabric >= 2 is not installed")


def hang_in_open(group: Group) -> None:
    import torch.distributed as dist

    if group.rank == 1:
        hang_in_python()
    dist.barrier(group=group.pg)


def raise_in_engine_close(group: Group) -> None:
    if group.rank == 0:
        raise RuntimeError("the engine would not let go")


# --- teeth: what the check has to see ---------------------------------------------------------------------------------


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


# --- the table --------------------------------------------------------------------------------------------------------


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
    "corrupts_a_received_row": CorruptsAReceivedRow,
    "corrupts_the_output": CorruptsTheOutput,
    "combines_once": CombinesOnce,
    "shows_the_last_output": ShowsTheLastOutput,
    "replays_the_last_dispatch": ReplaysTheLastDispatch,
    "weighs_twice": WeighsTwice,
    "skips_timed_calls": SkipsTimedCalls,
    "skips_timed_dispatch": SkipsTimedDispatch,
    "skips_timed_phases": SkipsTimedPhases,
    "gives_up_once_timed": GivesUpOnceTimed,
    "changes_inputs_in_timing": ChangesInputsInTiming,
    "drifts_in_timing": DriftsInTiming,
    "phases_tell_another_story": PhasesTellAnotherStory,
}
FAULTS = [
    Fake("honest"),
    Fake("deadly", at={1: DiesBesideACollective, 2: DiesBesideSleepers, 3: RaisesInTiming, 4: RaisesUnsupportedInBind}),
    Fake("clinging", at={1: RaisesInClose, 2: HangsInClose, 3: DiesInClose}, closing=raise_in_engine_close),
    Fake("stuck", at={1: HangsInPython, 2: HangsInACollective}),
    Fake("slow", at={2: IsSlow}),
    Fake("raises_in_open", opening=raise_in_open),
    Fake("unsupported", opening=raise_unsupported),
    Fake("missing", opening=raise_missing),
    Fake("hangs_in_open", opening=hang_in_open),
    Fake("isolated", isolation="point"),
    Fake("of_another_family", family="another"),
]
FAKES = {fake.name: fake for fake in [*FAULTS, *(Fake(name, always=session) for name, session in TEETH.items())]}


class FakeEngine(TorchEngine):
    def __init__(self, fake: Fake, group: Group, variant: Variant, weights: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        super().__init__(group, variant, weights)
        self.fake, self.isolation = fake, fake.isolation

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

    def open(self, group: Group, variant: Variant, capacity: Problem, knobs: Knobs) -> Engine:  # type: ignore[override]
        self.fake.opening(group)
        weights = super().open(group, variant, capacity, knobs).weights
        return FakeEngine(self.fake, group, variant, weights)
