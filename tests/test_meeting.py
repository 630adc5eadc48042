"""What the nodes say to each other before anything is measured, and how one that falls silent is missed."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from harness import free_port
from knob_helpers import parsed
from machine_helpers import cpu

from bench import ref
from lib import follower, nodes
from lib.channel import Channel
from lib.contract import unsupported
from lib.follower import Follower, NodeZeroGoneError, find_node_0
from lib.launcher import Launcher
from lib.meeting import Card, agree, everyones_verdicts, make_card
from lib.nodes import Hub, NotMetError, RefusedError
from lib.plan import Case, make_plan

SILENT_S = 0.6
NAMES = {0: "node 0 (a)", 1: "node 1 (b)", 2: "node 2 (c)"}


def planned(**knobs: str) -> list[Case]:
    return make_plan(ref.SECTION, parsed(REF_LIST="torch", **knobs), cpu(), False)


def card(host: str = "a", env: dict[str, str] | None = None, **knobs: str) -> Card:
    made = make_card("ref", parsed(REF_LIST="torch", **knobs), cpu(), planned(**knobs), env or {})
    return json.loads(json.dumps(made | {"host": host}))  # as it comes over the wire


def card_software() -> dict[str, str]:
    return dict(card()["device and software"])


# --- comparing --------------------------------------------------------------------------------------------------------


def test_nodes_with_the_same_command_agree_whatever_their_folders_and_ranks_are() -> None:
    meeting = {"NNODES": "2", "MASTER_PORT": "1"}
    first = card(MASTER_ADDR="node0", NODE_RANK="0", OUT_DIR="here", **meeting)
    other = card(MASTER_ADDR="10.0.0.1", NODE_RANK="1", OUT_DIR="there", DEBUG="1", **meeting)
    assert agree({0: first, 1: other}, NAMES) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"section": "comm"}, "section differs between nodes: ref on node 0 (a), comm on node 1 (b); give every"),
        ({"code": "s1", "git": "g2+"}, " on node 0 (a), g2+ s1 on node 1 (b); give every node the same"),
        (
            {"device and software": card_software() | {"device": "CPU (x)"}},
            "device differs between nodes: CPU (Some CPU, 8 cores) on node 0 (a), CPU (x) on node 1",
        ),
        ({"device and software": card_software() | {"torch": "9.9"}}, " on node 0 (a), 9.9 on node 1 (b)"),
        (
            {"device and software": card_software() | {"NCCL_PROTO": "LL"}},
            "NCCL_PROTO differs between nodes: none on node 0 (a), LL on node 1 (b)",
        ),
        ({"trouble": "NIC=x: leaves no RDMA device"}, "node 1 (b): NIC=x: leaves no RDMA device"),
        ({"cases": []}, "plan differs between nodes: torch e2e T=8 only on node 0 (a); give every node the same"),
        (
            {"cases": [["torch e2e T=8", "k2", "ok", ""]]},
            "torch e2e T=8 not the same on node 1 (b) (a routing file with other contents?)",
        ),
    ],
)
def test_a_difference_is_one_sentence_with_both_sides(changes: dict[str, Any], said: str) -> None:
    (sentence,) = agree({0: card(), 1: card("b") | changes}, NAMES)
    assert said in sentence
    assert "\n" not in sentence


def test_every_knob_that_differs_is_named_and_each_node_is_compared() -> None:
    refused = agree({0: card(), 1: card("b", ITERS="9", SEED="3"), 2: card("c", TOKENS="4")}, NAMES)
    assert [sentence.partition(" ")[0] for sentence in refused] == ["ITERS", "SEED", "TOKENS"]


def test_a_case_that_one_node_cannot_run_is_run_by_nobody_and_says_why() -> None:
    cases = planned()
    blind = card("b") | {"cases": [[name, key, "missing", "no torch"] for name, key, _, _ in card()["cases"]]}
    (case,) = everyones_verdicts(cases, {0: card(), 1: blind}, NAMES)
    assert (case.support.status, case.support.reason) == ("missing", "node 1 (b): no torch")
    cannot = [replace(cases[0], support=unsupported("too large"))]
    (case,) = everyones_verdicts(cannot, {0: card(), 1: blind}, NAMES)
    assert case.support == unsupported("too large")


# --- over sockets, in one process -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (nodes, follower):
        monkeypatch.setattr(module, "NODE_SILENT_S", SILENT_S)
    monkeypatch.setattr(nodes, "FAREWELL_S", 0.2)
    monkeypatch.setattr(follower, "MARGIN_S", 0.2)


class Meeting:
    """A hub, and connections to it that say what a test wants."""

    def __init__(self, members: int) -> None:
        port = str(free_port())
        self.knobs = parsed(NNODES=str(members), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, NUM_EXPERTS="48")
        self.launcher = Launcher(nodes=members)
        self.hub = Hub("ref", self.launcher, self.knobs)
        self.links: list[Channel] = []

    def connect(self) -> Channel:
        self.links.append(Channel.connect(f"127.0.0.1:{self.knobs.master_port}"))
        return self.links[-1]

    def come(self, member: int, host: str = "b") -> Channel:
        link = self.connect()
        link.send({"type": "hello", "member": member, "card": card(host)})
        return link

    def meet(self) -> list[Case]:
        return self.hub.meet(card(), planned())


@pytest.fixture
def two() -> Iterator[Meeting]:
    meeting = Meeting(2)
    yield meeting
    for link in meeting.links:
        link.close()


def wait_for_loss(hub: Hub) -> str:
    deadline = time.monotonic() + 10
    while (lost := hub.lost()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return str(lost)


def test_a_node_that_stops_speaking_is_missed_by_name_in_time(two: Meeting) -> None:
    with two.hub:
        two.come(1)
        two.meet()
        start = time.monotonic()
        assert wait_for_loss(two.hub) == f"node 1 (b) has been silent for {SILENT_S:g} s"
        assert time.monotonic() - start < SILENT_S + 1


def test_a_node_whose_connection_closes_is_missed_at_once(two: Meeting) -> None:
    with two.hub:
        link = two.come(1)
        two.meet()
        link.close()
        assert wait_for_loss(two.hub) == "node 1 (b) went away in mid run"


def test_a_node_that_leaves_before_all_have_come_has_not_come() -> None:
    meeting = Meeting(3)
    with meeting.hub:
        meeting.come(1).close()
        with pytest.raises(NotMetError) as caught:
            meeting.meet()
    assert [line.partition(" has not come")[0] for line in caught.value.lines] == ["node 1", "node 2"]


def test_a_node_that_waits_for_a_later_one_may_speak_meanwhile() -> None:
    meeting = Meeting(3)
    with meeting.hub:
        early = meeting.come(1)

        def later() -> None:
            for _ in range(3):
                early.send({"type": "beat"})
                time.sleep(0.05)
            meeting.come(2, "c")

        thread = threading.Thread(target=later)
        thread.start()
        assert len(meeting.meet()) == 1
        thread.join()
    assert meeting.hub.names == NAMES
    for link in meeting.links:
        link.close()


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.0\r\n\r\n", b'{"type": "hullo"}\n', b"[]\n", b'{"type": "hello", "member": 1, "card": {}}\n'],
)
def test_a_stranger_at_the_port_is_sent_away_and_disturbs_nobody(two: Meeting, words: bytes) -> None:
    with two.hub:
        stranger = two.connect()
        stranger.sock.sendall(words)
        two.come(1)
        assert len(two.meet()) == 1


def test_a_node_with_a_rank_that_does_not_exist_is_told_that_nnodes_differs(two: Meeting) -> None:
    other = card("c")
    other["knobs"]["NNODES"] = "9"
    with two.hub:
        two.connect().send({"type": "hello", "member": 8, "card": other})
        with pytest.raises(RefusedError, match=r"NNODES differs between nodes: 1 on node 0 \(a\), 9 on node 8 \(c\)"):
            two.meet()


def test_a_late_reply_of_an_earlier_group_is_not_taken_for_this_ones(two: Meeting) -> None:
    with two.hub:
        link = two.come(1)
        two.meet()
        link.send({"type": "ended", "group": "g1", "stuck": [1]})
        link.send({"type": "ended", "group": "g2", "stuck": []})
        assert two.hub.replies("ended", 5, "g2")[1]["stuck"] == []
        assert [message["group"] for _, message in two.hub.take()] == ["g1"]


def test_the_marks_of_a_row_are_the_worst_of_all_nodes(two: Meeting) -> None:
    with two.hub:
        link = two.come(1)
        two.meet()
        two.hub.mark("recheck")
        link.send({"type": "marks", "columns": {"sm_clk_mhz_min": 900, "throttled": True, "contended": False}})
        mine = {"sm_clk_mhz_min": 1980, "throttled": False, "contended": False}
        worst = two.hub.worst_marks(mine)
        assert worst == {"sm_clk_mhz_min": 900, "throttled": True, "contended": False}


def follow_a(server: socket.socket) -> Follower:
    host, port = server.getsockname()[:2]
    monitor: Any = SimpleNamespace()
    return Follower(Channel.connect(f"{host}:{port}"), Launcher(nodes=2, node_rank=1), 2, monitor, lambda way: {})


def test_a_follower_leaves_when_node_0_falls_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = follow_a(server)
        theirs = Channel(server.accept()[0])
        theirs.send({"type": "welcome"})
        with pytest.raises(NodeZeroGoneError, match=r"node 0 \(127.0.0.1\) has been silent for 0.6 s"):
            mine.run(card())
        theirs.close()


def test_a_follower_leaves_when_node_0_goes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = follow_a(server)
        server.accept()[0].close()
        with pytest.raises(NodeZeroGoneError, match=r"node 0 \(127.0.0.1\) went away"):
            mine.run(card())


def test_a_follower_says_what_node_0_says_last_and_takes_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = follow_a(server)
        theirs = Channel(server.accept()[0])
        theirs.send({"type": "end", "code": 7, "lines": ["ref: the rows are on node 0"]})
        assert mine.run(card()) == 7
        theirs.close()
    assert capsys.readouterr().err == "ref: the rows are on node 0\n"


def test_a_node_0_that_is_late_is_found() -> None:
    meeting = Meeting(2)
    threading.Timer(0.3, meeting.hub.__enter__).start()
    find_node_0("ref", meeting.launcher, meeting.knobs).close()
    meeting.hub.__exit__(None, None, None)


# -- words on the wire


@pytest.mark.parametrize("line", [b"[" * 100_000, b"5", b"[]", b"null", b'{"member": Infinity}', b"\xff", b"{"])
def test_what_a_stranger_says_is_no_message_and_nothing_worse(line: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(line[:60_000] + b"\n")
        with pytest.raises(ValueError, match=r"."):
            Channel(ours).receive_ready()
