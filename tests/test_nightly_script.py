"""nightly.sh itself, with a sweep of stand-ins: lock, signals, a killed night, cron's bare environment, exit codes."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nights import ROOT, Suite

from lib import history, nightly
from tests.harness import wait_until


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


def test_five_nights_an_acceptance_and_then_green(suite: Suite) -> None:
    suite.fake_nights(5)
    first = suite.run()
    assert first.returncode == 3, first.stderr
    assert first.stdout.splitlines()[-1].startswith("RED ")
    assert "1 NO_BASELINE" in first.stdout
    (last,) = [name for name in history.night_files(suite.out) if not name.startswith("2020")]
    assert len(list((suite.out / f"night_{last}").glob("*/sweep_*_ref.csv"))) == 4
    accepted = suite.run("--accept")
    assert accepted.returncode == 0
    assert "6 nights" in accepted.stdout
    second = suite.run()
    assert second.returncode == 0, second.stderr
    assert second.stdout.startswith("green ")
    assert suite.run("--status").stdout == second.stdout


def test_a_slow_night_runs_its_suspects_again_and_is_red(suite: Suite) -> None:
    suite.fake_nights(5)
    suite.run("--accept")
    answer = suite.run(FAKE_P50="150", STARTS="5")
    assert answer.returncode == 3, answer.stderr
    assert re.search(r"1 REGRESSED \| ref torch e2e T=8 \+(49|50)\.\d %", answer.stdout)
    calls = suite.sweeps()
    assert len(calls) == 10
    assert [Path(call["OUT_DIR"]).name for call in calls[5:]] == [f"again-{start}-ref" for start in range(1, 6)]
    assert (calls[5]["SECTION"], calls[5]["SEQ_LENS"], calls[5]["REF_LIST"]) == ("ref", "8", "torch")
    assert not any(name in call for call in calls for name in ("BASELINE", "STARTS", "KEEP"))


def test_every_row_failing_is_red_not_silent(suite: Suite) -> None:
    suite.fake_nights(5)
    suite.run("--accept")
    answer = suite.run(FAKE_STATUS="failed", FAKE_EXIT="1")
    assert answer.returncode == 3
    assert "LOST" in answer.stdout
    assert "rank 0 raised" in answer.stdout


def test_a_sweep_that_writes_no_row_is_red_with_the_last_night_named(suite: Suite, tmp_path: Path) -> None:
    suite.fake_nights(5)
    suite.run("--accept")
    (suite.root / "run_sweep.sh").write_text("#!/bin/bash\nexit 0\n")
    answer = suite.run()
    assert answer.returncode == 3
    assert "no new row since 20200105T020000Z" in answer.stdout


def test_two_nightlies_at_once_is_75_for_the_second_and_a_killed_first_is_gone_on_with(
    suite: Suite, tmp_path: Path
) -> None:
    suite.fake_nights(5)
    suite.run("--accept")
    hung = tmp_path / "hung"
    first = suite.start(FAKE_HANG=str(hung))
    wait_until(hung.exists, "the first sweep to hang")
    second = suite.run()
    assert second.returncode == 75
    assert "another nightly is at work" in second.stderr
    first.kill()  # its sweep lives on, and holds the lock
    first.wait()
    assert suite.run().returncode == 75
    assert suite.run("--accept").returncode == 75
    for pid in sweeps_of(suite):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not sweeps_of(suite), "the sweep to be gone")
    third = suite.run()
    assert third.returncode == 0, third.stderr
    assert "which was cut short" in third.stderr
    nights = [name for name in history.night_folders(suite.out) if not name.startswith("2020")]
    assert len(nights) == 1
    assert len(suite.sweeps()) == 5


def sweeps_of(suite: Suite) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = path.read_bytes()
            command = path.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if str(suite.out).encode() in text and b"fake_sweep.py" in command:
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_night_is_130_and_its_starts_are_kept(suite: Suite, number: int, tmp_path: Path) -> None:
    hung = tmp_path / "hung"
    process = suite.start(FAKE_HANG=str(hung))
    wait_until(hung.exists, "the sweep to hang")
    process.send_signal(number)
    assert process.wait(timeout=20) == 130
    assert not sweeps_of(suite)
    answer = suite.run()
    assert "which was cut short" in answer.stderr
    assert answer.returncode == 3  # nothing is accepted


def test_finished_starts_of_a_cut_short_night_are_not_run_again(suite: Suite) -> None:
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for start in (1, 2):
        folder = suite.out / f"night_{now}" / str(start)
        folder.mkdir(parents=True)
        (folder / "exit").write_text("0\n")
    suite.run()
    assert [Path(call["OUT_DIR"]).name for call in suite.sweeps()] == ["3", "4"]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ({"BASELINE": "/nonexistent"}, 3, "/nonexistent: cannot be read"),
        ({"STARTS": "2"}, 2, "STARTS=2: must be a whole number 4..20"),
        ({"KEEP": "1"}, 2, "KEEP=1: must be a whole number 5..365"),
        ({"RESUME": "20260101T000000Z"}, 2, "RESUME=20260101T000000Z: OUT_DIR="),
        ({"FAKE_PLAN_EXIT": "2"}, 2, ""),
        ({"FAKE_EXIT": "2"}, 2, "start 1"),
        ({"FAKE_EXIT": "75"}, 75, "start 1"),
        ({"FAKE_EXIT": "137"}, 3, "the sweep of start 1 ended with 137; the next call goes on with this night"),
        ({"PYTHON": "/nonexistent"}, 2, "PYTHON=/nonexistent"),
        ({"TOPK": "0", "MEGA_TIMNG": "x"}, 2, "MEGA_TIMNG"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_what_stops_a_night_is_a_sentence_and_its_code(
    suite: Suite, words: dict[str, str], code: int, told: str
) -> None:
    answer = suite.run(**words)
    assert answer.returncode == code, answer.stderr
    assert told in answer.stderr
    assert "Traceback" not in answer.stderr
    (line,) = answer.stdout.splitlines() or [""]
    assert line.startswith("RED 20") if code != 75 else not line, "cron mails what is on stdout"
    if suite.out.exists() and code != 75:
        assert suite.run("--status").stdout.startswith("RED ")


def test_a_lock_that_is_a_folder_is_2(suite: Suite) -> None:
    (suite.out / ".nightly.lock").mkdir(parents=True)
    answer = suite.run()
    assert (answer.returncode, ".nightly.lock is no file; remove it" in answer.stderr) == (2, True)


def test_a_good_night_takes_the_red_line_of_the_one_before_away(suite: Suite) -> None:
    suite.fake_nights(5)
    suite.run("--accept")
    assert suite.run(BASELINE="/nonexistent").stdout.startswith("RED ")
    assert suite.run("--status").returncode == 3
    assert suite.run().returncode == 0
    assert suite.run("--status").returncode == 0


def test_the_header_only_baseline_of_a_knob_stops_the_night_before_it_is_measured(suite: Suite, tmp_path: Path) -> None:
    (tmp_path / "bare.csv").write_text(history.NIGHT_HEADER)
    answer = suite.run(BASELINE=str(tmp_path / "bare.csv"))
    assert answer.returncode == 3
    assert suite.sweeps() == []


def test_a_given_baseline_is_relative_to_the_caller(suite: Suite) -> None:
    suite.fake_nights(5)
    suite.run("--accept")
    (found,) = suite.out.glob("baseline_*.csv")
    found.rename(suite.root.parent / "mine.csv")
    answer = suite.run(BASELINE="mine.csv")
    assert answer.returncode == 0, answer.stderr
    document = json.loads(next(iter(reversed(history.verdict_files(suite.out).values()))).read_text())
    assert document["baseline"] == str(suite.root.parent / "mine.csv")


def test_a_folder_that_cannot_be_written_is_2(suite: Suite) -> None:
    suite.out.write_text("a file")
    assert suite.run().returncode == 2


@pytest.mark.parametrize("arguments", [["--acept"], ["--accept", "yesterday"], ["--status", "now"], ["STARTS=4"]])
def test_a_wrong_word_is_2(suite: Suite, arguments: list[str]) -> None:
    assert suite.run(*arguments).returncode == 2


def test_the_help_names_its_commands(suite: Suite) -> None:
    answer = suite.run("--help")
    assert answer.returncode == 0
    assert all(word in answer.stdout for word in ("--accept", "--status", "BASELINE, STARTS, KEEP"))


def test_a_disk_that_is_full_in_mid_night_is_no_verdict_and_not_0(suite: Suite) -> None:
    suite.fake_nights(5)
    suite.run("--accept")
    (suite.root / "run_sweep.sh").write_text(
        '#!/bin/bash\n[[ ${1:-} == --plan ]] && exit\nprintf x >"$OUT_DIR/sweep_20260101T000000Z_ref.csv"\nexit 1\n'
    )
    answer = suite.run()  # what a disk that is full within a header leaves
    assert answer.returncode == 3
    assert "no new row since" in answer.stdout
    small = subprocess.Popen(
        [suite.root / "nightly.sh"],
        env=suite.environment({}),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    told = small.communicate(timeout=60)[1]
    assert small.returncode == 2, told
    assert "cannot be written" in told


def test_a_night_file_that_cannot_be_written_is_4(tmp_path: Path) -> None:
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10)); from lib import nightly; "
    code += f"sys.exit(nightly.main(['gather', {str(tmp_path)!r}, '20260101T000000Z']))"
    (tmp_path / "night_20260101T000000Z").mkdir()
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (answer.returncode, list(tmp_path.glob("*.csv"))) == (nightly.SET_UP_EXIT, [])
    assert "Traceback" not in answer.stderr


def test_a_dry_run_shows_the_sweeps_plan_and_starts_no_night(suite: Suite) -> None:
    assert suite.run(DRY_RUN="1", FAKE_PLAN_EXIT="4").returncode == 4
    assert not suite.out.exists()


def test_old_nights_go_when_there_are_more_than_keep(suite: Suite) -> None:
    suite.fake_nights(7)
    suite.run(KEEP="5")
    assert len(history.night_files(suite.out)) == 5


def test_a_real_night_from_crons_environment(tmp_path: Path) -> None:
    """Four real starts of a tiny case, by the real sweep."""
    tiny = {"HIDDEN": "64", "INTER": "32", "NUM_EXPERTS": "8", "TOPK": "2", "SEQ_LENS": "4", "GPUS": "1"}
    quick = {"WARMUP": "1", "ITERS": "3", "CHECK_REPEATS": "1", "SECTION": "ref", "REF_LIST": "torch"}
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHON": sys.executable, "OUT_DIR": str(tmp_path / "out")}
    answer = subprocess.run(
        [ROOT / "nightly.sh"], env={**bare, **tiny, **quick}, cwd="/", capture_output=True, text=True, check=False
    )
    assert answer.returncode == 3, answer.stderr
    assert "1 NO_BASELINE" in answer.stdout.splitlines()[-1]
    ((_, path),) = history.night_files(tmp_path / "out").items()
    rows, _ = history.read(path)
    assert [(row["start"], row["status"], row["again"]) for row in rows] == [(str(n), "ok", "0") for n in range(1, 5)]
    assert nightly.main(["accept", str(tmp_path / "out"), ""]) == 0
