"""Sessions with a kernel profiler of their own, as a library's build may have: whole, broken on one rank, or absent."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from lib.contract import LibraryProfiler
from tests.fake_session import FakeSession
from tests.trace_files import v1_events, write


class HasAProfiler(FakeSession):
    """It records each call since `start` as one iteration of a v1 trace."""

    recorded = -1  # not started

    def call(self) -> None:
        super().call()
        self.recorded += self.recorded >= 0

    def library_profiler(self) -> LibraryProfiler | str:
        return LibraryProfiler(self._start, self._write)

    def _start(self) -> None:
        self.recorded = 0

    def _write(self, path: Path) -> None:
        write(path, v1_events(self.recorded))


class HasABrokenProfiler(HasAProfiler):
    def _write(self, path: Path) -> None:
        super()._write(path)
        if self.rank == 1:
            path.write_text(path.read_text()[:1000])


class DiesInItsProfiler(HasAProfiler):
    def _write(self, path: Path) -> None:
        super()._write(path)
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class BuiltWithoutProfiler(FakeSession):
    def library_profiler(self) -> LibraryProfiler | str:
        return "this build of the library has no profiler; build it with ENABLE_PROFILER=ON"
