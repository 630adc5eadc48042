"""Sections as subprocesses on a tiny shape: start one, wait for what it does, read what it wrote."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lib import guard
from lib.rows import read_rows

ROOT = Path(__file__).resolve().parent.parent
SLOW_MACHINE_S = 120.0  # what nothing here takes unless it hangs
POLL_S = 0.02
TINY = {"HIDDEN": "64", "INTER": "32", "NUM_EXPERTS": "8", "TOPK": "2", "TOKENS": "4"}
QUICK = {"WARMUP": "1", "ITERS": "3", "CHECK_REPEATS": "2"}
FAKE_SECTION = [sys.executable, "-m", "tests.fake_section"]
TORCHRUN_PORT = 29500  # its default, which many a job on a shared machine has taken
_count = itertools.count(1)
_started: list[Run] = []


def clean_environment() -> dict[str, str]:
    """What a shell has at least: no knob and no launcher's variable of whoever runs the tests comes through."""
    return {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | {"LC_ALL": "C"}


def fresh_stamp() -> str:
    """Nobody else's, also where two suites run on one machine: the mark of a run's processes is its stamp."""
    return f"20260101T000000Z-{os.getpid()}{next(_count):02d}"


def wait_until(holds: Callable[[], bool], what: str, limit_s: float = SLOW_MACHINE_S) -> float:
    """Poll until it holds; returns the seconds that took, and fails with `what` after the limit."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < limit_s, f"not within {limit_s:g} s: {what}"
        time.sleep(POLL_S)
    return time.monotonic() - start


@dataclass
class Run:
    """One command in a folder of its own. `said` and `code` are there once it has ended."""

    folder: Path  # OUT_DIR, and where fakes leave their words
    stamp: str = field(default_factory=fresh_stamp)
    section: str = "fake"
    prefix: str = "bench"
    command: list[str] = field(default_factory=lambda: FAKE_SECTION)
    process: subprocess.Popen[str] | None = None
    code: int | None = None
    stdout: str = ""
    said: str = ""  # on stderr

    def start(self, fakes: str = "", **knobs: str) -> Run:
        self.folder.mkdir(parents=True, exist_ok=True)
        words = {"MOE_EP_STAMP": self.stamp, "MOE_EP_PREFIX": self.prefix, "OUT_DIR": str(self.folder)}
        words |= {"MOE_EP_FAKES": fakes, "MOE_EP_FAKE_DIR": str(self.folder)}
        self.process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            env=clean_environment() | TINY | QUICK | words | knobs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        _started.append(self)
        return self

    def end(self, limit_s: float = SLOW_MACHINE_S) -> Run:
        """Wait for the end; a run that does not come to one is killed, and fails the test with all that it said."""
        assert self.process is not None
        try:
            self.stdout, self.said = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.stdout, self.said = self.process.communicate()
            raise AssertionError(f"not done within {limit_s:g} s\n{self.said}\n{self.log_text()}") from None
        self.code = self.process.returncode
        return self

    def go(self, fakes: str = "", **knobs: str) -> Run:
        return self.start(fakes, **knobs).end()

    # -- what it wrote

    @property
    def stem(self) -> str:
        return f"{self.prefix}_{self.stamp}_{self.section}"

    @property
    def csv(self) -> Path:
        return self.folder / f"{self.stem}.csv"

    @property
    def jsonl(self) -> Path:
        return self.folder / f"{self.stem}.jsonl"

    def rows(self) -> list[dict[str, str]]:
        rows, torn = read_rows(self.csv)
        assert not torn
        return rows

    def row(self, variant: str, tokens: int) -> dict[str, str]:
        (row,) = [row for row in self.rows() if (row["variant"], row["tokens"]) == (variant, str(tokens))]
        return row

    def statuses(self) -> list[tuple[str, str, str]]:
        return [(row["variant"], row["tokens"], row["status"]) for row in self.rows()]

    def log_text(self) -> str:
        path = self.folder / f"{self.stem}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def bound(self) -> list[dict[str, object]]:
        """What each session of a fake said of itself when it was bound (tests/fakes.py, say_bound)."""
        return [json.loads(line) for line in (self.folder / "bound.jsonl").read_text().splitlines()]

    # -- its processes

    def wait_for(self, *names: str) -> None:
        """Until the fakes have written these files; a run that ends before fails the test."""
        assert self.process is not None
        process = self.process

        def there() -> bool:
            assert process.poll() is None, f"the run ended early\n{process.communicate()[1]}\n{self.log_text()}"
            return all((self.folder / name).exists() for name in names)

        wait_until(there, f"{', '.join(names)}\n{self.log_text()}")

    def living(self) -> list[int]:
        """Processes that carry this run's mark."""
        return guard.marked_pids(self.stamp)

    def kill(self) -> None:
        """Whatever is left of it."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in self.living():
            os.kill(pid, signal.SIGKILL)

    def seconds_until_nothing_lives(self, limit_s: float = 10.0) -> float:
        return wait_until(lambda: not self.living(), f"processes {self.living()} to be gone", limit_s)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def outer_launcher(ranks: int) -> list[str]:
    """The fake section started once a rank, by somebody else's torchrun."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "tests.fake_section"]
    return [sys.executable, "-m", *launcher]


def one_of(tasks: int) -> Mapping[str, str]:
    """The variables that rank 0 of `tasks` gets from an outer torchrun."""
    count, port = str(tasks), str(free_port())
    ranks = {"RANK": "0", "WORLD_SIZE": count, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": count, "GROUP_WORLD_SIZE": "1"}
    return ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


# --- scenarios: what one run, or a few after another, is put through; many small tests then look at the outcome -------

AT_ONCE = 2  # a worker group keeps two cores busy for the seconds that its imports take
_works: dict[str, Callable[[Path], Any]] = {}
_idle: set[str] = set()
_outcomes: dict[str, Future[Any]] = {}


def scenario(work: Callable[[Path], Any] | None = None, *, idle: bool = False) -> Any:
    """A session-wide fixture named as `work`, which gets a folder and returns the outcome.

    The first test that asks for one starts all that collected tests need, AT_ONCE at a time; an `idle` one spends its
    time asleep and runs beside them.
    """
    if work is None:
        return functools.partial(scenario, idle=idle)
    name = work.__name__
    assert name not in _works, f"two scenarios are called {name}: a test would get the other file's outcome"
    _works[name] = work
    if idle:
        _idle.add(name)

    @pytest.fixture(scope="session", name=name)
    def outcome(request: pytest.FixtureRequest, scenarios: None) -> Any:
        return _outcomes[name].result()

    return outcome


@pytest.fixture(scope="session")
def scenarios(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start them, with somebody listening on torchrun's default port; end what is left of them with the session."""
    needed = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # then somebody else is listening there, which serves as well
            stack.enter_context(socket.create_server(("127.0.0.1", TORCHRUN_PORT)))
        busy, idle = ThreadPoolExecutor(AT_ONCE), ThreadPoolExecutor(max(len(_idle), 1))
        for name, work in _works.items():
            if name in needed:
                pool = idle if name in _idle else busy
                _outcomes[name] = pool.submit(work, tmp_path_factory.mktemp(name))
        yield
        for executor in (busy, idle):
            executor.shutdown(wait=False, cancel_futures=True)
        for run in _started:
            run.kill()
