"""GSM8K through an installed lm-evaluation-harness: it asks and scores, the pairing and the verdict are ours."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

from lib.talk import say
from tools.e2e_client import POLL_S, Endpoint
from tools.e2e_verdict import judged

TASK, FILE_TASK = "gsm8k", "gsm8k_file"
SAMPLES = "samples_gsm8k_*.jsonl"
FILTERS = {"strict": "strict-match", "flexible": "flexible-extract"}  # of its gsm8k task
MODELS = {"completions": "local-completions", "chat": "local-chat-completions"}
DONE = "done"
UNTOLD = "lm_eval does not tell which answers --max-tokens cut off"
Rights = dict[str, dict[int, bool]]  # {strict, flexible: {question: right}}
PATHS = {"completions": "completions", "chat": "chat/completions"}


class InterruptedRunError(Exception):
    """By the person; what one side answered to its end is kept."""


class EndedError(Exception):
    """One sentence: lm_eval did not come to its end."""


def installed() -> bool:
    return importlib.util.find_spec("lm_eval") is not None


def run_lm_eval(options: Namespace, sides: Mapping[str, Endpoint], folder: Path, stopped: Event) -> dict[str, Any]:
    """Both sides one after the other. Raises EndedError or InterruptedRunError;
    a side that was not done is then asked anew.
    """
    found: dict[str, Rights] = {}
    titles: dict[int, str] = {}
    for name, endpoint in sides.items():
        its = folder / f"lm_eval_{name}"
        if not (its / DONE).exists():
            shutil.rmtree(its, ignore_errors=True)  # samples of a run that was cut short
            ask_side(options, endpoint, its, stopped)
            (its / DONE).touch()
        found[name], asked = samples(its)
        titles |= asked
    return verdict(options, sides, found, titles)


def ask_side(options: Namespace, endpoint: Endpoint, folder: Path, stopped: Event) -> None:
    folder.mkdir(parents=True)
    words = {
        "model": endpoint.model,
        "base_url": f"{endpoint.url.rstrip('/')}/{PATHS[options.api]}",
        "num_concurrent": options.concurrency,
        "max_retries": options.tries,
        "timeout": options.timeout,
        "max_gen_toks": options.max_tokens,
        "tokenized_requests": False,
        "tokenizer_backend": "none",  # text is sent, and a served model's name need not be a tokenizer's
    }
    model_args = ",".join(f"{name}={value}" for name, value in words.items())
    command = [sys.executable, "-m", "lm_eval", "--model", MODELS[options.api], "--model_args", model_args]
    shots = options.shots if options.train or not options.questions else 0  # not from the questions that are asked
    command += [*task_words(options, folder), "--limit", str(options.count), "--num_fewshot", str(shots)]
    command += ["--log_samples", "--output_path", str(folder)]
    command += ["--apply_chat_template"] if options.api == "chat" else []
    log = folder / "lm_eval.log"
    say(f"e2e_gate: {' '.join(command)} (its words: {log})")
    environment = os.environ | ({"OPENAI_API_KEY": endpoint.key} if endpoint.key else {})
    with log.open("w") as said, subprocess.Popen(command, stdout=said, stderr=said, env=environment) as process:
        while process.poll() is None:
            if stopped.wait(POLL_S):
                process.terminate()
                raise InterruptedRunError
    if process.returncode != 0:
        lines = log.read_text(errors="replace").strip().splitlines()
        last = lines[-1].strip() if lines else "it said nothing"
        raise EndedError(f"--harness lm_eval: ended with {process.returncode}: {last} (all of it: {log})")


def task_words(options: Namespace, folder: Path) -> list[str]:
    """Its own task, with its data from the Hub; with --questions the same task over that file."""
    if options.questions is None:
        return ["--tasks", TASK]
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        return ["--tasks", TASK]  # it will say itself that it is not there
    theirs = Path(next(iter(spec.submodule_search_locations)), "tasks", TASK, f"{TASK}.yaml")
    files = {"test": str(options.questions.resolve()), "train": str((options.train or options.questions).resolve())}
    data = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    task = {"include": str(theirs), "task": FILE_TASK, **data}
    (folder / f"{FILE_TASK}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return ["--include_path", str(folder), "--tasks", FILE_TASK]


def samples(folder: Path) -> tuple[Rights, dict[int, str]]:
    """{filter: {question: right}} of the samples that it logged, and the questions' texts."""
    found: Rights = {name: {} for name in FILTERS}
    titles: dict[int, str] = {}
    for path in sorted(folder.rglob(SAMPLES)):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            number = int(record["doc_id"])
            titles[number] = str(record["doc"]["question"])
            for name, its in FILTERS.items():
                if record["filter"] == its:
                    found[name][number] = bool(record["exact_match"])
    if not any(found.values()):
        raise EndedError(f"--harness lm_eval: {folder}: it logged no samples of {TASK}")
    return found, titles


def verdict(
    options: Namespace, sides: Mapping[str, Endpoint], found: Mapping[str, Rights], titles: Mapping[int, str]
) -> dict[str, Any]:
    chosen = [found[name][options.extract] for name in sides]
    numbers = sorted(chosen[0].keys() & chosen[1].keys())
    if not numbers or chosen[0].keys() != chosen[1].keys():
        raise EndedError("--harness lm_eval: its two runs did not answer the same questions; begin a run of its own")
    rights = [[side[number] for number in numbers] for side in chosen]
    made = judged(rights, options.margin, [titles[number] for number in numbers])
    for name, endpoint in sides.items():
        shares = {its: sum(found[name][its].values()) / len(numbers) for its in FILTERS}
        made[name] = {"source": endpoint.url, "model": endpoint.model, "answers": len(numbers)} | shares
    return made | {"extract": options.extract, "harness": "lm_eval", "notices": [*made["notices"], UNTOLD]}
