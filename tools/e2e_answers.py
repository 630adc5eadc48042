"""Answers on disk: a JSONL a side, written as they come, so that a run that was cut short asks only what is missing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lib.progress import Bar, Lines
from tools.e2e_client import CUT_OFF, Answer, Endpoint, ask_all

LINE_EVERY = 50  # answers
SYNC_EVERY_S = 1.0  # what a machine that dies can lose, beside what is under way

Record = dict[str, Any]
FIELDS = ("n", "prompt", "model", *(field.name for field in fields(Answer)))


class AnswersError(Exception):
    """One sentence: the file, what is wrong with it, and what to give instead."""


@dataclass(frozen=True)
class Task:
    """What both sides are asked. `wanted` are the right answers by number, [] where there are no labels."""

    prompts: list[str]
    max_tokens: int
    stop: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    titles: tuple[str, ...] = ()
    api: str = "completions"

    def digest(self, number: int) -> str:
        """Of all that decides a greedy answer beside the model: so answers to other prompts are not taken for these."""
        text = json.dumps([self.prompts[number], self.max_tokens, self.stop, self.api])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def read_answers(path: Path, task: Task) -> dict[int, Record]:
    """Answers by question; a later line replaces an earlier one, and a torn last line is left out.

    Raises AnswersError on a file that holds something else, or answers to other prompts.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise AnswersError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'it is no text'})") from error
    found: dict[int, Record] = {}
    lines = text.split("\n")
    for place, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
            number, digest = record["n"], record["prompt"]
            record = {name: record[name] for name in FIELDS}
        except (ValueError, LookupError, TypeError) as error:
            if place == len(lines):
                break
            raise AnswersError(f"{path}: line {place} is no answer; give a JSONL that this tool wrote") from error
        if not isinstance(number, int) or number < 0:
            raise AnswersError(f"{path}: line {place} has no number of a question")
        if number < len(task.prompts):
            if digest != task.digest(number):
                other = "another question file, other shots, --max-tokens or --api"
                raise AnswersError(f"{path}: question {number} was asked with another prompt ({other}): ask it anew")
            found[number] = record
    return found


def answered(records: dict[int, Record]) -> dict[int, Record]:
    return {number: record for number, record in records.items() if not record["error"]}


def cut_off(records: dict[int, Record]) -> int:
    return sum(record["finish"] == CUT_OFF for record in records.values())


def collect(
    path: Path, task: Task, endpoint: Endpoint, concurrency: int, stopped: threading.Event, bar: Bar | Lines
) -> dict[int, Record]:
    """Ask what is not yet in the file; returns all that is there then. OSError if it can't be written."""
    found = answered(read_answers(path, task)) if path.exists() else {}
    if others := {str(record["model"]) for record in found.values()} - {endpoint.model}:
        raise AnswersError(f"{path}: holds answers of {others.pop()}, not of {endpoint.model}; begin a run of its own")
    missing = [(number, prompt) for number, prompt in enumerate(task.prompts) if number not in found]
    heal(path)
    synced = time.monotonic()
    with (
        path.open("a", buffering=1) as file,
        contextlib.closing(
            ask_all(endpoint, missing, task.max_tokens, list(task.stop), concurrency, stopped)
        ) as answers,
    ):
        for number, answer in answers:
            record = {"n": number, "prompt": task.digest(number), "model": endpoint.model, **answer.record()}
            file.write(json.dumps(record) + "\n")
            if time.monotonic() - synced >= SYNC_EVERY_S:
                os.fsync(file.fileno())
                synced = time.monotonic()
            found[number] = record
            if answer.error or isinstance(bar, Bar) or len(found) % LINE_EVERY == 0 or len(found) == len(task.prompts):
                bar.case(f"question {number}", answer_words(answer))
            else:
                bar.count += 1  # in a log a line each would bury the verdict
        os.fsync(file.fileno())
    return found


def heal(path: Path) -> None:
    """Cut a torn last line off, so that what follows is a line of its own."""
    if path.exists() and (whole := path.read_bytes()) and not whole.endswith(b"\n"):
        path.write_bytes(whole[: whole.rfind(b"\n") + 1])


def answer_words(answer: Answer) -> str:
    if answer.error:
        return f"no answer: {answer.error}"
    cut = ", cut off" if answer.finish == CUT_OFF else ""
    return f"{answer.seconds:.1f} s{cut}"


def first_error(records: dict[int, Record], numbers: Sequence[int]) -> str:
    return next((str(records[number]["error"]) for number in numbers if number in records), "it was not asked")
