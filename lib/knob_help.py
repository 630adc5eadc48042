"""The text of `./run.sh --help` and of the README's knob table, both made from the table in lib/knobs.py."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator

from lib.knobs import KNOBS, Knob

HELP_COLUMNS = 110
INDENT = " " * 6

USAGE = """\
Measures Mixture-of-Experts expert parallelism: one process per GPU, DP = EP = number of GPUs, TP = 1.

usage
  [KNOB=value ...] ./run.sh [--plan | --help]         one row per variant at TOKENS tokens per rank
  [KNOB=value ...] ./run_sweep.sh [--plan | --help]   the same variants over SEQ_LENS
  [KNOB=value ...] ./nightly.sh [--help]              that sweep in several starts, against the accepted baseline

examples
  ./run.sh
  SECTION=ref TOKENS=64 ./run.sh
  SECTION=ref SEQ_LENS="1 8 64" ./run_sweep.sh
  SECTION=comm COMM_LIST=torch GPUS=2 ./run.sh --plan"""

EXIT_CODES: tuple[tuple[int, str], ...] = (
    (0, "every runnable row is ok, and at least one ran"),
    (1, "a row failed, is wrong or timed out"),
    (2, "usage; an interpreter that is absent or lacks torch or numpy; an OUT_DIR that can't be written at the start"),
    (3, "a row is red, nothing could be judged, or the baseline is missing (nightly, compare)"),
    (4, "set-up failed, or nothing could run here"),
    (75, "another run holds the lock"),
    (130, "interrupted"),
)


def _groups() -> Iterator[tuple[str, list[Knob]]]:
    for group, knobs in itertools.groupby(KNOBS, key=lambda knob: knob.group):
        yield group, list(knobs)


def help_text() -> str:
    """Usage, exit codes and every knob with its default."""
    lines = [USAGE, "", "exit codes", *(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES), ""]
    lines.append("knobs: environment variables; unset or empty = default, lists by spaces or commas")
    for group, knobs in _groups():
        lines += ["", f"  {group}"]
        for knob in knobs:
            lines.append(f"    {knob.name} [{knob.default}]")
            lines += textwrap.wrap(knob.help, HELP_COLUMNS, initial_indent=INDENT, subsequent_indent=INDENT)
    return "\n".join(lines)


def markdown_table() -> str:
    """One markdown table, a bold line a group."""
    lines = ["| knob | default | meaning |", "|---|---|---|"]
    for group, knobs in _groups():
        lines.append(f"| **{group}** | | |")
        lines += [f"| `{knob.name}` | {knob.default} | {knob.help} |" for knob in knobs]
    return "\n".join(lines)
