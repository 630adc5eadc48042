"""Sessions, opens and closes that break a run: what the coordinator has to survive."""

from __future__ import annotations

import ctypes
import os
import signal
import time

from bench.backends.torch_a2a import TorchEngine
from lib.contract import Group, Missing, Unsupported
from lib.problem import Inputs, Problem
from tests.fake_session import FakeSession, folder, in_timing

SLOW, GO = "slow", "go"  # files: "I am in mid timing", and the test's "be slow no more"
CULPRIT = int(os.environ.get("MOE_EP_FAKE_CULPRIT", "1"))  # the rank that breaks
ASLEEP_S = 600.0
POLL_S = 0.02


class DiesBesideACollective(FakeSession):
    """A rank is killed while its peers wait for it in a collective."""

    def call(self) -> None:
        if in_timing() and self.rank == CULPRIT:
            os.kill(os.getpid(), signal.SIGKILL)
        super().call()


class DiesBesideSleepers(FakeSession):
    """Rank 1 is killed while its peers are in no collective: nothing but the agent's TERM tells them."""

    def call(self) -> None:
        if in_timing():
            if self.rank == CULPRIT:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(ASLEEP_S)
        super().call()


class RaisesInTiming(FakeSession):
    def call(self) -> None:
        if in_timing() and self.rank == CULPRIT:
            raise RuntimeError("the wire is cut\nand this line is for the log")
        super().call()


class RaisesUnsupportedInBind(FakeSession):
    def __init__(self, engine: TorchEngine, problem: Problem, inputs: Inputs) -> None:
        raise Unsupported(f"TOKENS={problem.tokens}: this library knows no such number")


class HangsInPython(FakeSession):
    """Rank 1 sleeps in Python, so the others wait for it in a collective."""

    def call(self) -> None:
        if in_timing() and self.rank == CULPRIT:
            hang_in_python()
        super().call()


class HangsInC(FakeSession):
    """Every rank hangs in C, holds the interpreter's lock, and is deaf to TERM: it can't even see its socket close."""

    def call(self) -> None:
        if in_timing():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (folder() / f"{SLOW}_{self.rank}").touch()
            ctypes.PyDLL(None).sleep(int(ASLEEP_S))  # PyDLL: the lock is kept
        super().call()


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
        if self.rank == CULPRIT:
            raise RuntimeError("the session would not let go")


class HangsInClose(FakeSession):
    def close(self) -> None:
        if self.rank == CULPRIT:
            hang_in_python()


class DiesInClose(FakeSession):
    def close(self) -> None:
        if self.rank == CULPRIT:
            os.kill(os.getpid(), signal.SIGKILL)


def hang_in_python() -> None:
    while True:
        time.sleep(ASLEEP_S)


# --- faults of open and of the engine's close -------------------------------------------------------------------------


def raise_in_open(group: Group) -> None:
    import torch.distributed as dist

    if group.rank == CULPRIT:
        raise OSError("no such device: fabric0\nand this line is for the log")
    dist.barrier(group=group.pg)


def raise_unsupported(group: Group) -> None:
    raise Unsupported("the fabric has no multicast")


def raise_missing(group: Group) -> None:
    raise Missing("libfabric >= 2 is not installed")


def hang_in_open(group: Group) -> None:
    import torch.distributed as dist

    if group.rank == CULPRIT:
        hang_in_python()
    dist.barrier(group=group.pg)


def raise_in_engine_close(group: Group) -> None:
    if group.rank == 0:
        raise RuntimeError("the engine would not let go")


class SwapsTheRoutingFile(FakeSession):
    """Somebody writes another routing over the file while this point is being measured."""

    def __init__(self, engine: TorchEngine, problem: Problem, inputs: Inputs) -> None:
        super().__init__(engine, problem, inputs)
        if self.rank == 0:
            other = folder() / "other.npy"
            other.replace(problem.routing)
