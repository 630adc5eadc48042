"""The plots of a panel: latency, bandwidth and speed of light over tokens, and phases stacked. One timing a panel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tools.report_bars import bars_plot
from tools.report_cases import LATENCY, Panel
from tools.report_looks import PEAK, Look
from tools.report_svg import HEIGHT_PT, RIGHT_PT, WIDTH_PT, Drawing, Points, fixed_ticks, inline, new_figure
from tools.report_text import figure_text

LEFT_PT, TOP_PT, BOTTOM_PT, LEG_HEAD_PT = 52.0, 10.0, 40.0, 24.0
TICK_GAP_PT = 24.0  # tick labels closer than this would run into each other


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
    if at := only_tokens(points):
        return bars_plot([("", points)], at, looks, salt, f"Latency (p50) at {at} tokens, {panel.label}", "us", None)
    return _lines(points, looks, salt, f"Latency (p50) over tokens, {panel.label}", "us", _log_scale)


def light_plot(panel: Panel, looks: Mapping[str, Look], salt: str) -> Drawing | None:
    points = panel.points("sol_pct")
    title, ceiling = f"% of speed of light, {panel.label}", (100.0, "100 %")
    if at := only_tokens(points):
        return bars_plot([("", points)], at, looks, salt, title, "%", ceiling)
    return _lines(points, looks, salt, title, "%", lambda axes, values: _from_zero(axes, values, ceiling))


def only_tokens(points: Points) -> int | None:
    """The number of tokens if there is just one above 0: a line over tokens would be a dot, and bars say more."""
    tokens = {each for values in points.values() for each in values}
    return next(iter(tokens)) if len(tokens) == 1 else None


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
    note = "" if peak_gbps else "No measured wire peak came with these rows, so there is no line for it."
    title = f"Wire GB/s of a rank in one direction, {panel.label}"
    if at := only_tokens({leg + label: points for leg, by in legs for label, points in by.items()}):
        drawing = bars_plot(legs, at, looks, salt, title, "GB/s", line)
        return replace(drawing, note=note) if drawing else None
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
            axes.set_ylabel("GB/s")
    return Drawing(title, inline(figure, salt, title, tips, classes), note)
