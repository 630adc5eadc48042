"""GSM8K through an installed lm-evaluation-harness: it asks and scores, the pairing and the verdict are ours."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from lib.talk import say
from tools.e2e_answers import AnswersError
from tools.e2e_client import Endpoint, first_model
from tools.e2e_verdict import judged

TASK, FILE_TASK = "gsm8k", "gsm8k_file"
SAMPLES = "samples_gsm8k_*.jsonl"
FILTERS = {"strict": "strict-match", "flexible": "flexible-extract"}  # of its gsm8k task
MODELS = {"completions": "local-completions", "chat": "local-chat-completions"}
PATHS = {"completions": "completions", "chat": "chat/completions"}


def run_lm_eval(options: Namespace, stamp: str) -> dict[str, Any]:
    """Both sides one after the other. Raises AnswersError if it is not installed, or fails."""
    if options.mode != "gsm8k":
        raise AnswersError("--harness lm_eval: has no agreement mode; leave it out")
    found: dict[str, dict[str, dict[int, bool]]] = {}
    models: dict[str, str] = {}
    for name in ("reference", "candidate"):
        url = getattr(options, name)
        if not url.startswith(("http://", "https://")):
            raise AnswersError(f"--{name} {url}: --harness lm_eval asks servers only; give an address")
        models[name] = getattr(options, f"{name}_model") or first_model(Endpoint(url, "", timeout_s=options.timeout))
        folder = options.out_dir / f"e2e_{stamp}" / f"lm_eval_{name}"
        if not list(folder.rglob(SAMPLES)):
            ask_side(options, url, models[name], folder)
        found[name] = samples(folder)
    return verdict(options, found, models)


def ask_side(options: Namespace, url: str, model: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    address = f"{url.rstrip('/')}/{PATHS[options.api]}"
    words = f"model={model},base_url={address},num_concurrent={options.concurrency},max_retries={options.tries}"
    words += f",tokenized_requests=False,timeout={options.timeout}"
    command = [sys.executable, "-m", "lm_eval", "--model", MODELS[options.api], "--model_args", words]
    command += [*task_words(options, folder), "--limit", str(options.count), "--num_fewshot", str(options.shots)]
    command += ["--log_samples", "--output_path", str(folder)]
    command += ["--apply_chat_template"] if options.api == "chat" else []
    say(f"e2e_gate: {' '.join(command)}")
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or ["it said nothing"])[-1]
        remedy = f'get it by: {sys.executable} -m pip install "lm_eval[api]"; or leave --harness out'
        raise AnswersError(f"--harness lm_eval: ended with {answer.returncode}: {last}; {remedy}")


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


def samples(folder: Path) -> dict[str, dict[int, bool]]:
    """{filter: {question: right}} of the samples that it logged."""
    found: dict[str, dict[int, bool]] = {name: {} for name in FILTERS}
    for path in sorted(folder.rglob(SAMPLES)):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            for name, its in FILTERS.items():
                if record.get("filter") == its:
                    found[name][int(record["doc_id"])] = bool(record["exact_match"])
    if not any(found.values()):
        raise AnswersError(f"--harness lm_eval: {folder}: it logged no samples of {TASK}")
    return found


def verdict(options: Namespace, found: dict[str, dict[str, dict[int, bool]]], models: dict[str, str]) -> dict[str, Any]:
    chosen = [found[name][options.extract] for name in ("reference", "candidate")]
    numbers = sorted(chosen[0].keys() & chosen[1].keys())
    if not numbers or chosen[0].keys() != chosen[1].keys():
        raise AnswersError("--harness lm_eval: the two runs did not answer the same questions; use another --out-dir")
    made = judged([[side[number] for number in numbers] for side in chosen], options.margin, ())
    for name in ("reference", "candidate"):
        shares = {its: sum(rights.values()) / len(rights) for its, rights in found[name].items() if rights}
        made[name] = {"source": getattr(options, name), "model": models[name], "cut_off": 0, "answers": len(numbers)}
        made[name] |= shares
    return made | {"extract": options.extract, "harness": "lm_eval"}
