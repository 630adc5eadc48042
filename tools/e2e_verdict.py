"""The gate's verdict on two sets of answers: what is compared, what is said, and the JSON that the report reads."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.e2e_agreement import agreements, told
from tools.e2e_answers import Record, Task, cut_off
from tools.e2e_score import CONFIDENCE, EXTRACT, Paired, chance, interval, paired

SCHEMA = 1
FLIPS_SHOWN, TITLE_SHOWN = 10, 70
FLOOR = 0.1  # a reference that has less right can't be told from guessing, so nothing could get worse
CUT_SHARE_TOLD = 0.02  # of answers that max_tokens ended: from here the figures are of the limit, not of the model


@dataclass(frozen=True)
class Side:
    """One side's answers, by question."""

    source: str
    model: str
    answers: Mapping[int, Record]

    def texts(self, count: int) -> list[str]:
        return [str(self.answers[number]["text"]) for number in range(count)]


def gsm8k_verdict(task: Task, reference: Side, candidate: Side, options: Namespace) -> dict[str, Any]:
    count = len(task.prompts)
    right = {
        name: [
            [extract(text) == wanted for text, wanted in zip(side.texts(count), task.wanted, strict=True)]
            for side in (reference, candidate)
        ]
        for name, extract in EXTRACT.items()
    }
    verdict = judged(right[options.extract], options.margin, task.titles)
    for place, (name, side) in enumerate((("reference", reference), ("candidate", candidate))):
        accuracy = {extract: sum(rights[place]) / count for extract, rights in right.items()}
        verdict[name] = about(side, count) | accuracy
    return verdict | {"extract": options.extract, "notices": verdict["notices"] + cut_notices(verdict)}


def judged(right: Sequence[Sequence[bool]], margin: float, titles: Sequence[str]) -> dict[str, Any]:
    """`right`: of the reference and of the candidate, a flag a question."""
    pair = paired(*right)
    low, high = interval(pair)
    half = (high - low) / 2
    red = pair.difference < -margin - 1e-9 or pair.reference < FLOOR
    notices = []
    if half > margin:
        resolved = f"{pair.questions} questions tell differences of {half:.3f} from chance"
        notices.append(f"{resolved}, not of {margin:g}: ask more (--count)")
    return {
        "mode": "gsm8k",
        "red": red,
        "line": gsm8k_line(pair, (low, high), margin, red),
        "questions": pair.questions,
        "difference": pair.difference,
        "interval": [low, high],
        "confidence": CONFIDENCE,
        "margin": margin,
        "chance": chance(pair),
        "flips": {
            "lost": flips(right[0], right[1], titles),
            "won": flips(right[1], right[0], titles),
        },
        "notices": notices,
    }


def gsm8k_line(pair: Paired, limits: tuple[float, float], margin: float, red: bool) -> str:
    shares = f"{pair.candidate:.3f} right, the reference {pair.reference:.3f}"
    difference = f"{pair.difference:+.3f} ({limits[0]:+.3f} to {limits[1]:+.3f} at {CONFIDENCE:.0%})"
    if pair.reference < FLOOR:
        about = f"the reference has {pair.reference:.3f} right, and below {FLOOR:g} nothing can be told"
        return f"FAIL: not judged: {about} ({pair.questions} questions); try --api chat, --train, or agreement"
    verdict = f"below the margin of {margin:g}" if red else f"within the margin of {margin:g}"
    return f"{'FAIL' if red else 'PASS'}: {shares}, {difference}, {verdict}, {pair.questions} questions"


def flips(before: Sequence[bool], after: Sequence[bool], titles: Sequence[str]) -> list[dict[str, Any]]:
    """Questions that `before` has right and `after` wrong."""
    numbers = [number for number, (one, other) in enumerate(zip(before, after, strict=True)) if one and not other]
    return [{"n": number, "question": titles[number] if number < len(titles) else ""} for number in numbers]


def agreement_verdict(task: Task, reference: Side, candidate: Side, options: Namespace) -> dict[str, Any]:
    given = [
        [(side.answers[number]["text"], side.answers[number]["tokens"]) for number in range(len(task.prompts))]
        for side in (reference, candidate)
    ]
    pairs = list(zip(*given, strict=True))
    found = agreements(pairs)
    figures = told(found)
    red = options.least is not None and figures["agreement"] < options.least
    word = "told" if options.least is None else "FAIL" if red else "PASS"
    first = figures["first_parted"]
    quarters = figures["parted_quartiles"]
    where = "" if first is None else f", the others part after {quarters[1]:g} (first: {first}"
    where += "" if first is None else f", quartiles: {quarters[0]:g} and {quarters[2]:g})"
    least = "" if options.least is None else f", asked {options.least:.1%}"
    line = (
        f"{word}: {figures['agreement']:.1%} of {figures['unit']}s agree{least}; "
        f"{figures['prompts']} prompts, {figures['whole']:.1%} of them to the end{where}"
    )
    parts = [{"n": number, "same": each.same, "longest": each.longest} for number, each in enumerate(found)]
    notices = [] if figures["unit"] == "token" else ["a server does not tell its tokens, so characters were compared"]
    sides = {"reference": about(reference, len(pairs)), "candidate": about(candidate, len(pairs))}
    shown = {
        "mode": "agreement",
        "red": red,
        "line": line,
        "prompts": parts,
        "least": options.least,
        "notices": notices,
    }
    return shown | {"figures": figures} | sides


def about(side: Side, count: int) -> dict[str, Any]:
    return {"source": side.source, "model": side.model, "cut_off": cut_off(dict(side.answers)), "answers": count}


def cut_notices(verdict: Mapping[str, Any]) -> list[str]:
    return [
        f"{verdict[name]['cut_off']} answers of the {name} were cut off: raise --max-tokens"
        for name in ("reference", "candidate")
        if verdict[name]["cut_off"] > CUT_SHARE_TOLD * verdict["questions"]
    ]


def lines_of(verdict: Mapping[str, Any]) -> list[str]:
    """What a person reads."""
    lines = [str(verdict["line"])]
    for name in ("reference", "candidate"):
        side = verdict.get(name) or {}
        accuracy = [f"{extract} {side[extract]:.3f}" for extract in EXTRACT if extract in side]
        cut = f", {side['cut_off']} cut off" if side.get("cut_off") else ""
        called = " ".join(filter(None, (side.get("name"), side.get("model") or side.get("source", ""))))
        figures = "  " + ", ".join(accuracy) if accuracy else ""
        lines.append(f"  {name}: {called}{figures}{cut}")
    for word, questions in (verdict.get("flips") or {}).items():
        lines.append(f"  {word}: {len(questions)}")
        lines += [f"    {each['n']:>5}  {_title(each['question'])}" for each in questions[:FLIPS_SHOWN]]
        if len(questions) > FLIPS_SHOWN:
            lines.append(f"    and {len(questions) - FLIPS_SHOWN} more in the JSON")
    return [*lines, *(f"  {notice}" for notice in verdict["notices"])]


def _title(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TITLE_SHOWN else line[: TITLE_SHOWN - 1] + "…"


def write_verdict(out_dir: Path, stamp: str, verdict: Mapping[str, Any]) -> Path:
    """e2e_<stamp>.json, whole or not at all."""
    path = out_dir / f"e2e_{stamp}.json"
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps({"schema": SCHEMA, "stamp": stamp, **verdict}, indent=1) + "\n")
    fresh.replace(path)
    return path
