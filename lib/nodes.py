"""Node 0's side of a run over several commands: who is there, whether they agree, and a line to each of them.

Not torch's TCPStore, but a listener of our own at MASTER_ADDR:MASTER_PORT: a store has to be polled and can't tell that
a client died, a closed connection tells at once; and torch's import would cost each coordinator seconds. Only where an
outer torchrun's agent owns that port does a store pass on where we listen instead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from lib import channel, nic
from lib.channel import Channel, plain_address
from lib.launcher import Launcher
from lib.meeting import Card, agree, everyones_verdicts
from lib.plan import Case

if TYPE_CHECKING:
    from lib.knobs import Knobs

# A node that says nothing for so long is gone. Shortened by tests; also how long the nodes wait for each other to come.
NODE_SILENT_S = float(os.environ.get("MOE_EP_NODE_SILENT_S", "60"))
BEATS_A_SILENCE = 6  # words that have to be missed before a node counts as silent
POLL_S = 0.1
STORE_KEY = "moe-ep-bench"  # our prefix in a store that is not ours
FAREWELL_S = 3.0
NOT_MET = 5  # exit code of a section whose nodes did not come together: run.sh stops there, and makes 4 of it
USAGE_EXIT, INTERRUPTED_EXIT, FAILED_EXIT = 2, 130, 1
MARKS_S = 2.0  # for what the members saw while a case was timed, which they were asked for when it had been
Message = dict[str, Any]


class NotMetError(Exception):
    """Some node did not come: nothing was measured. `lines` name those that are missing."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = list(lines)


class RefusedError(Exception):
    """The nodes differ: `lines` name the differences."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = list(lines)


class NodeLostError(Exception):
    """A node went away or fell silent in mid run. `interrupted`: somebody stopped it on purpose."""

    def __init__(self, sentence: str, interrupted: bool) -> None:
        super().__init__(sentence)
        self.interrupted = interrupted


def leaving(error: BaseException) -> tuple[int, list[str]]:
    """With which exit code, and which words, the members leave when node 0 ends by this."""
    if isinstance(error, RefusedError):
        return USAGE_EXIT, error.lines
    if isinstance(error, NotMetError):
        return NOT_MET, error.lines
    if not isinstance(error, Exception):
        return INTERRUPTED_EXIT, ["node 0 was interrupted"]
    return FAILED_EXIT, [f"node 0 ended early: {type(error).__name__}; it says more"]


class Store(Protocol):
    """As much of torch's store as an address takes."""

    def set(self, key: str, value: str) -> object: ...
    def get(self, key: str) -> bytes: ...


def outer_store(address: str, port: int) -> Store:
    """The store that an outer torchrun's agent keeps; raises RuntimeError where there is none in time."""
    import datetime

    import torch.distributed as dist  # makes no GPU context

    limit = datetime.timedelta(seconds=NODE_SILENT_S)
    return dist.PrefixStore(STORE_KEY, dist.TCPStore(address, port, is_master=False, timeout=limit))


