"""A member that is not node 0: it shows its card, then starts, dumps and ends its ranks as node 0 says.

Its ranks speak to node 0's coordinator by themselves; what goes through here is what only this node can do.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lib import nic
from lib.agent import Agent
from lib.channel import Channel, plain_address
from lib.launcher import Launcher
from lib.machine import Machine
from lib.meeting import Card, make_card
from lib.monitor import Monitor
from lib.nodes import BEATS_A_SILENCE, NODE_SILENT_S, NOT_MET, POLL_S, address_key, outer_store
from lib.plan import Case
from lib.ranks_environment import LOOPBACK, worker_environment
from lib.talk import say
from lib.trace_files import remove_unfinished

if TYPE_CHECKING:
    from lib.knobs import Knobs

Message = dict[str, Any]
MARGIN_S = 5.0  # beyond node 0's own limit, so that its words come first
RETRY_S = 0.2
OUTPUT_S = 2.0  # for the last lines of ranks that have ended
LINGER_S = 2.0  # an outer torchrun ends everybody when one fails: node 0 shows its table first
FAILED_EXIT = 1


class NodeZeroGoneError(Exception):
    """Nothing more comes from node 0, in one sentence. `met`: it was there once."""

    def __init__(self, sentence: str, met: bool) -> None:
        super().__init__(sentence)
        self.met = met


def find_node_0(section: str, launcher: Launcher, knobs: Knobs) -> Channel:
    """Connect to node 0, which may still be on its way. Raises NodeZeroGoneError when it does not come."""
    assert knobs.master_port is not None
    point = f"{knobs.master_addr}:{knobs.master_port}"
    deadline, why = time.monotonic() + NODE_SILENT_S, ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            if launcher.store:  # asked each time: an earlier run under the same torchrun may have left its address
                point = outer_store(knobs.master_addr, knobs.master_port).get(address_key(section)).decode()
            return Channel.connect(point, left)
        except (OSError, RuntimeError) as error:  # noqa: PERF203 - it sleeps anyway; the latter from torch's store
            why = getattr(error, "strerror", None) or str(error).strip().splitlines()[0]
            time.sleep(RETRY_S)
    raise NodeZeroGoneError(f"node 0 was not found at {point} within {NODE_SILENT_S:g} s ({why})", False)


class Follower:
    """`environment` makes the ranks' variables from the interface by which node 0 is reached."""

    def __init__(
        self,
        link: Channel,
        launcher: Launcher,
        ranks: int,
        monitor: Monitor,
        environment: Callable[[str], dict[str, str]],
    ) -> None:
        self.link, self.launcher, self.ranks, self.monitor = link, launcher, ranks, monitor
        self.host = plain_address(link.sock.getpeername()[0])
        self.environment, self.interface = environment, nic.interface_of(plain_address(link.sock.getsockname()[0]))
        self.agent: Agent | None = None
        self.reader: threading.Thread | None = None
        self.group, self.mark, self.told_end = "", "", False  # of the agent
        self.heard, self.welcome = time.monotonic(), False

    def run(self, card: Card) -> int:
        """Follow node 0 to the end; returns its exit code."""
        selector = selectors.DefaultSelector()
        selector.register(self.link, selectors.EVENT_READ)
        self.tell({"type": "hello", "member": self.launcher.member, "card": card})
        next_beat = 0.0
        try:
            while True:
                ready = selector.select(POLL_S)
                for message in self._hear() if ready else []:
                    if message["type"] == "end":
                        if self.launcher.local_rank == 0:  # once a node
                            say("\n".join(message["lines"]))
                        return int(message["code"])
                    self._obey(message)
                self._tell_of_agent()
                if time.monotonic() > next_beat:
                    self.tell({"type": "beat"})
                    next_beat = time.monotonic() + NODE_SILENT_S / BEATS_A_SILENCE
                if time.monotonic() - self.heard > NODE_SILENT_S + (0 if self.welcome else MARGIN_S):
                    raise NodeZeroGoneError(
                        f"node 0 ({self.host}) has been silent for {NODE_SILENT_S:g} s", self.welcome
                    )
        except BaseException as error:
            if not isinstance(error, NodeZeroGoneError):
                self.tell({"type": "bye", "why": "was interrupted" if not isinstance(error, Exception) else "failed"})
            raise
        finally:
            self._end([])
            self.link.close()

    def _hear(self) -> list[Message]:
        try:
            messages = self.link.receive_ready()
        except ValueError:
            raise NodeZeroGoneError(f"what answers at {self.host} is not node 0 of this suite", False) from None
        if messages is None:
            raise NodeZeroGoneError(f"node 0 ({self.host}) went away", self.welcome)
        self.heard = time.monotonic()
        return messages

    def tell(self, message: Message) -> None:
        """To node 0; if it is gone the next look at the connection says so."""
        with contextlib.suppress(OSError):
            self.link.send(message)

    # -- what node 0 asks for

    def _obey(self, message: Message) -> None:
        kind = message["type"]
        if kind == "welcome":
            self.welcome = True
        elif kind == "start":
            self._start(message)
        elif kind == "dump" and self.agent is not None:
            ranks = [(number, pid, phase) for number, pid, phase in message["ranks"]]
            self.agent.dump_stacks(ranks, lambda text: self.tell({"type": "log", "text": text.decode()}))
            self.tell({"type": "dumped", "group": self.group})
        elif kind == "end group":
            self.tell({"type": "ended", "group": self.group, "stuck": self._end(message["leaders"])})
        elif kind == "watch":
            self.monitor.watch()
        elif kind == "take":
            self.tell({"type": "marks", "columns": self.monitor.columns()})

    def _start(self, message: Message) -> None:
        self.group, self.mark = message["group"], message["mark"]
        self.agent, self.told_end = Agent(self.mark, self.launcher, self.ranks), False
        control = f"{self.host}:{message['port']}"
        # on node 0 itself the way to node 0 may be the loopback, which is nobody else's way here
        way = message["interface"] if self.interface == LOOPBACK else self.interface
        environment = self.environment(way) | message["set"]
        self.agent.start(environment, control, message["secret"], subprocess.PIPE)
        assert self.agent.process is not None
        output = self.agent.process.stdout
        assert output is not None
        self.reader = threading.Thread(target=self._relay, args=(output,), daemon=True)
        self.reader.start()

    def _relay(self, output: IO[bytes]) -> None:
        """What the ranks here write goes to the one log, on node 0."""
        for line in output:
            self.tell({"type": "log", "text": line.decode(errors="replace")})

    def _tell_of_agent(self) -> None:
        if self.agent is not None and not self.told_end and (code := self.agent.poll()) is not None:
            self.told_end = True
            self.tell({"type": "agent", "code": code, "group": self.group})

    def _end(self, leaders: list[int]) -> list[int]:
        """End this node's ranks; returns the processes that do not go."""
        agent, self.agent = self.agent, None
        stuck = agent.end(leaders) if agent is not None else []
        if self.reader is not None:
            self.reader.join(OUTPUT_S)
        return stuck


def follow(section: str, launcher: Launcher, knobs: Knobs, machine: Machine, cases: list[Case]) -> int:
    """Returns the exit code of the section, which is node 0's."""
    monitor = Monitor(machine.gpus)
    card = make_card(section, knobs, machine, cases, os.environ, monitor.contended)
    ranks = 1 if launcher.joined else knobs.gpus
    try:
        link = find_node_0(section, launcher, knobs)
        follower = Follower(link, launcher, ranks, monitor, partial(worker_environment, knobs, machine))
        try:
            code = follower.run(card)
        finally:
            remove_unfinished(Path(knobs.out_dir), follower.mark, section)
    except NodeZeroGoneError as error:
        say(f"{section}: {error}" + ("; the rows that it has written stand" if error.met else ""))
        return FAILED_EXIT if error.met else NOT_MET
    finally:
        monitor.close()
    if launcher.store and code:
        time.sleep(LINGER_S)
    return code
