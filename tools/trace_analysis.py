"""What a trace says: its iterations, what ran at the same time in each, which of them and which threads stand out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise

import numpy as np

from lib.trace import BARRIER, Floats, Ints
from tools.trace_intervals import Intervals, intersection, union
from tools.trace_lanes import Spans, merged
from tools.trace_names import ANCHORS, COLLECTIVES, COPY, INTERNODE, INTRANODE, TRANSFER, phase_of

GAP_RATIO = 3.0  # idle gaps between iterations are at least this much longer than those within
GAP_FLOOR_SHARE = 0.02  # of the median busy stretch: what counts as no gap at all
ALIKE_SHARE = 0.9  # of the stretches must run the same kernels, or the gaps mean something else
OUTLIER_SHARE, OUTLIER_MADS = 0.05, 3 * 1.4826  # off the median by both; 1.4826 MAD = one standard deviation
MIN_ITERATIONS_TO_COMPARE, MIN_THREADS_TO_COMPARE = 3, 4
IMBALANCE_SHARE, FENCE_IQRS = 0.25, 1.5  # a thread outside Tukey's fences and this far off the median


@dataclass(frozen=True)
class Windows:
    """Iterations, in order. k = their number: start_us, end_us [k] float64, complete [k] bool (its end was seen)."""

    start_us: Floats
    end_us: Floats
    complete: np.ndarray
    found_by: str  # how, in words
    closed: bool = False  # what starts after the end of an iteration is in none

    def of(self, start_us: Floats) -> Ints:
        """The iteration in which each time lies, -1 before the first."""
        return np.searchsorted(self.start_us, start_us, side="right") - 1

    @property
    def duration_us(self) -> Floats:
        return self.end_us - self.start_us

    @cached_property
    def outliers(self) -> dict[int, float]:
        """Iteration -> its duration over the median, for those that stand out. Incomplete ones don't count."""
        whole = np.flatnonzero(self.complete)
        if len(whole) < MIN_ITERATIONS_TO_COMPARE:
            return {}
        duration = self.duration_us[whole]
        median = float(np.median(duration))
        off = np.abs(duration - median)
        limit = max(OUTLIER_SHARE * median, OUTLIER_MADS * float(np.median(off)))
        return {int(whole[i]): float(duration[i] / median) for i in np.flatnonzero(off > limit)}


def find_iterations(spans: Spans) -> Windows:
    """By the trace's own marks, else by the kernels that open and close one, else by idle gaps, else one for all."""
    if len(spans.marks.group):
        return _marked(spans)
    numbers = {name: index for index, name in enumerate(spans.names)}
    present = set(np.unique(spans.name_of).tolist())

    def there(names: tuple[str, ...]) -> list[int]:
        return [numbers[name] for name in names if numbers.get(name) in present]

    for anchors in ANCHORS:
        starts, ends = there(anchors.starts), there(anchors.ends)[:1]
        if starts and ends and starts != ends:
            return _anchored(spans, starts, ends, spans.names[ends[0]])
    return _by_gaps(spans)


def _marked(spans: Spans) -> Windows:
    start_us, end_us = spans.marks.start_us, spans.marks.end_us
    complete = np.ones(len(start_us), bool)
    if not spans.marks_have_ends:
        end_us = _last_ends(np.searchsorted(start_us, spans.start_us, side="right") - 1, spans.end_us, start_us)
    return Windows(start_us, end_us, complete, "marks in the trace", spans.marks_have_ends)


