"""Reads Chrome / Perfetto JSON traces: a consumer of files, whoever wrote them.

A trace is `{"traceEvents": [event, ...]}` or the bare list, plain or gzipped. It is read piece by piece into columns
(about 25 bytes an event), so memory does not follow the file. B and E events are paired, X events taken as they are;
what is not a span of time (metadata, counters, flows) is left out, and what is broken is counted, never asserted.
Times are microseconds by the file's own clock, as the format says, whatever its displayTimeUnit.
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lib.talk import printable
from lib.trace_json import JsonPieces, NotJson

MAX_BYTES = 200_000_000  # of JSON text, read without a word; more needs max_bytes=None
MATCH_BLOCK = 1 << 16  # events turned into Python objects at once while pairing
BEGIN, END, COMPLETE, INSTANT = 0, 1, 2, 3
PHASE_CODES = {"B": BEGIN, "E": END, "X": COMPLETE, "i": INSTANT, "I": INSTANT, "R": INSTANT}
PHASE_CATEGORY = "phase"  # of a session's phases in the traces that lib/trace_write.py writes
BARRIER = "barrier"  # what those of several ranks are lined up on
NAMELESS = -1  # an E event needs no name: it closes what its thread opened last
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class TraceError(Exception):
    """A file that can't be read as a trace; the message is one sentence that names the file."""


class TraceTooLarge(TraceError):  # noqa: N818 - reads better where it is caught
    """More JSON text than max_bytes."""


@dataclass(frozen=True)
class Trace:
    """The spans of one file, ordered by start, names printable; n = number of spans, m = number of instant events.

    name_of, category_of, thread_of [n] int64: indices into `names`, `categories`, `threads` (pid, tid; "" = missing) ·
    start_us, end_us [n] float64 · mark_name_of [m], mark_us [m]: the instant events.
    """

    path: Path
    names: list[str]
    categories: list[str]
    threads: list[tuple[str, str]]
    name_of: Ints
    category_of: Ints
    thread_of: Ints
    start_us: Floats
    end_us: Floats
    mark_name_of: Ints
    mark_us: Floats
    events: int  # in the file, of any kind
    unmatched_begins: int
    unmatched_ends: int
    malformed: int  # not an object, or a span without a usable ts, dur or name
    about: dict[str, Any] = field(default_factory=dict)  # otherData: what the writer says of the trace

    @property
    def complaint(self) -> str:
        """What was left out because it is broken, in words; "" if nothing was."""
        told = {"B without E": self.unmatched_begins, "E without B": self.unmatched_ends, "malformed": self.malformed}
        return ", ".join(f"{count} {what}" for what, count in told.items() if count)


def read_trace(
    path: Path,
    keep: Callable[[str], bool] | None = None,
    window_us: tuple[float, float] | None = None,
    max_bytes: int | None = MAX_BYTES,
) -> Trace:
    """Read one file. `keep` (by name) and `window_us` (start <= ts < end) leave events out while reading.

    Raises TraceTooLarge above max_bytes of JSON text, TraceError if the file can't be read, is no trace, is cut off, or
    holds no event at all. A trace whose events are all left out has n = 0.
    """
    columns, about = _Columns(keep, window_us), dict[str, Any]()
    try:
        if max_bytes is not None and path.suffix != ".gz" and path.stat().st_size > max_bytes:
            raise TraceTooLarge(f"{path} is {path.stat().st_size / 1e6:.0f} MB, above {max_bytes / 1e6:.0f} MB")
        with _open(path) as stream:
            for batch in _event_batches(JsonPieces(stream, max_bytes), path, about):
                columns.take(batch)
    except NotJson as error:
        at = f" in or after event {columns.events}" if columns.events else ""
        raise TraceError(f"{path} {error}{at}") from error
    except OverflowError as error:
        raise TraceTooLarge(f"{path} holds {error}") from error
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{path} is a damaged gzip file: {error}") from error
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error.strerror or error}") from error
    if not columns.events:
        raise TraceError(f"{path} holds no events: traceEvents is empty")
    return columns.trace(path, about)


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", errors="replace")
    return path.open(encoding="utf-8-sig", errors="replace")


def _event_batches(pieces: JsonPieces, path: Path, about: dict[str, Any]) -> Iterator[list[Any]]:
    """The items of traceEvents, or of a list at the top; otherData goes into `about`.

    Reads to the end, so that a cut-off file is never accepted.
    """
    first = pieces.peek()
    if first == "[":
        yield from pieces.batches()
        return
    if first == "":
        raise TraceError(f"{path} is empty")
    if first != "{":
        raise TraceError(f"{path} is not a JSON trace: it starts with {first!r}")
    found = False
    for key in pieces.object_keys():
        if key == "traceEvents" and pieces.peek() == "[":
            found = True
            yield from pieces.batches()
        elif isinstance(value := pieces.value(), dict) and key == "otherData":
            about.update(value)
    if not found:
        raise TraceError(f"{path} is JSON but no trace: it has no list named traceEvents")


