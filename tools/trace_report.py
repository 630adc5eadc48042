"""An analyzed trace in words and as JSON. Times are microseconds, by the trace's own clock unless said otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from lib.trace import Floats
from tools.trace_analysis import BARRIER, Analysis, KernelStats, alignment

NAME_CHARS, NAMED_OUTLIERS = 60, 20
NAMED_THREADS = 5  # of one kernel; the rest is counted


def as_text(analysis: Analysis, shown: list[int], picture: Path | None) -> str:
    """Everything about one trace; the kernels of the iterations in `shown` only."""
    blocks = [
        _head(analysis),
        _iterations(analysis),
        *(_kernels_of(analysis, iteration) for iteration in shown),
        _threads(analysis),
        _standing_out(analysis),
    ]
    if picture is not None:
        some = f", iterations {', '.join(map(str, shown))}" if len(shown) < len(analysis.chosen) else ""
        blocks.append(f"picture: {picture}{some}")
    return "\n\n".join(blocks)


def _head(analysis: Analysis) -> str:
    spans = analysis.spans
    words = [f"iterations found by {analysis.windows.found_by}"]
    words.append(f"{len(spans.start_us)} spans of {len(np.unique(spans.thread_of))} threads in {spans.events} events")
    if analysis.outside:
        words.append(f"{analysis.outside} spans in no iteration")
    if spans.complaint:
        words.append(f"left out: {spans.complaint}")
    return f"{spans.path}: {spans.variant}, {'; '.join(words)}"


def _iterations(analysis: Analysis) -> str:
    windows, together = analysis.windows, analysis.concurrent_us
    lines = [
        f"{len(windows.start_us)} iterations",
        f"{'iteration':>9} {'start us':>14} {'end us':>14} {'duration us':>12} {'concurrent us':>14}",
    ]
    for i in analysis.chosen.tolist():
        end = "" if windows.complete[i] else "  its end is not in the trace"
        lines.append(
            f"{i:>9} {windows.start_us[i]:>14.2f} {windows.end_us[i]:>14.2f} {windows.duration_us[i]:>12.2f}"
            f" {together[i]:>14.2f}{end}"
        )
    return "\n".join(lines)


def _kernels_of(analysis: Analysis, iteration: int) -> str:
    bars = analysis.bars(iteration)
    width = max([6, *(len(_told(bar.name)) for bar in bars)])
    lane = max([4, *(len(name) for name in analysis.spans.lanes)])
    lines = [
        f"iteration {iteration}, us since its start, all threads together: {analysis.concurrent_words(iteration)}",
        f"{'kernel':<{width}} {'lane':<{lane}} {'start':>10} {'end':>10} {'busy':>10} {'pieces':>6}",
    ]
    lines += [
        f"{_told(bar.name):<{width}} {analysis.spans.lanes[bar.lane]:<{lane}} {bar.start_us[0]:>10.2f}"
        f" {bar.end_us[-1]:>10.2f} {bar.busy_us:>10.2f} {len(bar.start_us):>6}"
        for bar in bars
    ]
    return "\n".join(lines)


def _threads(analysis: Analysis) -> str:
    width = max([6, *(len(_told(kernel.name)) for kernel in analysis.kernels)])
    lines = [
        "per thread and call, us",
        f"{'kernel':<{width}} {'mean':>10} {'min':>10} {'max':>10} {'calls':>8} {'threads':>8}",
    ]
    lines += [
        f"{_told(k.name):<{width}} {k.mean_us:>10.2f} {k.min_us:>10.2f} {k.max_us:>10.2f} {k.calls:>8} {k.threads:>8}"
        for k in analysis.kernels
    ]
    return "\n".join(lines)


def _standing_out(analysis: Analysis) -> str:
    outliers = {i: over for i, over in analysis.windows.outliers.items() if i in analysis.chosen}
    lines = [
        f"outlier: iteration {i}, {analysis.windows.duration_us[i]:.2f} us, {over:.2f}x the median"
        for i, over in list(outliers.items())[:NAMED_OUTLIERS]
    ] or ["no outlier iterations"]
    if len(outliers) > NAMED_OUTLIERS:
        lines.append(f"outlier: {len(outliers) - NAMED_OUTLIERS} more iterations")
    imbalanced = [line for kernel in analysis.kernels for line in _imbalance(kernel)]
    return "\n".join([*lines, *(imbalanced or ["no imbalanced threads"])])


def _imbalance(kernel: KernelStats) -> list[str]:
    lines = [
        f"imbalanced: thread {thread} in {_told(kernel.name)}, mean {mean:.2f} us, {over:.2f}x the median thread"
        for thread, mean, over in kernel.imbalanced[:NAMED_THREADS]
    ]
    more = len(kernel.imbalanced) - NAMED_THREADS
    return [*lines, f"imbalanced: {more} more threads in {_told(kernel.name)}"] if more > 0 else lines


def across_traces(analyses: list[Analysis]) -> str:
    """One line a trace, and how far the ranks' clocks agree; "" for fewer than two traces."""
    if len(analyses) < 2:
        return ""
    width = max(len(str(analysis.spans.path)) for analysis in analyses)
    lines = ["", f"{'trace':<{width}} {'iterations':>10} {'median us':>10} {'slowest us':>10} {'iteration':>9}"]
    for analysis in analyses:
        us = analysis.windows.duration_us[analysis.chosen]
        slowest = int(np.argmax(us))
        lines.append(
            f"{analysis.spans.path!s:<{width}} {len(us):>10} {np.median(us):>10.2f} {us[slowest]:>10.2f}"
            f" {analysis.chosen[slowest]:>9}"
        )
    aligned = alignment(analyses)
    if aligned:
        on, residual_us = aligned
        what, others = ("a barrier", "barriers") if on == BARRIER else (on, "collectives")
        lines.append(
            f"lined up on the end of {what}, which is one moment on all ranks, "
            f"the ends of the other {others} differ by at most {residual_us:.2f} us"
        )
    return "\n".join([*lines, ""])


