"""Draws an analyzed trace: one subplot an iteration, one row a lane, and what runs at the same time in black below.

From top to bottom of a subplot: the labels of the serial kernels, whose bars go through all lanes; the lanes; the true
intersection of the lanes, which is also shaded across them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lib.talk import printable
from tools.trace_analysis import Analysis
from tools.trace_looks import REST, looks
from tools.trace_names import short_name
from tools.trace_panel import EDGE_COLOUR, FONT, Panel, Scale, extent_of

WIDTH_IN, DPI = 16.0, 120
LEFT_IN, RIGHT_IN, HEAD_IN, TITLE_IN, AXIS_IN = 1.5, 0.3, 0.45, 0.36, 0.42
LEGEND_LINE_IN, LEGEND_COLUMNS, LEGEND_CHARS = 0.22, 5, 40
SHARED_SCALE_RATIO = 2.0  # iterations of more unequal length each get their own scale


def draw(analysis: Analysis, iterations: Sequence[int], out: Path) -> None:
    """Write the picture of these iterations, PNG or SVG by out's suffix. Raises OSError if it can't be written."""
    # names come from a file: a $ in one is no formula, and a letter that the font lacks is no news
    with rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        _figure(analysis, iterations).savefig(out, dpi=DPI)


def _figure(analysis: Analysis, iterations: Sequence[int]) -> Figure:
    extents = {iteration: extent_of(analysis, iteration) for iteration in iterations}
    longest = max(extents.values())
    shared = longest <= SHARED_SCALE_RATIO * min(extents.values())
    width_px = (WIDTH_IN - LEFT_IN - RIGHT_IN) * DPI
    style = looks(analysis)
    panels = []
    for iteration in iterations:
        scale = Scale(longest if shared else extents[iteration], width_px, DPI)
        panels.append(Panel(analysis, iteration, style, scale))
    used = {bar.name for iteration in iterations for bar in analysis.bars(iteration)}
    handles = [
        Patch(facecolor=look.colour, hatch=look.hatch, edgecolor=EDGE_COLOUR, linewidth=0.5, label=_told(name))
        for name, look in style.items()
        if name in used and look is not REST
    ]
    if any(style[name] is REST for name in used):
        handles.append(Patch(facecolor=REST.colour, label="all other kernels"))
    return _compose(analysis, panels, handles, shared)


def _told(name: str) -> str:
    told = name if len(name) <= LEGEND_CHARS else short_name(name)
    return f" {told}" if told.startswith("_") else told  # matplotlib leaves "_..." out of legends


def _compose(analysis: Analysis, panels: list[Panel], handles: list[Patch], shared: bool) -> Figure:
    """Panels below each other at their own heights: matplotlib's layouts would scale the text rows with the lanes."""
    legend_in = LEGEND_LINE_IN * -(-len(handles) // LEGEND_COLUMNS) + 0.3
    total_in = HEAD_IN + sum(TITLE_IN + panel.height_in + AXIS_IN for panel in panels) + legend_in
    figure = Figure(figsize=(WIDTH_IN, total_in), dpi=DPI)
    FigureCanvasAgg(figure)
    left, width = LEFT_IN / WIDTH_IN, (WIDTH_IN - LEFT_IN - RIGHT_IN) / WIDTH_IN
    figure.text(0.15 / WIDTH_IN, 1 - 0.12 / total_in, _heading(analysis, len(panels), shared), va="top", fontsize=12)
    top = total_in - HEAD_IN
    for panel in panels:
        bottom = top - TITLE_IN - panel.height_in
        panel.draw(figure.add_axes((left, bottom / total_in, width, panel.height_in / total_in)))
        top = bottom - AXIS_IN
    figure.axes[-1].set_xlabel("us since the start of the iteration", fontproperties=FONT, labelpad=2)
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(left, 0), ncols=LEGEND_COLUMNS, frameon=False, prop=FONT,
        handlelength=2.4, borderaxespad=0.3, borderpad=0,
    )  # fmt: skip
    return figure


def _heading(analysis: Analysis, drawn: int, shared: bool) -> str:
    count = len(analysis.windows.start_us)
    shown = f"{drawn} of {count} iterations" if drawn < count else f"{count} iterations"
    scales = "" if shared else ", each to its own scale"
    return f"{printable(analysis.spans.path.name)}: {analysis.spans.variant}, {shown}{scales}"
