"""The end-to-end gate through lm-evaluation-harness, of which a stand-in has the command line and the sample files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_server import serving

from tests.e2e_helpers import both, gate, verdict
from tools import e2e_gate
from tools.e2e_lm_eval import task_words

LM_EVAL = """
import json, os, sys
words = {word: sys.argv[place] for place, word in enumerate(sys.argv[:-1], 1) if word.startswith("--")}
if "model=broken" in words["--model_args"]:
    sys.exit("ConnectionError: the Hub is not reachable")
bad = 5 if "model=worse" in words["--model_args"] else 0
with open(os.path.join(words["--output_path"], "samples_gsm8k_2026.jsonl"), "w") as file:
    for doc in range(int(words["--limit"])):
        for name in ("strict-match", "flexible-extract"):
            file.write(json.dumps({"doc_id": doc, "filter": name, "exact_match": float(doc >= bad)}) + "\\n")
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


@pytest.mark.parametrize(("model", "code"), [("same", 0), ("worse", 3), ("broken", 2)])
def test_an_installed_lm_eval_asks_and_its_samples_are_paired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str, code: int
) -> None:
    """A stand-in package with its command line and its sample files; the real one needs the Hub for its data."""
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / "__main__.py").write_text(LM_EVAL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with serving("a") as reference, serving(model) as candidate:
        words = ("--harness", "lm_eval", "--count", 50, *both(reference, candidate))
        assert gate(tmp_path / "out", *words) == code
    if code == 2:
        assert "--harness lm_eval: ended with 1: ConnectionError: the Hub is not reachable" in capsys.readouterr().err
    else:
        assert verdict(tmp_path / "out")["difference"] == (-0.1 if code else 0)
