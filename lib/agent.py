"""The ranks that this node runs: started through torchrun (in a joined group: one, by itself), watched, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO

from lib import channel, guard
from lib.launcher import Launcher, joined_environment, own_environment
from lib.rendezvous import FIRST_RANK, WORLD
from lib.version import REPO_ROOT

POLL_S = 0.1
GRACE_S = 3.0  # from TERM to KILL
GONE_S = 10.0  # from KILL to giving up on a process the kernel won't end
DUMP_S = 1.0  # what a rank gets to write its stacks, on a busy machine too

RankHere = tuple[int, int, str]  # number, pid, phase


class Agent:
    """torchrun's process on this node, or the one worker of a joined task. `mark`: value of MOE_EP_RUN."""

    def __init__(self, mark: str, launcher: Launcher, ranks: int) -> None:
        self.mark, self.launcher, self.ranks = mark, launcher, ranks
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, environment: Mapping[str, str], control: str, secret: str, output: IO[bytes] | int) -> None:
        """`control`: where node 0's coordinator listens to ranks, host:port."""
        launcher = self.launcher
        told = {**environment, guard.RUN_MARK: self.mark, channel.ADDRESS: control, channel.SECRET: secret}
        told["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO_ROOT), environment.get("PYTHONPATH", "")]))
        told["PYTHONFAULTHANDLER"] = "1"
        if launcher.members > 1:
            told |= {FIRST_RANK: str(launcher.member * self.ranks), WORLD: str(launcher.members * self.ranks)}
        if launcher.joined:
            told, command = joined_environment(told, launcher), [sys.executable, "-m", "lib.worker"]
        else:
            told, command = own_environment(told), torchrun_command(self.ranks)
        # A session of its own: a terminal's Ctrl-C reaches the coordinator alone, which ends the group in order.
        self.process = subprocess.Popen(
            guard.wrap(command),
            cwd=REPO_ROOT,
            env=told,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output == subprocess.PIPE else output,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def dump_stacks(self, ranks: Iterable[RankHere], write: Callable[[bytes], object]) -> None:
        """faulthandler writes all threads of each rank to the agent's output, one rank after the other."""
        for number, pid, phase in ranks:
            if guard.is_alive(pid) and guard.carries_mark(pid, self.mark):
                write(f"--- stacks of rank {number} (pid {pid}, phase {phase})\n".encode())
                os.kill(pid, signal.SIGUSR1)
                time.sleep(DUMP_S)

    def end(self, leaders: Sequence[int]) -> list[int]:
        """TERM the agent, a grace, KILL every process group of `leaders` that is still ours; returns who won't go."""
        if self.process is None:
            return []
        pids = [self.pid, *leaders]
        if self.poll() is None:
            self.process.terminate()
        self._reap(pids, GRACE_S)
        for pid in pids:
            guard.signal_group(pid, self.mark, signal.SIGKILL)
        return self._reap(pids, GONE_S)

    def _reap(self, pids: Sequence[int], limit_s: float) -> list[int]:
        deadline = time.monotonic() + limit_s
        alive = list(pids)
        while alive and time.monotonic() < deadline:
            self.poll()
            alive = guard.wait_gone(alive, POLL_S)
        return alive


def torchrun_command(ranks: int) -> list[str]:
    """torchrun on this node alone: `--standalone` takes its port from the OS, and nothing is ever restarted.

    Also on several nodes: a torchrun that spans them would end all ranks of a node by its own rules; here every node's
    torchrun starts and ends its own, and node 0's coordinator alone judges.
    """
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"),
        *(f"--nproc-per-node={ranks}", "--max-restarts=0", "-m", "lib.worker"),
    ]
