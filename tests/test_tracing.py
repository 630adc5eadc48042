"""TRACE: what the pass records, how ranks are lined up, what is written, and what a run says of it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from harness import Run, scenario

from lib.contract import Phase
from lib.kernels import SPIN_KERNEL, Kernel
from lib.launch import Events, Rank, WorkerGroup
from lib.trace import TraceError, read_trace
from lib.trace_files import FRESH, trace_name
from lib.trace_record import BARRIER, ITERATION, PREFIX, NothingRecorded, cut_device, cut_host
from lib.trace_write import (
    PHASE_THREAD,
    Iteration,
    Span,
    align,
    encoded,
    fitting,
    thread_names,
    write_trace,
)
from tests.fake_profiler import BuiltWithoutProfiler
from tools.analyze_ep_trace import analyze_file
from tools.trace_analysis import alignment

ITERS = 3  # of the runs below
PHASES = [Phase("dispatch", lambda: None), Phase("identity", lambda: None, timed=False), Phase("combine", lambda: None)]
STREAM, SIDE = 7, 20
PERIOD_US = 3000.0
OF_ANOTHER_RUN = f"{FRESH}trace_rank_0_20260101T000000Z_ref_a_T5_e2e_k.json"
# kernel -> start, end, us from the delay's start; the markers stand at 2100, 2140, 2150 and 2190
DEVICE = {"barrier_kernel": (2080, 2098), "dispatch": (2103, 2138), "weigh": (2142, 2148), "combine": (2153, 2189)}
MARKERS = (2100.0, 2140.0, 2150.0, 2190.0)


def kernel(name: str, start: float, end: float, stream: int = STREAM) -> Kernel:
    return Kernel(name, start, end - start, stream)


def device_record(count: int, clock_us: float = 0.0) -> list[Kernel]:
    """What the profiler of one rank sees of `count` iterations."""
    kernels = []
    for origin in (clock_us + PERIOD_US * i for i in range(count)):
        spins = [(origin, origin + 2070), *((origin + at, origin + at + 2) for at in MARKERS)]
        kernels += [kernel(f"void {SPIN_KERNEL}(long)", *at) for at in spins]
        kernels += [kernel(name, origin + start, origin + end) for name, (start, end) in DEVICE.items()]
        kernels += [
            kernel("pack", origin + 2110, origin + 2120, SIDE),
            kernel("Memset (Device)", origin - 5, origin - 2),
        ]
    return kernels


# --- what the pass records --------------------------------------------------------------------------------------------


def test_on_a_gpu_phases_lie_between_the_markers_and_kernels_under_them_by_stream() -> None:
    (first, second) = cut_device(device_record(2), PHASES, 2)
    assert (first.barrier_us, first.start_us, first.end_us) == (2098, 2102, 2190)
    phases = {span.name: (span.start_us, span.end_us, span.note) for span in first.spans if span.category == "phase"}
    assert phases == {
        "dispatch": (2102, 2140, {}),
        "identity": (2142, 2150, {"timed": False}),
        "combine": (2152, 2190, {}),
    }
    kernels = [(span.name, span.thread) for span in first.spans if span.category == "kernel"]
    assert sorted(kernels) == [("combine", STREAM), ("dispatch", STREAM), ("pack", SIDE), ("weigh", STREAM)]
    assert [span.start_us for span in second.spans] == [span.start_us + PERIOD_US for span in first.spans]


def test_copies_are_told_from_kernels() -> None:
    record = [*device_record(1), kernel("Memcpy DtoD (Device -> Device)", 2104, 2106)]
    (iteration,) = cut_device(record, PHASES, 1)
    assert {span.category for span in iteration.spans} == {"phase", "kernel", "gpu_memcpy"}


def test_a_record_without_all_markers_is_no_trace() -> None:
    with pytest.raises(NothingRecorded, match="the profiler saw 9 of 10 marker kernels"):
        cut_device(device_record(2)[1:], PHASES, 2)
    with pytest.raises(NothingRecorded, match="saw 0 of 5"):
        cut_device([], PHASES, 1)


def host_event(name: str, start: float, end: float, thread: int = 1, is_async: bool = False) -> Any:
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=end), thread=thread, is_async=is_async
    )


def test_on_a_cpu_phases_are_annotations_and_collectives_stand_apart_from_operations() -> None:
    events = [host_event(BARRIER, 0, 10), host_event("gloo:barrier", 2, 9, 2, True), host_event(ITERATION, 11, 60)]
    events += [host_event(f"{PREFIX}{n}", 12 + 15 * n, 26 + 15 * n) for n in range(3)]
    events += [host_event("gloo:all_to_all", 15, 20, 3, True), host_event("aten::mul", 28, 30)]
    (iteration,) = cut_host(events, PHASES, 1)
    assert (iteration.barrier_us, iteration.start_us, iteration.end_us) == (10, 11, 60)
    told = [(span.name, span.category, span.thread) for span in iteration.spans]
    assert told[:3] == [(phase.name, "phase", PHASE_THREAD) for phase in PHASES]
    assert told[3:] == [("gloo:all_to_all", "collective", 3), ("aten::mul", "cpu_op", 1)]
    with pytest.raises(NothingRecorded, match="saw 1 of 2 iterations"):
        cut_host(events, PHASES, 2)


# --- lining up --------------------------------------------------------------------------------------------------------


def test_clocks_are_lined_up_on_barrier_ends_even_if_a_rank_is_often_late() -> None:
    zero = [1000.0 * i + 5000 for i in range(20)]
    late = [0.0, 0.4, -0.4, 300.0, 0.0] * 4  # every fifth time the scheduler wakes it late
    found = align([zero, [at - 7e6 + by for at, by in zip(zero, late, strict=True)], [at + 3 for at in zero]])
    assert found.shift_us == pytest.approx([5000, 5000 - 7e6, 5003], abs=0.5)
    assert found.residual_us == pytest.approx(300, abs=0.5)
    assert found.typical_us == pytest.approx(0, abs=0.5)
    mean = sum(late) / len(late)
    assert mean > 50, "the late ones would have moved a mean"


def test_one_rank_starts_at_zero_and_has_no_residual() -> None:
    found = align([[17.0, 30.0]])
    assert (found.shift_us, found.residual_us, found.typical_us) == ([17], 0, 0)


# --- writing ----------------------------------------------------------------------------------------------------------


def written(folder: Path, rank: int, clock_us: float, about: dict[str, Any]) -> Path:
    iterations = cut_device(device_record(3, clock_us), PHASES, 3)
    shift_us = align([[it.barrier_us for it in cut_device(device_record(3), PHASES, 3)]]).shift_us[0] + clock_us
    path = folder / f"trace_rank_{rank}.json"
    names = list(thread_names(iterations, rank, "stream"))
    write_trace(path, about, names, encoded(iterations, rank, shift_us))
    return path


def test_a_written_trace_is_read_by_the_analyzer_with_phases_over_streams(tmp_path: Path) -> None:
    about = {"stamp": "s", "key": "k1", "aligned_on": "barrier", "residual_us": 1.5}
    analyses = [analyze_file(written(tmp_path, rank, 1e6 * rank, about), None) for rank in range(2)]
    spans = analyses[0].spans
    assert (spans.variant, spans.lanes) == ("phases", ["serial", f"stream {STREAM}", f"stream {SIDE}"])
    assert analyses[0].windows.found_by == "marks in the trace"
    assert analyses[1].windows.start_us.tolist() == pytest.approx([4, 4 + PERIOD_US, 4 + 2 * PERIOD_US])
    serial = {bar.name for bar in analyses[0].bars(0) if bar.lane == 0}
    assert serial == {"dispatch", "identity", "combine"}, "untimed phases are phases too"
    assert analyses[0].concurrent_us.tolist() == pytest.approx([10, 10, 10])
    assert alignment(analyses) == ("barrier", 1.5)
    other = analyze_file(written(tmp_path, 2, 0, about | {"key": "k2"}), None)
    assert alignment([analyses[0], other]) is None, "traces of two cases share no clock"


def test_viewers_get_names_and_order_of_the_rows(tmp_path: Path) -> None:
    events = json.loads(written(tmp_path, 1, 0, {}).read_text())["traceEvents"]
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == {PHASE_THREAD: "phases", STREAM: f"stream {STREAM}", SIDE: f"stream {SIDE}"}
    assert {event["pid"] for event in events} == {1}


def test_what_does_not_read_back_as_it_was_meant_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "trace_rank_0.json"
    path.write_text("an earlier trace")
    good = encoded([Iteration(0, 1, 9, [Span("dispatch", "phase", PHASE_THREAD, 2, 5)])], 0, 0)
    write_trace(path, {}, [], good)
    assert len(read_trace(path).names) == 2
    for broken in (good[0].replace('"dur"', '"duration"', 1), good[0][:-3], good[0].replace("},\n", "}, ", 1)):
        with pytest.raises(TraceError):
            write_trace(path, {}, [], [broken])
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert len(read_trace(path).names) == 2


def test_iterations_that_a_file_has_no_room_for_are_left_out() -> None:
    assert fitting(["x" * 40, "x" * 40, "x" * 40], max_bytes=100) == 2
    assert fitting(["x" * 200, "x"], max_bytes=100) == 0


def test_the_cases_of_a_run_have_files_of_their_own() -> None:
    def name(rank: int, key: str) -> str:
        variant = SimpleNamespace(name="deepep_ht+cached", dispatch_dtype="fp8")
        case = SimpleNamespace(
            section="comm", variant=variant, problem=SimpleNamespace(tokens=8), timing="graph", key=key
        )
        return trace_name(rank, "20260101T000000Z", case)  # type: ignore[arg-type]

    assert name(1, "kab") == "trace_rank_1_20260101T000000Z_comm_deepep_ht+cached_fp8_T8_graph_kab.json"
    assert len({name(rank, key) for rank in (0, 1) for key in ("kab", "kcd")}) == 4


# --- in a run ---------------------------------------------------------------------------------------------------------


@scenario
def traced(folder: Path) -> Run:
    return Run(folder, prefix="sweep").go("honest", SEQ_LENS="2 4", ITERS=str(ITERS), TRACE="1")


@scenario
def traced_by_the_library(folder: Path) -> Run:
    """T=1: the library's profiler; 2: it breaks on rank 1; 3: it is not built in; 4: there is none; 5: rank 1 dies."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / OF_ANOTHER_RUN).write_text("{")
    return Run(folder, prefix="sweep").go("profiled", SEQ_LENS="1 2 3 4 5", ITERS="5", TRACE="library")


