"""The names of traces, whole or not yet. Standard library only: the coordinator tidies up after killed ranks."""

from __future__ import annotations

import contextlib
import glob
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lib.plan import Case

FRESH = ".new."  # in front of the name of a file that is not whole yet


def trace_name(rank: int | str, stamp: str, case: Case) -> str:
    """The file's name; the case's key at its end keeps the cases of a run apart, whatever they differ in."""
    words = (case.section, case.variant.name, case.variant.dispatch_dtype, f"T{case.problem.tokens}", case.timing)
    return f"trace_rank_{rank}_{stamp}_{'_'.join(filter(None, words))}_{case.key}.json"


class fresh:  # noqa: N801 - reads as `with fresh(path) as place`
    """A name beside `path` under which to write; the file takes its own name at the end, or goes on an error."""

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, path.with_name(f"{FRESH}{path.name}")

    def __enter__(self) -> Path:
        return self.place

    def __exit__(self, kind: object, error: object, where: object) -> None:
        if kind is None:
            self.place.replace(self.path)
        else:
            self.place.unlink(missing_ok=True)


def remove_unfinished(folder: Path, stamp: str, section: str) -> None:
    """Remove what ranks of this run were writing when they were killed. To be called when they are gone."""
    for path in folder.glob(f"{FRESH}trace_rank_*_{glob.escape(f'{stamp}_{section}')}_*.json"):
        with contextlib.suppress(OSError):  # a folder that went read-only decides nothing about the run
            path.unlink()
