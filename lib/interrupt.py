"""Ctrl-C and TERM in a coordinator: one interrupt, raised where no row is being saved. Standard library only."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


class Interrupted(BaseException):
    """Ctrl-C or TERM. Raised once; later ones are ignored, since what follows is only the tidying up."""


class Signals:
    """Where a row is being saved, a signal waits: else a row could be in one of its two files, or in both twice."""

    def __init__(self) -> None:
        self.holding = self.came = False

    def catch(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def ignore(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: object) -> None:
        self.ignore()
        self.came = True
        if not self.holding:
            raise Interrupted

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        came_before, self.holding = self.came, True
        try:
            yield
        finally:
            self.holding = False
        if self.came and not came_before:
            raise Interrupted


SIGNALS = Signals()
