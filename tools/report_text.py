"""Figures and names as a reader sees them."""

from __future__ import annotations

import math


def figure_text(value: float) -> str:
    """Three digits that count, never an exponent."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def short(label: str, most: int = 22) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"
