"""The plots of a panel: latency, bandwidth and speed of light over tokens, and phases stacked. One timing a panel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tools.report_cases import LATENCY, Panel
from tools.report_history import History
from tools.report_looks import INK, MUTED, PEAK, PHASES, Look, phase_colour
from tools.report_svg import bare, fixed_ticks, inline, new_figure

WIDTH_PT, HEIGHT_PT = 480.0, 270.0
LEFT_PT, RIGHT_PT, TOP_PT, BOTTOM_PT = 52.0, 12.0, 10.0, 40.0
TICK_GAP_PT = 24.0  # tick labels closer than this would run into each other
PHASE_POINTS = 3  # numbers of tokens shown in the phases plot: the least, a middle one and the most
BAR_MOST_PT, BAR_LEAST_PT, BAR_HEAD_PT, BAR_FOOT_PT, BAR_GAP_PT = 36.0, 17.0, 24.0, 40.0, 14.0
LETTER_PT = 6.0  # of a label, wide enough for the fonts that browsers take
LEG_HEAD_PT = 24.0
SPARK_WIDTH_PT, SPARK_HEIGHT_PT = 180.0, 34.0
SPARK_LEAST_SPAN = 0.10  # of the median: noise of 1 % must not look like a mountain range

Points = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Drawing:
    """A plot on the page: `svg` is an element, `note` what a reader must know beside it."""

    title: str
    svg: str
    note: str = ""


class TokenAxis:
    """Tokens on a log2 scale, with 0 one step before the least: a rank without tokens is a legal case."""

    def __init__(self, points: Points) -> None:
        self.tokens = sorted({tokens for values in points.values() for tokens in values})
        least = min((tokens for tokens in self.tokens if tokens), default=1)
        self.zero = math.log2(least) - 1

    def place(self, tokens: int) -> float:
        return math.log2(tokens) if tokens else self.zero

    def apply(self, axes: Axes, width_pt: float) -> None:
        places = [self.place(tokens) for tokens in self.tokens]
        low, high = places[0], places[-1]
        margin = 0.04 * (high - low) or 1.0
        axes.set_xlim(low - margin, high + margin)
        gap = TICK_GAP_PT / width_pt * (high - low + 2 * margin)
        kept: list[int] = []
        for tokens in reversed(self.tokens):  # the largest is always told
            if not kept or self.place(kept[-1]) - self.place(tokens) >= gap:
                kept.append(tokens)
        fixed_ticks(axes.xaxis, [self.place(tokens) for tokens in kept], [str(tokens) for tokens in kept])
        axes.set_xlabel("tokens a rank")


def latency_plot(panel: Panel, looks: Mapping[str, Look], salt: str) -> Drawing | None:
    points = panel.points(LATENCY)
    return _lines(points, looks, salt, f"latency (p50) over tokens, {panel.label}", "us", _log_scale)


def light_plot(panel: Panel, looks: Mapping[str, Look], salt: str) -> Drawing | None:
    points = panel.points("sol_pct")
    title = f"% of speed of light over tokens, {panel.label}"
    return _lines(points, looks, salt, title, "%", lambda axes, values: _from_zero(axes, values, (100.0, "100 %")))


def _lines(
    points: Points,
    looks: Mapping[str, Look],
    salt: str,
    title: str,
    unit: str,
    scale: Callable[[Axes, list[float]], None],
) -> Drawing | None:
    if not points:
        return None
    figure = new_figure(WIDTH_PT, HEIGHT_PT)
    width = WIDTH_PT - LEFT_PT - RIGHT_PT
    axes = figure.add_axes(_box(LEFT_PT, width, TOP_PT))
    tips, classes = _draw_lines(axes, points, looks, unit, "")
    TokenAxis(points).apply(axes, width)
    scale(axes, [value for values in points.values() for value in values.values()])
    return Drawing(title, inline(figure, salt, title, tips, classes))


def _box(left_pt: float, width_pt: float, top_pt: float) -> tuple[float, float, float, float]:
    height = HEIGHT_PT - top_pt - BOTTOM_PT
    return left_pt / WIDTH_PT, BOTTOM_PT / HEIGHT_PT, width_pt / WIDTH_PT, height / HEIGHT_PT


def _draw_lines(
    axes: Axes, points: Points, looks: Mapping[str, Look], unit: str, prefix: str
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """One line a series; returns the pointer's words and the group attributes by gid."""
    axis = TokenAxis(points)
    tips, classes = {}, {}
    for label, values in points.items():
        look = looks[label]
        gid = f"{prefix}line{look.number}"
        tokens = sorted(values)
        dash = (0, tuple(float(part) for part in look.dash.split())) if look.dash else "-"
        axes.plot(
            [axis.place(each) for each in tokens], [values[each] for each in tokens], gid=gid, color=look.colour,
            marker=look.marker, linestyle=dash, markeredgewidth=0, clip_on=False,
        )  # fmt: skip
        tips[gid] = [f"{label}, {each} tokens: {figure_text(values[each])} {unit}" for each in tokens]
        classes[gid] = f'class="series" data-series="{look.number}"'
    return tips, classes


def _log_scale(axes: Axes, values: list[float]) -> None:
    low, high = min(values), max(values)
    axes.set_yscale("log")
    margin = (high / low) ** 0.06 if high > low else 1.5
    axes.set_ylim(low / margin, high * margin)
    steps = (1,) if high / low > 1000 else (1, 2, 5)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    ticks = [tick for tick in ticks if low / margin <= tick <= high * margin]
    if len(ticks) < 2:
        ticks = [low, high] if high > low else [low]
    fixed_ticks(axes.yaxis, ticks, [figure_text(tick) for tick in ticks])
    axes.set_ylabel("us, log scale")


