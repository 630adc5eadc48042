"""What the tools share of their command lines."""

from __future__ import annotations

import argparse
from typing import NoReturn

from lib.rows import COLUMNS


class UsageError(Exception):
    """One sentence for whoever typed the command: the argument and what to give instead."""


class OneLineParser(argparse.ArgumentParser):
    """Raises UsageError with one sentence, where argparse would print its usage and leave."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def condition(text: str) -> tuple[str, str]:
    """COLUMN=VALUE, as --only takes it."""
    column, equals, value = text.partition("=")
    if not equals or column not in COLUMNS:
        raise argparse.ArgumentTypeError(f"{text} must be COLUMN=VALUE with a column of docs/columns.md")
    return column, value


def column(text: str) -> str:
    if text not in COLUMNS:
        raise argparse.ArgumentTypeError(f"{text} is no column of docs/columns.md")
    return text
