"""How far two greedy answers to one prompt agree, where there is no label: token by token, to where they part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Q: A farmer has 17 sheep and buys 5 more. How many has he now?\nA:",
    "Translate to German: The weather is nice today.\n",
    "List the first ten prime numbers:",
    "Once upon a time, in a village by the sea,",
    "SELECT name, COUNT(*) FROM orders",
    "The three laws of thermodynamics are:\n1.",
)


@dataclass(frozen=True)
class Agreement:
    """Of one prompt: how many tokens the two have in common from the start, and how many the longer one has.

    `unit` is `token`, or `character` where a server does not tell its tokens.
    """

    same: int
    longest: int
    unit: str

    @property
    def whole(self) -> bool:
        return self.same == self.longest


Given = tuple[str, Sequence[str] | None]  # an answer: its text, its tokens or None


def agreements(pairs: Sequence[tuple[Given, Given]]) -> list[Agreement]:
    """Of (reference, candidate): all by token, or all by character if any answer that is not empty has no tokens."""
    by_token = all(tokens or not text for pair in pairs for text, tokens in pair)
    return [agreement(*pair, by_token) for pair in pairs]


def agreement(reference: Given, candidate: Given, by_token: bool) -> Agreement:
    (text1, tokens1), (text2, tokens2) = reference, candidate
    first: Sequence[str] = (tokens1 or ()) if by_token else text1
    second: Sequence[str] = (tokens2 or ()) if by_token else text2
    same = next((place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), None)
    common = min(len(first), len(second)) if same is None else same
    return Agreement(common, max(len(first), len(second)), "token" if by_token else "character")


def told(found: Sequence[Agreement]) -> dict[str, Any]:
    """Shares of tokens and of whole answers that agree; where the others part (0 = at once): first and quartiles."""
    parted = [each.same for each in found if not each.whole]
    quarters = quantiles(parted, n=4, method="inclusive") if len(parted) > 1 else parted * 3
    longest = sum(each.longest for each in found)
    return {
        "prompts": len(found),
        "agreement": sum(each.same for each in found) / longest if longest else 1.0,
        "whole": sum(each.whole for each in found) / len(found),
        "parted": len(parted),
        "first_parted": min(parted) if parted else None,
        "parted_quartiles": quarters or None,
        "unit": found[0].unit,
    }
