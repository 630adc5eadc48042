"""Worker groups: started through torchrun, heard over a socket, watched by two clocks, ended by recorded pids.

One WorkerGroup serves the cases of one variant until they are done or one of them fails; it is never used again after
a failure. What a person or an operator sees of a failure is the Failure's status and sentence; the rest is in the log.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from lib import channel, guard
from lib.channel import Channel
from lib.launcher import Launcher, joined_environment, own_environment, run_mark
from lib.version import REPO_ROOT

POLL_S = 0.1
GRACE_S = 3.0  # from TERM to KILL
GONE_S = 10.0  # from KILL to giving up on a process the kernel won't end
DUMP_S = 0.5  # what a rank gets to write its stacks
SETTLE_S = 0.4  # after the first sign of a failure: a rank that died tells more than the peers it upset
TEARDOWN_S = float(os.environ.get("MOE_EP_TEARDOWN_S", "30"))  # from a saved row to the next point's start, or the end
SETUP, RUN, TEARDOWN = "setup", "run", "teardown"
NO_PHASE = ""  # of a launcher's own end
# Of a rank's phase; of all others: SETUP.
CLOCKS = {"check": RUN, "time": RUN, "recheck": RUN, "trace": RUN, "close": TEARDOWN}


@dataclass
class Failure:
    """Why a group ended early: the status for its current case, and one sentence."""

    status: str
    reason: str
    whole_variant: bool = False  # the engine could not be opened: no point of the variant can run


@dataclass
class Rank:
    """What is known of one rank: its first message, its latest phase, its error."""

    hello: dict[str, Any]
    phase: str = "start"
    error: dict[str, Any] | None = None
    teardown: str = ""
    said_bye: bool = False


@dataclass
class Limits:
    setup_s: float
    run_s: float


@dataclass
class Request:
    """What to start: `cases` are sent to every rank in answer to its hello."""

    mark: str  # value of MOE_EP_RUN
    ranks: int
    environment: dict[str, str]
    message: dict[str, Any]
    limits: Limits
    launcher: Launcher
    log: IO[bytes]


@dataclass
class Events:
    """What the coordinator wants to hear of."""

    result: Callable[[int, dict[str, Any]], None]
    phase: Callable[[int, str], None]
    note: Callable[[str], None]


@dataclass
class WorkerGroup:
    request: Request
    events: Events
    ranks: dict[int, Rank] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)  # ranks whose socket closed, in that order
    current: int = 0  # index of the case that is running or next
    agent: subprocess.Popen[bytes] | None = None

    def run(self) -> Failure | None:
        """Serve all cases. Returns None when every case was reported and the group left by itself."""
        self.listener = channel.listen()
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, None)
        self.secret = secrets.token_hex(16)
        try:
            self._start()
            return self._serve()
        finally:
            self.end()

    # -- starting

    def _start(self) -> None:
        request = self.request
        environment = {
            **request.environment,
            guard.RUN_MARK: request.mark,
            channel.ADDRESS: channel.address_of(self.listener),
            channel.SECRET: self.secret,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO_ROOT), request.environment.get("PYTHONPATH", "")])),
            "PYTHONFAULTHANDLER": "1",
        }
        if request.launcher.joined:
            environment = joined_environment(environment, request.launcher)
            command = [sys.executable, "-m", "lib.worker"]
        else:
            environment = own_environment(environment)
            command = torchrun_command(request.ranks)
        # A session of its own: a terminal's Ctrl-C reaches the coordinator alone, which ends the group in order.
        self.agent = subprocess.Popen(
            guard.wrap(command),
            cwd=REPO_ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=request.log,
            stderr=request.log,
            start_new_session=True,
        )
        self._restart_clock(SETUP)

    def _restart_clock(self, clock: str) -> None:
        limits = self.request.limits
        self.clock = clock
        self.limit_s = {SETUP: limits.setup_s, RUN: limits.run_s, TEARDOWN: TEARDOWN_S}[clock]
        self.deadline = time.monotonic() + self.limit_s

    # -- serving

    def _serve(self) -> Failure | None:
        settle_until: float | None = None
        while True:
            self._hear()
            if self._all_left():
                return None
            if settle_until is None and self._trouble():
                settle_until = time.monotonic() + SETTLE_S
            if settle_until is not None and time.monotonic() >= settle_until:
                return self._failure()
            if settle_until is None and time.monotonic() >= self.deadline:
                self._dump_stacks()
                return self._timeout()

    def _hear(self) -> None:
        for key, _ in self.selector.select(POLL_S):
            if key.fileobj is self.listener:
                connection, _ = self.listener.accept()
                self.selector.register(Channel(connection), selectors.EVENT_READ, None)
                continue
            assert isinstance(key.fileobj, Channel)
            self._read(key.fileobj, key.data)

    def _read(self, link: Channel, number: int | None) -> None:
        messages = link.receive_ready()
        if messages is None:
            self.selector.unregister(link)
            link.close()
            if number is not None:
                self.gone.append(number)
            return
        for message in messages:
            if number is None:
                number = self._hello(link, message)
            else:
                self._message(link, number, message)

    def _hello(self, link: Channel, message: dict[str, Any]) -> int | None:
        if message.get("type") != "hello" or not secrets.compare_digest(str(message.get("secret")), self.secret):
            self.selector.unregister(link)
            link.close()
            return None
        number = int(message["rank"])
        self.ranks[number] = Rank(hello=message)
        self.selector.modify(link, selectors.EVENT_READ, number)
        with contextlib.suppress(OSError):  # a rank that is gone is heard of by its closed socket
            link.send(self.request.message)
        return number

    def _message(self, link: Channel, number: int, message: dict[str, Any]) -> None:
        rank, kind = self.ranks[number], message["type"]
        if kind == "phase":
            rank.phase = message["phase"]
            if number == 0:
                clock = CLOCKS.get(rank.phase, SETUP)
                if clock != self.clock:
                    self._restart_clock(clock)
                self.events.phase(message["case"], rank.phase)
        elif kind == "result":
            self.events.result(message["case"], message)
            self.current = message["case"] + 1
            self._restart_clock(TEARDOWN)  # its session is closed before the next point begins
            with contextlib.suppress(OSError):
                link.send({"type": "saved", "case": message["case"]})
        elif kind == "error":
            rank.error = message
        elif kind == "teardown":
            rank.teardown = message["text"]
        elif kind == "bye":
            rank.said_bye = True

    # -- judging

    def _all_left(self) -> bool:
        left = self._everyone_said_bye() and len(self.gone) == self.request.ranks
        return left and self.agent is not None and self.agent.poll() is not None

    def _dead(self) -> list[int]:
        """Ranks that went without a word, the first one first: the agent ends the others soon after."""
        return [number for number in self.gone if not self.ranks[number].said_bye and self.ranks[number].error is None]

    def _errors(self) -> list[int]:
        return [number for number, rank in self.ranks.items() if rank.error is not None]

    def _teardowns(self) -> list[str]:
        return [rank.teardown for rank in self.ranks.values() if rank.teardown]

    def _agent_died(self) -> bool:
        assert self.agent is not None
        return self.agent.poll() is not None and not self._everyone_said_bye()

    def _everyone_said_bye(self) -> bool:
        return len(self.ranks) == self.request.ranks and all(rank.said_bye for rank in self.ranks.values())

    def _trouble(self) -> bool:
        return bool(self._dead() or self._errors() or self._teardowns() or self._agent_died())

    def _failure(self) -> Failure:
        """What comes between a saved row and the next case's start is the tear-down's: no case is charged with it."""
        if teardowns := self._teardowns():
            return Failure("teardown", teardowns[0])
        failure, phase = self._first_trouble()
        if self.clock == TEARDOWN and (phase == NO_PHASE or phase in CLOCKS):
            return Failure("teardown", f"{failure.reason}; its row stands")
        return failure

    def _first_trouble(self) -> tuple[Failure, str]:
        """And the phase it came in. A rank that died without a word comes first: what others report is its echo."""
        assert self.agent is not None
        code, joined = self.agent.poll(), self.request.launcher.joined  # a joined group's agent is rank 0 itself
        if code is not None and code < 0 and not joined:
            reason = f"the worker group's launcher (pid {self.agent.pid}) was killed by signal {-code}"
            return Failure("failed", reason), NO_PHASE
        for number in self._dead():
            rank = self.ranks[number]
            what = f"rank {number} died in phase {rank.phase}"
            return Failure("failed", f"{what} (pid {rank.hello['pid']}: killed or crashed; see the log)"), rank.phase
        if errors := self._errors():
            number = min(errors, key=lambda candidate: self.ranks[candidate].error["time"])  # type: ignore[index]
            error = self.ranks[number].error
            assert error is not None
            if error["status"] in ("unsupported", "missing", "eager"):
                return Failure(error["status"], error["text"], whole_variant=error["phase"] == "open"), error["phase"]
            return Failure(error["status"], f"rank {number} in phase {error['phase']}: {error['text']}"), error["phase"]
        heard = f"{len(self.ranks)} of {self.request.ranks} ranks heard of"
        reason = f"the worker group's launcher ended with exit code {code}, {heard} (see the log)"
        return Failure("failed", reason), NO_PHASE

    def _timeout(self) -> Failure:
        heard = [f"rank {number} in {rank.phase}" for number, rank in sorted(self.ranks.items())]
        phases = ", ".join(heard) or "no rank heard of"
        stacks = f"{phases}; {'stacks of all ranks are in the log' if heard else 'see the log'}"
        if self.clock == TEARDOWN:
            return Failure("teardown", f"closing took more than {TEARDOWN_S:g} s after the row was saved: {stacks}")
        knob = "SETUP_TIMEOUT_S" if self.clock == SETUP else "TIMEOUT_S"
        return Failure("timeout", f"not done within {knob}={self.limit_s:g} s: {stacks}")

    # -- ending

    def _local_leaders(self) -> list[int]:
        """Recorded processes of this host; each leads the process group that it reported."""
        host = socket.gethostname()
        return [rank.hello["pgid"] for rank in self.ranks.values() if rank.hello["host"] == host]

    def _dump_stacks(self) -> None:
        """faulthandler writes all threads of each rank to the log, one rank after the other."""
        for number, rank in sorted(self.ranks.items()):
            pid = rank.hello["pid"]
            if guard.is_alive(pid) and guard.carries_mark(pid, self.request.mark):
                self.request.log.write(f"--- stacks of rank {number} (pid {pid}, phase {rank.phase})\n".encode())
                self.request.log.flush()
                os.kill(pid, signal.SIGUSR1)
                time.sleep(DUMP_S)

    def end(self) -> None:
        """TERM the agent, a grace, KILL every recorded group that is still ours, and wait until all are gone."""
        for key in list(self.selector.get_map().values()):
            self.selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]  # listener and channels; a rank leaves when its own closes
        if self.agent is None:
            return
        mark, pids = self.request.mark, [self.agent.pid, *self._local_leaders()]
        if self.agent.poll() is None:
            self.agent.terminate()
        self._reap(pids, GRACE_S)
        for pid in pids:
            guard.signal_group(pid, mark, signal.SIGKILL)
        for pid in self._reap(pids, GONE_S):
            self.events.note(f"process {pid} does not end; it is stuck in the kernel")

    def _reap(self, pids: Sequence[int], limit_s: float) -> list[int]:
        assert self.agent is not None
        deadline = time.monotonic() + limit_s
        alive = list(pids)
        while alive and time.monotonic() < deadline:
            self.agent.poll()
            alive = guard.wait_gone(alive, POLL_S)
        return alive


def torchrun_command(ranks: int) -> list[str]:
    """torchrun on this node alone: `--standalone` takes its port from the OS, and nothing is ever restarted."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"),
        *(f"--nproc-per-node={ranks}", "--max-restarts=0", "-m", "lib.worker"),
    ]


def follow(launcher: Launcher, environment: dict[str, str]) -> int:
    """A joined rank above 0: start its worker, which finds rank 0's coordinator by itself, and share its end."""
    environment = joined_environment(environment, launcher) | {guard.RUN_MARK: run_mark(launcher, environment, "")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO_ROOT), environment.get("PYTHONPATH", "")]))
    command = guard.wrap([sys.executable, "-m", "lib.worker"])
    worker = subprocess.Popen(command, cwd=REPO_ROOT, env=environment, start_new_session=True)
    try:
        return 0 if worker.wait() == 0 else 1
    finally:  # an interrupt comes through here too
        worker.kill()
        worker.wait()
