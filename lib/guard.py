"""Processes that cannot outlive their parent, and stay findable: the death signal, the run's mark, the wrapper.

Run as `python -m lib.guard PARENT_PID COMMAND...` it is the wrapper in front of torchrun: the kernel drops the death
signal on fork but keeps it on exec, so the wrapper sets it and execs the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

RUN_MARK = "MOE_EP_RUN"  # in the environment of every process of a run
PARENT_PID = "MOE_EP_PARENT_PID"  # pid of the process whose death must end this one
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
POLL_S = 0.05


class NotItsChildError(Exception):
    """The process that should end with this one's is alive and not its parent: something stands between them."""


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when the parent *thread* ends; leave now if the parent is gone already.

    Raises NotItsChildError where the parent is another process than `parent_pid`, which lives.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        if is_alive(parent_pid):
            raise NotItsChildError
        os._exit(1)


def is_alive(pid: int) -> bool:
    """True while the process runs; a zombie that nobody reaps (a container's pid 1 may not) counts as gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def carries_mark(pid: int, stamp: str) -> bool:
    """True if the process belongs to the run, so that a reused pid is never signalled."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{RUN_MARK}={stamp}".encode() in environ.split(b"\0")


def marked_pids(stamp: str) -> list[int]:
    """Every living process of the run, this one left out (for tests and the last look before leaving)."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and is_alive(pid) and carries_mark(pid, stamp)]


def signal_group(pid: int, stamp: str, number: signal.Signals) -> None:
    """Signal the process group that `pid` leads, if it is still ours."""
    if is_alive(pid) and carries_mark(pid, stamp):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            return  # it ended between the look and the signal


def wait_gone(pids: list[int], limit_s: float) -> list[int]:
    """Wait until all have ended; returns those that have not."""
    deadline = time.monotonic() + limit_s
    alive = [pid for pid in pids if is_alive(pid)]
    while alive and time.monotonic() < deadline:
        time.sleep(POLL_S)
        alive = [pid for pid in alive if is_alive(pid)]
    return alive


def wrap(command: list[str]) -> list[str]:
    """The command behind the wrapper, with this process as the parent it follows."""
    return [sys.executable, "-m", "lib.guard", str(os.getpid()), *command]


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    die_with_parent(parent_pid)
    os.environ[PARENT_PID] = str(os.getpid())
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
