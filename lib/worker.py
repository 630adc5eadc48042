"""What each rank runs: `python -m lib.worker`, under torchrun or as a joined rank.

It says hello, gets the cases, runs them in order, and leaves when they are done, when something fails (after saying
what), or when the coordinator's socket closes.
"""

from __future__ import annotations

import os

from lib import guard

if __name__ == "__main__" and os.environ.get(guard.PARENT_PID) != str(os.getpid()):
    guard.die_with_parent(int(os.environ[guard.PARENT_PID]))  # before torch: its import takes seconds

import datetime
import faulthandler
import importlib
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from lib import channel, rendezvous
from lib.channel import Channel
from lib.contract import Backend, Engine, Group, Missing, NotCaptured, Unsupported
from lib.wire import unpack_case, unpack_knobs

if TYPE_CHECKING:
    from lib.contract import Session
    from lib.measure import Bench
    from lib.plan import Case

ORPHAN_EXIT = 3  # the coordinator went away
FAILED_EXIT = 1
BEFORE_LEAVING_S = 20.0  # a rank that reported an error waits to be ended, so that its peers' echo comes after it


@dataclass
class Link:
    """This rank's side of the control socket: what it says, and the thread that listens."""

    link: Channel
    rank: int
    phase: str = "start"
    saved: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ports: queue.Queue[int] = field(default_factory=queue.Queue)  # of the group's store (lib/rendezvous.py)

    def hello(self) -> dict[str, Any]:
        identity = {"rank": self.rank, "host": socket.gethostname(), "pid": os.getpid(), "pgid": os.getpgid(0)}
        self.link.send({"type": "hello", "secret": os.environ[channel.SECRET], **identity})
        message = self.link.receive()
        if message is None:
            os._exit(ORPHAN_EXIT)
        threading.Thread(target=self._listen, daemon=True).start()
        return message

    def _listen(self) -> None:
        while (messages := self.link.receive_ready()) is not None:
            for message in messages:
                if message["type"] == "saved":
                    self.saved.release()
                elif message["type"] == "store":
                    self.ports.put(message["port"])
        os._exit(ORPHAN_EXIT)

    def say_port(self, port: int) -> None:
        self.link.send({"type": "store", "port": port})

    def say_phase(self, case: int, phase: str) -> None:
        self.phase = phase
        self.link.send({"type": "phase", "case": case, "phase": phase})

    def say_result(self, case: int, result: dict[str, Any]) -> None:
        """Returns when the row is on disk."""
        self.link.send({"type": "result", "case": case, **result})
        self.saved.acquire()

    def say_measured(self, case: int, result: dict[str, Any]) -> None:
        """The result so far: it stands if what is still to come ends this group."""
        self.link.send({"type": "measured", "case": case, **result})

    def say_error(self, error: BaseException) -> None:
        verdicts = (("unsupported", Unsupported), ("missing", Missing), ("eager", NotCaptured))
        status = next((name for name, kind in verdicts if isinstance(error, kind)), "failed")
        text = str(error) if status != "failed" else f"{type(error).__name__}: {error}"
        first_line = text.strip().splitlines()[0] if text.strip() else type(error).__name__
        said = {"status": status, "text": first_line, "phase": self.phase, "time": time.time()}
        self.link.send({"type": "error", **said})

    def say_teardown(self, text: str) -> None:
        self.link.send({"type": "teardown", "text": f"rank {self.rank}: {text}"})


def make_group(rank: int, world: int, nodes: int, timeout_s: float) -> Group:
    import torch
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=timeout_s)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if os.environ["MOE_EP_VENDOR"] != "cpu":  # PyTorch calls an AMD GPU cuda too
        from lib.device import cuda_group

        return cuda_group(rank, world, local_rank, nodes, timeout)
    dist.init_process_group("gloo", timeout=timeout)
    pg = dist.group.WORLD
    return Group(rank, world, local_rank, nodes, torch.device("cpu"), pg=pg, host_pg=pg)


