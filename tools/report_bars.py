"""Bars: one number of tokens, phases stacked; and the small line of a case's history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tools.report_cases import LATENCY, Panel
from tools.report_history import History
from tools.report_looks import INK, MUTED, PEAK, PHASES, Look, phase_colour
from tools.report_svg import HEIGHT_PT, RIGHT_PT, WIDTH_PT, Drawing, Points, fixed_ticks, inline, new_figure
from tools.report_text import figure_text, short

PHASE_POINTS = 3  # numbers of tokens shown in the phases plot: the least, a middle one and the most
BAR_MOST_PT, BAR_LEAST_PT, BAR_HEAD_PT, BAR_FOOT_PT, BAR_GAP_PT = 36.0, 17.0, 24.0, 40.0, 14.0
LETTER_PT = 6.0  # of a label, wide enough for the fonts that browsers take
SPARK_WIDTH_PT, SPARK_HEIGHT_PT = 180.0, 34.0
SPARK_LEAST_SPAN = 0.10  # of the median: noise of 1 % must not look like a mountain range


def bars_plot(
    legs: Sequence[tuple[str, Points]],
    tokens: int,
    looks: Mapping[str, Look],
    salt: str,
    title: str,
    unit: str,
    ceiling: tuple[float, str] | None,
) -> Drawing | None:
    """At one number of tokens: a bar a series with its value, legs side by side on one scale."""
    labels = sorted({label for _, points in legs for label in points})
    layout = BarLayout(labels, len(legs))
    figure = new_figure(WIDTH_PT, layout.height_pt)
    tips: dict[str, list[str]] = {}
    classes: dict[str, str] = {}
    values = [by_tokens[tokens] for _, points in legs for by_tokens in points.values()]
    top = max([*values, ceiling[0] if ceiling else 0.0]) * 1.2  # room for the figures behind the bars
    for column, (leg, points) in enumerate(legs):
        axes = figure.add_axes(layout.box(column))
        axes.set_title(leg, loc="left")
        for place, label in enumerate(labels):
            value = points.get(label, {}).get(tokens)
            if value is None:
                continue
            gid = f"bar{len(tips)}"
            axes.barh(place, value, height=0.62, color=looks[label].colour, gid=gid, linewidth=0)
            axes.annotate(
                figure_text(value), (value, place), (4, 0), textcoords="offset points", va="center", fontsize=9
            )
            tips[gid] = [f"{label}, {tokens} tokens: {figure_text(value)} {unit}"]
            classes[gid] = f'class="series" data-series="{looks[label].number}"'
        if ceiling:
            axes.axvline(ceiling[0], color=PEAK, linewidth=1.4, linestyle=(0, (6, 3)))
            axes.annotate(
                ceiling[1], (ceiling[0], 1), (-3, 3), xycoords=("data", "axes fraction"), textcoords="offset points",
                ha="right", fontsize=9, color=PEAK,
            )  # fmt: skip
        layout.finish(axes, column, top, unit)
    return Drawing(title, inline(figure, salt, title, tips, classes))


class BarLayout:
    """Columns of horizontal bars that share their names, at the left."""

    def __init__(self, labels: Sequence[str], columns: int) -> None:
        self.labels, self.columns = labels, columns
        room = HEIGHT_PT - BAR_HEAD_PT - BAR_FOOT_PT
        self.height_pt = HEIGHT_PT - room + len(labels) * min(max(room / len(labels), BAR_LEAST_PT), BAR_MOST_PT)
        self.left_pt = 10 + LETTER_PT * max(len(short(label)) for label in labels)
        self.width_pt = (WIDTH_PT - self.left_pt - RIGHT_PT - BAR_GAP_PT * (columns - 1)) / columns

    def box(self, column: int) -> tuple[float, float, float, float]:
        left = self.left_pt + column * (self.width_pt + BAR_GAP_PT)
        height = 1 - (BAR_HEAD_PT + BAR_FOOT_PT) / self.height_pt
        return left / WIDTH_PT, BAR_FOOT_PT / self.height_pt, self.width_pt / WIDTH_PT, height

    def finish(self, axes: Axes, column: int, top: float, unit: str) -> None:
        """Scale from 0 to top, names at the left column only."""
        axes.set_ylim(len(self.labels) - 0.4, -0.6)
        axes.set_xlim(0, top or 1.0)
        ticks = [float(tick) for tick in MaxNLocator(3).tick_values(0, top) if 0 <= tick <= top]
        fixed_ticks(axes.xaxis, ticks, [figure_text(tick) for tick in ticks])
        fixed_ticks(axes.yaxis, range(len(self.labels)), [short(label) for label in self.labels])
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0, labelleft=column == 0)
        axes.set_xlabel(unit)


def phases_plot(panel: Panel, salt: str) -> Drawing | None:
    """Phases stacked, a bar a series, at up to PHASE_POINTS numbers of tokens, each to its own scale; p50 as a mark."""
    phases = {phase: panel.points(f"{phase}_us") for phase in PHASES}
    labels = [label for label in panel.series if any(label in points for points in phases.values())]
    tokens = sorted({tokens for points in phases.values() for values in points.values() for tokens in values})
    if not labels:
        return None
    chosen = sorted({tokens[0], tokens[len(tokens) // 2], tokens[-1]})[:PHASE_POINTS]
    layout = BarLayout(labels, len(chosen))
    figure = new_figure(WIDTH_PT, layout.height_pt)
    tips: dict[str, list[str]] = {}
    totals = panel.points(LATENCY)
    for column, at in enumerate(chosen):
        axes = figure.add_axes(layout.box(column))
        axes.set_title(f"{at} tokens")
        widest = _draw_phases(axes, at, labels, phases, totals, tips)
        layout.finish(axes, column, widest * 1.06, "us")
    title = f"Phases, {panel.label}"
    return Drawing(title, inline(figure, salt, title, tips, {}))


def _draw_phases(
    axes: Axes,
    tokens: int,
    labels: Sequence[str],
    phases: Mapping[str, Points],
    totals: Points,
    tips: dict[str, list[str]],
) -> float:
    """Returns how far the longest bar or mark reaches."""
    widest = 0.0
    for place, label in enumerate(labels):
        start = 0.0
        for phase in PHASES:
            value = phases[phase].get(label, {}).get(tokens)
            if value is None:
                continue
            gid = f"bar{len(tips)}"
            axes.barh(place, value, left=start, height=0.62, color=phase_colour(phase), gid=gid, linewidth=0)
            tips[gid] = [f"{label}, {tokens} tokens, {phase}: {figure_text(value)} us"]
            start += value
        total = totals.get(label, {}).get(tokens)
        if total is not None:
            axes.plot([total, total], [place - 0.42, place + 0.42], color=INK, linewidth=1.6, solid_capstyle="butt")
        widest = max(widest, start, total or 0.0)
    return widest


def spark(past: History, salt: str) -> str:
    """The history of one case as a small line: change points are upright lines, the newest point is a dot."""
    figure = new_figure(SPARK_WIDTH_PT, SPARK_HEIGHT_PT)
    axes = figure.add_axes((0.02, 0.1, 0.96, 0.8))
    values = past.values_us
    middle = (max(values) + min(values)) / 2
    half = max((max(values) - min(values)) / 2, middle * SPARK_LEAST_SPAN / 2) * 1.15
    axes.set_ylim(middle - half, middle + half)
    axes.set_xlim(-0.5, len(values) - 0.5)
    for change in past.changes:
        axes.axvline(change.index - 0.5, color=PEAK, linewidth=1.2)
    axes.plot(values, color=MUTED, linewidth=1.2, marker="o", markersize=3, markeredgewidth=0, gid="line")
    axes.plot([len(values) - 1], [values[-1]], color=INK, marker="o", markersize=4.5, markeredgewidth=0)
    axes.set_axis_off()
    pairs = zip(past.runs, values, strict=True)
    tips = {"line": [f"{run}: {figure_text(value)} us" for run, value in pairs]}
    return inline(figure, salt, "history of p50", tips, {})