def as_document(analyses: list[Analysis], pictures: dict[Path, Path]) -> str:
    """The JSON text of all traces; docs/traces.md describes it."""
    aligned = alignment(analyses) if len(analyses) > 1 else None
    document = {
        "traces": [_trace(analysis, pictures.get(analysis.spans.path)) for analysis in analyses],
        "alignment": {"on": aligned[0], "residual_us": aligned[1]} if aligned else None,
    }
    return json.dumps(document, indent=1) + "\n"


def _trace(analysis: Analysis, picture: Path | None) -> dict[str, Any]:
    spans, windows = analysis.spans, analysis.windows
    return {
        "trace": str(spans.path),
        "variant": spans.variant,
        "events": spans.events,
        "spans": len(spans.start_us),
        "spans_outside": analysis.outside,
        "broken": spans.complaint,
        "threads": len(np.unique(spans.thread_of)),
        "lanes": spans.lanes,
        "num_iterations": len(windows.start_us),
        "found_by": windows.found_by,
        "iterations": [_iteration(analysis, i) for i in analysis.chosen.tolist()],
        "kernels": [_kernel(kernel) for kernel in analysis.kernels],
        "picture": str(picture) if picture else None,
    }


def _iteration(analysis: Analysis, iteration: int) -> dict[str, Any]:
    windows, lanes = analysis.windows, analysis.spans.lanes
    start_us, end_us = analysis.concurrent.of(iteration)
    return {
        "iteration": iteration,
        "start_us": float(windows.start_us[iteration]),
        "end_us": float(windows.end_us[iteration]),
        "duration_us": float(windows.duration_us[iteration]),
        "complete": bool(windows.complete[iteration]),
        "over_median_if_outlier": windows.outliers.get(iteration),
        "concurrent_us": float((end_us - start_us).sum()),
        "concurrent": [
            {
                "phase": overlap.phase,
                "lanes": list(overlap.lanes),
                "intervals_us": pieces,
                "us": sum(e - s for s, e in pieces),
            }
            for overlap in analysis.overlaps
            if (pieces := _relative(overlap.where.of(iteration), float(windows.start_us[iteration])))
        ],
        "kernels": [
            {
                "kernel": bar.name,
                "lane": lanes[bar.lane],
                "start_us": float(bar.start_us[0]),
                "end_us": float(bar.end_us[-1]),
                "busy_us": bar.busy_us,
                "pieces": len(bar.start_us),
            }
            for bar in analysis.bars(iteration)
        ],
    }


def _relative(where: tuple[Floats, Floats], origin_us: float) -> list[tuple[float, float]]:
    return list(zip((where[0] - origin_us).tolist(), (where[1] - origin_us).tolist(), strict=True))


def _kernel(kernel: KernelStats) -> dict[str, Any]:
    return {
        "kernel": kernel.name,
        "mean_us": kernel.mean_us,
        "min_us": kernel.min_us,
        "max_us": kernel.max_us,
        "calls": kernel.calls,
        "threads": kernel.threads,
        "imbalanced_threads": [
            {"thread": thread, "mean_us": mean, "over_median": over} for thread, mean, over in kernel.imbalanced
        ],
    }


def _told(name: str) -> str:
    """A kernel's name in a table: a C++ one can be a page of template arguments."""
    return name if len(name) <= NAME_CHARS else f"{name[: NAME_CHARS - 3]}..."
