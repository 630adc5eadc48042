"""tools/measured_rows.py: sets of runs, kept as dated CSVs."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lib.knobs import KNOBS
from lib.rows import RowFiles
from tools import measured_rows
from tools.measured_rows import SETS, Sweep

STAMP = "20261201T000000Z"
REPRO = "SECTION=ref GPUS=2 PYTHON=/opt/private/python TOKENS=8 ./run.sh"
ROW = {"section": "ref", "variant": "torch", "timing": "e2e", "tokens": 8, "world": 2, "device": "NVIDIA H200"}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """In place of ./run_sweep.sh: writes one row of the given status; `asked` gets the environments."""
    told: dict[str, Any] = {"status": "ok", "code": 0, "asked": []}

    def run(command: list[str], env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        told["asked"].append(env)
        folder = Path(env["OUT_DIR"])
        folder.mkdir(parents=True, exist_ok=True)
        files = RowFiles(folder, "sweep", STAMP, "ref")
        files.open(resume=False)
        files.append(ROW | {"status": told["status"], "reason": "why", "repro": REPRO}, "k", {})
        files.close()
        (folder / f"peaks_{STAMP}.json").write_text('{"wire_gbps": 390}')
        return subprocess.CompletedProcess(command, told["code"])

    monkeypatch.setattr(measured_rows.subprocess, "run", run)
    return told


def test_rows_are_kept_under_set_machine_and_date_without_interpreters(runs: dict[str, Any], tmp_path: Path) -> None:
    assert measured_rows.main(["ref", "--out", str(tmp_path)]) == 0
    (kept,) = tmp_path.glob("ref_h200x2_*.csv")
    with kept.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["repro"] == "SECTION=ref GPUS=2 TOKENS=8 ./run.sh"
    assert list(tmp_path.glob("peaks_h200x2_*.json"))


def test_a_set_brings_its_knobs_and_the_caller_the_others(
    runs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEQ_LENS", "7")
    monkeypatch.setenv("COMM_PYTHON", "/opt/python")
    measured_rows.main(["ref", "--out", str(tmp_path)])
    (env,) = runs["asked"]
    assert env["SEQ_LENS"] == "8 4096"
    assert env["COMM_PYTHON"] == "/opt/python"


def test_ranks_that_share_a_gpu_are_of_one_gpu() -> None:
    shared = {"device": "NVIDIA H200", "world": "4", "repro": "SECTION=comm GPUS=4 RANKS_PER_GPU=2 ./run.sh"}
    assert measured_rows.machine_of([shared]) == "h200x2"


def test_a_red_row_is_kept_and_ends_the_command_with_1(
    runs: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs["status"] = "wrong"
    assert measured_rows.main(["ref", "--out", str(tmp_path)]) == 1
    assert list(tmp_path.glob("ref_*.csv"))
    assert "ref: torch e2e T=8: wrong: why" in capsys.readouterr().err


def test_a_sweep_that_failed_is_not_good_though_its_rows_are(runs: dict[str, Any], tmp_path: Path) -> None:
    runs["code"] = 130
    assert measured_rows.main(["ref", "--out", str(tmp_path)]) == 1


def test_an_unknown_set_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measured_rows.main(["reff", "--out", str(tmp_path)]) == 2
    assert "no set reff" in capsys.readouterr().err


def test_every_set_names_knobs_that_exist() -> None:
    known = {knob.name for knob in KNOBS}
    for told in SETS.values():
        if isinstance(told, Sweep):
            assert set(told.knobs) <= known
