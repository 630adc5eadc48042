"""The end-to-end gate beside its questions: arithmetic, lm-evaluation-harness, the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from e2e_helpers import both, gate, question_file, verdict
from fake_server import serving

from tools import e2e_client, e2e_gate
from tools.e2e_lm_eval import task_words
from tools.e2e_score import Paired, chance, cleaned, flexible, interval, paired, strict, wilson
from tools.report_e2e import find_e2e

ROOT = Path(__file__).resolve().parent.parent
COUNT = 40


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2e_client, "FIRST_PAUSE_S", 0.02)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return question_file(tmp_path / "test.jsonl", 400)


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "by_strict", "by_flexible"),
    [
        ("so it is 12.\n#### 1,234", "1234", "1234"),
        ("#### -5.50\nQuestion: 9?", "-5.5", "9"),
        ("it costs $1,200.00 in all.", "", "1200"),
        ("#### 70.", "70", "70"),
        ("none", "", ""),
    ],
)
def test_numbers_are_taken_strictly_and_flexibly(text: str, by_strict: str, by_flexible: str) -> None:
    assert (strict(text), flexible(text)) == (by_strict, by_flexible)


def test_the_interval_is_newcombes_tenth_and_the_chance_mcnemars() -> None:
    """His example: 36 both, 12 and 2 discordant, none neither: 0.0569 to 0.3404."""
    low, high = interval(Paired(both=36, reference_only=2, candidate_only=12, neither=0))
    assert (low, high) == (pytest.approx(0.0569, abs=5e-5), pytest.approx(0.3404, abs=5e-5))
    assert wilson(0.0, 10)[0] == pytest.approx(0)
    assert chance(Paired(90, 8, 2, 100)) == pytest.approx(112 / 1024)
    assert chance(Paired(1, 0, 0, 1)) == 1
    assert interval(Paired(5, 0, 0, 0))[0] < 0 < interval(Paired(5, 0, 0, 0))[1]
    assert cleaned("0.50") == "0.5"
    with pytest.raises(ValueError, match="no question"):
        paired([], [])


# --- through lm-evaluation-harness ------------------------------------------------------------------------------------

LM_EVAL = """
import json, os, sys
words = {word: sys.argv[place] for place, word in enumerate(sys.argv[:-1], 1) if word.startswith("--")}
if "model=broken" in words["--model_args"]:
    sys.exit("ConnectionError: the Hub is not reachable")
bad = 5 if "model=worse" in words["--model_args"] else 0
with open(os.path.join(words["--output_path"], "samples_gsm8k_2026.jsonl"), "w") as file:
    for doc in range(int(words["--limit"])):
        for name in ("strict-match", "flexible-extract"):
            sample = {"doc_id": doc, "filter": name, "doc": {"question": f"question {doc}"}}
            file.write(json.dumps(sample | {"exact_match": float(doc >= bad)}) + "\\n")
"""


def test_lm_eval_is_given_its_own_task_over_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    words = ["gsm8k", "--reference", "x", "--candidate", "y", "--questions", str(tmp_path / "test.jsonl")]
    assert task_words(e2e_gate.parser().parse_args(words), tmp_path)[-1] == "gsm8k_file"
    task = json.loads((tmp_path / "gsm8k_file.yaml").read_text())
    assert task["include"] == str(tmp_path / "lm_eval/tasks/gsm8k/gsm8k.yaml")
    assert task["dataset_kwargs"]["data_files"]["test"] == str(tmp_path / "test.jsonl")


@pytest.mark.parametrize(("model", "code"), [("same", 0), ("worse", 3), ("broken", 1)])
def test_an_installed_lm_eval_asks_and_its_samples_are_paired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str, code: int
) -> None:
    """A stand-in package with its command line and its sample files; the real one needs the Hub for its data."""
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / "__main__.py").write_text(LM_EVAL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(e2e_gate, "installed", lambda: True)
    with serving("a") as reference, serving(model) as candidate:
        words = ("--harness", "auto", "--count", 50, *both(reference, candidate))
        assert gate(tmp_path / "out", *words) == code
    if code == 1:
        assert "--harness lm_eval: ended with 1: ConnectionError: the Hub is not reachable" in capsys.readouterr().err
        return
    found = verdict(tmp_path / "out")
    assert found["difference"] == (-0.1 if code else 0)
    assert [each["question"] for each in found["flips"]["lost"]] == (
        [f"question {n}" for n in range(5)] if code else []
    )
    assert "cut_off" not in found["candidate"]


def test_lm_eval_that_is_not_there_or_cannot_do_it_is_said(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(e2e_gate, "installed", lambda: False)
    with serving() as server:
        words = both(server, server)
        assert gate(tmp_path, *words, "--harness", "lm_eval") == 2
        assert "--harness lm_eval: is not installed; get it by: " in capsys.readouterr().err
        assert gate(tmp_path, *words, "--harness", "lm_eval", mode="agreement") == 2
        assert gate(tmp_path, *words[:2], "--candidate", "a.jsonl", "--harness", "lm_eval") == 2
        assert "asks servers only" in capsys.readouterr().err
        assert gate(tmp_path, *words, "--harness", "auto", "--questions", questions, "--count", 2) == 0


# --- in the report ----------------------------------------------------------------------------------------------------


def test_the_report_shows_the_newest_verdict_of_a_pair_and_a_failed_one_is_red(tmp_path: Path, questions: Path) -> None:
    from tools.report_data import read_results
    from tools.report_markdown import markdown
    from tools.report_model import Options, Report
    from tools.report_page import render

    with serving() as reference, serving(wrong=1, every=4) as candidate:
        assert gate(tmp_path, "--questions", questions, "--count", 40, *both(reference, candidate)) == 3
    (path,) = tmp_path.glob("e2e_*.json")
    old = json.loads(path.read_text()) | {"stamp": "20200101T000000Z", "line": "PASS: long ago", "red": False}
    (tmp_path / "e2e_20200101T000000Z.json").write_text(json.dumps(old))
    (tmp_path / "e2e_20990101T000000Z.json").write_text("{")
    results = read_results([tmp_path])
    (found,) = find_e2e([tmp_path], results.notices)
    assert found.red
    assert any("e2e_20990101T000000Z.json is no verdict" in notice for notice in results.notices)
    (tmp_path / "e2e_20261231T000000Z.json").write_text(json.dumps(record_of(path, "deepep_low_latency")))
    assert len(find_e2e([tmp_path], [])) == 2  # another backend at the same address hides nothing
    report = Report(results, Options(datetime.now(timezone.utc), 0, "t", ""), None, None, [found])
    assert (report.level, report.headline) == ("red", "1 end-to-end gate not passed")
    assert "FAIL: 0.750 right" in markdown(report)
    assert "FAIL: 0.750 right" in render(report)


def record_of(path: Path, name: str) -> dict[str, Any]:
    record = json.loads(path.read_text())
    return dict(record | {"red": False, "candidate": record["candidate"] | {"name": name}})


def test_it_runs_as_a_file_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "e2e_gate.py"), "--help"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert answer.returncode == 0
    assert "agreement needs no labels" in answer.stdout
