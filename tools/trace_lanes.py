"""From a trace to what is drawn and counted: which spans are work, in which lane each is, which mark iterations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lib.trace import Floats, Ints, Trace
from tools.trace_intervals import Intervals, running_max, union
from tools.trace_names import (
    COPY,
    DROPPED_CATEGORIES,
    GPU_ANNOTATION,
    GPU_CATEGORIES,
    HOST_CATEGORIES,
    INTERNODE,
    INTRANODE,
    INTRANODE_STEPS,
    MARK,
    OWN_PHASE,
    SERIAL,
    TRANSFER,
    bare_name,
    named_lane,
    short_name,
    variant_of,
)

MAX_LANES = 12
OTHER = "other"
LANE_ORDER = (INTERNODE, INTRANODE, TRANSFER, COPY, *(step_name for step_name in map(short_name, INTRANODE_STEPS)))


@dataclass(frozen=True)
class Spans:
    """The spans that count, ordered by start. name_of, lane_of, thread_of [n] int64 index names, lanes, threads."""

    path: Path
    events: int  # in the file
    complaint: str  # what of them is broken, in words
    about: dict[str, Any]  # what the writer says of the trace
    variant: str
    names: list[str]
    lanes: list[str]  # from top to bottom; lanes[0] is SERIAL
    threads: list[tuple[str, str]]
    name_of: Ints
    lane_of: Ints
    thread_of: Ints
    start_us: Floats
    end_us: Floats
    marks: Intervals  # iterations as the trace marks them, group = running number; empty if it does not
    marks_have_ends: bool  # False: instants, each the start of an iteration

    def thread(self, number: int) -> str:
        """A thread in words: its tid, with the pid where the trace has several, `none` where it is missing."""
        pid, tid = self.threads[number]
        several = len({pid for pid, _ in self.threads}) > 1
        return f"{pid or 'none'}/{tid or 'none'}" if several else tid or "none"


def spans_of(trace: Trace) -> Spans:
    """Sort out one trace. Module prefixes go; host activity goes where there is GPU work beside it."""
    names = list(dict.fromkeys(bare_name(name) for name in trace.names))
    number = {name: index for index, name in enumerate(names)}
    renumber = np.array([number[bare_name(name)] for name in trace.names], np.int64)
    name_of = renumber[trace.name_of] if len(trace.name_of) else trace.name_of
    is_mark = np.array([MARK.match(name) is not None for name in names], bool)
    is_phase = np.array([OWN_PHASE.match(name) is not None for name in names], bool)
    marks, have_ends = _marks(trace, names, name_of, is_mark, renumber)
    work = _work(trace, is_mark[name_of], is_phase[name_of])
    name_of = name_of[work]
    lanes, lane_of = _lanes(trace, names, name_of, work)
    variant = variant_of({names[index] for index in np.unique(name_of)}, set(trace.categories), bool(len(marks.group)))
    return Spans(
        trace.path,
        trace.events,
        trace.complaint,
        trace.about,
        variant,
        names,
        lanes,
        trace.threads,
        name_of,
        lane_of,
        trace.thread_of[work],
        trace.start_us[work],
        trace.end_us[work],
        marks,
        have_ends,
    )


def _in(categories: list[str], wanted: tuple[str, ...]) -> np.ndarray:
    return np.array([category in wanted for category in categories], bool)


def _work(trace: Trace, is_mark: np.ndarray, is_phase: np.ndarray) -> Ints:
    """Indices of the spans that count.

    With GPU work in the trace: that, our phases on the GPU's clock, and what is of no torch category. Without: the
    outermost operation of each host thread, since what it calls is its own time.
    """
    of = trace.category_of
    dropped = _in(trace.categories, DROPPED_CATEGORIES)[of] | is_mark
    host = _in(trace.categories, HOST_CATEGORIES)[of]
    annotation = _in(trace.categories, (GPU_ANNOTATION,))[of]
    if _in(trace.categories, GPU_CATEGORIES)[of].any():
        return np.flatnonzero(~dropped & ~host & (~annotation | is_phase))
    keep = ~dropped & ~annotation
    nested = np.flatnonzero(keep & host & ~is_phase)
    keep[nested] = _outermost(trace.thread_of[nested], trace.start_us[nested], trace.end_us[nested])
    return np.flatnonzero(keep)


def _outermost(thread: Ints, start_us: Floats, end_us: Floats) -> np.ndarray:
    outer = np.ones(len(thread), bool)
    if len(thread):
        order = np.lexsort((-end_us, start_us, thread))
        thread, start_us = thread[order], start_us[order]
        reach = running_max(thread, end_us[order])
        outer[order[1:]] = (thread[1:] != thread[:-1]) | (start_us[1:] >= reach[:-1])
    return outer


def _marks(
    trace: Trace, names: list[str], name_of: Ints, is_mark: np.ndarray, renumber: Ints
) -> tuple[Intervals, bool]:
    """Iteration marks: the GPU's own if there are any, else the host's; instants if there are no spans.

    Numbered marks of one number (one a stream or thread) are one iteration.
    """
    spans = np.flatnonzero(is_mark[name_of])
    on_gpu = _in(trace.categories, (GPU_ANNOTATION,))[trace.category_of[spans]]
    spans = spans[on_gpu] if on_gpu.any() else spans
    start_us, end_us, names_there = trace.start_us[spans], trace.end_us[spans], name_of[spans]
    have_ends = bool(len(spans))
    if not have_ends and len(trace.mark_us):
        instants = np.flatnonzero((trace.mark_name_of >= 0) & is_mark[renumber[trace.mark_name_of]])
        start_us = end_us = trace.mark_us[instants]
        names_there = renumber[trace.mark_name_of[instants]]
    windows: dict[str, tuple[float, float]] = {}
    for index, (low, high, name) in enumerate(zip(start_us, end_us, names_there, strict=True)):
        match = MARK.match(names[name])
        key = match.group(1) if match and match.group(1) else f"unnumbered {index}"
        old = windows.get(key, (low, high))
        windows[key] = (min(old[0], low), max(old[1], high))
    ordered = sorted(windows.values())
    return Intervals(
        np.arange(len(ordered)), np.array([low for low, _ in ordered]), np.array([high for _, high in ordered])
    ), have_ends


def _lanes(trace: Trace, names: list[str], name_of: Ints, work: Ints) -> tuple[list[str], Ints]:
    """The lane of each span: by its name if that decides, else its stream or host thread, else a lane a name."""
    threaded = {**dict.fromkeys(GPU_CATEGORIES, "stream"), **dict.fromkeys(HOST_CATEGORIES, "thread")}
    category, thread = trace.category_of[work], trace.thread_of[work]
    pids = {trace.threads[index][0] for index in np.unique(thread)}
    labels: dict[str, int] = {SERIAL: 0}
    by_name = np.full((len(trace.categories) or 1, len(names)), -1, np.int64)
    by_thread = np.full((len(trace.categories) or 1, len(trace.threads) or 1), -1, np.int64)
    for pair in np.unique(category * len(names) + name_of) if len(work) else ():
        of_category, of_name = divmod(int(pair), len(names))
        lane = named_lane(names[of_name], trace.categories[of_category])
        if not lane and trace.categories[of_category] not in threaded:
            lane = short_name(names[of_name])
        if lane:
            by_name[of_category, of_name] = labels.setdefault(lane, len(labels))
    lane_of = by_name[category, name_of]
    rest = np.flatnonzero(lane_of < 0)
    for pair in np.unique(category[rest] * len(trace.threads) + thread[rest]) if len(rest) else ():
        of_category, of_thread = divmod(int(pair), len(trace.threads))
        pid, tid = trace.threads[of_thread]
        word = threaded[trace.categories[of_category]]
        lane = f"{word} {pid}/{tid}" if len(pids) > 1 else f"{word} {tid}"
        by_thread[of_category, of_thread] = labels.setdefault(lane, len(labels))
    lane_of[rest] = by_thread[category[rest], thread[rest]]
    return _ordered(list(labels), lane_of, trace.end_us[work] - trace.start_us[work])


def _ordered(labels: list[str], lane_of: Ints, duration_us: Floats) -> tuple[list[str], Ints]:
    """Lanes in their order of display; of too many, those busy for the shortest time go into one."""
    busy = np.bincount(lane_of, duration_us, minlength=len(labels))
    known = [lane for lane in (SERIAL, *LANE_ORDER) if lane in labels]
    others = [lane for lane in labels if lane not in known]
    room = max(MAX_LANES - len(known), 1)
    if len(others) > room:
        kept = set(sorted(others, key=lambda lane: -busy[labels.index(lane)])[: room - 1])
        others = [lane for lane in others if lane in kept]
    lanes = [*known, *others]
    too_many = any(lane not in lanes for lane in labels)
    if too_many:
        lanes.append(OTHER)
    to = np.array([lanes.index(lane) if lane in lanes else len(lanes) - 1 for lane in labels], np.int64)
    return lanes, to[lane_of] if len(lane_of) else lane_of


def merged(spans: Spans, iteration_of: Ints) -> Intervals:
    """Per iteration, lane and name the union over all threads; -1 is left out.

    group = (iteration * len(lanes) + lane) * len(names) + name.
    """
    there = np.flatnonzero(iteration_of >= 0)
    group = (iteration_of * len(spans.lanes) + spans.lane_of) * len(spans.names) + spans.name_of
    return union(group[there], spans.start_us[there], spans.end_us[there])
