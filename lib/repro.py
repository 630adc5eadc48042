"""What a row was asked for beyond its columns, read back from its repro line. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping

ASKED_TIMING = re.compile(r"\b(?:MEGA_)?TIMING=(\S+)")
# MEGA_KNOBS and the like, NIC, EXCLUDE_QUANT where it is on, ranks that share a GPU; what is checked or listed changes
# no figure.
OPTION = re.compile(
    r"(?:^| )((?:MEGA_(?!TIMING|LIST|ACC)[A-Z_]+|NIC|EXCLUDE_QUANT(?==1)|RANKS_PER_GPU(?!=1\b))=(?:'[^']*'|\S*))"
)


def asked_timing(row: Mapping[str, str]) -> str:
    """The timing that was wanted: a graph that could not be captured labels its row otherwise."""
    asked = ASKED_TIMING.search(row["repro"])
    return asked[1] if asked else row["timing"]


def options(row: Mapping[str, str]) -> str:
    text = row["repro"]
    if "MEGA_" not in text and "NIC=" not in text and "EXCLUDE_Q" not in text and "RANKS_PER" not in text:
        return ""  # most rows, of which there may be ten thousand
    return " ".join(OPTION.findall(text))
