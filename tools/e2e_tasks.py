"""The prompts of the end-to-end gate: GSM8K from a file, or prompts without labels."""

from __future__ import annotations

import json
from pathlib import Path

from tools.e2e_agreement import PROMPTS
from tools.e2e_answers import AnswersError, Task
from tools.e2e_score import strict

STOP = ("\nQuestion:",)
HOW = "Solve it step by step, and end with #### and the number alone."
GSM8K_FIELDS = ("question", "answer")


def read_questions(path: Path, count: int, flag: str) -> list[tuple[str, str]]:
    """The first `count` (question, answer) of a JSONL. Raises AnswersError, naming the flag."""
    found: list[tuple[str, str]] = []
    try:
        with path.open() as file:
            for number, line in enumerate(file, 1):
                if len(found) == count:
                    break
                if line.strip():
                    found.append(_question(line, path, number, flag))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise AnswersError(f"{flag} {path}: cannot be read ({why})") from error
    if not found:
        raise AnswersError(f"{flag} {path}: holds no question")
    return found


def _question(line: str, path: Path, number: int, flag: str) -> tuple[str, str]:
    try:
        record = json.loads(line)
        question, answer = (str(record[name]) for name in GSM8K_FIELDS)
    except (ValueError, LookupError, TypeError) as error:
        remedy = "give GSM8K's own test.jsonl"
        raise AnswersError(f"{flag} {path}: line {number} has no question and answer; {remedy}") from error
    if not strict(answer):
        raise AnswersError(f"{flag} {path}: the answer of line {number} does not end in #### and a number")
    return question, answer


def gsm8k(questions: Path, count: int, train: Path | None, shots: int, max_tokens: int) -> Task:
    """With `train`, its first `shots` questions and answers stand before each question; else the prompt says how."""
    asked = read_questions(questions, count, "--questions")
    examples = read_questions(train, shots, "--train") if train and shots else []
    before = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in examples)
    how = "" if examples else f"{HOW}\n"
    return Task(
        prompts=[f"{before}Question: {question}\n{how}Answer:" for question, _ in asked],
        max_tokens=max_tokens,
        stop=STOP,
        wanted=tuple(strict(answer) for _, answer in asked),
        titles=tuple(question for question, _ in asked),
    )


def unlabelled(path: Path | None, count: int, max_tokens: int) -> Task:
    """Prompts of a JSONL with `prompt` (or `question`), or those of e2e_agreement.py."""
    if path is None:
        return Task(list(PROMPTS[:count]), max_tokens, titles=PROMPTS[:count])
    prompts = []
    try:
        for line in path.read_text().splitlines()[:count]:
            record = json.loads(line)
            prompts.append(str(record.get("prompt") or record["question"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise AnswersError(f"--prompts {path}: is no JSONL with a prompt in each line") from error
    if not prompts:
        raise AnswersError(f"--prompts {path}: holds no prompt")
    return Task(prompts, max_tokens, titles=tuple(prompts))