def _anchored(spans: Spans, starts: list[int], ends: list[int], end_name: str) -> Windows:
    """A start anchor opens an iteration only if an end anchor came since the last one opened: groups may be split."""
    opening = np.isin(spans.name_of, starts)
    anchors = np.flatnonzero(opening | np.isin(spans.name_of, ends))
    opening = opening[anchors]
    anchors, opening = anchors[np.argmax(opening) :], opening[np.argmax(opening) :]
    opens = opening & np.concatenate([[True], ~opening[:-1]])
    start_us = spans.start_us[anchors[opens]]
    closing = anchors[~opening]
    at = np.searchsorted(start_us, spans.start_us[closing], side="right") - 1
    complete = np.bincount(at, minlength=len(start_us)) > 0
    end_us = _last_ends(at, spans.end_us[closing], start_us)
    if not complete.all():
        rest = _last_ends(np.searchsorted(start_us, spans.start_us, side="right") - 1, spans.end_us, start_us)
        end_us = np.where(complete, end_us, rest)
    return Windows(start_us, end_us, complete, f"{spans.names[starts[0]]} to {end_name}")


def _last_ends(iteration_of: Ints, end_us: Floats, start_us: Floats) -> Floats:
    last = start_us.copy()
    there = iteration_of >= 0
    np.maximum.at(last, iteration_of[there], end_us[there])
    return last


