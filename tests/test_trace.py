"""Reading and pairing: what a trace file holds, and what is said of one that can't be read."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib import trace_json
from lib.trace import Trace, TraceError, TraceTooLarge, read_trace
from tests.trace_files import Event, complete, span, v1_events, write


def spans(trace: Trace) -> list[tuple[str, float, float]]:
    named = [trace.names[index] for index in trace.name_of]
    return list(zip(named, trace.start_us.tolist(), trace.end_us.tolist(), strict=True))


def read(path: Path, events: list[Any]) -> Trace:
    return read_trace(write(path / "trace.json", events))


def instant(name: str, ts: float) -> Event:
    return {"name": name, "ph": "i", "ts": ts, "pid": 0, "tid": 0, "s": "t"}


def test_begin_and_end_make_a_span_in_microseconds_whatever_the_display_unit(tmp_path: Path) -> None:
    trace = read(tmp_path, span("dispatch_intra", 17, 13.04, 88.11))
    assert spans(trace) == [("dispatch_intra", 13.04, 88.11)]
    assert trace.threads == [("0", "17")]
    assert trace.events == 2
    assert trace.complaint == ""


def test_back_to_back_phases_that_share_a_time_stamp_stay_apart(tmp_path: Path) -> None:
    events = [*span("combine_barrier", 0, 0, 5), *span("combine_barrier", 0, 5, 9), *span("combine_barrier", 0, 9, 9)]
    assert [(start, end) for _, start, end in spans(read(tmp_path, events))] == [(0, 5), (5, 9), (9, 9)]


def test_nested_spans_of_one_name_close_the_innermost_first(tmp_path: Path) -> None:
    outer, inner = span("a", 0, 0, 10), span("a", 0, 2, 3)
    assert spans(read(tmp_path, [outer[0], *inner, outer[1]])) == [("a", 0, 10), ("a", 2, 3)]


def test_overlapping_spans_of_two_names_on_one_thread_are_paired_by_name(tmp_path: Path) -> None:
    first, second = span("a", 0, 0, 5), span("b", 0, 3, 9)
    assert spans(read(tmp_path, [first[0], second[0], first[1], second[1]])) == [("a", 0, 5), ("b", 3, 9)]


def test_events_out_of_order_are_paired_by_their_time(tmp_path: Path) -> None:
    assert spans(read(tmp_path, [*reversed(span("a", 0, 7, 9)), *span("a", 0, 1, 2)])) == [("a", 1, 2), ("a", 7, 9)]


def test_an_end_without_a_name_closes_what_its_thread_opened_last(tmp_path: Path) -> None:
    outer, inner, other = span("a", 0, 0, 10), span("b", 0, 2, 3), span("c", 1, 1, 5)
    for event in (outer[1], inner[1]):
        del event["name"]
    events = [outer[0], other[0], *inner, other[1], outer[1]]
    assert spans(read(tmp_path, events)) == [("a", 0, 10), ("c", 1, 5), ("b", 2, 3)]


def test_orphans_are_counted_and_cost_no_other_span(tmp_path: Path) -> None:
    lost_end, lost_begin = span("a", 0, 1, 2)[0], span("b", 0, 0, 4)[1]
    trace = read(tmp_path, [lost_end, *span("b", 1, 2, 3), lost_begin])
    assert spans(trace) == [("b", 2, 3)]
    assert (trace.unmatched_begins, trace.unmatched_ends) == (1, 1)
    assert trace.complaint == "1 B without E, 1 E without B"


def test_an_event_without_thread_pairs_with_one_without_thread(tmp_path: Path) -> None:
    trace = read(tmp_path, [*span("a", None, 0, 4), *span("a", 3, 1, 2)])
    assert spans(trace) == [("a", 0, 4), ("a", 1, 2)]
    assert [trace.threads[index] for index in trace.thread_of] == [("0", ""), ("0", "3")]


def test_metadata_counters_and_flows_are_no_spans(tmp_path: Path) -> None:
    names = {"ph": "M", "name": "process_name", "args": {"name": "python"}}
    counter, flow = (
        {"ph": "C", "name": "memory", "ts": 1, "args": {"b": 2}},
        {"ph": "s", "name": "ac2g", "ts": 1, "id": 7},
    )
    trace = read(tmp_path, [names, counter, *span("a", 0, 0, 1), flow])
    assert spans(trace) == [("a", 0, 1)]
    assert trace.complaint == ""


def test_complete_events_are_spans_and_instants_are_marks(tmp_path: Path) -> None:
    trace = read(tmp_path, [instant("iteration 0", 3), complete("gemm", 7, 4.5, 2.25)])
    assert spans(trace) == [("gemm", 4.5, 6.75)]
    assert [trace.names[index] for index in trace.mark_name_of] == ["iteration 0"]
    assert trace.mark_us.tolist() == [3]


@pytest.mark.parametrize(
    "broken",
    [
        7,
        None,
        [],
        {},
        {"ph": "X", "name": "a", "ts": 1},
        {"ph": "X", "name": "a", "ts": 1, "dur": -1},
        {"ph": "X", "name": "a", "ts": float("nan"), "dur": 1},
        {"ph": "X", "name": "a", "ts": 1, "dur": float("inf")},
        {"ph": "X", "name": ["a"], "ts": 1, "dur": 1},
        {"ph": "X", "name": 5, "ts": 1, "dur": 1},
        {"ph": ["X"], "name": "a", "ts": 1, "dur": 1},
        {"ph": "B", "name": "a", "ts": "soon", "tid": 1},
        {"ph": "B", "name": "a", "ts": 1, "tid": {}},
        {"ph": "B", "ts": 1, "tid": 1},
    ],
)
def test_a_broken_event_is_counted_and_the_others_are_read(tmp_path: Path, broken: object) -> None:
    trace = read(tmp_path, [broken, *span("a", 1, 0, 1)])
    assert spans(trace) == [("a", 0, 1)]
    assert trace.complaint == "1 malformed"


def test_times_written_as_strings_are_numbers(tmp_path: Path) -> None:
    assert spans(read(tmp_path, [{"ph": "X", "name": "a", "ts": "1.5", "dur": "2"}])) == [("a", 1.5, 3.5)]


def test_numbers_split_anywhere_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"n":-12.5e+3,"traceEvents":[{"ph":"X","name":"a","ts":1.25e+2,"dur":0.5}],"m":1}')
    for piece_chars in range(1, 40):
        monkeypatch.setattr(trace_json, "PIECE_CHARS", piece_chars)
        assert spans(read_trace(path)) == [("a", 125, 125.5)]


def test_a_bare_list_a_byte_order_mark_and_gzip_are_read_too(tmp_path: Path) -> None:
    text = json.dumps(span("a", 0, 1, 2))
    (tmp_path / "list.json").write_text(text)
    (tmp_path / "mark.json").write_text("\ufeff" + text, encoding="utf-8")
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("list.json", "mark.json", "packed.json.gz"):
        assert spans(read_trace(tmp_path / name)) == [("a", 1, 2)]


def test_other_keys_around_the_events_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "torch.json"
    around = {"deviceProperties": [{"id": 0, "traceEvents": [1]}], "traceEvents": span("a", 0, 1, 2), "base": 12345}
    path.write_text(json.dumps(around))
    assert spans(read_trace(path)) == [("a", 1, 2)]


@pytest.mark.parametrize("piece_chars", [1, 7, 64, 4096])
@pytest.mark.parametrize("indent", [None, 2])
def test_where_the_text_is_split_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_chars: int, indent: int | None
) -> None:
    tricky = [
        complete('} , { "]', 1, 0.125, 1e3),
        complete("b\\", 2, 1234567.5, 2),
        {"ph": "M", "args": [{"x": {}}, {"y": {}}]},
    ]
    document = {"a": 12, "traceEvents": [*tricky * 3, *v1_events(1)], "z": -1.5e3}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document, indent=indent))
    whole = read_trace(path)
    monkeypatch.setattr(trace_json, "PIECE_CHARS", piece_chars)
    split = read_trace(path)
    assert spans(split) == spans(whole)
    assert whole.events == len(document["traceEvents"])  # type: ignore[arg-type]


ONE = json.dumps({"traceEvents": v1_events(1), "displayTimeUnit": "ms"})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("[", "ends too early"),
        ('{"traceEvents": []}', "holds no events"),
        ('{"traceEvents": null}', "no list named traceEvents"),
        ('{"iterations": [1, 2]}', "no list named traceEvents"),
        ('"a"', "is not a JSON trace"),
        ("\x89PNG", "is not a JSON trace"),
        (ONE[: len(ONE) // 2], "ends too early"),
        (ONE[: ONE.index("dispatch") + 3], "ends too early"),
        (ONE[: ONE.rindex("]") + 1], "ends too early"),
        (ONE[:-1], "ends too early"),
        (ONE.replace('"ph"', "ph", 1), "is not JSON (Expecting property name enclosed in double quotes at character"),
        (ONE.replace("}, {", "} {", 1), "is not JSON"),
        ("[" * 100_000, "is nested too deeply"),
    ],
)
def test_what_cannot_be_read_is_one_sentence_that_names_the_file(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path} ")
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_absent_files_directories_and_damaged_gzip_are_sentences(tmp_path: Path) -> None:
    packed = gzip.compress(ONE.encode())
    (tmp_path / "cut.json.gz").write_bytes(packed[: len(packed) // 2])
    (tmp_path / "plain.json.gz").write_text(ONE)
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 0xFF
    (tmp_path / "flipped.json.gz").write_bytes(flipped)
    for name in ("absent.json", ".", "cut.json.gz", "plain.json.gz", "flipped.json.gz"):
        with pytest.raises(TraceError, match=r"can't be read|damaged|not JSON|ends too early"):
            read_trace(tmp_path / name)


def test_too_much_text_is_refused_packed_or_not(tmp_path: Path) -> None:
    write(tmp_path / "large.json", v1_events(2))
    (tmp_path / "large.json.gz").write_bytes(gzip.compress((tmp_path / "large.json").read_bytes()))
    for name in ("large.json", "large.json.gz"):
        with pytest.raises(TraceTooLarge, match="MB"):
            read_trace(tmp_path / name, max_bytes=10_000)


def test_names_and_times_that_are_not_wanted_are_left_out_while_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", v1_events(3))
    only = read_trace(path, keep=lambda name: name == "ep_combine_all", window_us=(380.0, 760.0))
    assert [name for name, _, _ in spans(only)] == ["ep_combine_all"] * 4
    assert only.start_us.min() == 380 + 340
    assert only.complaint == ""


def test_memory_does_not_follow_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_json, "PIECE_CHARS", 1 << 16)
    path = write(tmp_path / "trace.json", v1_events(150, warps=8))
    tracemalloc.start()
    trace = read_trace(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    json.loads(path.read_text())
    _, loaded = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert trace.events == 18_000
    assert np.all(np.diff(trace.start_us) >= 0)
    assert peak < 0.4 * loaded