def run_cases(message: dict[str, Any], group: Group, link: Link) -> None:
    """All cases in order. The engine is opened once a variant; whatever is raised here is a failure of the case."""
    from lib.measure import Bench, measure_case

    knobs = unpack_knobs(message["knobs"])
    bench = Bench.make(group, knobs, message["peaks"], message["stamp"])
    section = importlib.import_module(message["module"]).SECTION
    engine: Engine | None = None
    opened: Any = None
    for index, packed in enumerate(message["cases"]):
        case = unpack_case(packed)
        backend: Backend = section.find(case.backend, knobs)
        if engine is None or opened != case.variant:
            if engine is not None:
                close_or_say(engine, "engine", link)
            link.say_phase(index, "open")
            capacity = case.problem.at(message["capacity"])
            engine, opened = backend.open(group, case.variant, capacity, knobs), case.variant
        eager = message["eager"].get(case.key, "")
        result, session = measure_case(case, engine, bench, partial(link.say_phase, index), eager)
        if knobs.trace != "0" and result["status"] == "ok":
            trace_case(result, case, session, bench, index, link)
        if group.rank == 0:
            link.say_result(index, result)
        barrier(group)
        if session is not None:
            link.say_phase(index, "close")
            close_or_say(session, "session", link)
            barrier(group)  # the next point's clock starts when every rank is done with this one
        if result["status"] != "ok":
            return  # a group is not used again after a failure
        if engine.isolation == "point":
            break  # the coordinator starts another group for the next point
    if engine is not None:
        close_or_say(engine, "engine", link)
    barrier(group)


def trace_case(result: dict[str, Any], case: Case, session: Session, bench: Bench, index: int, link: Link) -> None:
    """TRACE's own pass, after all that the row is made of."""
    from lib.tracing import add_trace

    if bench.group.rank == 0:
        link.say_measured(index, result)
    link.say_phase(index, "trace")
    add_trace(result, case, session, bench)


def run_peaks(group: Group, link: Link) -> None:
    """This machine's ceilings, reported like a case's result."""
    from lib.device import device_barrier
    from lib.peaks import measure_peaks

    link.say_phase(0, "time")
    align, _ = device_barrier(group)
    peaks = measure_peaks(group, align)
    if group.rank == 0:
        link.say_result(0, {"peaks": peaks})
    barrier(group)


def barrier(group: Group) -> None:
    import torch.distributed as dist

    dist.barrier(group=group.host_pg)


def close_or_say(thing: Any, what: str, link: Link) -> None:
    """The row is saved by now, so trouble in the tear-down never reaches it; it ends the group."""
    try:
        thing.close()
    except Exception as error:
        traceback.print_exc()
        link.say_teardown(f"closing the {what} failed: {type(error).__name__}: {error}; its row stands")
        raise TearDownError from error


class TearDownError(Exception):
    """After this the group ends; the rows that it made stand."""


def main() -> int:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    rank, world = rendezvous.place(os.environ)
    timeout_s = float(os.environ["MOE_EP_GROUP_TIMEOUT_S"])
    nodes = int(os.environ["MOE_EP_NODES"])
    link = Link(Channel.connect(os.environ[channel.ADDRESS]), rank)
    message = link.hello()
    try:
        if rendezvous.FIRST_RANK in os.environ:
            rendezvous.meet(link.say_port, link.ports, link.link.sock.getpeername()[0], timeout_s)
        group = make_group(rank, world, nodes, timeout_s)
        if message["task"] == "peaks":
            run_peaks(group, link)
        else:
            run_cases(message, group, link)
    except Exception as error:  # noqa: BLE001 - whatever a library raises is reported to the coordinator
        if not isinstance(error, TearDownError):
            traceback.print_exc()
            link.say_error(error)
        sys.stderr.flush()
        time.sleep(BEFORE_LEAVING_S)  # the coordinator closes the socket sooner, which ends this process
        return FAILED_EXIT
    return leave(link, 0)


def leave(link: Link, code: int) -> int:
    import torch.distributed as dist

    link.link.send({"type": "bye"})
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    # os._exit: a library's exit handler must not hang a rank that has said all it had to say.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
