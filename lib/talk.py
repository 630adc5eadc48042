"""Words to people: talk on stderr, results on stdout. Neither stream decides what becomes of a run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence


def say(text: str) -> None:
    """A line on stderr; one that is closed, full or gone is gone."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def show(lines: Sequence[str]) -> None:
    """Results, on stdout; `| head` may have seen enough, and a closed or full stdout is no reason to fail."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
        return
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - else the interpreter tries once more as it ends