def address_key(section: str) -> str:
    """One key a section, and a start: after a restart by the outer torchrun nobody may find the first start's port."""
    return f"{section}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def address_towards(host: str, port: int) -> str:
    """This node's address on the way to `host`."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing: it only chooses a route
        return str(probe.getsockname()[0])


@dataclass
class Peer:
    """One member beside ourselves."""

    name: str
    link: Channel
    heard: float = field(default_factory=time.monotonic)
    gone: str = ""  # why, once it is
    stopped: bool = False  # on purpose


class Hub:
    """The members' meeting point. Use as a context: leaving it tells every member to leave too, with `code`."""

    def __init__(self, section: str, launcher: Launcher, knobs: Knobs) -> None:
        self.section, self.launcher, self.knobs = section, launcher, knobs
        self.peers: dict[int, Peer] = {}
        self.inbox: queue.Queue[tuple[int, Message]] = queue.Queue()
        self.kept: list[tuple[int, Message]] = []
        self.links: list[Channel] = []  # of whoever came
        self.log: Callable[[bytes], object] = lambda text: None
        self.code, self.farewell = 1, list[str]()  # what members leave with, and say
        self.address = "127.0.0.1"  # of this node, as others reach it
        self.closing = threading.Event()
        self.thread: threading.Thread | None = None

    # -- the meeting

    def __enter__(self) -> Hub:
        assert self.knobs.master_port is not None
        port = 0 if self.launcher.store else self.knobs.master_port
        try:
            self.listener = channel.listen_to_nodes(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            sentence = f"MASTER_PORT={port}: is taken on node 0, something listens there already; give a free port"
            raise RefusedError([sentence]) from error
        if self.launcher.store:
            self._publish()
        return self

    def _publish(self) -> None:
        host, port = self.knobs.master_addr, self.knobs.master_port
        assert port is not None
        mine = address_towards(host, port)
        if mine.startswith("127.") or mine == "::1":
            mine = host  # it is ours, and its name may stand for the loopback on this node alone
        try:
            outer_store(host, port).set(address_key(self.section), f"{mine}:{self.listener.getsockname()[1]}")
        except RuntimeError as error:
            why = str(error).strip().splitlines()[0]
            raise RefusedError([f"torchrun's store at {host}:{port} does not answer ({why})"]) from error

    def meet(self, card: Card, cases: list[Case]) -> list[Case]:
        """Wait for all members, compare, and return the cases with everybody's verdicts.

        Raises NotMetError or RefusedError; those who came have then been told the same.
        """
        cards: dict[int, Card] = {0: card}
        twice = self._gather(cards)
        names = {number: self.launcher.name(number, cards[number]["host"]) for number in sorted(cards)}
        cards = dict(sorted(cards.items()))
        refused = [*twice, *agree(cards, names)]
        late = [] if twice else self._late(cards)
        if refused or late:
            raise RefusedError(refused + late) if refused else NotMetError(late)
        self.cards, self.names = cards, names
        # the last member is on another node, if any is: its way here is that of all nodes' words
        self.address = plain_address(self.peers[max(self.peers)].link.sock.getsockname()[0])
        self.tell({"type": "welcome", "name": names[0]})
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()
        return everyones_verdicts(cases, cards, names)

    def _late(self, cards: dict[int, Card]) -> list[str]:
        where = f"to {self.knobs.master_addr}:{self.knobs.master_port} within {NODE_SILENT_S:g} s"
        kind, hint = "rank", ""
        if not self.launcher.joined:
            kind, hint = "node", "; start it with the same command and its own NODE_RANK"
        missing = [number for number in range(self.launcher.members) if number not in cards]
        return [f"{kind} {number} has not come {where}{hint}" for number in missing]

    def _gather(self, cards: dict[int, Card]) -> list[str]:
        """Fill in `cards` and peers until all are there or time is up; returns what is wrong with who came."""
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, None)
        deadline, wrong = time.monotonic() + NODE_SILENT_S, list[str]()
        while len(cards) < self.launcher.members and not wrong and (left := deadline - time.monotonic()) > 0:
            for key, _ in self.selector.select(min(left, POLL_S)):
                if key.fileobj is self.listener:
                    connection, _ = self.listener.accept()
                    self.selector.register(link := Channel(connection), selectors.EVENT_READ, link)
                    self.links.append(link)
                else:
                    wrong += self._greet(key.data, cards)
        self.selector.unregister(self.listener)
        self.listener.close()  # the next section's meeting may open the port while this section is still running
        return wrong

    def _greet(self, link: Channel, cards: dict[int, Card]) -> list[str]:
        """A member's card, or a stranger's words, which end the connection. Returns why the run can't be."""
        try:
            messages = link.receive_ready()
            known = next((number for number, peer in self.peers.items() if peer.link is link), None)
            if messages == [] or (known is not None and messages and messages[-1]["type"] == "beat"):
                return []  # the rest of a long line is still to come, or a member waits on
            if messages is None or messages[0]["type"] != "hello":
                raise ValueError("no member of a run, or one that left again")
            number, card = int(messages[0]["member"]), dict(messages[0]["card"])
            name = self.launcher.name(number, card["host"])
        except (ValueError, KeyError, TypeError, OverflowError):
            self._forget(link, cards)
            return []
        if not 0 < number < self.launcher.members:
            return agree({0: cards[0], number: card}, {0: self.launcher.name(0, cards[0]["host"]), number: name})
        if number in cards:
            return [f"NODE_RANK={number}: two nodes say so ({name} came second); give each of them its own"]
        cards[number] = card
        self.peers[number] = Peer(name, link)
        return []

    def _forget(self, link: Channel, cards: dict[int, Card]) -> None:
        """A stranger, or a member that left before all had come and may come again."""
        self.selector.unregister(link)
        link.close()
        self.links.remove(link)
        for number in [number for number, peer in self.peers.items() if peer.link is link]:
            del self.peers[number], cards[number]

    # -- afterwards

    def tell(self, message: Message) -> None:
        """Say it to every member that is there; one that is not is heard of by its closed connection."""
        for number in list(self.peers):
            self.tell_one(number, message)

    def tell_one(self, number: int, message: Message) -> None:
        with contextlib.suppress(OSError):
            self.peers[number].link.send(message)

    def take(self) -> list[tuple[int, Message]]:
        """What members have said since the last call."""
        found, self.kept = self.kept, []
        while not self.inbox.empty():
            found.append(self.inbox.get())
        return found

    def replies(self, kind: str, limit_s: float, group: str = "") -> dict[int, Message]:
        """One message of this kind (of this group) from each member that is there; others are kept for `take`."""
        found: dict[int, Message] = {}
        deadline = time.monotonic() + limit_s
        while any(number not in found and not peer.gone for number, peer in self.peers.items()):
            if time.monotonic() > deadline:
                break
            with contextlib.suppress(queue.Empty):
                number, message = self.inbox.get(timeout=POLL_S)
                if message["type"] == kind and message.get("group", "") == group:
                    found[number] = message
                else:
                    self.kept.append((number, message))
        return found

    def lost(self) -> NodeLostError | None:
        """The first member that is gone."""
        for peer in self.peers.values():
            if peer.gone:
                return NodeLostError(f"{peer.name} {peer.gone}", peer.stopped)
        return None

    def _listen(self) -> None:
        """A thread of its own: a coordinator that is busy, saving a row for instance, is not silent."""
        beat_s, next_beat = NODE_SILENT_S / BEATS_A_SILENCE, 0.0
        while not self.closing.is_set():
            for key, _ in self.selector.select(POLL_S):
                self._read(key.data)
            now = time.monotonic()
            if now >= next_beat:
                self.tell({"type": "beat"})
                next_beat = now + beat_s
            for peer in self.peers.values():
                if not peer.gone and now - peer.heard > NODE_SILENT_S:
                    peer.gone = f"has been silent for {NODE_SILENT_S:g} s"

    def _read(self, link: Channel) -> None:
        (number,) = [number for number, peer in self.peers.items() if peer.link is link]
        peer = self.peers[number]
        try:
            messages = link.receive_ready()
        except ValueError:
            messages = None
        if messages is None:
            self.selector.unregister(link)
            peer.gone = peer.gone or "went away in mid run"
            return
        peer.heard = time.monotonic()
        for message in messages:
            if message["type"] == "log":
                with contextlib.suppress(OSError, ValueError):  # a full disk, or a log that is closed already
                    self.log(message["text"].encode(errors="replace"))
            elif message["type"] == "bye":
                peer.gone, peer.stopped = message["why"], True
            elif message["type"] != "beat":
                self.inbox.put((number, message))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.code, self.farewell = leaving(error)
        self.closing.set()
        if self.thread is not None:
            self.thread.join()
        self.listener.close()
        for link in self.links:
            with contextlib.suppress(OSError):
                lines = [f"{self.section}: {line}" for line in self.farewell]
                link.send({"type": "end", "code": self.code, "lines": lines})
        # A connection that is closed with words unread in it may lose our last ones: wait until each has left.
        deadline = time.monotonic() + FAREWELL_S
        for link in self.links:
            with contextlib.suppress(OSError):
                while (left := deadline - time.monotonic()) > 0:
                    link.sock.settimeout(left)
                    if not link.sock.recv(channel.RECEIVE_BYTES):
                        break
            link.close()

    # -- for the ranks of this node

    @property
    def interface(self) -> str:
        """The interface by which the other nodes reach this one."""
        return nic.interface_of(self.address)

    def fingerprints(self) -> dict[str, object]:
        """The other members', beside node 0's own."""
        return {"others": {self.names[number]: self.cards[number]["fingerprint"] for number in self.peers}}

    def notices(self) -> list[str]:
        """What the other members have to say of themselves before the first case."""
        return [f"{self.names[number]}: {text}" for number in self.peers for text in self.cards[number]["notices"]]

    def mark(self, phase: str) -> None:
        """Let every member's monitor watch while a case is timed."""
        if phase in ("time", "recheck"):
            self.tell({"type": "watch" if phase == "time" else "take"})

    def worst_marks(self, mine: Message) -> Message:
        """lib/monitor.py's columns over all members: the lowest clock, and any mark that one of them has."""
        everyone = [mine, *(reply["columns"] for reply in self.replies("marks", MARKS_S).values())]
        clocks = [seen["sm_clk_mhz_min"] for seen in everyone if seen.get("sm_clk_mhz_min") is not None]
        marks = {name: any(seen.get(name) for seen in everyone) for name in ("throttled", "contended")}
        return {"sm_clk_mhz_min": min(clocks, default=None)} | marks
