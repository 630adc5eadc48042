"""What a row was asked for beyond its columns, read back from its repro line. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

ASKED_TIMING = re.compile(r"\b(?:MEGA_)?TIMING=(\S+)")
# MEGA_KNOBS and the like, NIC, EXCLUDE_QUANT where it is on, ranks that share a GPU; what is checked or listed changes
# no figure.
OPTION = re.compile(
    r"(?:^| )((?:MEGA_(?!TIMING|LIST|ACC)[A-Z_]+|NIC|EXCLUDE_QUANT(?==1)|RANKS_PER_GPU(?!=1\b))=(?:'[^']*'|\S*))"
)


def asked_timing(row: Mapping[str, str]) -> str:
    """The timing that was wanted: a graph that could not be captured labels its row otherwise."""
    return asked_of(row["repro"]) or row["timing"]


@lru_cache(maxsize=100_000)
def asked_of(text: str) -> str:
    asked = ASKED_TIMING.search(text)
    return asked[1] if asked else ""


def options(row: Mapping[str, str]) -> str:
    return options_of(row["repro"])


@lru_cache(maxsize=100_000)  # a row is asked several times, and rows of many nights have the same lines
def options_of(text: str) -> str:
    if "MEGA_" not in text and "NIC=" not in text and "EXCLUDE_Q" not in text and "RANKS_PER" not in text:
        return ""  # most rows, of which there may be ten thousand
    return " ".join(OPTION.findall(text))
