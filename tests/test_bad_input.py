"""What a user's mistake gets: one sentence with the knob, the documented exit code, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest

from lib import guard

ROOT = Path(__file__).resolve().parent.parent
SECRET = "hunter2-do-not-print"
SMALL = {
    "HIDDEN": "64",
    "INTER": "32",
    "NUM_EXPERTS": "8",
    "TOPK": "2",
    "WARMUP": "1",
    "ITERS": "3",
    "CHECK_REPEATS": "2",
}
RUN_LIMIT_S = 150


def environment(**knobs: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "PYTHON": sys.executable, **knobs}


def run(script: str = "run.sh", *arguments: str, cwd: Path = ROOT, **knobs: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / script), *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment(**knobs), capture_output=True, text=True, timeout=RUN_LIMIT_S
    )


USAGE = [
    ("run.sh", {"GPUS": "3", "NUM_EXPERTS": "256"}, ("GPUS=3", "256", "255 or 258")),
    ("run.sh", {"TOPK": "9", "NUM_EXPERTS": "8"}, ("TOPK=9", "1..8", "NUM_EXPERTS=8")),
    ("run.sh", {"TOPK": "0"}, ("TOPK=0",)),
    ("run.sh", {"HIDDEN": "abc"}, ("HIDDEN=abc",)),
    ("run.sh", {"TOKENS": "-1"}, ("TOKENS=-1",)),
    ("run_sweep.sh", {"SEQ_LENS": "8 x"}, ("SEQ_LENS=", "x")),
    ("run_sweep.sh", {"SEQ_LEN_MIN": "64", "SEQ_LEN_MAX": "8"}, ("SEQ_LEN_MIN=64", "SEQ_LEN_MAX=8")),
    ("run.sh", {"SECTION": "fi_mga"}, ("SECTION=fi_mga", "fi_mega")),
    ("run.sh", {"MEGA_TIMNG": "e2e"}, ("MEGA_TIMNG", "MEGA_TIMING")),
    ("run.sh", {"MEGA_KNOBS": "{bad"}, ("MEGA_KNOBS=", "JSON")),
    ("run.sh", {"MEGA_KNOBS": "[1]"}, ("MEGA_KNOBS=", "object")),
    ("run.sh", {"MEGA_IKR": "1", "MEGA_COMBINE_DTYPE": "nvfp4"}, ("MEGA_IKR=1", "MEGA_COMBINE_DTYPE=nvfp4")),
    ("run.sh", {"ITERS": "0"}, ("ITERS=0",)),
    ("run.sh", {"EXPERTS_LIST": "deepgem"}, ("EXPERTS_LIST=deepgem", "deepgemm")),
    ("run.sh", {"COMM_LIST": "deepp"}, ("COMM_LIST=deepp", "deepep")),
    ("run.sh", {"MEGA_LIST": "foo"}, ("MEGA_LIST=foo",)),
    ("run.sh", {"SECTION": "fi_mega", "MEGA_KNOBS": '{"flag_bach": 4}'}, ("flag_bach", "did you mean flag_batch?")),
    (
        "run.sh",
        {"SECTION": "fi_mega", "MEGA_KNOBS": "auto", "MEGA_LIST": "sm90_push_fp8"},
        ("MEGA_KNOBS=auto", "has it"),
    ),
    ("run.sh", {"SECTION": "fi_mega", "MEGA_IKR": "1", "MEGA_LIST": "deep_gemm_mega"}, ("MEGA_IKR=1", "has it")),
    (
        "run.sh",
        {"SECTION": "fi_mega", "MEGA_COMBINE_DTYPE": "nvfp4", "MEGA_LIST": "mxfp8_cutedsl"},
        ("MEGA_COMBINE_DTYPE=nvfp4", "add nvfp4_cutedsl"),
    ),
    ("run.sh", {"ROUTING": "gauss"}, ("ROUTING=gauss", "uniform")),
    ("run.sh", {"L2": "hot"}, ("L2=hot", "cold")),
    ("run.sh", {"L2": "cold", "TIMING": "graph"}, ("L2=cold", "TIMING=graph")),
    ("run.sh", {"CUDA_VISIBLE_DEVICES": "0", "GPUS": "2"}, ("CUDA_VISIBLE_DEVICES=0", "GPUS=2")),
    ("run.sh", {"PYTHON": "/nonexistent"}, ("PYTHON=/nonexistent",)),
    ("run.sh", {"RESUME": "20200101T000000Z"}, ("RESUME=20200101T000000Z",)),
]


@pytest.mark.parametrize(
    ("script", "knobs", "words"), USAGE, ids=[" ".join(f"{k}={v}" for k, v in u[1].items()) for u in USAGE]
)
def test_a_wrong_knob_is_one_sentence_and_exit_2(
    script: str, knobs: dict[str, str], words: tuple[str, ...], tmp_path: Path
) -> None:
    answer = run(script, OUT_DIR=str(tmp_path / "out"), **knobs)
    assert answer.returncode == 2, answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stdout == ""
    (line,) = [line for line in answer.stderr.splitlines() if all(word in line for word in words)]
    assert line.count("\n") == 0
    assert not list(tmp_path.rglob("*.csv")), "nothing may be measured"


def test_all_wrong_knobs_are_told_at_once() -> None:
    answer = run(TOPK="0", HIDDEN="abc", L2="hot")
    assert answer.returncode == 2
    assert [line.split("=")[0] for line in answer.stderr.splitlines()] == ["TOPK", "HIDDEN", "L2"] or len(
        answer.stderr.splitlines()
    ) == 3


def test_a_python_without_torch_is_told_with_the_command_that_brings_it(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(bare.stat().st_mode | stat.S_IXUSR)
    answer = run(PYTHON=str(bare), OUT_DIR=str(tmp_path / "out"))
    assert answer.returncode == 2
    assert "PYTHON=" in answer.stderr
    assert "pip install torch numpy" in answer.stderr


def test_a_python_that_is_a_parent_of_python_is_told_what_to_do(tmp_path: Path) -> None:
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\n"{sys.executable}" "$@"\nexit $?\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    answer = run(SECTION="comm", COMM_PYTHON=str(wrapper), OUT_DIR=str(tmp_path / "out"))
    assert answer.returncode == 2
    assert f"COMM_PYTHON={wrapper}: starts python as its child" in answer.stderr


def test_an_out_dir_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    answer = run(OUT_DIR=str(tmp_path / "file"), SECTION="fi_mega")
    assert answer.returncode == 2
    assert "OUT_DIR=" in answer.stderr
    assert "Traceback" not in answer.stderr


def mount(folder: Path, options: str) -> None:
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")


def test_a_read_only_out_dir_is_refused_at_the_start(tmp_path: Path) -> None:
    """A mount, since root writes into a folder without write permission."""
    mount(tmp_path / "ro", "ro,size=1m")
    try:
        answer = run(OUT_DIR=str(tmp_path / "ro"), SECTION="fi_mega")
    finally:
        subprocess.run(["umount", str(tmp_path / "ro")], check=True)
    assert answer.returncode == 2
    assert answer.stderr.splitlines()[-1].startswith("OUT_DIR=")
    assert "Read-only file system" in answer.stderr


def test_a_full_out_dir_is_refused_at_the_start(tmp_path: Path) -> None:
    full = tmp_path / "full"
    mount(full, "size=1m")
    try:
        ballast = ["dd", "if=/dev/zero", f"of={full / 'ballast'}", "bs=64k"]
        assert subprocess.run(ballast, capture_output=True).returncode, "the disk is full now"
        answer = run(OUT_DIR=str(full), SECTION="fi_mega")
    finally:
        subprocess.run(["umount", str(full)], check=True)
    assert answer.returncode == 2
    assert "OUT_DIR=" in answer.stderr
    assert "No space left" in answer.stderr


def test_an_empty_knob_is_its_default() -> None:
    answer = run("run.sh", "--plan", HIDDEN="", SECTION="ref", REF_LIST="torch")
    assert answer.returncode == 0
    assert answer.stdout == run("run.sh", "--plan", SECTION="ref", REF_LIST="torch").stdout


def test_commas_separate_a_list_too() -> None:
    answer = run("run_sweep.sh", "--plan", SEQ_LENS="8,16", SECTION="ref", REF_LIST="torch")
    assert [line.split()[2] for line in answer.stdout.splitlines()[2:]] == ["8", "16"]


def test_more_memory_than_there_is_is_refused_by_the_plan_with_the_figure(tmp_path: Path) -> None:
    huge = {"SECTION": "ref", "REF_LIST": "torch", "NUM_EXPERTS": "4096", "HIDDEN": "16384", "INTER": "16384"}
    answer = run(OUT_DIR=str(tmp_path), **huge)
    assert answer.returncode == 4
    (row,) = pd.read_csv(next(tmp_path.glob("*.csv"))).to_dict("records")
    assert row["status"] == "unsupported"
    assert "GB a rank" in row["reason"]


def test_a_section_that_cannot_run_here_writes_its_rows_and_exits_4(tmp_path: Path) -> None:
    answer = run(SECTION="fi_mega", OUT_DIR=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert answer.returncode == 4
    assert "nothing could run here: " in answer.stderr
    rows = pd.read_csv(next(tmp_path.glob("*_fi_mega.csv")))
    assert list(rows["variant"]) == ["deep_gemm_mega", "mxfp8_cutedsl", "nvfp4_cutedsl"]
    assert set(rows["status"]) == {"unsupported"}
    assert rows["reason"].str.contains("FlashInfer|flashinfer").all() or shutil.which("flashinfer")


def bash(script: str, **knobs: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment(**knobs), timeout=RUN_LIMIT_S, check=False)


@pytest.mark.parametrize("streams", [">&- 2>&-", ">/dev/full 2>/dev/full", "2>&1 | head -1 >/dev/null"])
def test_a_stream_that_is_closed_full_or_gone_costs_no_row(streams: str, tmp_path: Path) -> None:
    bash(f"./run.sh {streams}", SECTION="fi_mega vllm_split", OUT_DIR=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    deadline = time.monotonic() + 20  # `head` ends the pipeline before the run does
    while len(list(tmp_path.glob("*.csv"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    assert sorted(len(pd.read_csv(path)) for path in tmp_path.glob("*.csv")) == [2, 3]


def test_paths_that_no_file_can_have_are_one_sentence(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for knobs in ({"OUT_DIR": "/" + "a" * 300}, {"PEAKS": "/" + "a" * 300}, {"OUT_DIR": str(loop)}):
        answer = run(SECTION="fi_mega", **knobs)
        (name,) = knobs
        assert answer.returncode == 2
        assert answer.stderr.splitlines()[-1].startswith(f"{name}=")
        assert "Traceback" not in answer.stderr


def test_a_killed_run_sh_takes_its_section_along_and_the_rows_are_written(tmp_path: Path) -> None:
    knobs = SMALL | {"SECTION": "ref", "REF_LIST": "torch", "SEQ_LENS": "1 2", "ITERS": "100000", "WARMUP": "100000"}
    env = environment(OUT_DIR=str(tmp_path), CUDA_VISIBLE_DEVICES="", **knobs)
    shell = subprocess.Popen([str(ROOT / "run_sweep.sh")], cwd=ROOT, env=env, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not any(
            "worker group" in log.read_text() for log in tmp_path.glob("*.log")
        ):
            time.sleep(0.1)
    finally:
        shell.kill()
        shell.wait()
    (path,) = tmp_path.glob("*.csv")
    stamp = path.name.split("_")[1]
    deadline = time.monotonic() + 10
    while guard.marked_pids(stamp) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert guard.marked_pids(stamp) == []
    while len(rows := pd.read_csv(path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(rows["status"]) == ["interrupted", "interrupted"]


@pytest.mark.parametrize("delay_s", [0.05, 0.15, 0.3])
def test_an_early_ctrl_c_is_quiet_and_every_row_is_due(delay_s: float, tmp_path: Path) -> None:
    env = environment(SECTION="ref fi_mega", REF_LIST="torch", OUT_DIR=str(tmp_path), CUDA_VISIBLE_DEVICES="", **SMALL)
    shell = subprocess.Popen(
        [str(ROOT / "run.sh")], cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    time.sleep(delay_s)
    os.killpg(shell.pid, signal.SIGINT)
    stderr = shell.communicate(timeout=RUN_LIMIT_S)[1]
    assert shell.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in stderr
    made = list(tmp_path.glob("*.csv"))
    assert len(made) in (0, 2), "either nothing has begun, or every section has its rows"


def test_joined_ranks_leave_when_there_is_nothing_to_run(tmp_path: Path) -> None:
    joined = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 --no-python ./run.sh"
    knobs = SMALL | {"SECTION": "comm", "COMM_LIST": "torch", "OUT_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    for command in (f"{joined} --plan", joined, f"RESUME=last {joined}"):
        started = time.monotonic()
        assert bash(command, **knobs).returncode == 0, command
        assert time.monotonic() - started < 60
    (path,) = tmp_path.glob("*.csv")
    assert list(pd.read_csv(path)["status"]) == ["ok"]


# --- one pair of real runs at once, under everything that must not matter


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, subprocess.Popen[str], str, str]]:
    """Two sweeps into one OUT_DIR with a space in its name, from another folder, beside a listener on MASTER_PORT."""
    out = tmp_path_factory.mktemp("results with spaces") / "out dir"
    knobs = {**SMALL, "SECTION": "ref comm", "REF_LIST": "torch", "COMM_LIST": "torch", "SEQ_LENS": "0,8"}
    hostile = {"LC_ALL": "de_DE.UTF-8", "TOKEN": SECRET, "HIDDEN_KEY": SECRET, "DEBUG": SECRET}
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        hostile["MASTER_PORT"] = str(listener.getsockname()[1])
        command = [str(ROOT / "run_sweep.sh")]
        env = environment(OUT_DIR=str(out), CUDA_VISIBLE_DEVICES="", **knobs, **hostile)
        started = [
            subprocess.Popen(
                command, cwd=out.parent, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        said = [process.communicate(timeout=RUN_LIMIT_S) for process in started]
    return [(out, process, *words) for process, words in zip(started, said, strict=True)]


Runs = list[tuple[Path, subprocess.Popen[str], str, str]]


def test_two_runs_at_once_both_end_well_with_files_of_their_own(two_runs: Runs) -> None:
    for _, process, _, stderr in two_runs:
        assert process.returncode == 0, stderr
    out = two_runs[0][0]
    assert len(list(out.glob("sweep_*_ref.csv"))) == 2
    assert len(list(out.glob("sweep_*_comm.csv"))) == 2
    assert not list(out.glob(".claim*")), "claims are given back"


def test_zero_tokens_is_a_row_with_blank_bandwidths(two_runs: Runs) -> None:
    for path in two_runs[0][0].glob("*_comm.csv"):
        rows = pd.read_csv(path)
        assert list(rows["tokens"]) == [0, 8]
        assert list(rows["status"]) == ["ok", "ok"]
        empty = rows.iloc[0]
        assert empty[["dispatch_wire_gbps", "combine_wire_gbps", "tokens_per_s", "wire_gbps_min"]].isna().all()
        assert empty["lat_us_p50"] > 0


def test_figures_have_a_point_and_no_comma_under_a_german_locale(two_runs: Runs) -> None:
    for path in two_runs[0][0].glob("*.csv"):
        assert pd.api.types.is_float_dtype(pd.read_csv(path)["lat_us_p50"])


def test_a_secret_in_a_variable_like_a_knob_is_never_printed_or_written(two_runs: Runs) -> None:
    for out, _, stdout, stderr in two_runs:
        assert SECRET not in stdout + stderr
        assert "TOKEN" in stderr, "the near miss is told, without its value"
        for path in out.iterdir():
            assert SECRET not in path.read_text()


def test_the_table_is_on_stdout_and_the_talk_on_stderr(two_runs: Runs) -> None:
    for _, _, stdout, stderr in two_runs:
        assert "rows: " in stdout
        assert "2 ok" in stdout
        assert "[ref 1/2]" in stderr
        assert "[ref" not in stdout


def test_jsonl_holds_the_csv_rows_and_raw_samples_by_rank(two_runs: Runs) -> None:
    for path in two_runs[0][0].glob("*_ref.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        rows = pd.read_csv(path.with_suffix(".csv"))
        assert [record["row"]["lat_us_p50"] for record in records] == pytest.approx(list(rows["lat_us_p50"]), rel=1e-4)
        assert [len(record["samples"]["total_us"]) for record in records] == [2, 2]
        assert len(records[1]["samples"]["total_us"][0]) == int(SMALL["ITERS"])


def test_a_repro_line_makes_the_same_case_again(two_runs: Runs, tmp_path: Path) -> None:
    row = pd.read_csv(next(two_runs[0][0].glob("*_comm.csv"))).iloc[1]
    command = f"OUT_DIR='{tmp_path}' {row['repro']}"
    answer = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    again = pd.read_csv(next(tmp_path.glob("*.csv"))).iloc[0]
    same = ["section", "variant", "timing", "tokens", "hidden", "routing_sha", "dispatch_bytes_wire", "check", "repro"]
    assert again[same].to_dict() == row[same].to_dict()


def test_the_default_run_has_a_row_for_every_planned_case(tmp_path: Path) -> None:
    knobs = {**SMALL, "CUDA_VISIBLE_DEVICES": "", "OUT_DIR": str(tmp_path)}
    planned = run("run.sh", "--plan", **knobs)
    answer = run(**knobs)
    assert answer.returncode == 0, answer.stderr
    rows = pd.concat([pd.read_csv(path) for path in tmp_path.glob("*.csv")])
    headings = 2 * 5
    assert len(rows) == len(planned.stdout.splitlines()) - headings
    ok = rows[rows["status"] == "ok"]
    assert sorted(ok["section"] + " " + ok["variant"]) == ["comm torch", "ref torch"]
    assert rows[rows["status"] != "ok"]["reason"].notna().all()
