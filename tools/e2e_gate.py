#!/usr/bin/env python3
"""End to end: does a model served with the candidate backend still answer as it does with the reference?

gsm8k asks both the same questions and compares how many are right; agreement needs no labels and compares the greedy
answers token by token. Answers go to OUT_DIR/e2e_<stamp>/, the verdict to OUT_DIR/e2e_<stamp>.json, where the report
finds it. A run that was cut short goes on with --resume. How to serve a model with each backend: SKILL.md, rung 5.

Examples:
    python -m tools.e2e_gate gsm8k --questions test.jsonl --train train.jsonl \\
        --reference http://localhost:8000/v1 --candidate http://localhost:8001/v1
    python -m tools.e2e_gate gsm8k --questions test.jsonl --reference results/e2e_20261201T020000Z/reference.jsonl \\
        --candidate http://localhost:8001/v1 --candidate-name deepep_low_latency
    python -m tools.e2e_gate agreement --reference http://localhost:8000/v1 --candidate http://localhost:8001/v1
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # started as a file, from any folder

from lib.progress import make_progress  # noqa: E402
from lib.talk import say, show  # noqa: E402
from tools.e2e_answers import AnswersError, Record, Task, answered, collect, first_error, read_answers  # noqa: E402
from tools.e2e_client import Endpoint, EndpointError, model_served  # noqa: E402
from tools.e2e_lm_eval import EndedError, InterruptedRunError, installed, run_lm_eval  # noqa: E402
from tools.e2e_plan import begin, go_on  # noqa: E402
from tools.e2e_score import EXTRACT  # noqa: E402
from tools.e2e_tasks import gsm8k, unlabelled  # noqa: E402
from tools.e2e_verdict import Side, agreement_verdict, gsm8k_verdict, lines_of, write_verdict  # noqa: E402

PROGRAM = "e2e_gate"
PASSED, INCOMPLETE, USAGE, RED, INTERRUPTED = 0, 1, 2, 3, 130
SIDES = ("reference", "candidate")
MARGIN, QUESTIONS, CONCURRENCY, SHOTS = 0.02, 200, 16, 5
URL = re.compile(r"https?://")
STAMP = re.compile(r"\d{8}T\d{6}Z")


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        say(f"{PROGRAM}: {message} (--help lists all)")
        raise SystemExit(USAGE)


def whole(low: int, high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text} must be a whole number, {low}..{high}")
        return int(text)

    return number


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be a share, 0..1")
    return value


def parser() -> argparse.ArgumentParser:
    title, *about, examples = (__doc__ or "").split("\n\n")
    text = argparse.RawDescriptionHelpFormatter
    made = OneLineParser(PROGRAM, description="\n\n".join([title, *about]), epilog=examples, formatter_class=text)
    made.allow_abbrev = False
    add = made.add_argument
    add("mode", choices=("gsm8k", "agreement"))
    add("--reference", required=True, metavar="URL|JSONL", help="endpoint (ends in /v1), or answers of an earlier run")
    add("--candidate", required=True, metavar="URL|JSONL", help="the same, of the backend in question")
    add("--reference-model", metavar="NAME", help="by default what the server names first")
    add("--candidate-model", metavar="NAME")
    add("--reference-name", metavar="TEXT", help="what the report calls it: the backend (the address)")
    add("--candidate-name", metavar="TEXT", help="the same; verdicts on candidates of other names stand side by side")
    add("--questions", type=Path, metavar="JSONL", help="GSM8K's test.jsonl (gsm8k)")
    add("--train", type=Path, metavar="JSONL", help="GSM8K's train.jsonl, for examples before each question")
    add("--shots", type=whole(0, 32), default=SHOTS, metavar="N", help=f"examples of --train ({SHOTS})")
    add("--prompts", type=Path, metavar="JSONL", help="lines with `prompt` (agreement); some are built in")
    add("--count", type=whole(1, 1_000_000), default=QUESTIONS, metavar="N", help=f"the first N of them ({QUESTIONS})")
    add("--margin", type=share, default=MARGIN, metavar="SHARE", help=f"how much less may be right ({MARGIN})")
    add("--extract", choices=tuple(EXTRACT), default="flexible", help="which number of an answer decides (flexible)")
    add("--least", type=share, metavar="SHARE", help="of tokens that must agree (agreement); without it nothing is red")
    add("--api", choices=("completions", "chat"), default="completions", help="which API is asked (completions)")
    add("--max-tokens", type=whole(1, 1_000_000), default=512, metavar="N", help="of an answer (512)")
    add("--concurrency", type=whole(1, 4096), default=CONCURRENCY, metavar="N", help=f"at once ({CONCURRENCY})")
    add("--timeout", type=whole(1, 86_400), default=300, metavar="S", help="of one request (300)")
    add("--tries", type=whole(1, 100), default=5, metavar="N", help="of one question (5)")
    add("--key-variable", metavar="NAME", help="environment variable that holds the servers' API key")
    add("--harness", choices=("builtin", "lm_eval", "auto"), default="builtin", help="who asks gsm8k (builtin)")
    add("--out-dir", type=Path, default=Path(os.environ.get("OUT_DIR") or "results"), metavar="DIR", help="(OUT_DIR)")
    add("--resume", metavar="STAMP|last", help="go on with a run that was cut short")
    return made


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    stopped = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda *_: stopped.set())
    try:
        return run(options, stopped)
    except (AnswersError, EndpointError) as error:
        say(f"{PROGRAM}: {error}")
        return USAGE
    except OSError as error:
        say(f"{PROGRAM}: {error.filename or options.out_dir}: {error.strerror}; what was answered before is kept")
        return INCOMPLETE
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(options: argparse.Namespace, stopped: threading.Event) -> int:
    options.harness = harness_of(options)
    stamp = resumed(options) if options.resume else ""
    if stamp:
        go_on(options, stamp)
    if options.harness == "lm_eval":
        return through_lm_eval(options, stamp, stopped)
    task = task_of(options)
    sides = {name: source(options, name) for name in SIDES}
    stored = {name: read_answers(side, task) for name, side in sides.items() if isinstance(side, Path)}
    stamp = stamp or begin(options)
    found = asked(options, task, sides, stored, stamp, stopped)
    if found is None:
        return interrupted(stamp)
    for name in SIDES:
        missing = [number for number in range(len(task.prompts)) if number not in answered(found[name])]
        if missing:
            told = f"{len(missing)} of {len(task.prompts)} questions have no answer of the {name}"
            why = f"question {missing[0]}: {first_error(found[name], missing)}"
            say(f"{PROGRAM}: {told} ({why}); --resume {stamp} asks again")
            return INCOMPLETE
    judge = gsm8k_verdict if options.mode == "gsm8k" else agreement_verdict
    named = {name: Side(shown(sides[name]), model_of(found[name]), found[name]) for name in SIDES}
    return settle(options, stamp, judge(task, named["reference"], named["candidate"], options))


def harness_of(options: argparse.Namespace) -> str:
    """`auto` is lm_eval where it is installed and can do what is asked."""
    stored = [name for name in SIDES if not URL.match(getattr(options, name))]
    if options.harness == "auto":
        return "lm_eval" if installed() and options.mode == "gsm8k" and not stored else "builtin"
    if options.harness == "lm_eval":
        if options.mode != "gsm8k":
            raise AnswersError("--harness lm_eval: has no agreement mode; leave it out")
        if stored:
            text = getattr(options, stored[0])
            raise AnswersError(f"--{stored[0]} {text}: --harness lm_eval asks servers only; give an address")
        if not installed():
            remedy = f'get it by: {sys.executable} -m pip install "lm_eval[api]"; or leave --harness out'
            raise AnswersError(f"--harness lm_eval: is not installed; {remedy}")
    return str(options.harness)


def through_lm_eval(options: argparse.Namespace, stamp: str, stopped: threading.Event) -> int:
    sides = {name: endpoint_of(options, name) for name in SIDES}
    stamp = stamp or begin(options)
    try:
        return settle(options, stamp, run_lm_eval(options, sides, options.out_dir / f"e2e_{stamp}", stopped))
    except InterruptedRunError:
        return interrupted(stamp)
    except EndedError as error:
        say(f"{PROGRAM}: {error}; --resume {stamp} asks again")
        return INCOMPLETE


def asked(
    options: argparse.Namespace,
    task: Task,
    sides: dict[str, Endpoint | Path],
    stored: dict[str, dict[int, Record]],
    stamp: str,
    stopped: threading.Event,
) -> dict[str, dict[int, Record]] | None:
    """The answers of both sides, None if it was interrupted before all were there."""
    found: dict[str, dict[int, Record]] = {}
    for name, side in sides.items():
        if isinstance(side, Path):
            found[name] = stored[name]
            continue
        path = options.out_dir / f"e2e_{stamp}" / f"{name}.jsonl"
        done = len(answered(read_answers(path, task))) if path.exists() else 0
        bar = make_progress(f"e2e {name}", len(task.prompts), done)
        try:
            found[name] = collect(path, task, side, options.concurrency, stopped, bar)
        finally:
            bar.close()
        if stopped.is_set() and len(answered(found[name])) < len(task.prompts):
            return None
    return found


def interrupted(stamp: str) -> int:
    say(f"{PROGRAM}: interrupted; go on with --resume {stamp}")
    return INTERRUPTED


def settle(options: argparse.Namespace, stamp: str, verdict: dict[str, Any]) -> int:
    for name in SIDES:
        verdict[name] |= {"name": getattr(options, f"{name}_name") or ""}
    path = write_verdict(options.out_dir, stamp, verdict)
    show([*lines_of(verdict), f"verdict: {path}"])
    return RED if verdict["red"] else PASSED


def task_of(options: argparse.Namespace) -> Task:
    if options.mode == "agreement":
        return replace(unlabelled(options.prompts, options.count, options.max_tokens), api=options.api)
    if options.questions is None:
        raise AnswersError("--questions: is needed by gsm8k; give GSM8K's test.jsonl")
    task = gsm8k(options.questions, options.count, options.train, options.shots, options.max_tokens)
    return replace(task, api=options.api)


def source(options: argparse.Namespace, name: str) -> Endpoint | Path:
    """An endpoint, or a file of answers."""
    text = getattr(options, name)
    if URL.match(text):
        return endpoint_of(options, name)
    if not Path(text).is_file():
        raise AnswersError(f"--{name} {text}: is neither an address (http://host:port/v1) nor a file of answers")
    return Path(text)


def endpoint_of(options: argparse.Namespace, name: str) -> Endpoint:
    """With its model. Raises EndpointError if nobody is there."""
    text = getattr(options, name)
    key = os.environ.get(options.key_variable, "") if options.key_variable else ""
    if options.key_variable and not key:
        raise AnswersError(f"--key-variable {options.key_variable}: is not set")
    model = getattr(options, f"{name}_model") or ""
    endpoint = Endpoint(text, model, options.api, key, options.timeout, options.tries)
    return replace(endpoint, model=model_served(endpoint))


def shown(side: Endpoint | Path) -> str:
    return str(side) if isinstance(side, Path) else side.url


def model_of(answers: dict[int, Record]) -> str:
    return ", ".join(sorted({str(record["model"]) for record in answers.values()}))


def resumed(options: argparse.Namespace) -> str:
    """The stamp of the run to go on with."""
    there = sorted(path.name.removeprefix("e2e_") for path in options.out_dir.glob("e2e_*") if path.is_dir())
    there = [stamp for stamp in there if STAMP.fullmatch(stamp)]
    wanted = options.resume
    if wanted == "last" and there:
        return there[-1]
    if wanted not in there:
        listed = f"; there are {', '.join(there[-3:])}" if there else "; there is none yet"
        raise AnswersError(f"--resume {wanted}: is no run in {options.out_dir}{listed}")
    return str(wanted)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # an interrupted run does not wait for the answers that are still under way