def files_of(run: Run) -> list[Path]:
    return sorted(path for path in run.folder.iterdir() if "trace_rank" in path.name)


def records(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.jsonl.read_text().splitlines()]


def test_each_case_gets_a_trace_a_rank_beside_the_csv(traced: Run) -> None:
    told = [name for record in records(traced) for name in record["samples"]["trace"]["files"]]
    assert sorted(told) == [path.name for path in files_of(traced)]
    assert len(told) == 4
    assert all(
        name.startswith(f"trace_rank_{rank}_{traced.stamp}_") for rank, name in zip((0, 1) * 2, told, strict=True)
    )


def test_a_traced_row_is_ok_has_its_figures_and_is_tainted(traced: Run) -> None:
    assert traced.code == 0
    for row in traced.rows():
        assert (row["status"], row["tainted"], row["reason"]) == ("ok", "1", "")
        assert float(row["lat_us_p50"]) > 0


def test_a_trace_holds_the_iterations_phases_and_collectives_of_its_rank(traced: Run) -> None:
    for path in files_of(traced):
        analysis = analyze_file(path, None)
        assert (analysis.spans.variant, len(analysis.windows.start_us)) == ("phases", ITERS)
        phases = [bar.name for bar in analysis.bars(0) if bar.lane == 0]
        assert phases == ["dispatch", "identity", "combine"]
        calls = {kernel.name: kernel.calls for kernel in analysis.kernels}
        assert calls["gloo:all_to_all"] == 4 * ITERS, "counts, rows and their meta out, rows back"
        assert analysis.spans.about["repro"].endswith("TRACE=1 ./run.sh")


