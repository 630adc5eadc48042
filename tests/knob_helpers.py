"""What the tests of the knobs share: pretended machines, and knobs parsed from keyword arguments."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from lib.knobs import KnobErrors, Knobs, MachineFacts, parse_knobs

CPU = MachineFacts(gpu_count=0)
HOPPER = MachineFacts(gpu_count=8, sm=(9, 0))
BLACKWELL = MachineFacts(gpu_count=8, sm=(10, 0))
SECRET = "hunter2-do-not-print"


def parsed(facts: MachineFacts = CPU, /, **env: str) -> Knobs:
    return parse_knobs(env, facts)


def swept(facts: MachineFacts = CPU, /, **env: str) -> Knobs:
    return parse_knobs(env, facts, sweep=True)


def errors(facts: MachineFacts = CPU, /, sweep: str = "", **env: str) -> list[str]:
    with pytest.raises(KnobErrors) as caught:
        parse_knobs(env, facts, sweep=bool(sweep))
    return caught.value.errors


def error(facts: MachineFacts = CPU, /, **env: str) -> str:
    """The one error of these knobs; `sweep="1"` reads them as the points of a sweep."""
    (found,) = errors(facts, **env)
    return found


def write_routing(path: Path, world: int, tokens: int, topk: int) -> None:
    """An int32 .npy file of distinct experts, [world, tokens, topk]."""
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({world}, {tokens}, {topk}), }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    ids = list(range(topk)) * (world * tokens)
    body = struct.pack(f"<{len(ids)}i", *ids)
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + body)
