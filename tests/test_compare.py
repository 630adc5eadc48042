"""tools/compare.py and the files it reads: fails closed on whatever is no baseline, and is quick."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nights import MEASURED, baseline, measured, night, quiet, row, write_nights

from lib import history
from lib.history import BaselineError
from lib.rows import COLUMNS, HEADER, csv_line

ROOT = Path(__file__).resolve().parent.parent


def compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / "compare.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_stdout_without_the_letter_gets_a_question_mark(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    rows = [made | {"variant": "torch\x1b"} for made in night(9, quiet(seed=7))]
    answer = compare(files[0], file_of(tmp_path / "odd.csv", rows))
    assert "torch? " in answer.stdout


def file_of(path: Path, rows: list[history.Row]) -> Path:
    history.write_whole(path, history.as_text(rows))
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return file_of(tmp_path / "old.csv", baseline()), file_of(tmp_path / "new.csv", night(9, quiet(seed=7)))


def test_a_good_night_is_exit_0_with_one_line(files: tuple[Path, Path]) -> None:
    answer = compare(*files)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout == "green 20261109T020000Z nvidia-h200-x2: 1 OK\n"


def test_ten_times_slower_is_exit_3_also_without_a_second_run(files: tuple[Path, Path], tmp_path: Path) -> None:
    slow = file_of(tmp_path / "slow.csv", night(9, quiet(1000)))
    answer = compare(files[0], slow, "--json", tmp_path / "v.json")
    assert answer.returncode == 3
    assert "REGRESSED" in answer.stdout
    (verdict,) = json.loads((tmp_path / "v.json").read_text())["verdicts"]
    assert verdict["change_pct"] == pytest.approx(900, abs=20)


BROKEN = {
    "missing": None,
    "empty": "",
    "header only": history.NIGHT_HEADER,
    "header of plain rows only": HEADER,
    "other columns": "variant,time\ntorch,3\n",
    "another schema": HEADER.replace("lat_us_p50", "latency_us") + "1\n",
    "no number": history.as_text([made | {"lat_us_p50": "fast"} for made in baseline()]),
    "a short line": history.NIGHT_HEADER + "20261101T020000Z,1,0,1\n" + "x\n",
    "a cell of megabytes": history.as_text(baseline()) + "x" * 17_000_000 + "\n",
    "no stamp": HEADER + "1,yesterday" + "," * (len(COLUMNS) - 2) + "\n",
}


NO_ROW = ("header only", "header of plain rows only")  # of NEW: what was measured is lost, and that is red
NO_FIGURE = ("no number",)  # of NEW: found while judging


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_no_baseline_is_one_sentence_and_exit_3_and_a_new_that_cannot_be_read_is_usage(
    what: str, files: tuple[Path, Path]
) -> None:
    bad, text = files[0].with_name("bad.csv"), BROKEN[what]
    if text is not None:
        bad.write_text(text)
    of_new = 3 if what in (*NO_ROW, *NO_FIGURE) else 2
    for pair, code in (((bad, files[1]), 3), ((files[0], bad), of_new)):
        answer = compare(*pair)
        assert answer.returncode == code
        assert len(answer.stderr.splitlines()) == 1
        assert "Traceback" not in answer.stderr


def test_wrong_usage_is_exit_2_with_json_or_without(files: tuple[Path, Path], tmp_path: Path) -> None:
    answer = compare(*files, "--metric", "latency", "--json", tmp_path / "v.json")
    assert answer.returncode == 2
    assert "lat_us_p50" in answer.stderr
    assert compare(files[0], "--json", tmp_path / "v.json").returncode == 2
    for place in (tmp_path, tmp_path / "absent" / "v.json"):
        answer = compare(*files, "--json", place)
        assert answer.returncode == 2
        assert answer.stderr.startswith(f"--json {place}: cannot be written")
        assert answer.stdout.startswith("green ")


def test_json_goes_into_a_pipe_and_through_a_link_and_replaces_neither(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "kept" / "v.json"
    target.parent.mkdir()
    os.mkfifo(pipe)
    link.symlink_to(target)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        try:
            assert compare(*files, "--json", pipe).returncode == 0
            assert pipe.is_fifo()
            assert json.loads(reader.communicate(timeout=10)[0])["exit"] == 0
        finally:
            reader.kill()
    for _ in range(2):  # before the target is there, and after
        assert compare(*files, "--json", link).returncode == 0
        assert link.is_symlink()
        assert json.loads(target.read_text())["exit"] == 0


def test_control_characters_of_a_cell_reach_no_terminal(files: tuple[Path, Path], tmp_path: Path) -> None:
    hostile = "torch\x1b]0;x\x07\x9b2J\x1b[2J\u202e\x7f"
    rows = [made | {"variant": hostile, "transport": hostile} for made in night(9, quiet(1000))]
    answers = [compare(files[0], file_of(tmp_path / "new.csv", rows), "--json", tmp_path / "v.json")]
    answers += [compare(file_of(tmp_path / "bad.csv", [made | {"lat_us_p50": hostile} for made in rows]), files[1])]
    assert "torch\ufffd]0;x" in answers[0].stdout
    for answer in answers:
        for text in (answer.stdout, answer.stderr):
            assert not set(hostile).difference("torch]0;x2J[") & set(text)
    written = json.loads((tmp_path / "v.json").read_text())["verdicts"]
    assert hostile in {verdict["variant"] for verdict in written}  # whole there: JSON escapes it


def test_a_torn_last_line_is_left_out_with_a_notice(files: tuple[Path, Path]) -> None:
    text = files[0].read_text()
    files[0].write_text(text[:-5])
    answer = compare(*files)
    assert "notice: old.csv: a torn last line was left out" in answer.stdout
    assert "INCONCLUSIVE" in answer.stdout  # the fifth night has three whole starts left


def test_plain_rows_are_nights_by_their_stamps_and_files_by_name_or_folder(tmp_path: Path) -> None:
    rows = [dict(measured()[1]) | {"stamp": f"2026113{day}T02{minute}000Z"} for day in (0,) for minute in range(4)]
    path = tmp_path / "sweep_20261130T020000Z_comm.csv"
    path.write_text(HEADER + "".join(csv_line({name: row[name] for name in COLUMNS}) for row in rows))
    for place in (path, tmp_path):
        found, _ = history.read_all(place)
        assert [(made["night"], made["start"]) for made in found] == [("20261130T020000Z", str(n)) for n in range(1, 5)]
    with pytest.raises(BaselineError, match="no rows"):
        history.read_all(tmp_path.parent / "test_empty" if (tmp_path.parent / "test_empty").mkdir() else ROOT / "lib")


def plain_file(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text(HEADER + "".join(csv_line({name: row[name] for name in COLUMNS}) for row in rows))
    return path


def test_runs_every_five_hours_are_not_one_night_for_ever(tmp_path: Path) -> None:
    stamps = [f"202611{1 + hour // 24:02d}T{hour % 24:02d}0000Z" for hour in range(0, 72, 5)]
    found, _ = history.read(
        plain_file(tmp_path / "a.csv", [dict(measured()[1]) | {"stamp": stamp} for stamp in stamps])
    )
    nights = [made["night"] for made in found]
    assert len(set(nights)) == 5
    assert max(nights.count(night) for night in nights) == 3  # 0, 5 and 10 h; 15 h is too far from the first


def test_a_case_that_a_stamp_has_twice_is_one_start_and_counts_by_its_last_row(tmp_path: Path) -> None:
    first = dict(measured()[1])
    found, _ = history.read(plain_file(tmp_path / "a.csv", [first, first | {"lat_us_p50": "999"}]))
    assert [(made["start"], made["lat_us_p50"]) for made in found] == [("1", "999")]


def test_the_night_compared_is_left_out_of_its_own_baseline(tmp_path: Path) -> None:
    write_nights(tmp_path, baseline(6) + night(9, quiet(seed=7)))
    answer = compare(tmp_path, tmp_path / "night_20261109T020000Z.csv")
    assert answer.returncode == 0
    assert "left out of the baseline" in answer.stdout


def test_a_baseline_from_after_the_night_is_told(tmp_path: Path) -> None:
    late, early = file_of(tmp_path / "a.csv", baseline(9)), file_of(tmp_path / "b.csv", night(6, quiet(seed=7)))
    rows = [made for made in history.read(late)[0] if made["night"] != "20261106T020000Z"]
    assert "did a clock go back" in compare(file_of(late, rows), early).stdout


def test_the_committed_h200_rows_of_two_starts_raise_no_false_alarm() -> None:
    answer = compare(MEASURED / "comm_h200x2_repeat.csv", MEASURED / "comm_h200x2_repeat.csv")
    assert "REGRESSED" not in answer.stdout


@pytest.mark.parametrize("kind", ["a baseline of 7 nights", "all incomparable"])
def test_two_files_of_ten_thousand_rows_take_two_seconds_at_most(kind: str, tmp_path: Path) -> None:
    if kind == "all incomparable":
        cases = [row(1, 1, tokens=str(case)) for case in range(10_000)]
        tonight = [made | {"night": "20261120T020000Z", "iters": "7"} for made in cases]
    else:
        cases = [made | {"tokens": str(case)} for case in range(358) for made in baseline(7)][:10_000]
        tonight = [made | {"night": "20261120T020000Z"} for made in cases]
    old, new = file_of(tmp_path / "old.csv", cases), file_of(tmp_path / "new.csv", tonight)
    code = f"import sys, time; sys.argv[1:] = {[str(old), str(new)]!r}; from tools.compare import main; main()"
    timed = f"{code}; print(time.process_time())"  # its own work: on a busy machine the wall tells of the others
    for _ in range(3):  # a busy machine's caches and clocks are shared too
        answer = subprocess.run([sys.executable, "-c", timed], cwd=ROOT, capture_output=True, text=True, check=True)
        assert " 20261120T020000Z " in answer.stdout
        if float(answer.stdout.splitlines()[-1]) <= 2:
            return
    pytest.fail(f"{answer.stdout.splitlines()[-1]} s three times")