def _from_zero(axes: Axes, values: list[float], line: tuple[float, str] | None) -> None:
    """A linear axis from 0, with the ceiling as a line, so that the distance to it is seen as it is."""
    top = max([*values, line[0] if line else 0.0]) * 1.09
    axes.set_ylim(0, top)
    ticks = [float(tick) for tick in MaxNLocator(6).tick_values(0, top) if 0 <= tick <= top]
    fixed_ticks(axes.yaxis, ticks, [figure_text(tick) for tick in ticks])
    if line:
        axes.axhline(line[0], color=PEAK, linewidth=1.4, linestyle=(0, (6, 3)))
        axes.annotate(
            line[1], (0, line[0]), (4, 3), xycoords=axes.get_yaxis_transform(), textcoords="offset points", fontsize=9,
            color=PEAK,
        )  # fmt: skip


def bandwidth_plot(panel: Panel, looks: Mapping[str, Look], salt: str, peak_gbps: float | None) -> Drawing | None:
    """Wire GB/s of dispatch and combine side by side on one scale; the wire's measured peak is a line."""
    legs = [(leg, panel.points(f"{leg}_wire_gbps")) for leg in ("dispatch", "combine")]
    values = [value for _, points in legs for by_tokens in points.values() for value in by_tokens.values()]
    if not values:
        return None
    line = (peak_gbps, f"measured peak {peak_gbps:.0f}") if peak_gbps else None
    figure = new_figure(WIDTH_PT, HEIGHT_PT)
    gap = 16.0
    width = (WIDTH_PT - LEFT_PT - RIGHT_PT - gap) / 2
    tips: dict[str, list[str]] = {}
    classes: dict[str, str] = {}
    for number, (leg, points) in enumerate(legs):
        axes = figure.add_axes(_box(LEFT_PT + number * (width + gap), width, LEG_HEAD_PT))
        axes.set_title(leg)
        more_tips, more_classes = _draw_lines(axes, points, looks, f"GB/s, {leg}", leg)
        tips |= more_tips
        classes |= more_classes
        _from_zero(axes, values, line)
        if points:
            TokenAxis(points).apply(axes, width)
        if number:
            axes.tick_params(labelleft=False)
        else:
            axes.set_ylabel("wire GB/s a rank, one direction")
    title = f"bandwidth over tokens, {panel.label}"
    note = "" if peak_gbps else "No measured wire peak came with these rows, so there is no line for it."
    return Drawing(title, inline(figure, salt, title, tips, classes), note)


def phases_plot(panel: Panel, salt: str) -> Drawing | None:
    """Phases stacked, one bar a series, at up to PHASE_POINTS numbers of tokens, each to its own scale; p50 as a mark."""
    phases = {phase: panel.points(f"{phase}_us") for phase in PHASES}
    labels = [label for label in panel.series if any(label in points for points in phases.values())]
    tokens = sorted({tokens for points in phases.values() for values in points.values() for tokens in values})
    if not labels:
        return None
    chosen = sorted({tokens[0], tokens[len(tokens) // 2], tokens[-1]})[:PHASE_POINTS]
    room = HEIGHT_PT - BAR_HEAD_PT - BAR_FOOT_PT
    height = HEIGHT_PT - room + len(labels) * min(max(room / len(labels), BAR_LEAST_PT), BAR_MOST_PT)
    figure = new_figure(WIDTH_PT, height)
    names_pt = 10 + LETTER_PT * max(len(short(label)) for label in labels)
    width = (WIDTH_PT - names_pt - RIGHT_PT - BAR_GAP_PT * (len(chosen) - 1)) / len(chosen)
    tips: dict[str, list[str]] = {}
    totals = panel.points(LATENCY)
    for column, at in enumerate(chosen):
        left = (names_pt + column * (width + BAR_GAP_PT)) / WIDTH_PT
        box = (left, BAR_FOOT_PT / height, width / WIDTH_PT, 1 - (BAR_HEAD_PT + BAR_FOOT_PT) / height)
        axes = figure.add_axes(box)
        axes.set_title(f"{at} tokens")
        _draw_bars(axes, at, labels, phases, totals, tips)
        if column:
            axes.tick_params(labelleft=False)
    title = f"phases, {panel.label}"
    return Drawing(title, inline(figure, salt, title, tips, {}))


def _draw_bars(
    axes: Axes,
    tokens: int,
    labels: Sequence[str],
    phases: Mapping[str, Points],
    totals: Points,
    tips: dict[str, list[str]],
) -> None:
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
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlim(0, widest * 1.06 or 1.0)
    ticks = [float(tick) for tick in MaxNLocator(3).tick_values(0, widest) if 0 <= tick <= widest * 1.06]
    fixed_ticks(axes.xaxis, ticks, [figure_text(tick) for tick in ticks])
    fixed_ticks(axes.yaxis, range(len(labels)), [short(label) for label in labels])
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("us")


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
    bare(axes)
    pairs = zip(past.runs, values, strict=True)
    tips = {"line": [f"{run}: {figure_text(value)} us" for run, value in pairs]}
    return inline(figure, salt, "history of p50", tips, {})


def figure_text(value: float) -> str:
    """Three digits that count, never an exponent."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def short(label: str, most: int = 22) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"
