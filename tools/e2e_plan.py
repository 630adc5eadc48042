"""What a run asks, kept beside its answers: a run that goes on with --resume must ask the same of the same servers."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from typing import Any

from tools.e2e_answers import AnswersError

PLAN = "plan.json"
FLAGS = ("harness", "api", "reference", "candidate", "reference_model", "candidate_model", "max_tokens")
NAMES = ("reference_name", "candidate_name")
FILES = ("questions", "train", "prompts")
LM_EVAL_FLAGS = ("shots", "count")  # elsewhere each answer's own hash tells, and --count may grow


def plan_of(options: Namespace) -> dict[str, Any]:
    """All that decides answers, by flag."""
    flags = (*FLAGS, *NAMES, *(LM_EVAL_FLAGS if options.harness == "lm_eval" else ()))
    found = {"mode": options.mode} | {flag: getattr(options, flag) for flag in flags}
    return found | {flag: str(path.resolve()) if (path := getattr(options, flag)) else None for flag in FILES}


def stamp_now() -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def begin(options: Namespace) -> str:
    """The stamp of a new run, its folder made and its plan in it. OSError if it can't be."""
    options.out_dir.mkdir(parents=True, exist_ok=True)
    while True:
        stamp = stamp_now()
        folder = options.out_dir / f"e2e_{stamp}"
        try:
            folder.mkdir()
            break
        except FileExistsError:
            time.sleep(0.1)  # another run began in this second: its answers are not ours
    (folder / PLAN).write_text(json.dumps(plan_of(options), indent=1) + "\n")
    return stamp


def go_on(options: Namespace, stamp: str) -> None:
    """Raises AnswersError, naming the flag, if the run of `stamp` asked something else or someone else."""
    path = options.out_dir / f"e2e_{stamp}" / PLAN
    try:
        before = json.loads(path.read_text())
        kept = dict(before)
    except (OSError, ValueError, TypeError) as error:
        raise AnswersError(f"--resume {stamp}: {path} cannot be read; begin a run of its own") from error
    for flag, now in plan_of(options).items():
        if kept.get(flag) != now:
            name = flag if flag == "mode" else f"--{flag.replace('_', '-')}"
            remedy = "give what it was begun with, or begin a run of its own"
            raise AnswersError(f"{name} {now}: the run {stamp} was begun with {kept.get(flag)}; {remedy}")