def test_the_ranks_of_a_trace_share_a_clock_and_the_log_says_how_well(traced: Run) -> None:
    zero, one = (analyze_file(path, None) for path in files_of(traced)[::2])
    on, residual_us = alignment([zero, one])  # type: ignore[misc]
    assert on == "barrier"
    apart = median(abs(a - b) for a, b in zip(zero.windows.start_us, one.windows.start_us, strict=True))
    assert apart < residual_us + 2000, "starts follow the barrier's end at once, give or take the scheduler"
    assert "ranks lined up on the ends of barriers, residual " in traced.log_text()
    assert f"{files_of(traced)[0]} and that of rank 1 written; {ITERS} iterations" in traced.said


def test_the_librarys_own_trace_is_kept_as_it_wrote_it(traced_by_the_library: Run) -> None:
    first = [path for path in files_of(traced_by_the_library) if "_T1_" in path.name]
    assert len(first) == 2
    analysis = analyze_file(first[0], None)
    assert (analysis.spans.variant, len(analysis.windows.start_us)) == ("v1", 3)
    assert "by the library's own profiler, 3 iterations" in traced_by_the_library.said


def test_without_a_librarys_trace_the_row_says_why_and_stands(traced_by_the_library: Run) -> None:
    rows = {row["tokens"]: row for row in traced_by_the_library.rows()}
    assert {(row["status"], row["tainted"]) for row in rows.values()} == {("ok", "1")}
    assert rows["1"]["reason"] == ""
    assert rows["2"]["reason"].startswith(f"TRACE: rank 1: {traced_by_the_library.folder}/trace_rank_1_")
    assert "json ends too early: it is cut off in or after event " in rows["2"]["reason"]
    assert rows["3"]["reason"] == f"TRACE: {BuiltWithoutProfiler.library_profiler(None)}"  # type: ignore[arg-type]
    assert rows["4"]["reason"] == "TRACE: this backend has no profiler of its own; TRACE=1 traces it"
    left = [path.name for path in files_of(traced_by_the_library) if "_T2_" in path.name]
    assert [("_T2_" in name, name.startswith("trace_rank_0")) for name in left] == [(True, True)], (
        "rank 1's is not there"
    )