def _by_gaps(spans: Spans) -> Windows:
    """Split where nothing runs for much longer than elsewhere, if what lies between is alike."""
    n = len(spans.start_us)
    busy = union(np.zeros(n, np.int64), spans.start_us, spans.end_us)
    gaps = busy.start_us[1:] - busy.end_us[:-1]
    whole = Windows(busy.start_us[:1], busy.end_us[-1:], np.ones(1, bool), "none found: the whole trace is one")
    if not len(gaps):
        return whole
    floor = GAP_FLOOR_SHARE * float(np.median(busy.end_us - busy.start_us))
    ladder = np.maximum(np.concatenate([[floor], np.sort(gaps)]), 1e-9)
    step = int(np.argmax(ladder[1:] / ladder[:-1]))
    if ladder[step + 1] < GAP_RATIO * ladder[step]:
        return whole
    cut = np.flatnonzero(gaps >= ladder[step + 1])
    start_us = busy.start_us[np.concatenate([[0], cut + 1])]
    end_us = busy.end_us[np.concatenate([cut, [len(gaps)]])]
    windows = Windows(start_us, end_us, np.ones(len(start_us), bool), "idle gaps")
    ran = np.unique(windows.of(spans.start_us) * len(spans.names) + spans.name_of)
    each = np.split(ran % len(spans.names), np.flatnonzero(np.diff(ran // len(spans.names))) + 1)
    alike = Counter(names.tobytes() for names in each).most_common(1)[0][1]
    return windows if alike >= ALIKE_SHARE * len(each) else whole


@dataclass(frozen=True)
class Overlap:
    """Two lanes busy at once: the intersection of their unions, in one phase ("" = not told apart), by iteration."""

    phase: str
    lanes: tuple[str, str]
    where: Intervals  # group = iteration


@dataclass(frozen=True)
class KernelStats:
    """Durations of one kernel over all threads and the chosen iterations; a call is one span."""

    name: str
    mean_us: float
    min_us: float
    max_us: float
    calls: int
    threads: int
    imbalanced: tuple[tuple[str, float, float], ...]  # (thread, its mean in us, over the median of the threads' means)


@dataclass(frozen=True)
class Bar:
    """One name in one lane of one iteration, over all threads: where it ran, us since the start of the iteration."""

    name: str
    lane: int
    start_us: Floats
    end_us: Floats

    @property
    def busy_us(self) -> float:
        return float((self.end_us - self.start_us).sum())


@dataclass(frozen=True)
class Analysis:
    """One trace, analyzed. `pieces` is grouped as tools.trace_lanes.merged says."""

    spans: Spans
    windows: Windows
    chosen: Ints  # the iterations that were asked for
    pieces: Intervals
    overlaps: tuple[Overlap, ...]
    kernels: tuple[KernelStats, ...]  # the longest mean first
    outside: int  # spans in no iteration at all

    def bars(self, iteration: int) -> list[Bar]:
        """What ran in one iteration, the earliest first."""
        size = len(self.spans.lanes) * len(self.spans.names)
        low, high = np.searchsorted(self.pieces.group, [iteration * size, (iteration + 1) * size])
        group, origin = self.pieces.group[low:high], self.windows.start_us[iteration]
        edges = np.concatenate([[0], np.flatnonzero(np.diff(group)) + 1, [len(group)]]) if len(group) else [0]
        bars = []
        for first, last in pairwise(edges):
            lane, name = divmod(int(group[first]) - iteration * size, len(self.spans.names))
            at = slice(low + first, low + last)
            bars.append(
                Bar(self.spans.names[name], lane, self.pieces.start_us[at] - origin, self.pieces.end_us[at] - origin)
            )
        return sorted(bars, key=lambda bar: float(bar.start_us[0]))

    @cached_property
    def concurrent_us(self) -> Floats:
        """[iterations] float64: the time with two lanes busy, counted once."""
        return self.concurrent.us(len(self.windows.start_us))

    def concurrent_words(self, iteration: int) -> str:
        """What was concurrent in one iteration, for how long; the largest pair of lanes if there are several."""
        count = len(self.windows.start_us)
        pairs = [(float(overlap.where.us(count)[iteration]), overlap) for overlap in self.overlaps]
        pairs = [(us, overlap) for us, overlap in pairs if us > 0]
        if not pairs:
            return "nothing concurrent"
        longest_us, longest = max(pairs, key=lambda pair: pair[0])
        total = f"concurrent for {self.concurrent_us[iteration]:.2f} us"
        if all(overlap.phase for _, overlap in pairs):
            each = " + ".join(f"{overlap.phase} {us:.2f}" for us, overlap in pairs)
            return f"{' and '.join(longest.lanes)} {total} ({each})"
        if len(pairs) == 1:
            return f"{' and '.join(longest.lanes)} {total}"
        return f"two lanes or more {total}, most of all {' and '.join(longest.lanes)} ({longest_us:.2f})"

    @cached_property
    def concurrent(self) -> Intervals:
        """The union of all overlaps; group = iteration."""
        if not self.overlaps:
            return Intervals(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
        columns = zip(*(overlap.where for overlap in self.overlaps), strict=True)
        group, start_us, end_us = (np.concatenate(column) for column in columns)
        return union(group, start_us, end_us)


def analyze(spans: Spans, windows: Windows, chosen: Ints) -> Analysis:
    """Count everything within the chosen iterations. A span belongs to the iteration in which it starts."""
    iteration_of = windows.of(spans.start_us)
    if windows.closed:
        iteration_of[spans.start_us >= windows.end_us[iteration_of]] = -1
    outside = int((iteration_of < 0).sum())
    iteration_of[~np.isin(iteration_of, chosen)] = -1
    return Analysis(
        spans,
        windows,
        chosen,
        merged(spans, iteration_of),
        _overlaps(spans, iteration_of),
        _kernel_stats(spans, np.flatnonzero(iteration_of >= 0)),
        outside,
    )


def _overlaps(spans: Spans, iteration_of: Ints) -> tuple[Overlap, ...]:
    """Every pair of lanes; where a trace has the two lanes of its kind, that pair alone, per phase."""
    lanes, pair = spans.lanes, None
    for known in ((INTERNODE, INTRANODE), (TRANSFER, COPY)):
        if set(known) <= set(lanes):
            pair = known
    phases = [phase_of(name) if pair else "" for name in spans.names]
    phase_names = sorted(set(phases), reverse=True)  # dispatch before combine
    phase_of_span = np.array([phase_names.index(phase) for phase in phases], np.int64)[spans.name_of]
    found = []
    for number, phase in enumerate(phase_names):
        unions = {}
        for lane in pair or lanes[1:]:
            at = (spans.lane_of == lanes.index(lane)) & (phase_of_span == number) & (iteration_of >= 0)
            unions[lane] = union(iteration_of[at], spans.start_us[at], spans.end_us[at])
        for a, b in combinations(unions, 2):
            where = intersection(unions[a], unions[b])
            if len(where.group):
                found.append(Overlap(phase, (a, b), where))
    return tuple(found)


def _kernel_stats(spans: Spans, there: Ints) -> tuple[KernelStats, ...]:
    name, thread = spans.name_of[there], spans.thread_of[there]
    duration = spans.end_us[there] - spans.start_us[there]
    order = np.lexsort((thread, name))
    name, thread, duration = name[order], thread[order], duration[order]
    stats = []
    edges = np.concatenate([[0], np.flatnonzero(np.diff(name)) + 1, [len(name)]]) if len(name) else np.zeros(1, int)
    for low, high in pairwise(edges.tolist()):
        us, of = duration[low:high], thread[low:high]
        threads, at = np.unique(of, return_index=True)
        means = np.add.reduceat(us, at) / np.diff(np.append(at, len(us)))
        stats.append(
            KernelStats(
                spans.names[name[low]],
                float(us.mean()),
                float(us.min()),
                float(us.max()),
                len(us),
                len(threads),
                _imbalanced(spans, threads, means),
            )
        )
    return tuple(sorted(stats, key=lambda kernel: -kernel.mean_us))


def _imbalanced(spans: Spans, threads: Ints, means: Floats) -> tuple[tuple[str, float, float], ...]:
    """Threads far off the others of the same kernel, the farthest first. Two even halves are roles, not outliers."""
    low, median, high = np.percentile(means, [25, 50, 75])
    if len(threads) < MIN_THREADS_TO_COMPARE or median <= 0:
        return ()
    fence = FENCE_IQRS * (high - low)
    off = np.abs(means - median)
    out = np.flatnonzero(((means > high + fence) | (means < low - fence)) & (off > IMBALANCE_SHARE * median))
    out = out[np.argsort(-off[out], kind="stable")]
    over = [float(means[i] / median) for i in out]
    return tuple((spans.thread(threads[i]), float(means[i]), ratio) for i, ratio in zip(out, over, strict=True))


def alignment(analyses: list[Analysis]) -> tuple[str, float] | None:
    """Ranks lined up on the end of a collective, one moment on all of them: each file's clock starts at 0.

    Returns (the collective, of the first common iteration, that they are lined up on; the residual: by how much the
    ends of the others then differ at most, us), or None if the traces share fewer than two such ends.
    Our own files are lined up already and say how well.
    """
    if aligned := _aligned_when_written(analyses):
        return aligned
    tables = []
    for analysis in analyses:
        names = analysis.spans.names
        table: dict[tuple[int, int], float] = {}
        iteration, name = np.divmod(analysis.pieces.group, len(analysis.spans.lanes) * len(names))
        name %= len(names)
        for number, collective in enumerate(COLLECTIVES):
            at = np.flatnonzero(name == (names.index(collective) if collective in names else -1))
            table.update(((int(iteration[i]), number), float(analysis.pieces.end_us[i])) for i in at)
        tables.append(table)
    common = sorted(set.intersection(*(set(table) for table in tables)))
    if len(common) < 2:
        return None
    ends = np.array([[table[key] for key in common] for table in tables])
    ends -= ends[:, :1]
    return COLLECTIVES[common[0][1]], float(np.ptp(ends, axis=0).max())


def _aligned_when_written(analyses: list[Analysis]) -> tuple[str, float] | None:
    """What the ranks of one case say of themselves (lib/tracing.py)."""
    said = [analysis.spans.about for analysis in analyses]
    ours = all(about.get("aligned_on") == BARRIER and about.get("key") for about in said)
    one_case = len({(about.get("stamp"), about.get("key")) for about in said}) == 1
    return (BARRIER, float(said[0]["residual_us"])) if ours and one_case else None
