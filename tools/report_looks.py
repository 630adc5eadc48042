"""Colours, dashes and markers. A plot names a colour by a stand-in, and the page's style sheet decides what it is.

Hues are Okabe and Ito's (jfly.uni-koeln.de/color), their yellow exchanged for a wine that shows on white; a test holds
them apart for the three kinds of dichromats. Markers and dashes tell the same again without any colour.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HUES = 8
DASHES = ("", "5 2.5", "1.5 2", "7 2 1.5 2")
MARKERS = (("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"), ("P", "✚"), ("X", "✖"), ("*", "★"), ("<", "◀"))
PHASES = ("quant", "stage", "dispatch", "experts", "forward", "combine")

INK, MUTED, GRID, PEAK, PAPER = "#fd0001", "#fd0002", "#fd0003", "#fd0004", "#fd0005"
_NAMES = {INK: "ink", MUTED: "muted", GRID: "grid", PEAK: "peak", PAPER: "paper"}
_SERIES, _PHASE = "#fe00", "#fc00"
_STAND_IN = re.compile(r"#f[cde]00[0-9a-f]{2}")


@dataclass(frozen=True)
class Look:
    """How one series is drawn in every plot of a page. `sign` is the marker as a character, for legends."""

    number: int

    @property
    def colour(self) -> str:
        return f"{_SERIES}{self.number % HUES:02x}"

    @property
    def css(self) -> str:
        return f"var(--s{self.number % HUES})"

    @property
    def dash(self) -> str:
        """As SVG's stroke-dasharray; blank is solid."""
        return DASHES[self.number // HUES % len(DASHES)]

    @property
    def marker(self) -> str:
        return MARKERS[self.number % len(MARKERS)][0]

    @property
    def sign(self) -> str:
        return MARKERS[self.number % len(MARKERS)][1]


def phase_colour(phase: str) -> str:
    return f"{_PHASE}{PHASES.index(phase):02x}"


def phase_css(phase: str) -> str:
    return f"var(--p{PHASES.index(phase)})"


def with_css_colours(svg: str) -> str:
    """Put the style sheet's variables where a drawing has stand-ins."""
    return _STAND_IN.sub(_variable, svg)


def _variable(match: re.Match[str]) -> str:
    text = match[0]
    if name := _NAMES.get(text):
        return f"var(--{name})"
    kind = "s" if text.startswith(_SERIES) else "p"
    return f"var(--{kind}{int(text[-2:], 16)})"
