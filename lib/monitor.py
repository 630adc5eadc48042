"""The state of the GPUs while a case is timed, by NVML: clocks, throttle reasons, and who was there before us."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from lib.machine import Gpu, nvml

PERIOD_S = 0.1
IDLE = 0x1  # NVML's clocks-event reasons (nvml.h, nvmlClocksEventReason*)
SLOWING = 0x4 | 0x8 | 0x20 | 0x40 | 0x80  # power cap, HW slowdown, SW thermal, HW thermal, power brake
FULL_CLOCK = 0.97  # below this share of the largest SM clock, with a slowing reason, a case counts as throttled
NEIGHBOUR_BYTES = 1 << 30  # a GPU that nobody uses holds some hundred MB at most
NEIGHBOUR_UTILISATION = 5  # per cent
LOOKS, LOOK_S = 4, 0.4  # NVML averages over up to a second: an earlier section's end must not look like a neighbour


def neighbours(gpus: tuple[Gpu, ...]) -> str:
    """Who uses the GPUs before our start, in one sentence; "" if nobody does or NVML is not there."""
    library = nvml()
    if library is None:
        return ""
    found = []
    for gpu in gpus:
        handle = library.nvmlDeviceGetHandleByIndex(gpu.index)
        used = library.nvmlDeviceGetMemoryInfo(handle).used
        busy = library.nvmlDeviceGetUtilizationRates(handle).gpu
        for _ in range(LOOKS):
            if busy <= NEIGHBOUR_UTILISATION:
                break
            time.sleep(LOOK_S)
            busy = min(busy, library.nvmlDeviceGetUtilizationRates(handle).gpu)
        pids = [process.pid for process in library.nvmlDeviceGetComputeRunningProcesses(handle)]
        if used > NEIGHBOUR_BYTES or busy > NEIGHBOUR_UTILISATION:
            who = f", pids {' '.join(map(str, pids))}" if pids else ""
            found.append(f"GPU {gpu.index}: {used / 1e9:.1f} GB in use, {busy} % busy{who}")
    return "; ".join(found)


@dataclass
class Seen:
    """What the samples of one case held."""

    sm_clk_mhz_min: int | None = None
    reasons: int = 0
    throttled: bool = False

    def add(self, clock_mhz: int, largest_mhz: int, reasons: int) -> None:
        if reasons & IDLE:
            return  # an idle GPU's clock says nothing about the timed work
        self.sm_clk_mhz_min = clock_mhz if self.sm_clk_mhz_min is None else min(self.sm_clk_mhz_min, clock_mhz)
        self.reasons |= reasons
        self.throttled |= bool(reasons & SLOWING) and clock_mhz < FULL_CLOCK * largest_mhz


@dataclass
class Monitor:
    """A thread that samples while `watch` is on; `take` ends the watch and gives what was seen."""

    gpus: tuple[Gpu, ...]
    seen: Seen = field(default_factory=Seen)
    watching: bool = False

    def __post_init__(self) -> None:
        self.contended = neighbours(self.gpus) if self.gpus else ""
        self.library = nvml() if self.gpus else None
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        if self.library is not None:
            self.handles = [self.library.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in self.gpus]
            self.largest = [self._clock(handle, largest=True) for handle in self.handles]
            threading.Thread(target=self._run, daemon=True).start()

    def _clock(self, handle: Any, largest: bool = False) -> int:
        library = self.library
        assert library is not None
        read = library.nvmlDeviceGetMaxClockInfo if largest else library.nvmlDeviceGetClockInfo
        return int(read(handle, library.NVML_CLOCK_SM))

    def _run(self) -> None:
        assert self.library is not None
        while not self.stopped.wait(PERIOD_S):
            if not self.watching:
                continue
            for handle, largest in zip(self.handles, self.largest, strict=True):
                reasons = self.library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
                clock = self._clock(handle)
                with self.lock:
                    self.seen.add(clock, largest, reasons)

    def watch(self) -> None:
        with self.lock:
            self.seen = Seen()
            self.watching = True

    def take(self) -> Seen:
        with self.lock:
            self.watching = False
            return self.seen

    def columns(self) -> dict[str, Any]:
        """What the case that was watched last gets in its row; nothing without GPUs or NVML."""
        if self.library is None:
            return {}
        seen = self.take()
        return {
            "sm_clk_mhz_min": seen.sm_clk_mhz_min,
            "throttled": seen.throttled,
            "contended": bool(self.contended),
        }

    def close(self) -> None:
        self.stopped.set()
