"""kernel_us: which kernels are the session's, and that nothing becomes 0."""

from __future__ import annotations

import pytest

from lib.kernels import Kernel, attribute

PATTERNS = {"dispatch": ["dispatch"], "combine": [r"::combine<"], "staging": ["elementwise"]}


def iteration(start: float, *kernels: tuple[str, float]) -> list[Kernel]:
    """A delay, the flush, the barrier, the marker, then the session's kernels."""
    before = [("spin_kernel", 2000.0), ("fill_kernel", 50.0), ("barrier_kernel", 3.0), ("spin_kernel", 1.0)]
    made = []
    for name, length in [*before, *kernels]:
        made.append(Kernel(name, start, length))
        start += length + 1
    return made


def test_the_sum_is_of_the_sessions_kernels_and_not_of_barrier_or_staging() -> None:
    call = [("ep::dispatch<8>", 20.0), ("elementwise_kernel", 400.0), ("ep::combine<8>", 30.0)]
    kernels = iteration(0, *call) + iteration(6000, *call)
    times = attribute(kernels, PATTERNS, expected=2)
    assert times.problem == ""
    assert times.total_us == [50.0, 50.0]
    assert times.by_phase == {"dispatch": 20.0, "combine": 30.0, "staging": 400.0}


def test_kernels_are_taken_in_the_order_of_their_starts() -> None:
    kernels = iteration(0, ("dispatch", 5.0)) + iteration(9000, ("dispatch", 7.0))
    assert attribute(kernels[::-1], PATTERNS, expected=2).total_us == [5.0, 7.0]


def test_time_that_no_pattern_names_fails_the_column_and_is_named() -> None:
    times = attribute(iteration(0, ("dispatch", 20.0), ("mystery_kernel", 5.0)), PATTERNS, expected=1)
    assert times.total_us == []
    assert "20 % of the GPU time" in times.problem
    assert "mystery_kernel" in times.problem


def test_a_little_of_it_is_let_pass() -> None:
    times = attribute(iteration(0, ("dispatch", 100.0), ("mystery_kernel", 1.0)), PATTERNS, expected=1)
    assert (times.problem, times.total_us) == ("", [100.0])


@pytest.mark.parametrize("kernels", [[], iteration(0), iteration(0, ("dispatch", 1.0))[:-1]])
def test_an_empty_recording_is_a_problem_and_never_0(kernels: list[Kernel]) -> None:
    times = attribute(kernels, PATTERNS, expected=1)
    assert times.total_us == []
    assert "the profiler saw kernels in 0 of 1 iterations" in times.problem
