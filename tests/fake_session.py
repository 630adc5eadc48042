"""What all fakes stand on: an honest session, and how a fake learns where it is and leaves words for the test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bench.backends.torch_a2a import TorchSession

CLOCKS = ("lib.timing", "lib.device_timing")
METHODS = ("e2e", "e2e_pipelined", "graph", "kernel")
FOLDER = "MOE_EP_FAKE_DIR"  # where fakes leave words for the test, and find the test's


def folder() -> Path:
    return Path(os.environ[FOLDER])


def in_timing(*methods: str) -> bool:
    """Whether a timing method (one of these) is on the stack: what a cheat would find out by counting calls."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_globals["__name__"] in CLOCKS and frame.f_code.co_name in (methods or METHODS):
            return True
    return False


class FakeSession(TorchSession):
    """Honest; the fakes below change one method each."""

    @property
    def rank(self) -> int:
        return self.engine.group.rank
