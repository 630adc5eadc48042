"""Marks of a case: the clock while it was timed, throttling, neighbours."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lib import monitor
from lib.machine import Gpu
from lib.monitor import IDLE, Monitor, Seen, neighbours

LARGEST = 1980
GPU = Gpu(0, "x", "GPU-0", (9, 0), 1 << 37, 1 << 37, "580")


def seen(*samples: tuple[int, int]) -> Seen:
    found = Seen()
    for clock, reasons in samples:
        found.add(clock, LARGEST, reasons)
    return found


def test_the_lowest_clock_of_a_busy_gpu_is_kept() -> None:
    assert seen((1980, 0), (1900, 0), (1950, 0)).sm_clk_mhz_min == 1900


def test_an_idle_gpus_clock_says_nothing() -> None:
    found = seen((345, IDLE))
    assert (found.sm_clk_mhz_min, found.throttled) == (None, False)


@pytest.mark.parametrize("reason", [0x4, 0x8, 0x20, 0x40, 0x80])
def test_a_slowing_reason_with_a_low_clock_is_throttling(reason: int) -> None:
    assert seen((1425, reason)).throttled
    assert not seen((1975, reason)).throttled, "a power cap that costs no clock"
    assert not seen((1425, 0)).throttled, "a low clock that somebody asked for"


def nvml_of(used: int, busy: list[int]) -> SimpleNamespace:
    looks = iter(busy)
    return SimpleNamespace(
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=used),
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=next(looks)),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=77)],
    )


def test_a_neighbours_memory_or_work_is_told_with_its_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "LOOK_S", 0)
    monkeypatch.setattr(monitor, "nvml", lambda: nvml_of(10 << 30, [0]))
    assert neighbours((GPU,)) == "GPU 0: 10.7 GB in use, 0 % busy, pids 77"
    monkeypatch.setattr(monitor, "nvml", lambda: nvml_of(0, [90, 80, 95, 85, 99]))
    assert "80 % busy" in neighbours((GPU,))


def test_what_an_earlier_section_left_in_the_average_is_no_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "LOOK_S", 0)
    monkeypatch.setattr(monitor, "nvml", lambda: nvml_of(500 << 20, [60, 20, 0]))
    assert neighbours((GPU,)) == ""


def test_without_gpus_or_nvml_there_are_no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Monitor(()).columns() == {}
    monkeypatch.setattr(monitor, "nvml", lambda: None)
    assert Monitor((GPU,)).columns() == {}
