"""The entry scripts: strict, clean, and right in what they choose, claim, combine and refuse."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shell_helpers import ENTRY_SCRIPTS, ROOT, SCRIPTS, Clone

STAMP = re.compile(r"bench_(\d{8}T\d{6}Z(?:-\d+)?)_ref\.csv")


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@pytest.fixture
def ready(clone: Clone) -> Clone:
    """A clone on a machine whose `python3` has torch and numpy."""
    clone.fake("python3")
    return clone


# --- what stands in the files -----------------------------------------------------------------------------------------


def shellcheck(*scripts: Path) -> subprocess.CompletedProcess[str]:
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    program = shutil.which("shellcheck", path=search)
    assert program, "shellcheck is not installed: ./test.sh --setup"
    return subprocess.run([program, "-x", *map(str, scripts)], cwd=ROOT, capture_output=True, text=True, check=False)


def kills_by_name(text: str) -> bool:
    return re.search(r"\b(pkill|killall|pgrep|fuser)\b", text) is not None


def is_strict(text: str) -> bool:
    """The first command, after the shebang and comments, turns strict mode on."""
    lines = text.splitlines()
    commands = [line for line in lines if line and not line.startswith("#")]
    return lines[0] == "#!/usr/bin/env bash" and commands[0] == "set -euo pipefail"


def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    result = shellcheck(*(ROOT / script for script in SCRIPTS))
    assert result.returncode == 0, result.stdout
    careless = tmp_path / "careless.sh"
    careless.write_text("#!/bin/bash\nrm -r $1\n")
    assert shellcheck(careless).returncode != 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_script_kills_by_name(script: str) -> None:
    assert not kills_by_name((ROOT / script).read_text())
    assert kills_by_name("trap 'pkill -f bench' EXIT")


@pytest.mark.parametrize("script", ENTRY_SCRIPTS)
def test_every_entry_script_is_executable_and_strict_from_its_first_command(script: str) -> None:
    text = (ROOT / script).read_text()
    assert is_strict(text)
    assert os.access(ROOT / script, os.X_OK)
    assert not is_strict(text.replace("set -euo pipefail", "set -eu"))


def test_numbers_keep_their_point_in_every_locale() -> None:
    assert "\nexport LC_ALL=C" in (ROOT / "lib/env.sh").read_text()


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt"])
def test_every_requirement_is_pinned(name: str) -> None:
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    assert lines
    marker = r"(; (python_version|platform_\w+) [<>=]+ \"[\w.]+\"( and platform_\w+ == \"\w+\")?)?"
    assert [line for line in lines if not re.fullmatch(rf"[\w-]+==[\w.]+{marker}", line)] == []


# --- interpreters -----------------------------------------------------------------------------------------------------


def test_a_folder_with_a_line_end_in_its_name_is_refused(ready: Clone) -> None:
    """Its first line alone would be taken for it, and the rows would go there."""
    folder = ready.root.parent / "two\nlines"
    folder.mkdir()
    result = subprocess.run(
        [str(ready.root / "run.sh")], env=ready.environment(), cwd=folder, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert "line end in its name" in result.stderr


def test_a_python_on_path_that_has_everything_is_used_and_nothing_is_installed(ready: Clone) -> None:
    result = ready.run()
    assert result.returncode == 0, result.stderr
    assert "ran ref by python3" in result.stdout
    assert not (ready.root / ".venv").exists()


def test_python_is_looked_at_when_python3_lacks_torch(clone: Clone) -> None:
    clone.fake("python3", missing="torch")
    clone.fake("python")
    assert "ran ref by python leader" in clone.run().stdout


def test_PYTHON_wins_over_path_and_may_be_relative_to_the_caller(ready: Clone) -> None:  # noqa: N802 - the knob's name
    ready.fake("mine")
    for value in ("mine", "bin dir/mine", str(ready.bin / "mine")):
        assert "ran ref by mine" in ready.run(PYTHON=value).stdout


def test_comm_and_fi_mega_have_interpreters_of_their_own(ready: Clone) -> None:
    ready.fake("for_comm")
    ready.fake("for_fi")
    said = ready.run(SECTION="ref vllm_split comm fi_mega", COMM_PYTHON="for_comm", FI_PYTHON="for_fi").stdout
    ran = ["ran ref by python3", "ran split by python3", "ran comm by for_comm", "ran fi_mega by for_fi"]
    assert [line.rpartition(" ")[0] for line in said.splitlines()[:4]] == ran


@pytest.mark.parametrize("knob", ["PYTHON", "COMM_PYTHON", "FI_PYTHON"])
def test_an_interpreter_that_is_not_there_is_refused(ready: Clone, knob: str) -> None:
    result = ready.run(SECTION="ref comm fi_mega", **{knob: "/nonexistent"})
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == f"{knob}=/nonexistent: there is no such interpreter"


def test_a_given_interpreter_without_torch_is_refused_with_the_command_that_mends_it(ready: Clone) -> None:
    bare = ready.bin / "no site"
    bare.write_text(f'#!/bin/bash\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    leftovers = ready.bin.parent / "leftovers"
    (leftovers / "torch").mkdir(parents=True)  # an empty folder imports, as a namespace
    result = ready.run(PYTHON=str(bare), PYTHONPATH=str(leftovers))
    assert result.returncode == 2
    assert f"PYTHON={bare}: torch and numpy not installed there; run: " in result.stderr
    assert result.stderr.endswith("bin\\ dir/no\\ site -m pip install torch numpy\n")


def test_a_given_interpreter_that_is_too_old_is_refused(ready: Clone) -> None:
    ready.fake("old", version="3.9")
    result = ready.run(PYTHON="old")
    assert (result.returncode, result.stderr) == (2, "PYTHON=old: is Python 3.9, 3.10 or newer is needed\n")


def test_without_any_new_enough_python_the_set_up_fails(clone: Clone) -> None:
    for tool in ("bash", "readlink", "dirname"):
        (clone.bin / tool).symlink_to(shutil.which(tool) or "")
    clone.fake("python3", version="2.7")
    result = clone.run(PATH=str(clone.bin))
    assert result.returncode == 4
    assert result.stderr.startswith("no Python >= 3.10 on PATH")


def test_the_first_run_makes_a_venv_and_the_second_finds_it(clone: Clone) -> None:
    clone.fake("python3", missing="torch numpy")
    first, second = clone.run(), clone.run()
    assert "ran ref by venv" in first.stdout
    assert "set-up done" in first.stderr
    assert "chatter" not in first.stderr
    assert "ran ref by venv" in second.stdout
    assert second.stderr == ""
    assert clone.calls.read_text() == "pip\n"


def test_new_requirements_are_installed_over_the_old_ones(clone: Clone) -> None:
    clone.fake("python3", missing="torch numpy")
    clone.run()
    (clone.root / "requirements.txt").write_text("torch==10\n")
    assert clone.run().returncode == 0
    assert clone.calls.read_text() == "pip\npip\n"


def test_a_set_up_that_was_cut_short_is_done_again_from_the_start(clone: Clone) -> None:
    clone.fake("python3", missing="torch numpy")
    clone.run()
    (clone.root / ".venv/.incomplete").touch()
    (clone.root / ".venv/half a package").touch()
    assert "set-up done" in clone.run().stderr
    assert not (clone.root / ".venv/half a package").exists()


def test_two_first_runs_at_once_set_up_once(clone: Clone) -> None:
    clone.fake("python3", missing="torch numpy", pip_s=1)
    command = [str(clone.root / "run.sh")]
    runs = [subprocess.Popen(command, env=clone.environment(), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [run.communicate(timeout=20)[0].split("\n")[0] for run in runs] == ["ran ref by venv leader"] * 2
    assert clone.calls.read_text() == "pip\n"
    assert len(clone.files()) == 2


def test_a_failed_set_up_shows_the_end_of_the_log_and_exits_with_4(clone: Clone) -> None:
    clone.fake("python3", missing="torch numpy", pip=1)
    result = clone.run()
    assert result.returncode == 4
    assert "chatter\nset-up of" in result.stderr
    assert (clone.root / ".venv/.incomplete").exists()


def test_a_debian_without_its_venv_package_is_told_the_package(clone: Clone) -> None:
    clone.fake("python3", missing="torch numpy", ensurepip=1)
    result = clone.run()
    assert result.returncode == 4
    assert "apt-get install python3-venv" in result.stderr


def test_the_plan_and_the_help_install_nothing_and_leave_no_file(clone: Clone) -> None:
    clone.fake("python3", missing="torch numpy")
    assert clone.run("--plan", SECTION="ref comm").stdout == "plan ref bare\nplan comm bare\n"
    assert clone.run(DRY_RUN="1").stdout == "plan ref bare\n"
    for script in ("run.sh", "run_sweep.sh"):
        assert clone.run("--help", script=script).stdout == "the help text\n"
    assert not (clone.root / ".venv").exists()
    assert not clone.results.exists()


# --- arguments, folder, stamp -----------------------------------------------------------------------------------------


def test_wrong_knobs_and_arguments_end_the_run_before_anything_is_made(ready: Clone) -> None:
    assert ready.run(WRONG="1").stderr == "TOPK=0: must be 1..8\n"
    for result in (ready.run(WRONG="1"), ready.run("--pln"), ready.run("SECTION=ref")):
        assert result.returncode == 2
        assert result.stderr.count("\n") == 1
    assert not ready.results.exists()


def test_a_sweep_writes_files_of_its_own_prefix(ready: Clone) -> None:
    result = ready.run(script="run_sweep.sh")
    told = r"ran ref by python3 leader\ntable (sweep_(\d{8}T\d{6}Z)_ref.csv)\npage report_\2.html \1\n"
    assert re.fullmatch(told, result.stdout)


@pytest.mark.parametrize(("status", "told"), [("1", "no page: tools.report failed"), ("2", "")])
def test_a_page_that_fails_does_not_fail_the_run(ready: Clone, status: str, told: str) -> None:
    result = ready.run(STATUS_report=status)
    assert result.returncode == 0
    assert ("no page" in result.stderr) == bool(told), "2: it has said itself what it lacks"
    assert told in result.stderr


def test_a_stamp_that_is_taken_gets_a_number_and_no_claim_stays_behind(ready: Clone) -> None:
    ready.results.mkdir()
    now = int(time.time())
    for second in range(now, now + 5):
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))
        (ready.results / f"sweep_{stamp}_comm.csv").touch()
        (ready.results / f".claim_{stamp}-2").touch()
    before = set(ready.files())
    assert ready.run().returncode == 0
    (added,) = set(ready.files()) - before
    assert STAMP.fullmatch(added)
    assert added.endswith("Z-3_ref.csv")


def test_an_out_dir_that_is_a_file_is_refused(ready: Clone) -> None:
    ready.results.touch()
    result = ready.run()
    said = f"OUT_DIR={ready.results}: cannot be written (Not a directory); give another one"
    assert (result.returncode, result.stderr.splitlines()[-1]) == (2, said)


def test_an_out_dir_without_room_is_refused(ready: Clone) -> None:
    # A limit on file sizes fails the write as a full disk does, and needs no mount.
    script = f'ulimit -f 8; trap "" XFSZ; exec "{ready.root}/run.sh"'
    result = subprocess.run(
        ["bash", "-c", script], env=ready.environment(), capture_output=True, text=True, timeout=20, check=False
    )
    said = f"OUT_DIR={ready.results}: cannot be written (File too large); give another one"
    assert (result.returncode, result.stderr.splitlines()[-1]) == (2, said)
    assert ready.files() == []


def test_resume_goes_on_with_the_newest_stamp_or_the_one_named(ready: Clone) -> None:
    ready.results.mkdir()
    stamps = ["20260101T000000Z", "20260102T000000Z", "20260102T000000Z-2", "20260102T000000Z-10"]
    for stamp in stamps:
        (ready.results / f"bench_{stamp}_ref.csv").touch()
    (ready.results / "sweep_20260103T000000Z_ref.csv").touch()
    assert "table bench_20260102T000000Z-10_ref.csv" in ready.run(RESUME="last").stdout
    assert "table bench_20260101T000000Z_ref.csv" in ready.run(RESUME=stamps[0]).stdout
    assert len(ready.files()) == 5


@pytest.mark.parametrize("wanted", ["last", "20260101T000000Z"])
def test_resume_without_such_a_run_is_refused(ready: Clone, wanted: str) -> None:
    result = ready.run(RESUME=wanted)
    assert result.returncode == 2
    assert f"RESUME={wanted}: {ready.results} has no bench_" in result.stderr


def test_a_run_that_is_being_written_is_not_resumed_but_a_dead_ones_claim_is_taken_over(ready: Clone) -> None:
    ready.results.mkdir()
    (ready.results / "bench_20260101T000000Z_ref.csv").touch()
    claim = ready.results / ".claim_20260101T000000Z"
    host = os.uname().nodename
    claim.write_text(f"{os.getpid()} {host}\n")
    assert ready.run(RESUME="last").returncode == 75
    gone = subprocess.Popen(["true"])
    gone.wait()
    claim.write_text(f"{gone.pid} {host}\n")
    assert ready.run(RESUME="last").returncode == 0
    assert not claim.exists()


# --- sections ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ref", "split", "comm", "run"),
    [(0, 4, 4, 0), (4, 4, 4, 4), (0, 1, 4, 1), (1, 2, 0, 2), (2, 75, 1, 75), (130, 75, 2, 130), (0, 7, 0, 1)],
)
def test_the_gravest_section_gives_the_exit_status(ready: Clone, ref: int, split: int, comm: int, run: int) -> None:
    statuses = {"STATUS_ref": str(ref), "STATUS_split": str(split), "STATUS_comm": str(comm)}
    result = ready.run(SECTION="ref vllm_split comm", **statuses)
    assert result.returncode == run
    # a lock held by another run on these files ends this one: nothing is measured beside it
    assert len(ready.files()) == (2 if split == 75 else 3)


def test_the_table_shows_the_sections_in_the_order_they_were_asked_for(ready: Clone) -> None:
    table = ready.run(SECTION="vllm_split ref comm").stdout.splitlines()[-1]
    assert re.findall(r"Z_(\w+)\.csv", table) == ["vllm_split", "ref", "comm"]


def test_a_section_that_is_killed_counts_as_failed_and_the_next_one_runs(ready: Clone) -> None:
    result = ready.run(SECTION="ref comm", STATUS_ref="-9")
    assert result.returncode == 1
    assert "section ref ended with status 137 (above 128: by signal 9)" in result.stderr
    assert "ran comm" in result.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_waits_for_the_rows_and_reaches_the_sections_left(ready: Clone, number: int) -> None:
    run = subprocess.Popen(
        [str(ready.root / "run.sh")],
        env=ready.environment(HANG="1", SECTION="ref comm"),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdout
    assert run.stdout.readline() == "hanging\n"
    run.send_signal(number)
    said = run.communicate(timeout=10)[0]
    assert run.returncode == 130
    assert [line for line in said.splitlines() if line.startswith("ran")] == [
        "ran ref by python3 leader",
        "ran comm by python3 leader",
    ]
    rows = [path.read_text() for path in sorted(ready.results.glob("bench_*.csv"))]
    assert rows == ["130\n", "130\n"]
    assert len(ready.files()) == 2


def test_an_interrupted_run_says_so_even_if_its_last_section_came_to_its_end(ready: Clone) -> None:
    run = subprocess.Popen(
        [str(ready.root / "run.sh")], env=ready.environment(HANG="deaf"), stdout=subprocess.PIPE, text=True
    )
    assert run.stdout
    assert run.stdout.readline() == "hanging\n"
    run.send_signal(signal.SIGINT)
    assert "ran ref" in run.communicate(timeout=10)[0]
    assert run.returncode == 130


@pytest.mark.parametrize(
    ("told", "follows"),
    [
        ("1", True),
        ("0", False),
    ],
)
def test_only_the_first_node_or_rank_keeps_files(ready: Clone, told: str, follows: bool) -> None:
    """`told`: what lib.knobs makes of the launcher's variables, see test_knobs."""
    result = ready.run(FOLLOWS=told)
    assert f"ran ref by python3 {'follower' if follows else 'leader'}" in result.stdout
    assert ready.results.exists() != follows
    assert ("table" in result.stdout) != follows


@pytest.mark.parametrize(("sections", "code"), [("comm fi_mega", 4), ("ref comm fi_mega", 1)])
def test_nodes_that_do_not_come_together_end_the_run_and_no_later_section_is_tried(
    ready: Clone, sections: str, code: int
) -> None:
    result = ready.run(SECTION=sections, STATUS_comm="5")
    assert result.returncode == code
    assert "ran comm" in result.stdout
    assert "ran fi_mega" not in result.stdout