def test_what_a_killed_rank_was_writing_goes_and_another_runs_stays(traced_by_the_library: Run) -> None:
    (row,) = [row for row in traced_by_the_library.rows() if row["tokens"] == "5"]
    assert row["reason"].startswith("TRACE: rank 1 died in phase trace (pid ")
    unfinished = [path.name for path in files_of(traced_by_the_library) if path.name.startswith(FRESH)]
    assert unfinished == [OF_ANOTHER_RUN]


def test_a_group_that_ends_in_the_trace_keeps_the_row_that_was_measured() -> None:
    written: list[tuple[int, dict[str, Any]]] = []
    events = Events(lambda index, result: written.append((index, result)), lambda *_: None, lambda _: None)
    group = WorkerGroup(request=None, events=events)  # type: ignore[arg-type]
    assert not group._keep_measured("rank 1 died in phase trace")
    group.ranks[0] = Rank(hello={})
    told = {"type": "measured", "case": 2, "status": "ok", "reason": "", "columns": {"lat_us_p50": 7.0}, "samples": {}}
    group._message(None, 0, told)  # type: ignore[arg-type]
    assert written == []
    assert group._keep_measured("rank 1 died in phase trace")
    ((index, result),) = written
    assert (index, group.current, result["status"]) == (2, 3, "ok")
    assert result["reason"] == "TRACE: rank 1 died in phase trace"
    assert result["columns"] == {"lat_us_p50": 7.0}
    assert not group._keep_measured("twice")
