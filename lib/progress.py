"""Progress on stderr: a bar with case, phase and time left on a terminal, else a line a case."""

from __future__ import annotations

import sys
from typing import Any

from lib.talk import say

try:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
except ImportError:  # other people's containers need not have it
    Console = None  # type: ignore[assignment,misc]


class Lines:
    """One line a case, for logs and pipes, and where rich is not installed."""

    def __init__(self, section: str, total: int, done: int) -> None:
        self.section, self.total, self.count = section, total, done

    def phase(self, name: str, phase: str) -> None:
        """A line a case is enough here."""

    def case(self, name: str, outcome: str) -> None:
        self.count += 1
        say(f"[{self.section} {self.count}/{self.total}] {name}: {outcome}")

    def skip(self) -> None:
        """A case that can't run here: the table at the end says why, once."""
        self.count += 1

    def note(self, text: str) -> None:
        say(f"[{self.section}] {text}")

    def close(self) -> None:
        """Nothing is drawn that would have to go."""


class Bar:
    """The same on a terminal."""

    def __init__(self, section: str, total: int, done: int) -> None:
        counts = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        columns = (TextColumn("{task.description}"), BarColumn(), *counts)
        self.progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self.section = section
        self.task: Any = self.progress.add_task(section, total=total, completed=done)
        self.progress.start()

    def phase(self, name: str, phase: str) -> None:
        self.progress.update(self.task, description=f"{self.section} {name} · {phase}")

    def case(self, name: str, outcome: str) -> None:
        self.progress.console.print(f"[{self.section}] {name}: {outcome}", markup=False, highlight=False)
        self.progress.advance(self.task)

    def skip(self) -> None:
        self.progress.advance(self.task)

    def note(self, text: str) -> None:
        self.progress.console.print(f"[{self.section}] {text}", markup=False, highlight=False)

    def close(self) -> None:
        self.progress.stop()


def make_progress(section: str, total: int, done: int) -> Lines | Bar:
    """`done`: cases that a resumed run has already."""
    if Console is not None and sys.stderr is not None and sys.stderr.isatty():
        return Bar(section, total, done)
    return Lines(section, total, done)
