"""Is the clock right? Kernels of known length, read back by every method of lib/device_timing.py, on real GPUs.

    python -m torch.distributed.run --standalone --nproc-per-node=2 -m tools.clock_check [--out clock.csv]

The known length is made on the device: a kernel that spins until %globaltimer (32 ns steps on an H200) says so. One
line a check: what was expected, what was read, the limit, and whether it holds. Exit code 1 if one does not.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import datetime
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lib import device_timing, stats
from lib.contract import Group, Phase, Session
from lib.device import cuda_group, make_tools
from lib.device_timing import DeviceTools
from lib.kernels import profile_session
from lib.measure import time_columns
from lib.timing import Plan, Samples

LENGTHS_US = (20, 100, 1000)
FLOOR_US, SHARE = 1.0, 0.01  # a length is right within the larger of the two
EXCESS_US = 2.0
SLEEP_S, SLEEP_SHARE, SLEEP_LEAST_US = 2e-3, 0.02, 4.0  # a host that slept enqueues 1 to 3 us slower all the same
DELAY_US, DELAY_LIMIT_US = 200, 20.0
COLD_MARGINS = {32 << 20: 1.02, 8 << 20: 1.2}  # bytes copied -> how much slower cold must at least be than warm
BOUNDARIES, BOUNDARY_DELAY_CYCLES = 64, 10_000_000  # about 5 ms of delay, 64 launches and events take about 1
PLAN = Plan(warmup=10, iters=200, iters_per_graph=50)
SHORT_PLAN, TURNS, EXCESS_TURNS = Plan(warmup=2, iters=20), 15, 31
TIMEOUT_S = 300
SPIN = r"""
extern "C" __global__ void moe_ep_spin(unsigned long long ns) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < ns);
}
"""


@dataclass
class Line:
    """One check of the table."""

    check: str
    method: str
    expected_us: float
    read_us: float
    limit_us: float
    ok: bool


class Work(Session):
    """A session made of plain functions, one a phase; the call runs them all."""

    capturable = ""
    kernels = {"call": [""]}  # noqa: RUF012 - whatever runs is this session's

    def __init__(self, *steps: Callable[[], None]) -> None:
        self.steps = steps
        self.phases = [Phase(f"step{number}", step) for number, step in enumerate(steps)]

    def call(self) -> None:
        for step in self.steps:
            step()

    def bare_kernel(self) -> Callable[[], None]:
        return self.call


class Late(Work):
    """A delay on the device, then the arrival, then a meeting of all ranks on the device."""

    def __init__(self, delay: Callable[[], None], meet: Callable[[], None]) -> None:
        def arrive() -> None:
            delay()
            self.mark_arrival()
            meet()

        super().__init__(arrive)


class Checks:
    """All checks of one machine; every rank runs them, rank 0 keeps the lines."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.tools = make_tools(group, cold=False)
        self.kernel = torch.cuda._compile_kernel(SPIN, "moe_ep_spin")
        self.lines: list[Line] = []

    def spin(self, length_us: float) -> Callable[[], None]:
        """A launch with its arguments made ready: about 3 us of host time (the compiled object's own call takes 25)."""
        driver, function = torch.cuda._utils._get_gpu_runtime_library(), self.kernel.func
        nanoseconds = ctypes.c_ulonglong(int(length_us * 1000))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(nanoseconds))
        index = self.group.device.index

        def launch(keep_alive: Any = nanoseconds) -> None:
            stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(index))
            driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, None)

        return launch

    def measure(
        self, method: str, session: Session, tools: DeviceTools | None = None, plan: Plan = PLAN
    ) -> list[Samples]:
        samples = device_timing.METHODS[method](session, tools or self.tools, plan, lambda replay: None)
        everyone: list[Any] = [None] * self.group.world
        dist.all_gather_object(everyone, samples, group=self.group.host_pg)
        return everyone

    def p50(self, method: str, session: Session, tools: DeviceTools | None = None, plan: Plan = PLAN) -> float:
        total = list(zip(*(samples.total for samples in self.measure(method, session, tools, plan)), strict=True))
        pipelined = method == "e2e_pipelined"
        return median(stats.median_over_ranks(total) if pipelined else stats.max_over_ranks(total))

    def add(self, check: str, method: str, expected: float, read: float, limit: float, ok: bool | None = None) -> None:
        holds = abs(read - expected) <= limit if ok is None else ok
        self.lines.append(Line(check, method, expected, read, limit, holds))

    # -- the checks

    def lengths(self) -> None:
        nothing = Work(self.spin(0))
        empty = {method: self.p50(method, nothing) for method in ("graph", "kernel")}
        empty["e2e_pipelined"] = self.boundary()
        for method, read in empty.items():
            self.add("empty kernel", method, 0, read, 0, ok=True)
        for length in LENGTHS_US:
            session, limit = Work(self.spin(length)), max(FLOOR_US, SHARE * length)
            self.add(f"spin {length}", "graph", length, self.p50("graph", session), limit)
            alone = self.p50("kernel", session)
            self.add(f"spin {length} less an empty kernel", "kernel", length, alone - empty["kernel"], limit)
            times = profile_session(session, self.tools)
            self.add(f"spin {length}", "kernel_us", length, median(times.total_us), limit)
            columns = time_columns("e2e_pipelined", 0, self.measure("e2e_pipelined", session))
            rest, check = columns["lat_us_p50"] - empty["e2e_pipelined"], f"spin {length} less an empty boundary"
            host_bound = bool(columns["launch_bound"])  # then the period is the host's, and the row would say so
            told = f"{check}, launch_bound" if host_bound else check
            self.add(told, "e2e_pipelined", length, rest, limit, ok=host_bound or None)

    def excesses(self) -> None:
        """What e2e adds to a length: the host's enqueue and the events, the same for every length.

        A kernel shorter than the enqueue of the end event is charged with that too, so the shortest length is the
        base, not an empty kernel. Lengths take turns, since the host's enqueue time drifts by more than the limit.
        """
        sessions = {length: Work(self.spin(length)) for length in LENGTHS_US}
        turns: dict[int, list[float]] = {length: [] for length in LENGTHS_US}
        for _ in range(EXCESS_TURNS):
            for length, session in sessions.items():
                turns[length].append(self.p50("e2e", session, plan=SHORT_PLAN) - length)
        base = median(turns[LENGTHS_US[0]])
        for length, reads in turns.items():
            read = median(reads)
            ok = min(reads) >= 0 and abs(read - base) <= EXCESS_US
            self.add(f"excess of spin {length} over its length", "e2e", base, read, EXCESS_US, ok=ok)

    def boundary(self) -> float:
        """The device's period of an empty kernel and an event, all enqueued behind a delay so that no host is seen."""
        stamps, launch = [device_timing.event() for _ in range(BOUNDARIES + 1)], self.spin(0)
        launch()
        torch.cuda.synchronize()
        torch.cuda._sleep(BOUNDARY_DELAY_CYCLES)
        stamps[0].record()
        for stamp in stamps[1:]:
            launch()
            stamp.record()
        torch.cuda.synchronize()
        return median(device_timing.between_us(before, after) for before, after in pairwise(stamps))

    def phases_add_up(self) -> None:
        session = Work(self.spin(200), self.spin(100))
        everyone = self.measure("e2e", session)

        def over_ranks(series: list[list[float]]) -> float:
            return median(stats.max_over_ranks(list(zip(*series, strict=True))))

        total, gap = over_ranks([s.total for s in everyone]), over_ranks([s.gaps for s in everyone])
        parts = sum(over_ranks([s.phases[name] for s in everyone]) for name in everyone[0].phases)
        self.add("sum of phases", "e2e", total, parts, EXCESS_US + gap)

    def late_host(self) -> None:
        late_rank = self.group.world - 1

        def late() -> None:
            if self.group.rank == late_rank:
                time.sleep(SLEEP_S)
            self.tools.rendezvous()

        for length in LENGTHS_US:
            session, delayed_tools = Work(self.spin(length)), replace(self.tools, rendezvous=late)
            punctual, delayed = [], []
            for _ in range(TURNS):
                punctual.append(self.p50("e2e", session, plan=SHORT_PLAN))
                delayed.append(self.p50("e2e", session, delayed_tools, SHORT_PLAN))
            moved = median(after - before for before, after in zip(punctual, delayed, strict=True))
            expected = median(punctual)
            read, limit = expected + moved, max(SLEEP_SHARE * expected, SLEEP_LEAST_US)
            self.add(f"spin {length}, 2 ms host sleep on rank {late_rank}", "e2e", expected, read, limit)

    def late_device(self) -> None:
        """One rank's device delayed by more than the others', beside equal delays in turns.

        Every rank has a delay, so that the host's enqueue of the arrival hides behind it on all ranks; and ranks are
        never equally punctual by themselves, so the turns without a late rank say what to expect.
        """
        ranks = range(self.group.world)

        def delayed(late: int | None) -> Late:
            return Late(self.spin(2 * DELAY_US if late == self.group.rank else DELAY_US), self.tools.align)

        sessions = {late: delayed(late) for late in (None, *ranks)}
        arrivals: dict[int | None, list[tuple[float, ...]]] = {late: [] for late in sessions}
        for _ in range(TURNS):
            for late, session in sessions.items():
                everyone = self.measure("e2e", session, plan=SHORT_PLAN)
                arrivals[late] += zip(*(samples.arrivals for samples in everyone), strict=True)
        for late in ranks:
            skew, slowest = stats.skew_us(arrivals[late]), stats.slowest_rank(arrivals[late])
            others = [rank for rank in ranks if rank != late]
            ahead = median(times[late] - min(times[rank] for rank in others) for times in arrivals[None])
            expected = DELAY_US + ahead
            named = slowest == late and abs(skew - expected) <= DELAY_LIMIT_US
            check = f"{DELAY_US} us more on rank {late}, slowest_rank {slowest}"
            self.add(check, "skew_us", expected, skew, DELAY_LIMIT_US, ok=named)

    def cold_l2(self) -> None:
        """A copy that fits the L2 by a third, and one that fills it with its two sides."""
        cold_tools = make_tools(self.group, cold=True)
        for size, margin in COLD_MARGINS.items():
            source = torch.rand(size // 4, device=self.group.device)
            target = torch.empty_like(source)

            def copy(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
                target.copy_(source)

            warm, cold = self.p50("kernel", Work(copy)), self.p50("kernel", Work(copy), cold_tools)
            check = f"{size >> 20} MB copy, cold over warm"
            self.add(check, "kernel", warm, cold, warm * (margin - 1), ok=cold >= margin * warm)


def run(group: Group) -> list[Line]:
    checks = Checks(group)
    checks.lengths()
    checks.excesses()
    checks.phases_add_up()
    checks.late_host()
    if group.world > 1:
        checks.late_device()
    checks.cold_l2()
    return checks.lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="CSV to write")
    out = parser.parse_args().out
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not torch.cuda.is_available():
        sys.stderr.write("clock_check: needs a CUDA GPU, this machine has none\n")
        return 4
    group = cuda_group(rank, world, int(os.environ.get("LOCAL_RANK", "0")), 1, datetime.timedelta(seconds=TIMEOUT_S))
    lines = run(group)
    if rank == 0:
        for line in lines:
            verdict = "ok" if line.ok else "WRONG"
            sys.stdout.write(
                f"{line.check:40} {line.method:14} {line.expected_us:10.2f} {line.read_us:10.2f} {verdict}\n"
            )
        if out is not None:
            with out.open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(["check", "method", "expected_us", "read_us", "limit_us", "ok", "device", "world"])
                device = torch.cuda.get_device_name()
                for line in lines:
                    cells = [
                        line.check,
                        line.method,
                        *(f"{v:.3f}" for v in (line.expected_us, line.read_us, line.limit_us)),
                    ]
                    writer.writerow([*cells, int(line.ok), device, world])
    dist.barrier(group=group.host_pg)
    dist.destroy_process_group()
    return 0 if all(line.ok for line in lines) else 1


if __name__ == "__main__":
    raise SystemExit(main())