class _Columns:
    """Events as columns; strings are kept once."""

    def __init__(self, keep: Callable[[str], bool] | None, window_us: tuple[float, float] | None) -> None:
        self.keep, self.window_us = keep, window_us
        self.names: dict[str, int] = {}
        self.categories: dict[str, int] = {}
        self.threads: dict[tuple[Any, Any], int] = {}
        self.kept: list[bool] = []
        self.phase = bytearray()
        self.name, self.category, self.thread = array("i"), array("i"), array("i")
        self.ts, self.duration = array("d"), array("d")
        self.events = self.malformed = 0

    def take(self, events: list[Any]) -> None:
        """Add one batch. One call an event: this loop is where a large file's time goes."""
        self.events += len(events)
        for event in events:
            try:
                code = PHASE_CODES.get(event["ph"])
                if code is not None:
                    self._add(code, event)
            except (KeyError, TypeError, ValueError, OverflowError):  # noqa: PERF203 - each event fails on its own
                self.malformed += 1

    def _add(self, code: int, event: dict[str, Any]) -> None:
        name = event.get("name")
        if name is not None:
            number = self.names.get(name)
            if number is None:
                number = self._new_name(name)
            if not self.kept[number]:
                return
        elif code == END:
            number = NAMELESS
        else:
            raise KeyError("name")
        ts = float(event["ts"])
        duration = float(event["dur"]) if code == COMPLETE else 0.0
        # inf - inf and nan compare unequal to 0: one test for both numbers being finite
        if duration < 0 or (ts - ts) + (duration - duration) != 0:
            raise ValueError("ts or dur")
        if self.window_us is not None and not self.window_us[0] <= ts < self.window_us[1]:
            return
        thread = (event.get("pid", ""), event.get("tid", ""))
        self.thread.append(self.threads.setdefault(thread, len(self.threads)))
        self.category.append(self.categories.setdefault(event.get("cat") or "", len(self.categories)))
        self.phase.append(code)
        self.name.append(number)
        self.ts.append(ts)
        self.duration.append(duration)

    def _new_name(self, name: Any) -> int:
        if not isinstance(name, str):
            raise TypeError("name")
        self.kept.append(self.keep is None or self.keep(name))
        self.names[name] = len(self.names)
        return self.names[name]

    def trace(self, path: Path, about: dict[str, Any]) -> Trace:
        phase = np.frombuffer(self.phase, np.uint8)
        name, category, thread = (np.array(c, np.int64) for c in (self.name, self.category, self.thread))
        ts, duration = np.array(self.ts), np.array(self.duration)
        begin, end, unmatched_begins, unmatched_ends = _pair(phase, name, thread, ts)
        whole = np.flatnonzero(phase == COMPLETE)
        first = np.concatenate([begin, whole])
        start_us = ts[first]
        end_us = np.concatenate([ts[end], ts[whole] + duration[whole]])
        order = np.argsort(start_us, kind="stable")
        first = first[order]
        marks = np.flatnonzero(phase == INSTANT)
        return Trace(
            path,
            [printable(name) for name in self.names],
            [printable(str(category)) for category in self.categories],
            [(printable(str(pid)), printable(str(tid))) for pid, tid in self.threads],
            name[first],
            category[first],
            thread[first],
            start_us[order],
            end_us[order],
            name[marks],
            ts[marks],
            self.events,
            unmatched_begins,
            unmatched_ends,
            self.malformed,
            about,
        )


def _pair(phase: NDArray[np.uint8], name: Ints, thread: Ints, ts: Floats) -> tuple[Ints, Ints, int, int]:
    """Which B belongs to which E: an E closes the latest open B of its thread and name.

    Returns (index of each span's B, index of its E, B left open, E that close nothing). Equal times keep the order of
    the file, where back-to-back phases have the E before the next B.
    """
    edges = np.flatnonzero((phase == BEGIN) | (phase == END))
    edges = edges[np.argsort(ts[edges], kind="stable")]
    nameless = bool((name[edges] == NAMELESS).any())
    by_thread: dict[int, list[int]] = {}  # only for nameless E: also holds what is closed already, skipped when met
    open_of: dict[tuple[int, int], list[int]] = {}
    closed = bytearray(len(phase)) if nameless else bytearray()
    begins, ends = array("q"), array("q")
    unmatched_ends = 0
    for low in range(0, len(edges), MATCH_BLOCK):
        block = edges[low : low + MATCH_BLOCK]
        columns = (block.tolist(), phase[block].tolist(), thread[block].tolist(), name[block].tolist())
        for event, code, of_thread, of_name in zip(*columns, strict=True):
            if code == BEGIN:
                open_of.setdefault((of_thread, of_name), []).append(event)
                if nameless:
                    by_thread.setdefault(of_thread, []).append(event)
                continue
            if of_name == NAMELESS:
                last = _last_open(by_thread.get(of_thread, []), closed)
                waiting = open_of[of_thread, int(name[last])] if last is not None else []
            else:
                waiting = open_of.get((of_thread, of_name), [])
            if not waiting:
                unmatched_ends += 1
                continue
            begin = waiting.pop()
            if nameless:
                closed[begin] = 1
            begins.append(begin)
            ends.append(event)
    unmatched_begins = sum(len(waiting) for waiting in open_of.values())
    return np.array(begins, np.int64), np.array(ends, np.int64), unmatched_begins, unmatched_ends


def _last_open(opened: list[int], closed: bytearray) -> int | None:
    while opened and closed[opened[-1]]:
        opened.pop()
    return opened[-1] if opened else None
