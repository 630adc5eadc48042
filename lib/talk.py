"""Words to people: talk on stderr, results on stdout. Neither stream decides what becomes of a run."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence

NO_LETTER = "\N{REPLACEMENT CHARACTER}"
# Control characters, line separators, what turns the direction of writing, halves of surrogate pairs.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """A line with what is of somebody else's file: a terminal obeys control characters, no stream takes a surrogate."""
    return UNPRINTABLE.sub(NO_LETTER, text)


def say(text: str) -> None:
    """A line on stderr; one that is closed, full or gone is gone."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(_lines(text))
        sys.stderr.flush()


def show(lines: Sequence[str]) -> None:
    """Results, on stdout; `| head` may have seen enough, and a closed or full stdout is no reason to fail."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal that has no such letter gets a question mark
        sys.stdout.write(_lines("\n".join(lines)))
        sys.stdout.flush()
        return
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - else the interpreter tries once more as it ends


def _lines(text: str) -> str:
    """Tabs are the scripts' own: they stand between words for `env`."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n")) + "\n"
