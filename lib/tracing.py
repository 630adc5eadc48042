"""TRACE of one case: record after all timing, line the ranks up, write a file a rank, and say what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lib.contract import LibraryProfiler, Session
from lib.measure import Bench, gather
from lib.plan import Case
from lib.trace import BARRIER, TraceError
from lib.trace_files import FRESH, fresh, trace_name
from lib.trace_record import NothingRecorded, record_device, record_host
from lib.trace_write import MAX_BYTES, Iteration, align, check, encoded, fitting, thread_names
from lib.trace_write import write_trace as write

MAX_ITERATIONS = 20
LIBRARY_ITERATIONS = 3  # what MORI's own profile commands capture; its ring keeps 16384 events a warp
BYTES_PER_MB = 1e6


@dataclass
class Traced:
    """What rank 0 tells of it: a note for the log, or a problem; `samples` is for the row's record."""

    note: str = ""
    problem: str = ""
    samples: dict[str, Any] = field(default_factory=dict)


def add_trace(result: dict[str, Any], case: Case, session: Session, bench: Bench) -> None:
    """Trace the case, and put the outcome into its result. Collective; a problem is the row's reason, nothing more."""
    trace = trace_library if bench.knobs.trace == "library" else trace_phases
    traced = trace(case, session, bench)
    if traced.problem:
        result["reason"] = "; ".join(filter(None, [result["reason"], f"TRACE: {traced.problem}"]))
        return
    result["samples"]["trace"] = traced.samples
    result["notes"] = [f"trace: {traced.note}"]


def trace_phases(case: Case, session: Session, bench: Bench) -> Traced:
    """TRACE=1: at most MAX_ITERATIONS staged calls, on every rank as many as MAX_BYTES hold on all of them."""
    count, rank, problem = min(bench.knobs.iters, MAX_ITERATIONS), bench.group.rank, ""
    on_gpu = bench.group.device.type == "cuda"
    iterations: list[Iteration] = []
    try:
        iterations = (record_device if on_gpu else record_host)(session, bench.tools, count)
    except NothingRecorded as nothing:
        problem = str(nothing)
    if problem := first_problem(problem, bench):
        return Traced(problem=problem)
    lined_up = align(gather([iteration.barrier_us for iteration in iterations], bench.group))
    texts = encoded(iterations, rank, lined_up.shift_us[rank])
    kept = min(gather(fitting(texts), bench.group))
    if kept == 0:
        return Traced(problem=f"one iteration is above {MAX_BYTES / BYTES_PER_MB:.0f} MB; take fewer TOKENS")
    about = {
        **about_case(case, bench),
        "iterations": kept,
        "left_out_iterations": count - kept,
        "aligned_on": BARRIER if bench.group.world > 1 else "",
        "residual_us": round(lined_up.residual_us, 3),
        "typical_residual_us": round(lined_up.typical_us, 3),
    }
    names = list(thread_names(iterations[:kept], rank, "stream" if on_gpu else "thread"))
    try:
        write(path_of(rank, case, bench), about, names, texts[:kept])
    except (OSError, TraceError) as error:
        problem = told(error)
    if problem := first_problem(problem, bench):
        return Traced(problem=problem)
    words = [written(case, bench), f"{kept} iterations"]
    if kept < count:
        words.append(f"{count - kept} more left out, since a file ends at {MAX_BYTES / BYTES_PER_MB:.0f} MB")
    if bench.group.world > 1:
        left = f"{lined_up.typical_us:.1f} us (median), {lined_up.residual_us:.1f} us (largest)"
        words.append(f"ranks lined up on the ends of barriers, residual {left}")
    return Traced("; ".join(words), samples={"files": file_names(case, bench)} | about)


def trace_library(case: Case, session: Session, bench: Bench) -> Traced:
    """TRACE=library: the library's own profiler around plain calls. It writes the file, which is read back."""
    profiler = session.library_profiler()
    if problem := first_problem(profiler if isinstance(profiler, str) else "", bench):
        return Traced(problem=problem)
    assert isinstance(profiler, LibraryProfiler)
    count = min(bench.knobs.iters, LIBRARY_ITERATIONS)
    profiler.start()
    for _ in range(count):
        bench.tools.rendezvous()
        session.call()
        if bench.group.device.type == "cuda":
            torch.cuda.synchronize()
    problem = ""
    try:
        with fresh(path_of(bench.group.rank, case, bench)) as place:
            profiler.write(place)
            check(place)
    except (OSError, TraceError) as error:
        problem = told(error)
    if problem := first_problem(problem, bench):
        return Traced(problem=problem)
    about = about_case(case, bench) | {"iterations": count, "aligned_on": ""}
    note = f"{written(case, bench)}; by the library's own profiler, {count} iterations, each file on its own clock"
    return Traced(note, samples={"files": file_names(case, bench)} | about)


def about_case(case: Case, bench: Bench) -> dict[str, Any]:
    """What a trace says of where it comes from."""
    return {
        "stamp": bench.stamp,
        "section": case.section,
        "variant": case.variant.name,
        "dispatch_dtype": case.variant.dispatch_dtype,
        "timing": case.timing,
        "tokens": case.problem.tokens,
        "world": bench.group.world,
        "key": case.key,
        "repro": case.repro,
    }


def path_of(rank: int, case: Case, bench: Bench) -> Path:
    return Path(bench.knobs.out_dir) / trace_name(rank, bench.stamp, case)


def file_names(case: Case, bench: Bench) -> list[str]:
    return [trace_name(rank, bench.stamp, case) for rank in range(bench.group.world)]


def written(case: Case, bench: Bench) -> str:
    ranks = bench.group.world
    others = f" and those of ranks 1 to {ranks - 1}" if ranks > 2 else " and that of rank 1" if ranks > 1 else ""
    return f"{path_of(0, case, bench)}{others} written"


def told(error: Exception) -> str:
    """The file does not have the name that the reader saw it under."""
    return f"cannot be written ({error.strerror})" if isinstance(error, OSError) else str(error).replace(FRESH, "")


def first_problem(problem: str, bench: Bench) -> str:
    """A sentence if any rank has one, with the first such rank's name unless all say the same. Collective."""
    problems = gather(problem, bench.group)
    if len(set(problems)) == 1:
        return problems[0]
    return next(f"rank {rank}: {found}" for rank, found in enumerate(problems) if found)
