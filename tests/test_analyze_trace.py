"""What a trace says: iterations, concurrency, statistics, also where the trace is of a kind that breaks analyzers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trace_files import (
    CONCURRENT_US,
    DURATION_US,
    PERIOD_US,
    Event,
    by_time,
    complete,
    span,
    v1_events,
    write,
)
from tools.analyze_ep_trace import analyze_file
from tools.trace_analysis import Analysis, alignment
from tools.trace_intervals import Intervals, intersection, union
from tools.trace_lanes import MAX_LANES

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT.parent / "shared" / "golden" / "traces"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden traces are not beside this checkout")


def analyzed(directory: Path, events: list[Any], **more: Any) -> Analysis:
    return analyze_file(write(directory / "trace.json", events, **more), None)


def windows(analysis: Analysis) -> list[tuple[float, float]]:
    found = analysis.windows
    return list(zip(found.start_us.round(2).tolist(), found.end_us.round(2).tolist(), strict=True))


def lanes(analysis: Analysis, iteration: int = 0) -> dict[str, str]:
    return {bar.name: analysis.spans.lanes[bar.lane] for bar in analysis.bars(iteration)}


def v1_windows(iterations: int) -> list[tuple[float, float]]:
    return [(PERIOD_US * i, PERIOD_US * i + DURATION_US) for i in range(iterations)]


# --- golden traces ---------------------------------------------------------------------------------------------------


@needs_golden
def test_the_golden_v1_trace_gives_the_expected_iterations_spans_and_means() -> None:
    analysis = analyze_file(GOLDEN / "trace_rank_0_v1.json", None)
    assert analysis.spans.variant == "v1"
    assert windows(analysis) == [(0.0, 348.98), (380.01, 728.74), (760.03, 1108.94)]
    assert analysis.windows.duration_us.round(2).tolist() == [348.98, 348.73, 348.91]
    expected = """ep_dispatch_copy_to_staging 0.00 9.89; dispatch_inter_node_send 12.04 41.98;
        dispatch_intra 13.06 89.76;
        dispatch_inter_node_recv 41.04 161.98; dispatch_sync 89.06 171.98; combine_sync 175.04 186.98;
        ep_combine_sync_barrier 186.04 191.98; combine_inter_node 200.04 331.98; combine_intra_node 200.06 271.76;
        ep_combine_all 340.04 348.98"""
    got = [f"{bar.name} {bar.start_us[0]:.2f} {bar.end_us[-1]:.2f}" for bar in analysis.bars(0)]
    assert got == [each.strip() for each in expected.split(";")]
    assert all(len(bar.start_us) == 1 for bar in analysis.bars(0))
    means = {k.name: (round(k.mean_us), k.calls) for k in analysis.kernels}
    assert means == {
        "combine_inter_node": (130, 48),
        "dispatch_inter_node_recv": (119, 48),
        "dispatch_intra": (75, 48),
        "combine_intra_node": (70, 48),
        "dispatch_sync": (45, 96),
        "dispatch_inter_node_send": (28, 48),
        "combine_sync": (10, 96),
        "ep_dispatch_copy_to_staging": (8, 96),
        "ep_combine_all": (7, 96),
        "ep_combine_sync_barrier": (4, 96),
    }
    sync = next(k for k in analysis.kernels if k.name == "dispatch_sync")
    assert (round(sync.min_us), round(sync.max_us)) == (9, 81)


@needs_golden
def test_the_golden_v1_ll_and_intranode_traces_give_the_expected_iterations() -> None:
    low_latency = analyze_file(GOLDEN / "trace_rank_0_v1ll.json", None)
    assert low_latency.spans.variant == "v1_ll"
    assert len(low_latency.windows.start_us) == 3
    assert low_latency.windows.end_us[-1].round(2) == 1108.89
    intranode = analyze_file(GOLDEN / "trace_intranode_rank0.json", None)
    assert intranode.spans.variant == "intranode"
    assert windows(intranode) == [(0.0, 31.5), (100.0, 131.5)]


# --- iterations ------------------------------------------------------------------------------------------------------


def test_a_v1_trace_has_its_iterations_lanes_and_true_concurrency(tmp_path: Path) -> None:
    analysis = analyzed(tmp_path, v1_events(3))
    assert windows(analysis) == v1_windows(3)
    assert lanes(analysis) == {
        "ep_dispatch_copy_to_staging": "serial",
        "dispatch_inter_node_send": "internode",
        "dispatch_inter_node_recv": "internode",
        "dispatch_intra": "intranode",
        "dispatch_sync": "serial",
        "combine_sync": "serial",
        "ep_combine_sync_barrier": "serial",
        "combine_inter_node": "internode",
        "combine_intra_node": "intranode",
        "ep_combine_all": "serial",
    }
    by_phase = {overlap.phase: overlap.where.us(3).tolist() for overlap in analysis.overlaps}
    assert by_phase == {phase: [us] * 3 for phase, us in CONCURRENT_US.items()}
    assert analysis.concurrent_us.tolist() == [sum(CONCURRENT_US.values())] * 3


def test_concurrency_counts_the_intersection_and_not_the_hull(tmp_path: Path) -> None:
    gap = [
        *span("ep_dispatch_copy_to_staging", 0, 0, 1),
        *span("dispatch_inter_node_send", 0, 2, 10),
        *span("dispatch_inter_node_recv", 0, 50, 60),
        *span("dispatch_intra", 1, 8, 55),
        *span("ep_combine_all", 0, 70, 71),
    ]
    analysis = analyzed(tmp_path, gap)
    assert analysis.concurrent_us.tolist() == [2 + 5]
    assert analysis.concurrent.of(0)[0].tolist() == [8, 50]


def test_split_groups_of_staging_warps_stay_one_iteration(tmp_path: Path) -> None:
    late = [event for i in range(3) for event in span("ep_dispatch_copy_to_staging", 9, 380 * i + 30, 380 * i + 35)]
    assert windows(analyzed(tmp_path, by_time([*v1_events(3), *late]))) == v1_windows(3)


def test_module_prefixes_do_not_hide_a_kernel(tmp_path: Path) -> None:
    events = [{**event, "name": f"internode_v1.{event['name']}"} for event in v1_events(2)]
    analysis = analyzed(tmp_path, events)
    assert windows(analysis) == v1_windows(2)
    assert "dispatch_intra" in lanes(analysis)


def test_metadata_missing_threads_orphans_and_complete_events_change_nothing(tmp_path: Path) -> None:
    plain = v1_events(2)
    as_x = [
        {"ph": "X", "name": b["name"], "ts": b["ts"], "dur": e["ts"] - b["ts"], "tid": b["tid"]}
        for b, e in ((b, e) for b in plain if b["ph"] == "B" for e in [_end_of(b, plain)])
    ]
    metadata = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}},
        {"ph": "C", "name": "c", "ts": 1},
    ]
    orphans = [span("dispatch_intra", 77, 500, 501)[0], span("dispatch_sync", 78, 20, 21)[1]]
    threadless = span("dispatch_intra", None, 20, 60)
    for events in (as_x, [*metadata, *plain], by_time([*plain, *orphans]), by_time([*plain, *threadless])):
        analysis = analyzed(tmp_path, events)
        assert windows(analysis) == v1_windows(2)
        assert analysis.concurrent_us.tolist() == [sum(CONCURRENT_US.values())] * 2


def _end_of(begin: Event, events: list[Event]) -> Event:
    same = (e for e in events if e["ph"] == "E" and (e["name"], e["tid"]) == (begin["name"], begin["tid"]))
    return next(e for e in same if e["ts"] >= begin["ts"])


def test_an_iteration_cut_off_by_the_end_of_the_trace_says_so(tmp_path: Path) -> None:
    analysis = analyzed(tmp_path, [event for event in v1_events(3) if event["ts"] < 2 * PERIOD_US + 100])
    assert analysis.windows.complete.tolist() == [True, True, False]
    assert analysis.windows.outliers == {}


def test_spans_before_the_first_iteration_are_counted_outside(tmp_path: Path) -> None:
    events = [{**event, "ts": event["ts"] + 100} for event in v1_events(1)]
    assert analyzed(tmp_path, [*span("ep_combine_all", 0, 3, 9), *events]).outside == 1


def test_async_ll_has_lanes_for_transfers_and_copies(tmp_path: Path) -> None:
    events = []
    for origin in (0, 100):
        steps = "dispatch_async_slot_assign dispatch_async_send_transfer dispatch_async_recv_copy".split()
        steps += "combine_async_send_copy combine_async_recv_transfer combine_async_recv_copy".split()
        for place, name in enumerate(steps):
            events += span(name, place, origin + 10 * place, origin + 10 * place + 12)
    analysis = analyzed(tmp_path, by_time(events))
    assert analysis.spans.variant == "async_ll"
    assert windows(analysis) == [(0, 62), (100, 162)]
    assert {overlap.phase: overlap.where.us(2).tolist() for overlap in analysis.overlaps} == {
        "dispatch": [4, 4],
        "combine": [4, 4],
    }


def test_intranode_steps_repeated_per_token_stay_one_iteration(tmp_path: Path) -> None:
    events = []
    for origin in (0, 100):
        events += span("combine_stage_input", 0, origin, origin + 5) + span(
            "combine_barrier", 0, origin + 5, origin + 6
        )
        for token in range(4):
            at = origin + 6 + 4 * token
            events += span("combine_accum_setup", 0, at, at + 1) + span("combine_dequant_accum", 0, at + 1, at + 4)
    analysis = analyzed(tmp_path, events)
    assert windows(analysis) == [(0, 22), (100, 122)]
    assert lanes(analysis)["combine_dequant_accum"] == "comb_dequant_accum"


@pytest.mark.parametrize("mark", ["span", "begin_end", "instant"])
def test_our_own_traces_are_cut_at_their_iteration_marks(tmp_path: Path, mark: str) -> None:
    events: list[Event] = []
    for i in range(3):
        origin = 200.0 * i
        if mark == "span":
            events.append(complete(f"iteration {i}", 0, origin, 150, cat="iteration"))
        elif mark == "begin_end":
            events += span(f"iteration {i}", 0, origin, origin + 150)
        else:
            events.append({"ph": "i", "name": f"iteration {i}", "ts": origin, "pid": 0, "tid": 0})
        events += [
            complete("dispatch", 0, origin, 50, cat="phase"),
            complete("combine", 0, origin + 60, 90, cat="phase"),
            complete("void deep::intranode::dispatch<8>(int*)", 7, origin + 2, 40),
            complete("gemm", 8, origin + 30, 40),
        ]
    analysis = analyzed(tmp_path, by_time(events))
    assert analysis.spans.variant == "phases"
    assert windows(analysis) == [(0, 150), (200, 350), (400, 550)]
    assert lanes(analysis) == {
        "dispatch": "serial",
        "combine": "serial",
        "void deep::intranode::dispatch<8>(int*)": "stream 7",
        "gemm": "stream 8",
    }
    assert analysis.concurrent_us.tolist() == [12, 12, 12]


def test_what_starts_after_the_end_of_a_marked_iteration_is_in_none(tmp_path: Path) -> None:
    marks = [complete(f"iteration {i}", 0, 100 * i, 50, cat="") for i in range(2)]
    analysis = analyzed(
        tmp_path, [*marks, complete("inside", 0, 149, 9, cat=""), complete("between", 0, 70, 9, cat="")]
    )
    assert (lanes(analysis, 0), lanes(analysis, 1)) == ({}, {"inside": "inside"})
    assert analysis.outside == 1


def test_a_gpu_trace_of_torch_drops_the_host_and_puts_each_stream_in_a_lane(tmp_path: Path) -> None:
    events: list[Event] = []
    for i in range(2):
        origin = 1e6 + 1000.0 * i
        events += [
            complete(f"ProfilerStep#{i}", 99, origin - 400, 700, cat="user_annotation", pid=4321),
            complete(f"ProfilerStep#{i}", 7, origin, 500, cat="gpu_user_annotation"),
            complete(f"ProfilerStep#{i}", 20, origin + 50, 480, cat="gpu_user_annotation"),
            complete("aten::mm", 99, origin - 300, 30, cat="cpu_op", pid=4321),
            complete("cudaLaunchKernel", 99, origin - 290, 10, cat="cuda_runtime", pid=4321),
            complete("gemm", 7, origin, 300),
            complete("nccl", 20, origin + 200, 300),
            complete("Memcpy DtoD", 7, origin + 310, 20, cat="gpu_memcpy"),
        ]
    analysis = analyzed(tmp_path, events, schemaVersion=1, deviceProperties=[{"id": 0}])
    assert analysis.spans.variant == "torch"
    assert windows(analysis) == [(1e6, 1e6 + 530), (1e6 + 1000, 1e6 + 1530)]
    assert lanes(analysis) == {"gemm": "stream 7", "nccl": "stream 20", "Memcpy DtoD": "stream 7"}
    assert analysis.concurrent_us.tolist() == [120, 120]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_a_real_trace_of_torch_profiler_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    path = tmp_path / "torch.json"
    x = torch.ones(64, 64)

    def ready(profiler: Any) -> None:
        profiler.export_chrome_trace(str(path))

    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=3), on_trace_ready=ready
    ) as profiler:
        for _ in range(4):
            with record_function("dispatch"):
                y = x @ x
            with record_function("combine"):
                y.sum()
            profiler.step()
    analysis = analyze_file(path, None)
    assert len(analysis.windows.start_us) == 3
    for iteration in range(3):
        there = lanes(analysis, iteration)
        assert there["dispatch"] == there["combine"] == "serial"
        assert there["aten::matmul"].startswith("thread ")
        assert "aten::mm" not in there  # inside aten::matmul


def test_a_trace_without_marks_is_cut_at_idle_gaps_if_the_stretches_are_alike(tmp_path: Path) -> None:
    alike, unlike = [], []
    for i in range(5):
        origin = 100 * i
        alike += [complete("a", 0, origin, 10, cat=""), complete("b", 0, origin + 11, 20, cat="")]
        unlike += [complete(f"a{i}", 0, origin, 10, cat=""), complete("b", 0, origin + 11, 20, cat="")]
    assert windows(analyzed(tmp_path, alike)) == [(100 * i, 100 * i + 31) for i in range(5)]
    assert windows(analyzed(tmp_path, unlike)) == [(0, 431)]


def test_a_trace_of_one_span_is_one_iteration(tmp_path: Path) -> None:
    assert windows(analyzed(tmp_path, span("something", 0, 5, 5))) == [(5, 5)]


def test_unknown_kernels_get_lanes_of_their_own_and_too_many_share_one(tmp_path: Path) -> None:
    unknown = [event for i in range(40) for event in span(f"Unknown_Slot_{i}", 1, 20 + i, 21 + i)]
    analysis = analyzed(tmp_path, by_time([*v1_events(1), *span("combine_new_step", 0, 192, 198), *unknown]))
    assert lanes(analysis)["combine_new_step"] == "combine_new_step"
    assert lanes(analysis)["Unknown_Slot_39"] == "other"
    assert len(analysis.spans.lanes) <= MAX_LANES
    assert analysis.concurrent_us.tolist() == [sum(CONCURRENT_US.values())]


# --- what stands out -------------------------------------------------------------------------------------------------


def test_a_slow_iteration_is_named_and_equal_ones_are_not(tmp_path: Path) -> None:
    assert analyzed(tmp_path, v1_events(8, slow={5: 1.5})).windows.outliers == {5: pytest.approx(1.5)}
    assert analyzed(tmp_path, v1_events(8)).windows.outliers == {}


def test_a_slow_thread_is_named_and_two_roles_are_not(tmp_path: Path) -> None:
    slow = [event for event in v1_events(2, warps=12) if (event["name"], event["tid"]) != ("combine_inter_node", 3)]
    for origin in (0, PERIOD_US):
        slow += span("combine_inter_node", 3, origin + 200, origin + 200 + 260)
    named = {k.name: k.imbalanced for k in analyzed(tmp_path, by_time(slow)).kernels if k.imbalanced}
    assert named == {"combine_inter_node": (("3", 260, 2.0),)}
    # some threads wait about 10 us in dispatch_sync, the others about 80
    waits = [span("dispatch_sync", i, 90 if i % 2 else 162, 171 + i / 10) for i in range(12)]
    assert all(not k.imbalanced for k in analyzed(tmp_path, by_time([e for wait in waits for e in wait])).kernels)


def test_ranks_are_lined_up_on_a_collective_and_the_residual_is_told(tmp_path: Path) -> None:
    events = v1_events(2)
    moved = [{**e, "ts": e["ts"] + (3 if e["ts"] >= PERIOD_US + 174 else 0) + 1000} for e in events]
    one = analyze_file(write(tmp_path / "a.json", events), None)
    other = analyze_file(write(tmp_path / "b.json", moved), None)
    assert alignment([one, one]) == ("dispatch_sync", 0)
    assert alignment([one, other]) == ("dispatch_sync", 3)
    assert alignment([one, analyze_file(write(tmp_path / "c.json", span("a", 0, 0, 1)), None)]) is None


# --- intervals against a plain recount -------------------------------------------------------------------------------


def test_unions_and_intersections_agree_with_counting_every_microsecond() -> None:
    random = np.random.default_rng(0)
    for _ in range(30):
        pairs = []
        for _ in range(2):
            n = int(random.integers(0, 40))
            start = random.integers(0, 60, n).astype(float)
            pairs.append((random.integers(0, 3, n), start, start + random.integers(0, 9, n)))
        unions = [union(*pair) for pair in pairs]
        both = intersection(*unions)
        for group in range(3):
            marked = [_microseconds(pair, group) for pair in pairs]
            for made, expected in zip([*unions, both], [*marked, marked[0] & marked[1]], strict=True):
                assert made.us(3)[group] == len(expected)
                assert _microseconds(made, group) == expected


def _microseconds(intervals: Any, group: int) -> set[int]:
    rows = zip(*intervals, strict=True)
    return {us for of, start, end in rows if of == group for us in range(int(start), int(end))}


def test_a_union_of_nothing_is_nothing() -> None:
    none = union(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    assert intersection(none, Intervals(np.array([0]), np.array([1.0]), np.array([2.0]))).us(1).tolist() == [0]
