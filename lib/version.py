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


@cache
def source_hash() -> str:
    """`s` + hash of bench/ and lib/: what a resumed run must share with the run that it continues."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in ("bench", "lib"):
        for path in sorted((REPO_ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(REPO_ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return f"s{digest.hexdigest()}"
