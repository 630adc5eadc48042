"""Which code made a row: the commit for people, a hash of the sources for the resume key."""

from __future__ import annotations

import hashlib
import subprocess
from functools import cache
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parent.parent
GIT_TIMEOUT_S = 10


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(REPO_ROOT), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


@cache
def git_label() -> str:
    """`g<commit>`, with a `+` if the tree differs from it; outside a git checkout the sources' hash, `s<hash>`."""
    commit = _git("rev-parse", "--short=8", "HEAD")
    if commit is None:
        return source_hash()
    return f"g{commit}" + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def source_hash() -> str:
    """`s` + hash of bench/ and lib/ at the first call: what a resumed run must share with the run that it continues."""
    return _first()[0]


def changed_sources() -> bool:
    """Do bench/ and lib/ on disk differ from what source_hash() saw? A touched file with the same content does not."""
    code, stats = _first()
    try:
        return _stats() != stats and _hash(source_files()) != code
    except OSError:  # a file went away between listing and reading it
        return True


@cache
def _first() -> tuple[str, dict[Path, tuple[int, int]]]:
    stats = _stats()  # before the reading: what is written meanwhile shows later
    return _hash(source_files()), stats


def source_files() -> list[Path]:
    return sorted(path for folder in ("bench", "lib") for path in (REPO_ROOT / folder).rglob("*.py"))


def _stats() -> dict[Path, tuple[int, int]]:
    """Size and time of each source."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in source_files()}


def _hash(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        digest.update(str(path.relative_to(REPO_ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return f"s{digest.hexdigest()}"
