"""Several "nodes" on this machine: a network namespace each where that is allowed, else all on the loopback."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import FAKE_SECTION, Run, free_port

NODES = 3
RANKS = 2  # of each
SUBNET = f"10.{77 + os.getpid() % 100}.0"
_one_at_a_time = threading.Lock()
_names = [f"moe{os.getpid()}n{number}" for number in range(NODES)]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def without_namespaces() -> str:
    """Why there are no namespaces, "" once they are there."""
    with _one_at_a_time:
        return _make_namespaces()


@functools.cache
def _make_namespaces() -> str:
    """Node 0 holds a bridge, the others have a cable to it."""
    try:
        for name in _names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", _names[0], "link", "add", "bridge0", "type", "bridge")
        ip("-n", _names[0], "addr", "add", f"{SUBNET}.1/24", "dev", "bridge0")
        ip("-n", _names[0], "link", "set", "bridge0", "up")
        for number, name in list(enumerate(_names))[1:]:
            port = f"port{number}"
            ip("-n", name, "link", "add", "wire0", "type", "veth", "peer", "name", port, "netns", _names[0])
            ip("-n", name, "addr", "add", f"{SUBNET}.{number + 1}/24", "dev", "wire0")
            ip("-n", name, "link", "set", "wire0", "up")
            ip("-n", _names[0], "link", "set", port, "master", "bridge0", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        remove_namespaces()
        told = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        return f"this machine allows no network namespaces: {' '.join(told.split())}"
    return ""


def remove_namespaces() -> None:
    for name in _names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def inside(node: int) -> list[str]:
    """What stands in front of a command of this node."""
    return [] if without_namespaces() else ["ip", "netns", "exec", _names[node]]


def meeting_point() -> dict[str, str]:
    address = "127.0.0.1" if without_namespaces() else f"{SUBNET}.1"
    return {"MASTER_ADDR": address, "MASTER_PORT": str(free_port())}


Each = Mapping[int, Mapping[str, str]]


@dataclass
class Cluster:
    """One command on several nodes. Node 0's run has the files; all write what fakes say into its folder."""

    nodes: list[Run]

    @classmethod
    def start(
        cls,
        folder: Path,
        fakes: str,
        count: int = 2,
        each: Each | None = None,
        come: Sequence[int] | None = None,
        folders: Mapping[int, Path] | None = None,
        stamp: str = "",
        **knobs: str,
    ) -> Cluster:
        """`each`: what a node gets beside the others' knobs · `come`: those that do · `folders`: of their own code."""
        shared = {"NNODES": str(count), "GPUS": str(RANKS), "MOE_EP_FAKE_DIR": str(folder)} | meeting_point() | knobs
        runs = []
        for node in range(count) if come is None else come:
            own = {"NODE_RANK": str(node)} | dict((each or {}).get(node, {}))
            run = Run(folder if node == 0 else folder / f"node{node}", prefix="sweep")
            run.stamp = stamp or run.stamp
            at = ["env", f"--chdir={folders[node]}"] if folders and node in folders else []
            run.command = [*inside(node), *at, *FAKE_SECTION]
            runs.append(run.start(fakes, **{name: value for name, value in (shared | own).items() if value}))
        return cls(runs)

    @classmethod
    def go(cls, folder: Path, fakes: str, **more: object) -> Cluster:
        return cls.start(folder, fakes, **more).end()  # type: ignore[arg-type]

    def end(self) -> Cluster:
        for run in self.nodes:
            run.end()
        return self

    @property
    def first(self) -> Run:
        return self.nodes[0]

    @property
    def codes(self) -> list[int | None]:
        return [run.code for run in self.nodes]

    @property
    def said(self) -> list[str]:
        return [run.said for run in self.nodes]


def torchrun_tasks(node: int, point: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """One task a node, by somebody else's torchrun over two nodes."""
    port = f"--master-port={point['MASTER_PORT']}"
    where = ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", f"--master-addr={point['MASTER_ADDR']}", port]
    return [sys.executable, "-m", "torch.distributed.run", *where, *command]


def srun_tasks(nodes: int, tasks: int) -> Iterator[dict[str, str]]:
    """The variables of each task that srun would start: `tasks` on each of `nodes`."""
    for node, task in itertools.product(range(nodes), range(tasks)):
        yield {
            "SLURM_PROCID": str(node * tasks + task),
            "SLURM_LOCALID": str(task),
            "SLURM_NODEID": str(node),
            "SLURM_STEP_NUM_TASKS": str(nodes * tasks),
            "SLURM_STEP_NUM_NODES": str(nodes),
            "SLURM_NNODES": str(nodes),
        }
