"""The end-to-end gate against a local server: who passes, what is said of a bad server, and going on after a cut."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
from datetime import datetime, timedelta, timezone
from email.message import Message
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from e2e_helpers import both, gate, question_file, verdict
from fake_server import (
    always_broken,
    busy_at_first,
    busy_until_a_date,
    cuts_off,
    drops_at_first,
    forbidden,
    no_json_at_first,
    one_lasting,
    other_json,
    serving,
    slow_at_first,
)

from tests.harness import wait_until
from tools import e2e_client, e2e_gate, e2e_plan
from tools.e2e_agreement import agreements, told

ROOT = Path(__file__).resolve().parent.parent
COUNT = 40


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2e_client, "FIRST_PAUSE_S", 0.02)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return question_file(tmp_path / "test.jsonl", 400)


# --- who passes -------------------------------------------------------------------------------------------------------


def test_an_equal_candidate_passes_and_every_answer_is_kept(tmp_path: Path, questions: Path) -> None:
    with serving("a") as reference, serving("b") as candidate:
        assert gate(tmp_path, "--questions", questions, "--count", COUNT, *both(reference, candidate)) == 0
    found = verdict(tmp_path)
    assert (found["red"], found["difference"], found["reference"]["strict"]) == (False, 0, 1)
    assert (found["reference"]["model"], found["candidate"]["model"]) == ("a", "b")
    (folder,) = [path for path in tmp_path.glob("e2e_*") if path.is_dir()]
    for side in ("reference", "candidate"):
        assert len((folder / f"{side}.jsonl").read_text().splitlines()) == COUNT
    body = reference.bodies[0]
    assert (body["temperature"], body["max_tokens"], body["stop"]) == (0, 512, ["\nQuestion:"])


def test_a_candidate_five_points_worse_fails_with_its_questions(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as reference, serving(wrong=1, every=20) as candidate:
        assert gate(tmp_path, "--questions", questions, *both(reference, candidate)) == 3
    found = verdict(tmp_path)
    assert found["red"]
    assert found["difference"] == pytest.approx(-0.05)
    assert [flip["n"] for flip in found["flips"]["lost"]] == list(range(0, 200, 20))
    assert found["flips"]["won"] == []
    said = capsys.readouterr().out
    assert said.startswith("FAIL: 0.950 right, the reference 1.000, -0.050")
    assert "How much is 20 and 7?" in said


def test_the_margin_decides_and_a_small_sample_is_told_to_be_one(tmp_path: Path, questions: Path) -> None:
    with serving() as reference, serving(wrong=1, every=50) as candidate:
        words = ("--questions", questions, "--count", 100, *both(reference, candidate))
        assert gate(tmp_path / "exact", *words) == 0  # 2 of 100: just the margin
        assert gate(tmp_path / "less", *words, "--margin", "0.019") == 3
    assert "tell differences of" in verdict(tmp_path / "exact")["notices"][0]


def test_a_reference_that_only_guesses_judges_nothing(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(wrong=19, every=20) as reference, serving(wrong=19, every=20) as candidate:
        assert gate(tmp_path, "--questions", questions, *both(reference, candidate)) == 3
    assert capsys.readouterr().out.startswith("FAIL: not judged: the reference has 0.050 right")


def test_a_better_candidate_passes(tmp_path: Path, questions: Path) -> None:
    with serving(wrong=1, every=10) as reference, serving() as candidate:
        assert gate(tmp_path, "--questions", questions, "--count", COUNT, *both(reference, candidate)) == 0
    assert len(verdict(tmp_path)["flips"]["won"]) == COUNT // 10


def test_a_stored_reference_stands_for_its_server(tmp_path: Path, questions: Path) -> None:
    with serving() as reference, serving(wrong=1, every=4) as candidate:
        words = ("--questions", questions, "--count", COUNT)
        assert gate(tmp_path / "first", *words, *both(reference, reference)) == 0
        (stored,) = (tmp_path / "first").glob("e2e_*/reference.jsonl")
        asked = sum(reference.asked.values())
        assert gate(tmp_path / "second", *words, "--reference", stored, "--candidate", candidate.url) == 3
        assert sum(reference.asked.values()) == asked


def test_examples_stand_before_the_question_and_chat_uses_the_servers_template(tmp_path: Path, questions: Path) -> None:
    train = question_file(tmp_path / "train.jsonl", 9)
    with serving() as server:
        words = ("--questions", questions, "--count", 2, *both(server, server))
        assert gate(tmp_path / "shots", *words, "--train", train, "--shots", 3) == 0
        assert server.bodies[-1]["prompt"].count("Question: ") == 4
        assert "Solve it" not in server.bodies[-1]["prompt"]
        assert gate(tmp_path / "chat", *words, "--api", "chat") == 0
        assert "Solve it step by step" in server.bodies[-1]["messages"][0]["content"]


# --- bad servers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", [busy_at_first, busy_until_a_date, drops_at_first, no_json_at_first, slow_at_first])
def test_a_server_that_fails_once_is_asked_again(tmp_path: Path, questions: Path, trouble: Any) -> None:
    with serving() as reference, serving(trouble=trouble) as candidate:
        assert gate(tmp_path, "--questions", questions, "--count", 6, *both(reference, candidate)) == 0
    assert set(candidate.asked.values()) == {2}


@pytest.mark.parametrize(
    ("trouble", "said", "times"),
    [
        (always_broken, 'HTTP 500: {"error": {"message": "CUDA error: an illegal memory access"}}', 3),
        (forbidden, "HTTP 404", 1),
        (other_json, "no answer in its JSON", 3),
    ],
)
def test_a_server_that_keeps_failing_is_named_and_judges_nothing(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str], trouble: Any, said: str, times: int
) -> None:
    with serving() as reference, serving(trouble=trouble) as candidate:
        words = ("--questions", questions, "--count", 4, "--tries", 3, *both(reference, candidate))
        assert gate(tmp_path, *words) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "4 of 4 questions have no answer of the candidate (question 0: " in error
    assert said in error
    assert set(candidate.asked.values()) == {times}
    assert not list(tmp_path.glob("e2e_*.json"))


def test_answers_that_were_cut_off_are_counted_and_named(tmp_path: Path, questions: Path) -> None:
    with serving() as reference, serving(trouble=cuts_off) as candidate:
        assert gate(tmp_path, "--questions", questions, "--count", 5, *both(reference, candidate)) == 3
    assert "5 answers of the candidate were cut off: raise --max-tokens" in verdict(tmp_path)["notices"]


def test_nobody_at_the_address_is_one_sentence(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as server:
        url = server.url
    for model in ((), ("--reference-model", "m")):
        assert gate(tmp_path, "--questions", questions, "--reference", url, "--candidate", url, *model) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"e2e_gate: {url}: is not reachable (")


def test_a_server_that_wants_a_key_is_not_called_unreachable(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATE_KEY", "open sesame")
    with serving(key="open sesame") as server:
        words = ("--questions", questions, "--count", 2, *both(server, server))
        assert gate(tmp_path, *words) == 2
        assert "/models: HTTP 401: " in (said := capsys.readouterr().err)
        assert "name its key by --key-variable" in said
        assert gate(tmp_path, *words, "--key-variable", "GATE_KEY") == 0


def test_a_busy_server_is_given_the_time_it_asks_for() -> None:
    def pause(told: str) -> float:
        headers = Message()
        headers["Retry-After"] = told
        return e2e_client._retry_after(urllib.error.HTTPError("", 429, "", headers, None))

    assert [pause(told) for told in ("45", "0.5", "-3", "soon", "nan")] == [45, 0.5, 0, 0, 0]
    assert pause("99999") == e2e_client.LONGEST_ASKED_S
    assert 50 < pause(format_datetime(datetime.now(timezone.utc) + timedelta(minutes=1), usegmt=True)) <= 60


def test_a_reasoning_model_cut_off_before_it_said_anything_has_an_empty_answer() -> None:
    assert e2e_client._answer(choice(None, "length"), "chat") == ("", None, "length")
    with pytest.raises(TypeError, match="its text is no text"):
        e2e_client._answer(choice(None, "stop"), "chat")


def choice(content: str | None, finish: str) -> dict[str, Any]:
    return {"choices": [{"message": {"content": content}, "finish_reason": finish}]}


# --- going on ---------------------------------------------------------------------------------------------------------


def test_a_run_that_was_killed_goes_on_and_asks_only_what_is_missing(tmp_path: Path, questions: Path) -> None:
    with serving() as reference, serving(trouble=one_lasting) as candidate:
        words = [
            "gsm8k",
            "--questions",
            str(questions),
            "--count",
            "30",
            "--concurrency",
            "2",
            *both(reference, candidate),
        ]
        command = [sys.executable, "-m", "tools.e2e_gate", *words, "--out-dir", str(tmp_path)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: sum(candidate.asked.values()) > 10, "ten questions")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=10)
        assert process.returncode == 130, said
        assert "go on with --resume" in said
        (answers,) = tmp_path.glob("e2e_*/candidate.jsonl")
        answers.write_text(answers.read_text() + '{"n": 3, "prom')  # a torn line
        there = {json.loads(line)["n"] for line in answers.read_text().splitlines()[:-1]}
        candidate.trouble = lambda handler, before: False
        candidate.asked.clear()
        asked = sum(reference.asked.values())
        assert e2e_gate.main([*words, "--out-dir", str(tmp_path), "--resume", "last"]) == 0
        assert sum(reference.asked.values()) == asked
        assert len(candidate.asked) == 30 - len(there)


@pytest.mark.parametrize("torn", [b'{"n": 1, "pro', b"\0\0\0"])
def test_a_run_killed_at_once_keeps_what_was_answered(tmp_path: Path, questions: Path, torn: bytes) -> None:
    with serving() as reference, serving(trouble=one_lasting) as candidate:
        words = ["gsm8k", "--questions", str(questions), "--count", "20", *both(reference, candidate)]
        words += ["--concurrency", "2", "--out-dir", str(tmp_path)]
        command = [sys.executable, "-m", "tools.e2e_gate", *words]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: sum(candidate.asked.values()) > 10, "ten questions")
        process.kill()
        process.wait(timeout=10)
        (answers,) = tmp_path.glob("e2e_*/candidate.jsonl")
        there = len(answers.read_text().splitlines())
        answers.write_bytes(answers.read_bytes() + torn)
        candidate.trouble = lambda handler, before: False
        candidate.asked.clear()
        assert e2e_gate.main([*words, "--resume", "last"]) == 0
        assert there >= 8
        assert len(candidate.asked) == 20 - there  # a request of the killed run may come late: it is one of these


def test_answers_of_other_prompts_or_another_model_are_not_mixed(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as server:
        words = ("--questions", questions, *both(server, server))
        assert gate(tmp_path, *words, "--count", 3) == 0
        (stored,) = tmp_path.glob("e2e_*/reference.jsonl")
        for changed in (["--max-tokens", "9"], ["--api", "chat"]):
            again = ("--questions", questions, "--count", 3, "--reference", stored, "--candidate", server.url)
            assert gate(tmp_path / "other", *again, *changed) == 2
            assert "was asked with another prompt" in capsys.readouterr().err
        server.model = "x"  # the server was started anew with another model
        assert gate(tmp_path, *words, "--count", 4, "--resume", "last") == 2
        assert "holds answers of tiny, not of x" in capsys.readouterr().err


def test_going_on_with_another_server_or_other_words_is_refused_before_anything_is_asked(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as good, serving(wrong=1, every=2) as bad:
        words = ("--questions", questions, "--count", 4)
        assert gate(tmp_path, *words, *both(good, good)) == 0
        asked = sum(good.asked.values())
        assert gate(tmp_path, *words, *both(good, bad), "--resume", "last") == 2
        assert f"--candidate {bad.url}: the run " in capsys.readouterr().err
        for changed in (["--api", "chat"], ["--max-tokens", "9"], ["--candidate-name", "other"]):
            assert gate(tmp_path, *words, *both(good, good), *changed, "--resume", "last") == 2
            assert f"{changed[0]} {changed[1]}: the run " in capsys.readouterr().err
        assert gate(tmp_path, "--count", 6, *words[:2], *both(good, good), "--resume", "last") == 0  # more may be asked
        assert (sum(good.asked.values()) - asked, sum(bad.asked.values())) == (4, 0)


def test_two_runs_of_one_second_do_not_share_answers(
    tmp_path: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamps = iter(["20261201T000000Z"] * 3 + ["20261201T000001Z"])
    monkeypatch.setattr(e2e_plan, "stamp_now", lambda: next(stamps))
    with serving() as good, serving(wrong=1, every=2) as bad:
        words = ("--questions", questions, "--count", 4)
        assert gate(tmp_path, *words, *both(good, good)) == 0
        assert gate(tmp_path, *words, *both(good, bad)) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--candidate", "nowhere"], "--candidate nowhere: is neither an address"),
        (["--count", "0"], "0 must be a whole number, 1..1000000"),
        (["--margin", "2"], "2 must be a share, 0..1"),
        (["--questions", "/nope"], "--questions /nope: cannot be read (No such file"),
        (["--resume", "last"], "--resume last: is no run in"),
        (["--key-variable", "NO_SUCH_KEY"], "--key-variable NO_SUCH_KEY: is not set"),
    ],
)
def test_a_wrong_word_is_one_sentence(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with serving() as server:
        try:
            code = gate(tmp_path, "--questions", questions, *both(server, server), *words)
        except SystemExit as ended:
            code = int(str(ended.code))
    error = capsys.readouterr().err
    assert code == 2
    assert said in error
    assert error.count("\n") == 1


def test_a_question_file_of_another_kind_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with serving() as server:
        for text in ('{"prompt": "x"}\n', "[1]\n", '{"question": "a", "answer": "no number"}\n', "\xff"):
            path.write_bytes(text.encode("latin-1"))
            assert gate(tmp_path, "--questions", path, *both(server, server)) == 2


# --- agreement --------------------------------------------------------------------------------------------------------


def test_answers_that_agree_and_those_that_part_are_told_by_token(tmp_path: Path, questions: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"How much is {n} and 7?"}) + "\n" for n in range(10)))
    with serving() as reference, serving(wrong=1, every=5) as candidate:
        words = ("--prompts", prompts, *both(reference, candidate))
        assert gate(tmp_path / "told", *words, mode="agreement") == 0
        assert gate(tmp_path / "least", *words, "--least", "0.95", mode="agreement") == 3
        assert (
            gate(tmp_path / "same", "--prompts", prompts, *both(reference, reference), "--least", 1, mode="agreement")
            == 0
        )
    figures = verdict(tmp_path / "told")["figures"]
    assert figures["unit"] == "token"
    assert (figures["prompts"], figures["parted"], figures["whole"]) == (10, 2, 0.8)
    assert figures["first_parted"] == 4  # " 5", "and", "7", "make" agree
    assert verdict(tmp_path / "same")["figures"]["agreement"] == 1


def test_without_tokens_characters_are_compared_and_that_is_said(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "How much is 1 and 7?"}) + "\n")
    with serving(tells_tokens=False) as server:
        assert gate(tmp_path, "--prompts", prompts, *both(server, server), mode="agreement") == 0
    assert verdict(tmp_path)["notices"] == ["a server does not tell its tokens, so characters were compared"]


def test_an_empty_answer_leaves_the_others_compared_by_token() -> None:
    (found,) = agreements([(("", []), ("a b", ["a ", "b"]))])
    assert (found.unit, found.same, found.longest) == ("token", 0, 2)
    mixed = agreements([(("a", ["a"]), ("a", ["a"])), (("bc", None), ("bd", ["bd"]))])
    assert {each.unit for each in mixed} == {"character"}  # one unit, so that the share has a meaning


def test_an_answer_that_goes_on_agrees_up_to_the_others_end() -> None:
    found = agreements([(("ab", ["a", "b"]), ("abc", ["a", "b", "c"])), (("", None), ("", None))])
    assert [(each.same, each.longest, each.whole) for each in found] == [(2, 3, False), (0, 0, True)]
    assert told(found)["parted_quartiles"] == [2, 2, 2]
