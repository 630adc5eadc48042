"""tools/analyze_ep_trace.py as a command: text, JSON, picture, and a sentence for all that goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lib.trace import TraceTooLarge, read_trace
from tests.trace_files import CONCURRENT_US, DURATION_US, PERIOD_US, by_time, complete, span, v1_events, write
from tools.analyze_ep_trace import analyze_file, main, shown_iterations
from tools.trace_analysis import analyze, find_iterations
from tools.trace_lanes import spans_of
from tools.trace_panel import MAX_LABEL_LINES, Scale, place_labels

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "analyze_ep_trace.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")


def test_the_command_runs_from_anywhere_and_puts_the_picture_beside_the_trace(tmp_path: Path) -> None:
    path = write(tmp_path / "trace_rank_0.json", v1_events(3))
    answer = run(path)
    assert (answer.returncode, answer.stderr) == (0, "")
    lines = answer.stdout.splitlines()
    at = lines.index("3 iterations")
    numbers = [[float(word) for word in line.split()] for line in lines[at + 2 : at + 5]]
    together = sum(CONCURRENT_US.values())
    origins = [PERIOD_US * i for i in range(3)]
    assert numbers == [[i, at, at + DURATION_US, DURATION_US, together] for i, at in enumerate(origins)]
    assert "no outlier iterations" in lines
    assert (tmp_path / "trace_rank_0.png").read_bytes().startswith(b"\x89PNG")


def test_text_names_outliers_imbalanced_threads_and_what_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [
        event
        for event in v1_events(8, warps=12, slow={5: 1.5})
        if (event["name"], event["tid"]) != ("dispatch_intra", 4)
    ]
    events += [event for i in range(5) for event in span("dispatch_intra", 4, 380 * i + 13, 380 * i + 167)]
    path = write(tmp_path / "trace.json", by_time([*events, span("dispatch_sync", 50, 5, 6)[0]]))
    assert main([str(path), "--no-picture"]) == 0
    said = capsys.readouterr().out
    assert "outlier: iteration 5, 523.50 us, 1.50x the median" in said
    assert "imbalanced: thread 4 in dispatch_intra, mean 154.00 us" in said
    assert "left out: 1 B without E" in said
    assert not list(tmp_path.glob("*.png"))


def test_json_holds_what_the_text_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write(tmp_path / f"trace_rank_{rank}.json", v1_events(2)) for rank in range(2)]
    assert main([*map(str, paths), "--json", "--no-picture"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["alignment"] == {"on": "dispatch_sync", "residual_us": 0}
    assert [trace["trace"] for trace in document["traces"]] == [str(path) for path in paths]
    first = document["traces"][0]
    assert (first["variant"], first["num_iterations"], first["threads"]) == ("v1", 2, 4)
    iteration = first["iterations"][1]
    assert (iteration["start_us"], iteration["end_us"], iteration["duration_us"]) == (380, 729, 349)
    told = {each["phase"]: (each["lanes"], each["us"], each["intervals_us"]) for each in iteration["concurrent"]}
    assert told["dispatch"] == (["internode", "intranode"], 77, [[13, 90]])
    sync = next(kernel for kernel in first["kernels"] if kernel["kernel"] == "dispatch_sync")
    assert (sync["mean_us"], sync["min_us"], sync["max_us"], sync["calls"]) == (46, 10, 82, 8)
    assert iteration["kernels"][0] == {
        "kernel": "ep_dispatch_copy_to_staging",
        "lane": "serial",
        "start_us": 0,
        "end_us": 10,
        "busy_us": 10,
        "pieces": 1,
    }


def test_several_traces_get_a_picture_each_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write(tmp_path / f"trace_rank_{rank}.json", v1_events(2)) for rank in range(2)]
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    assert main([*map(str, paths), "--out", str(pictures)]) == 0
    assert sorted(path.name for path in pictures.iterdir()) == ["trace_rank_0.png", "trace_rank_1.png"]
    assert "lined up on the end of dispatch_sync" in capsys.readouterr().out


def test_one_unreadable_trace_does_not_cost_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path / "good.json", v1_events(1))
    (tmp_path / "empty.json").write_text("")
    assert main([str(tmp_path / "empty.json"), str(good), "--no-picture"]) == 2
    said = capsys.readouterr()
    assert said.err == f"analyze_ep_trace: {tmp_path / 'empty.json'} is empty\n"
    assert "1 iterations" in said.out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ('{"traceEvents": [', "ends too early"),
        ('{"traceEvents": []}', "holds no events"),
        ('{"traceEvents": [{"ph": "M", "name": "process_name"}]}', "1 events but no spans of time"),
        ('{"traceEvents": [{"ph": "E", "name": "a", "ts": 1}]}', "no spans of time (1 E without B)"),
    ],
)
def test_an_unreadable_trace_is_a_sentence_and_exit_code_2(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    answer = run(path)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert told in answer.stderr
    assert len(answer.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--out", "picture.jpg"], "ends in .png or .svg"),
        (["--out", "{tmp}/absent/a.png"], "there is no directory"),
        (["--iterations", "a-b"], "write e.g. 0-2,7"),
        (["--iterations", "3-1"], "write e.g. 0-2,7"),
        (["--iterations", "5"], "has iterations 0-1"),
        (["{tmp}/trace.json", "--out", "{tmp}/a.png"], "give a directory"),
        (["{tmp}/trace.json"], "two of the traces"),
    ],
)
def test_wrong_usage_is_a_sentence_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    path = write(tmp_path / "trace.json", v1_events(2))
    assert main([str(path), *(argument.replace("{tmp}", str(tmp_path)) for argument in arguments)]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert len(said.err.splitlines()) == 1


def test_a_picture_that_cannot_be_written_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "trace.json", v1_events(1))
    (tmp_path / "taken.png").mkdir()
    (tmp_path / "trace.png").mkdir()
    assert main([str(path)]) == 2
    said = capsys.readouterr()
    assert "can't be written" in said.err
    assert "1 iterations" in said.out


def test_without_matplotlib_the_remedy_is_named_and_text_still_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tools.trace_plot", None)
    path = write(tmp_path / "trace.json", v1_events(1))
    assert main([str(path)]) == 2
    assert "pip install matplotlib, or use --no-picture" in capsys.readouterr().err
    assert main([str(path), "--no-picture"]) == 0


def test_a_large_file_points_to_iterations_and_is_then_read_in_part(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", v1_events(9, slow={4: 1.5}))
    with pytest.raises(TraceTooLarge, match="--iterations 0-2"):
        analyze_file(path, None, max_bytes=10_000)
    part, whole = analyze_file(path, [(3, 4), (7, 7)], max_bytes=10_000), analyze_file(path, [(3, 4), (7, 7)])
    assert part.windows.start_us.tolist() == whole.windows.start_us.tolist()
    assert part.windows.end_us.tolist() == whole.windows.end_us.tolist()
    assert part.chosen.tolist() == [3, 4, 7]
    for iteration in (3, 4, 7):
        assert [(b.name, b.busy_us) for b in part.bars(iteration)] == [
            (b.name, b.busy_us) for b in whole.bars(iteration)
        ]
        assert part.concurrent_us[iteration] == whole.concurrent_us[iteration]
    assert part.kernels == whole.kernels
    assert part.spans.complaint == ""


def test_the_picture_says_what_is_concurrent_and_for_how_long(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", v1_events(2))
    from matplotlib import rcParams

    old, rcParams["svg.fonttype"] = rcParams["svg.fonttype"], "none"  # text as text
    try:
        assert main([str(path), "--out", str(tmp_path / "picture.svg")]) == 0
    finally:
        rcParams["svg.fonttype"] = old
    texts = [
        "".join(each.itertext()).strip()
        for each in ElementTree.parse(tmp_path / "picture.svg").iter()
        if each.tag.endswith("text")
    ]
    for told in ("internode", "intranode", "serial", "concurrent", "disp_recv", "us since the start of the iteration"):
        assert told in texts, told
    assert texts.count("77.0 us") >= 2  # the shaded intersection of dispatch, in both iterations
    assert any(
        text.startswith("iteration 1: 349.00 us, internode and intranode concurrent for 147.00 us") for text in texts
    )


def test_many_iterations_draw_the_first_and_the_slowest(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", v1_events(30, slow={20: 1.4, 11: 1.3, 27: 1.2}))
    analysis = analyze_file(path, None)
    assert shown_iterations(analysis) == [0, 1, 2, 11, 20, 27]
    few = analyze(analysis.spans, find_iterations(analysis.spans), np.arange(4))
    assert shown_iterations(few) == [0, 1, 2, 3]


def test_labels_of_serial_kernels_never_touch_each_other() -> None:
    scale = Scale(extent_us=350.0, width_px=1700, dpi=120)
    random = np.random.default_rng(1)
    for count in (3, 10, 24):
        wanted = [(f"combine_sync {i}.0", float(at)) for i, at in enumerate(random.uniform(0, 350, count))]
        labels = place_labels(wanted, scale)
        assert labels
        for line in range(MAX_LABEL_LINES):
            there = [(label.text_us, scale.text_us(label.text) / 2) for label in labels if label.line == line]
            edges = sorted((centre - half, centre + half) for centre, half in there)
            assert all(left[1] <= right[0] + 1e-9 for left, right in pairwise(edges))
            assert all(left >= -1e-9 and right <= 350 + 1e-9 for left, right in edges)


def test_a_crowded_trace_is_drawn(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    events = [complete("iteration 0", 0, 0, 1000, cat="mark"), complete("dispatch.send", 0, 3, 5, cat="phase")]
    for stream in range(20):
        events += [complete(f"k{i % 13}", stream, float(random.uniform(0, 990)), 0.4) for i in range(200)]
    path = write(tmp_path / "trace.json", events)
    assert main([str(path), "--out", str(tmp_path / "a.png")]) == 0


def test_a_million_events_take_ten_seconds_at_most_picture_included(tmp_path: Path) -> None:
    once = [(json.dumps(event), event["ts"]) for event in v1_events(1, warps=128)]
    path, repeats = tmp_path / "trace.json", 1_000_000 // len(once) + 1
    with path.open("w") as file:
        file.write('{"traceEvents": [\n')
        for i in range(repeats):
            moved = (text.replace(f'"ts": {ts}', f'"ts": {ts + i * PERIOD_US}') for text, ts in once)
            file.write(",\n".join(moved) + ("\n" if i == repeats - 1 else ",\n"))
        file.write("]}")
    started = time.process_time()
    assert main([str(path)]) == 0
    assert time.process_time() - started < 10
    assert (tmp_path / "trace.png").is_file()


def test_names_that_look_like_formulas_or_hidden_labels_are_drawn_as_they_are(tmp_path: Path) -> None:
    names = ["a<b>&$\\frac{$", "_ZN4gemmEv", "\u4e2d"]
    path = write(tmp_path / "trace$\\x{$.json", [complete(name, i, 0, 100) for i, name in enumerate(names)])
    answer = run(path, "--out", tmp_path / "a.svg")
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize("option", ["--no-picture", "--json", "--out"])
def test_letters_that_no_stream_takes_and_a_terminal_would_obey_are_replaced(tmp_path: Path, option: str) -> None:
    names = ["lone \ud800", "red \x1b[31m"]
    path = write(tmp_path / "trace.json", [complete(name, i, 0, 100, cat=name) for i, name in enumerate(names)])
    answer = run(path, option, *([tmp_path / "a.svg"] if option == "--out" else []))
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "\x1b" not in answer.stdout
    assert json.dumps("lone \ufffd") in answer.stdout if option == "--json" else "lone \ufffd" in answer.stdout


@pytest.mark.parametrize("option", ["--no-picture", "--json"])
def test_output_that_cannot_be_written_is_a_sentence(tmp_path: Path, option: str) -> None:
    path = write(tmp_path / "trace.json", v1_events(1))
    command = [sys.executable, ROOT / "tools" / "analyze_ep_trace.py", path, "--no-picture", option]
    with Path("/dev/full").open("w") as full:
        answer = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert answer.returncode == 2
    assert answer.stderr == "analyze_ep_trace: the output can't be written: No space left on device\n"


def test_lanes_of_a_trace_without_spans_are_empty(tmp_path: Path) -> None:
    spans = spans_of(read_trace(write(tmp_path / "trace.json", [{"ph": "M", "name": "x"}])))
    assert spans.lanes == ["serial"]
    assert len(spans.start_us) == 0
