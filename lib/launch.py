"""Worker groups: started through torchrun, heard over a socket, watched by two clocks, ended by recorded pids.

One WorkerGroup serves the cases of one variant until they are done or one of them fails; it is never used again after
a failure. What a person or an operator sees of a failure is the Failure's status and sentence; the rest is in the log.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from lib import channel
from lib.agent import DUMP_S, GONE_S, GRACE_S, POLL_S, Agent, RankHere
from lib.channel import Channel
from lib.launcher import Launcher
from lib.nodes import Hub

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
    """What to start: `message` is sent to every rank in answer to its hello."""

    mark: str  # value of MOE_EP_RUN
    ranks: int  # of all members
    environment: dict[str, str]
    wanted: dict[str, str]  # what the adapter wants of every rank's environment
    message: dict[str, Any]
    limits: Limits
    launcher: Launcher
    log: IO[bytes]
    hub: Hub | None = None  # of the other members, where there are some

    @property
    def here(self) -> int:
        """Ranks that each member starts."""
        return self.ranks // self.launcher.members


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
    ended: dict[int, int] = field(default_factory=dict)  # other members' agents: exit codes
    store: dict[str, Any] | None = None  # rank 0's word of where the group's store is
    measured: dict[str, Any] | None = None  # the result of a case that is still being traced

    def run(self) -> Failure | None:
        """Serve all cases. Returns None when every case was reported and the group left by itself."""
        request = self.request
        self.agent = Agent(request.mark, request.launcher, request.here)
        self.listener = channel.listen_to_nodes() if request.hub else channel.listen()
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, None)
        self.secret, self.name = secrets.token_hex(16), secrets.token_hex(4)
        try:
            self._start()
            failure = self._serve()
            if failure is not None and self._keep_measured(failure.reason):
                return Failure("teardown", f"{failure.reason}; its row stands")
            return failure
        except BaseException:
            self._keep_measured("interrupted")
            raise
        finally:
            self.end()

    def _keep_measured(self, trouble: str) -> bool:
        """A trace that fails loses nothing of the row that was measured before it."""
        if self.measured is None:
            return False
        told, self.measured = self.measured, None
        told["reason"] = "; ".join(filter(None, [told["reason"], f"TRACE: {trouble}"]))
        self.events.result(told["case"], told)
        self.current = told["case"] + 1
        return True

    # -- starting

    def _start(self) -> None:
        request, hub = self.request, self.request.hub
        control, port = channel.address_of(self.listener), self.listener.getsockname()[1]
        if hub is not None:
            told = {"mark": request.mark, "port": port, "secret": self.secret, "set": request.wanted}
            hub.tell({"type": "start", "group": self.name, "interface": hub.interface} | told)
            control = f"{hub.address}:{port}"
        self.agent.start(request.environment | request.wanted, control, self.secret, request.log)
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
            self._hear_members()
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

    def _hear_members(self) -> None:
        for member, message in self.request.hub.take() if self.request.hub else []:
            if message["type"] == "agent" and message["group"] == self.name:  # not an earlier group's
                self.ended[member] = message["code"]

    def _read(self, link: Channel, number: int | None) -> None:
        try:
            messages = link.receive_ready()
        except ValueError:  # a stranger: on several nodes the port is open to all
            messages = None
        if messages is None:
            self.selector.unregister(link)
            link.close()
            if number is not None:
                self.gone.append(number)
            return
        for message in messages:
            if number is not None:
                self._message(link, number, message)
            elif (number := self._hello(link, message)) is None:
                return

    def _hello(self, link: Channel, message: Any) -> int | None:
        said = str(message.get("secret")) if isinstance(message, dict) and message.get("type") == "hello" else ""
        if not secrets.compare_digest(said.encode(), self.secret.encode()):
            self.selector.unregister(link)
            link.close()
            return None
        number = int(message["rank"])
        self.ranks[number] = Rank(hello=message)
        self.selector.modify(link, selectors.EVENT_READ, number)
        with contextlib.suppress(OSError):  # a rank that is gone is heard of by its closed socket
            link.send(self.request.message)
            if self.store is not None:
                link.send(self.store)
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
        elif kind == "measured":
            self.measured = message
        elif kind == "result":
            self.measured = None
            self.events.result(message["case"], message)
            self.current = message["case"] + 1
            self._restart_clock(TEARDOWN)  # its session is closed before the next point begins
            with contextlib.suppress(OSError):
                link.send({"type": "saved", "case": message["case"]})
        elif kind == "store":
            self.store = message
            for key in self.selector.get_map().values():
                if key.data is not None and key.fileobj is not link:
                    with contextlib.suppress(OSError):
                        key.fileobj.send(message)  # type: ignore[union-attr]  # those with a number are channels
        elif kind == "error":
            rank.error = message
        elif kind == "teardown":
            rank.teardown = message["text"]
        elif kind == "bye":
            rank.said_bye = True

    # -- judging

    def _all_left(self) -> bool:
        left = self._everyone_said_bye() and len(self.gone) == self.request.ranks
        return left and self.agent.poll() is not None

    def _dead(self) -> list[int]:
        """Ranks that went without a word, the first one first: the agent ends the others soon after."""
        return [number for number in self.gone if not self.ranks[number].said_bye and self.ranks[number].error is None]

    def _errors(self) -> list[int]:
        return [number for number, rank in self.ranks.items() if rank.error is not None]

    def _teardowns(self) -> list[str]:
        return [rank.teardown for rank in self.ranks.values() if rank.teardown]

    def _agent_died(self) -> bool:
        return (self.agent.poll() is not None or bool(self.ended)) and not self._everyone_said_bye()

    def _everyone_said_bye(self) -> bool:
        return len(self.ranks) == self.request.ranks and all(rank.said_bye for rank in self.ranks.values())

    def _trouble(self) -> bool:
        lost = self.request.hub is not None and self.request.hub.lost()
        return bool(lost or self._dead() or self._errors() or self._teardowns() or self._agent_died())

    def _failure(self) -> Failure:
        """What comes between a saved row and the next case's start is the tear-down's: no case is charged with it."""
        if self.request.hub is not None and (lost := self.request.hub.lost()):
            status = "interrupted" if lost.interrupted else "failed"
            return Failure("teardown" if self.clock == TEARDOWN else status, str(lost))
        if teardowns := self._teardowns():
            return Failure("teardown", teardowns[0])
        failure, phase = self._first_trouble()
        if self.clock == TEARDOWN and (phase == NO_PHASE or phase in CLOCKS):
            return Failure("teardown", f"{failure.reason}; its row stands")
        return failure

    def _first_trouble(self) -> tuple[Failure, str]:
        """And the phase it came in. A rank that died without a word comes first: what others report is its echo."""
        members = {0: self.agent.poll()} | self.ended
        for member, code in members.items():
            if code is not None and code < 0 and not self.request.launcher.joined:  # there it is the rank itself
                pid = f" (pid {self.agent.pid})" if member == 0 else ""
                reason = f"the worker group's launcher{self._on(member)}{pid} was killed by signal {-code}"
                return Failure("failed", reason), NO_PHASE
        for number in self._dead():
            rank = self.ranks[number]
            what = f"{self._name(number)} died in phase {rank.phase}"
            return Failure("failed", f"{what} (pid {rank.hello['pid']}: killed or crashed; see the log)"), rank.phase
        if errors := self._errors():
            number = min(errors, key=lambda candidate: self.ranks[candidate].error["time"])  # type: ignore[index]
            error = self.ranks[number].error
            assert error is not None
            if error["status"] in ("unsupported", "missing", "eager"):
                return Failure(error["status"], error["text"], whole_variant=error["phase"] == "open"), error["phase"]
            reason = f"{self._name(number)} in phase {error['phase']}: {error['text']}"
            return Failure(error["status"], reason), error["phase"]
        heard = f"{len(self.ranks)} of {self.request.ranks} ranks heard of"
        member, code = next((item for item in members.items() if item[1] is not None), (0, None))
        reason = f"the worker group's launcher{self._on(member)} ended with exit code {code}, {heard} (see the log)"
        return Failure("failed", reason), NO_PHASE

    def _name(self, number: int) -> str:
        """A rank, and on which node it is where there are several."""
        nodes = self.request.launcher.nodes
        return f"rank {number}" + (self._on(number // self.request.here) if nodes > 1 else "")

    def _on(self, member: int) -> str:
        hub = self.request.hub
        return f" on {hub.names[member].partition('task on ')[2] or hub.names[member]}" if hub else ""

    def _timeout(self) -> Failure:
        heard = [f"{self._name(number)} in {rank.phase}" for number, rank in sorted(self.ranks.items())]
        phases = ", ".join(heard) or "no rank heard of"
        stacks = f"{phases}; {'stacks of all ranks are in the log' if heard else 'see the log'}"
        if self.clock == TEARDOWN:
            return Failure("teardown", f"closing took more than {TEARDOWN_S:g} s after the row was saved: {stacks}")
        knob = "SETUP_TIMEOUT_S" if self.clock == SETUP else "TIMEOUT_S"
        return Failure("timeout", f"not done within {knob}={self.limit_s:g} s: {stacks}")

    # -- ending

    def _ranks_of(self, member: int) -> dict[int, Rank]:
        here = self.request.here
        return {number: rank for number, rank in sorted(self.ranks.items()) if number // here == member}

    def _dump_stacks(self) -> None:
        """Of every rank on every node, to the log. This node first, lest another comes between a head and its stack."""
        stacks: dict[int, list[RankHere]] = {
            member: [(number, rank.hello["pid"], rank.phase) for number, rank in self._ranks_of(member).items()]
            for member in range(self.request.launcher.members)
        }
        self.agent.dump_stacks(stacks[0], self.request.log.write)
        if (hub := self.request.hub) is not None:
            for member in hub.peers:
                hub.tell_one(member, {"type": "dump", "ranks": stacks[member]})
            hub.replies("dumped", DUMP_S * self.request.here + GRACE_S, self.name)

    def end(self) -> None:
        """TERM every agent, a grace, KILL every recorded group that is still ours, and wait until all are gone."""
        for key in list(self.selector.get_map().values()):
            self.selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]  # listener and channels; a rank leaves when its own closes
        hub = self.request.hub
        leaders = {
            member: [rank.hello["pgid"] for rank in self._ranks_of(member).values()]
            for member in range(self.request.launcher.members)
        }
        for member in hub.peers if hub else []:
            assert hub is not None
            hub.tell_one(member, {"type": "end group", "leaders": leaders[member]})
        stuck = {"": self.agent.end(leaders[0])}
        if hub is not None:
            replies = hub.replies("ended", GRACE_S + 2 * GONE_S, self.name)
            stuck |= {self._on(member): reply["stuck"] for member, reply in replies.items()}
        for where, pids in stuck.items():
            for pid in pids:
                self.events.note(f"process {pid}{where} does not end; it is stuck in the kernel")
