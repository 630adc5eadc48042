"""Turns a matplotlib figure into SVG that lives in a page: themed by its style sheet, with words for the pointer."""

from __future__ import annotations

import contextlib
import html
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from tools.report_looks import GRID, INK, MUTED, with_css_colours

WIDTH_PT, HEIGHT_PT, RIGHT_PT = 480.0, 270.0, 12.0

Points = Mapping[str, Mapping[int, float]]  # series label -> {tokens: value}

DPI = 72  # SVG points, so that sizes here are those of the viewBox
STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and is set in the page's font
    "svg.image_inline": True,
    "text.parse_math": False,  # names come from files: a $ in one is no formula
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titley": 1.0,  # else each draw measures all ticks to find room for a title
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.color": GRID,
    "ytick.labelcolor": MUTED,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "text.color": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
_PROLOG = re.compile(r"^.*?(?=<svg)", re.DOTALL)
# What a page does not need: who drew it, a style sheet that would hold for all of the page, fonts (it has its own),
# turns by nothing; then white space, and digits below a hundredth of a point.
_NEEDLESS = re.compile(
    r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>|font-family: [^;\"]*; |"
    r' transform="rotate\(-0 [^\"]*\"|<g id="[^\"]*"/>',
    re.DOTALL,
)
_SPACE = re.compile(r"(?<=>)\s+(?=<)|\s+(?=\")")
_DIGITS = re.compile(r"(\.\d\d)\d+")
_INSIDE = re.compile(r"<[^>]*>")
_SIZE = re.compile(r'<svg ([^>]*?)width="[\d.]+pt" height="[\d.]+pt"([^>]*)>|<svg ([^>]*)>')
_MARK = re.compile(r'<g id="([^"]*)">|<use ')


@dataclass(frozen=True)
class Drawing:
    """A plot on the page: `svg` is an element, `note` what a reader must know beside it."""

    title: str
    svg: str
    note: str = ""


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Figures here look like the page. A letter that the font lacks is no news: the browser sets the text."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield


def new_figure(width_pt: float, height_pt: float) -> Figure:
    figure = Figure(figsize=(width_pt / DPI, height_pt / DPI), dpi=DPI)
    FigureCanvasSVG(figure)
    return figure


def fixed_ticks(axis: Any, places: Sequence[float], labels: Sequence[str]) -> None:
    """Exactly these ticks; looking for pretty ones is most of the time that matplotlib takes for a small plot."""
    axis.set_major_locator(FixedLocator(places))
    axis.set_major_formatter(FixedFormatter(labels))
    axis.set_minor_locator(NullLocator())


def inline(figure: Figure, salt: str, label: str, tips: Mapping[str, Sequence[str]], classes: Mapping[str, str]) -> str:
    """The figure as an <svg> element.

    `salt` keeps the ids of different figures apart. `tips`: words for the markers (or the one shape) of the artist with
    that gid. `classes`: attributes for that artist's group.
    """
    out = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": salt}):
        figure.savefig(out, format="svg", dpi=DPI)
    text = _INSIDE.sub(_rounded, _SPACE.sub("", _NEEDLESS.sub("", _PROLOG.sub("", out.getvalue()))))
    words = html.escape(label, quote=True)
    text = _SIZE.sub(lambda m: f'<svg {m[1] or m[3] or ""}{m[2] or ""} role="img" aria-label="{words}">', text, count=1)
    return with_css_colours(_with_words(text, tips, classes)).strip()


def _rounded(element: re.Match[str]) -> str:
    """Shorter digits and no line breaks within an element; the texts between elements stay as they are."""
    return " ".join(_DIGITS.sub(r"\1", element[0]).split())


def _with_words(svg: str, tips: Mapping[str, Sequence[str]], classes: Mapping[str, str]) -> str:
    """Words go into data-tip; matplotlib's own ids, the same in every figure, go."""
    told: Iterator[str] = iter(())

    def replace(match: re.Match[str]) -> str:
        nonlocal told
        gid = match[1]
        if gid is None:
            tip = next(told, None)
            return "<use " if tip is None else f'<use data-tip="{html.escape(tip, quote=True)}" '
        told = iter(tips.get(gid, ()))
        extra = f" {classes[gid]}" if gid in classes else ""
        if gid.startswith("bar"):
            extra += f' data-tip="{html.escape(next(told, ""), quote=True)}"'
        return f"<g{extra}>"

    return _MARK.sub(replace, svg)
