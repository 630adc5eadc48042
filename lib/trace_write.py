"""Writes the traces of a case, one file a rank: iterations, phases and what ran under them, on one time line.

Each rank's profiler has a clock of its own. They are lined up on the ends of barriers, which are one moment on all
ranks: a rank's clock is shifted by the difference that most of its barrier ends have from rank 0's (docs/method.md).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from lib.trace import TraceError, read_trace
from lib.trace_files import fresh

MAX_BYTES = 64_000_000  # of JSON text in one file, well below what lib/trace.py reads without a word
ITERATION_CATEGORY = "iteration"
PHASE_THREAD = 1 << 20  # the row of iterations and phases: no stream and no profiler's thread has this number
NS_DIGITS = 3  # of a microsecond
Event = dict[str, Any]


@dataclass(frozen=True)
class Span:
    """Something that ran. `thread`: of the host, or the number of a stream; `note` goes into the event's args."""

    name: str
    category: str
    thread: int
    start_us: float
    end_us: float
    note: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Iteration:
    """One staged call on one rank, by that rank's clock, and when the barrier before it ended."""

    barrier_us: float
    start_us: float
    end_us: float
    spans: list[Span]


@dataclass(frozen=True)
class Alignment:
    """What to subtract from each rank's times, and how far aligned barrier ends still lie from rank 0's."""

    shift_us: list[float]
    residual_us: float  # at most
    typical_us: float  # the median over ranks above 0 and iterations


def align(barriers_us: Sequence[Sequence[float]]) -> Alignment:
    """Line up clocks. barriers_us [rank][iteration]: the end of each barrier, by the rank's own clock.

    The first barrier end of rank 0 becomes 0.
    """
    first = barriers_us[0]
    differences = [[own - zero for own, zero in zip(ends, first, strict=True)] for ends in barriers_us]
    offsets = [middle(each) for each in differences]
    left = [abs(d - offset) for each, offset in zip(differences, offsets, strict=True) for d in each]
    others = left[len(first) :] or [0.0]
    return Alignment([first[0] + offset for offset in offsets], max(others), median(others))


def middle(values: Sequence[float]) -> float:
    """The middle of the shortest interval that holds more than half of the values (Rousseeuw's location).

    A rank that the scheduler wakes late every third time pulls a mean, and can pull a median, but not this.
    """
    ordered, held = sorted(values), len(values) // 2 + 1
    low = min(range(len(ordered) - held + 1), key=lambda first: ordered[first + held - 1] - ordered[first])
    return (ordered[low] + ordered[low + held - 1]) / 2


def encoded(iterations: Sequence[Iteration], rank: int, shift_us: float) -> list[str]:
    """The events of each iteration as JSON text, one event a line."""
    texts = []
    for number, iteration in enumerate(iterations):
        start_us, end_us = iteration.start_us, iteration.end_us
        whole = Span(f"iteration {number}", ITERATION_CATEGORY, PHASE_THREAD, start_us, end_us)
        spans = sorted([whole, *iteration.spans], key=lambda span: (span.start_us, -span.end_us))
        texts.append(",\n".join(json.dumps(_event(span, rank, shift_us)) for span in spans))
    return texts


def _event(span: Span, rank: int, shift_us: float) -> Event:
    start, end = round(span.start_us - shift_us, NS_DIGITS), round(span.end_us - shift_us, NS_DIGITS)
    event = {"ph": "X", "name": span.name, "cat": span.category, "pid": rank, "tid": span.thread}
    event |= {"ts": start, "dur": round(max(end - start, 0.0), NS_DIGITS)}
    return event | ({"args": span.note} if span.note else {})


def fitting(texts: Sequence[str], max_bytes: int = MAX_BYTES) -> int:
    """How many of the first iterations a file may hold."""
    return sum(total <= max_bytes for total in accumulate(len(text) for text in texts))


def thread_names(iterations: Sequence[Iteration], rank: int, word: str) -> Iterator[Event]:
    """Metadata by which a viewer names the rows: phases first, then streams or threads (`word`)."""
    threads = sorted({span.thread for iteration in iterations for span in iteration.spans} - {PHASE_THREAD})
    yield _named("process_name", rank, 0, name=f"rank {rank}")
    for place, thread in enumerate([PHASE_THREAD, *threads]):
        label = "phases" if thread == PHASE_THREAD else f"{word} {thread}"
        yield _named("thread_name", rank, thread, name=label)
        yield _named("thread_sort_index", rank, thread, sort_index=place)


def _named(what: str, rank: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}


def write_trace(path: Path, about: dict[str, Any], names: Sequence[Event], texts: Sequence[str]) -> None:
    """Write one file and read it again before it takes its name. `about` becomes its otherData.

    Raises OSError if it can't be written, TraceError if what can be read of it is not what was meant.
    """
    head = json.dumps({"displayTimeUnit": "ns", "otherData": about}, allow_nan=False)[:-1]
    whole = [*(json.dumps(name) for name in names), *texts]
    with fresh(path) as place:
        with place.open("w") as file:
            file.write(f'{head}, "traceEvents": [\n' + ",\n".join(whole) + "\n]}\n")
            file.flush()
            os.fsync(file.fileno())
        check(place, sum(text.count("\n") + 1 for text in texts))


def check(path: Path, spans: int | None = None) -> None:
    """Raise TraceError unless the file is a whole trace with this many spans (None: any, but not none)."""
    read = read_trace(path, max_bytes=None)
    found = len(read.start_us)
    if read.complaint or (found == 0 if spans is None else found != spans):
        wanted = "" if spans is None else f" of {spans}"
        raise TraceError(f"{path} was read back with {found}{wanted} spans{read.complaint and ', '}{read.complaint}")
