"""Parsers: each turns the text of one knob into a checked value, or raises ValueError with a sentence that helps.

A parser takes the stripped, non-empty text and the folder that a relative path starts from (the caller's).
Standard library only.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from lib.routing_spec import canonical, parse_routing

Parser = Callable[[str, Path], Any]

SECTIONS = ("ref", "vllm_split", "vllm_mega", "fi_mega", "comm")
SECTION_ALIASES = {"split": "vllm_split"}
ALL = "all"
STAMP = r"[0-9]{8}T[0-9]{6}Z(-[0-9]+)?"
INT32_MAX = 2**31 - 1
HIDDEN_MULTIPLE = 16  # a bf16 row of 16 elements is 32 bytes, the widest aligned load; libraries ask for more
DID_YOU_MEAN_CUTOFF = 0.6
MOST_SECONDS = 10_000_000  # 116 days; process groups count milliseconds in 32 bits beyond twice that
SHOWN_CHARACTERS = 80
UNTIMED = "none"  # the value of TIMING and MEGA_TIMING that checks only
OBJECT_EXAMPLE = 'give an object like {"flag_batch": 4}, or auto, or leave it unset'


@dataclass(frozen=True)
class MachineFacts:
    """What defaults and limits depend on. `gpu_count` counts this machine's GPUs before CUDA_VISIBLE_DEVICES.

    `local_world_size` is set under an outer launcher that started one task a GPU, else None. `nodes` and `node_rank`
    are an outer launcher's, `nics` this node's RDMA devices.
    """

    gpu_count: int
    sm: tuple[int, int] | None = None
    local_world_size: int | None = None
    nodes: int = 1
    node_rank: int = 0
    nics: tuple[str, ...] = ()


def shown(text: str) -> str:
    """The text of a knob of ours as a message may carry it: one line, printable, not endless."""
    plain = text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
    return plain if len(plain) <= SHOWN_CHARACTERS else plain[: SHOWN_CHARACTERS - 3] + "..."


def or_list(items: Sequence[object]) -> str:
    """1, 2 or 4"""
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def plain(error: OSError | RecursionError) -> str:
    """What went wrong, without the path or the depth that Python puts behind it."""
    return str(error.strerror) if isinstance(error, OSError) else "nested too deep"


def words(text: str) -> tuple[str, ...]:
    """Items of a space- or comma-separated list, duplicates dropped, order kept. ValueError if there is none."""
    found = tuple(dict.fromkeys(text.replace(",", " ").split()))
    if not found:
        raise ValueError("names nothing; list values separated by spaces or commas")
    return found


def did_you_mean(word: str, choices: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, choices, n=1, cutoff=DID_YOU_MEAN_CUTOFF)
    return f"; did you mean {near[0]}?" if near else ""


def _whole(word: str, low: int | None, high: int) -> int:
    limits = "" if low is None else f" {low}..{high}" if high < INT32_MAX else f" >= {low}"
    must = f"must be a whole number{limits}"
    if not re.fullmatch(r"[+-]?[0-9]{1,12}", word):
        raise ValueError(f"{must}, not '{shown(word)}'")
    value = int(word)
    if low is not None and value < low:
        raise ValueError(must)
    if value > high:
        raise ValueError(must if high < INT32_MAX else f"must be at most {high}")
    return value


def integer(low: int | None = None, high: int = INT32_MAX) -> Parser:
    return lambda text, base: _whole(text, low, high)


def integers(low: int) -> Parser:
    """A list of whole numbers; the message names the one that is wrong."""
    return lambda text, base: tuple(dict.fromkeys(_whole(word, low, INT32_MAX) for word in words(text)))


def width(text: str, base: Path) -> int:
    """A row width in elements."""
    value = _whole(text, HIDDEN_MULTIPLE, INT32_MAX)
    if value % HIDDEN_MULTIPLE:
        below = value - value % HIDDEN_MULTIPLE
        raise ValueError(f"must be a multiple of {HIDDEN_MULTIPLE}; {below} or {below + HIDDEN_MULTIPLE} work")
    return value


def sweep_points(text: str, base: Path) -> tuple[int, ...]:
    """Tokens per rank of each point; empty for `auto`, which SEQ_LEN_MIN and SEQ_LEN_MAX resolve."""
    if text == "auto":
        return ()
    try:
        points: tuple[int, ...] = integers(0)(text, base)
    except ValueError as error:
        raise ValueError(f"{error}; list tokens per rank, or auto") from error
    return points


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    return tuple(1 << bit for bit in range(high.bit_length()) if low <= 1 << bit <= high)


def seconds(text: str, base: Path) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and 0 < value <= MOST_SECONDS):
        raise ValueError(f"must be a number of seconds greater than 0, at most {MOST_SECONDS}")
    return value


def flag(text: str, base: Path) -> bool:
    if text not in ("0", "1"):
        raise ValueError("must be 0 or 1")
    return text == "1"


def anything(text: str, base: Path) -> bool:
    """Set is all that counts, so the value is dropped here."""
    return True


def _unknown(wrong: Sequence[str], choices: Sequence[str]) -> NoReturn:
    named = "; ".join(f"there is no '{shown(word)}'{did_you_mean(word, choices)}" for word in wrong)
    raise ValueError(f"{named} (choose from: {' '.join(choices)})")


def choice(*choices: str) -> Parser:
    def parse(text: str, base: Path) -> str:
        if text not in choices:
            _unknown([text], choices)
        return text

    return parse


def some_of(*choices: str) -> Parser:
    """A list of one or more of the choices."""

    def parse(text: str, base: Path) -> tuple[str, ...]:
        wrong = [word for word in words(text) if word not in choices]
        if wrong:
            _unknown(wrong, choices)
        return words(text)

    return parse


def section_list(text: str, base: Path) -> tuple[str, ...]:
    """Section names without aliases; ("all",) if `all` is among them."""
    named = some_of(*SECTIONS, *SECTION_ALIASES, ALL)(text, base)
    return (ALL,) if ALL in named else tuple(dict.fromkeys(SECTION_ALIASES.get(name, name) for name in named))


def auto_or_json_object(text: str, base: Path) -> str | dict[str, Any]:
    twice: list[str] = []  # of the two values one would be lost without a word

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    def named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return dict(pairs)

    if text == "auto":
        return text
    try:
        value = json.loads(text, parse_constant=refuse, object_pairs_hook=named_once)
    except ValueError as error:
        raise ValueError(f"is not JSON ({error}); {OBJECT_EXAMPLE}") from error
    if not isinstance(value, dict):
        raise ValueError(f"must be an object; {OBJECT_EXAMPLE}")
    if twice:
        raise ValueError(f"names '{shown(twice[0])}' twice; name it once")
    return value


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must not hold line breaks or other unprintable characters")
    return text


def _absolute(text: str, base: Path) -> Path:
    return Path(os.path.normpath(base / _one_line(text)))  # not resolve(): a venv's python is a symlink


def interpreter(text: str, base: Path) -> str:
    """Absolute path of an executable, given as a path or as a command on PATH. What it imports is checked later."""
    command = str(_absolute(text, base)) if "/" in text else _one_line(text)
    found = shutil.which(command)
    if found is None:
        why = "is not executable" if Path(command).is_file() else "no such interpreter"
        raise ValueError(f"{why}; give the path or the command of a Python >= 3.10, or leave it unset")
    return str(_absolute(found, base))


def any_path(text: str, base: Path) -> str:
    """Absolute path. Whether it can be used is told by who uses it, who may have an exit code of its own for that."""
    return str(_absolute(text, base))


def word_or_file(*choices: str) -> Parser:
    def parse(text: str, base: Path) -> str:
        if text in choices:
            return text
        if not _absolute(text, base).is_file():
            raise ValueError(f"must be {' or '.join(choices)}, or an existing file")
        return str(_absolute(text, base))

    return parse


def folder(text: str, base: Path) -> str:
    """Absolute path of a folder that exists or can be made later; whether it can be written is told by writing."""
    path = _absolute(text, base)
    if path.exists() and not path.is_dir():
        raise ValueError("is not a folder; give a folder, or leave it unset")
    return str(path)


def routing(text: str, base: Path) -> str:
    """Canonical text of a routing; a relative file starts from the caller's folder."""
    spec = parse_routing(_one_line(text))
    return canonical(replace(spec, path=str(_absolute(spec.path, base))) if spec.path else spec)


def pattern(regex: str, must: str) -> Parser:
    def parse(text: str, base: Path) -> str:
        if not re.fullmatch(regex, text, re.ASCII):
            raise ValueError(must)
        return text

    return parse


host = pattern(r"\S+", "must be a host name or an address")
nics = pattern(r"\^?[\w.:-]+(,[\w.:-]+)*", "must be names separated by commas, ^ in front to exclude")


def render(value: object) -> str:
    """The text that parses to the value again."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    return str(value)
