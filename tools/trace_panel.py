"""One iteration of a trace as one subplot: labels of the serial kernels, lanes, and what is concurrent."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import MaxNLocator

from lib.trace import Floats
from tools.trace_analysis import Analysis
from tools.trace_looks import Look
from tools.trace_names import SERIAL, short_name

LANE_IN, LABEL_LINE_IN, CONCURRENT_IN = 0.62, 0.19, 0.3
FONT = FontProperties(size=8.5)
MAX_LABEL_LINES, MAX_SERIAL_LABELS, MAX_BAR_LABELS = 4, 24, 40
MAX_SUB_ROWS, SUB_ROW_SHARE = 3, 0.015  # bars of one lane that overlap for more of the window go above each other
JOIN_PX = 1.5  # smaller gaps are not drawn
PAD_PX = 5
MIN_STRIP_PX = 2  # a shorter span is drawn this wide: it is there
MIN_LABEL_PX = 3 * PAD_PX  # no text is narrower
LEADER_LINES = 0.3  # room between bars and labels
MAX_SHIFT_PX = 60  # from a bar to a label beside it
BEHIND_TEXT = {"facecolor": "white", "edgecolor": "none", "pad": 0.0}
CONCURRENT_COLOUR = "#1a1a1a"
EDGE_COLOUR = "#4d4d4d"


@dataclass
class Scale:
    """The x axis of a panel, and text widths on it, before there is a figure."""

    extent_us: float
    width_px: float
    dpi: int
    renderer: FigureCanvasAgg = field(init=False)

    def __post_init__(self) -> None:
        self.renderer = FigureCanvasAgg(Figure(dpi=self.dpi))

    def px(self, us: float) -> float:
        return us / self.extent_us * self.width_px

    def us(self, px: float) -> float:
        return px / self.width_px * self.extent_us

    def text_us(self, text: str) -> float:
        """The width of one line of text with a little room, in us of the axis."""
        width, _, _ = self.renderer.get_renderer().get_text_width_height_descent(text, FONT, False)
        return self.us(float(width) + 2 * PAD_PX)


@dataclass(frozen=True)
class Label:
    """A serial kernel's label: where its bar is, where its text goes."""

    text: str
    bar_us: float
    left_us: float
    text_us: float
    line: int


def place_labels(wanted: list[tuple[str, float]], scale: Scale) -> list[Label]:
    """Put each (text, us) above its bar, on the lowest line where it touches no other; what has no room is left out.

    Line 0 is next to the bars, and there a text may stand a little right of its bar. The leader up to a higher line
    keeps clear of the texts on the lower ones, or passes behind them where there is no other way.
    """
    right = [-np.inf] * MAX_LABEL_LINES
    placed = []
    for text, at in sorted(wanted, key=lambda label: label[1]):
        half = scale.text_us(text) / 2
        last = max(scale.extent_us - half, half)
        centre = float(np.clip(at, half, last))
        beside = max(centre, right[0] + half)
        if beside <= last and beside - half - at <= scale.us(MAX_SHIFT_PX):
            line, centre = 0, beside
        else:
            free = [line for line in range(1, MAX_LABEL_LINES) if right[line] <= centre - half]
            clear = [line for line in free if max(right[:line]) <= at]
            if not free:
                continue
            line = (clear or free)[0]
        right[line] = centre + half
        right[:line] = [max(end, at) for end in right[:line]]
        placed.append(Label(text, at, centre - half + scale.us(PAD_PX), centre, line))
    return placed


def sub_rows(bars: list[Strip], extent_us: float) -> list[int]:
    """The sub-row of each bar of a lane: the first in which it overlaps none by more than a sliver."""
    rows: list[list[Strip]] = []
    chosen = []
    for bar in bars:
        fits = (row for row, there in enumerate(rows) if _shared_us(bar, there) <= SUB_ROW_SHARE * extent_us)
        row = next(fits, len(rows) if len(rows) < MAX_SUB_ROWS else MAX_SUB_ROWS - 1)
        if row == len(rows):
            rows.append([])
        rows[row].append(bar)
        chosen.append(row)
    return chosen


def _shared_us(bar: Strip, others: list[Strip]) -> float:
    """How long the bar overlaps the others at most."""
    longest = 0.0
    for other in others:
        start = np.maximum(bar.start_us[:, None], other.start_us[None, :])
        end = np.minimum(bar.end_us[:, None], other.end_us[None, :])
        longest = max(longest, float(np.clip(end - start, 0, None).sum()))
    return longest


class Panel:
    """One iteration, laid out; `draw` puts it on axes whose height is `height_in`."""

    def __init__(self, analysis: Analysis, iteration: int, looks: dict[str, Look], scale: Scale) -> None:
        self.analysis, self.iteration, self.looks, self.scale = analysis, iteration, looks, scale
        serial = analysis.spans.lanes.index(SERIAL)
        bars = [_joined(b.name, b.lane, b.start_us, b.end_us, scale) for b in analysis.bars(iteration)]
        self.serial = [bar for bar in bars if bar.lane == serial]
        self.lanes = {
            lane: [b for b in bars if b.lane == lane] for lane in range(len(analysis.spans.lanes)) if lane != serial
        }
        middles = [(bar.name, us, at) for bar in self.serial for us, at in zip(bar.us, bar.middle_us, strict=True)]
        longest = sorted(middles, key=lambda middle: -middle[1])[:MAX_SERIAL_LABELS]
        self.labels = place_labels([(f"{short_name(name)} {_us(us)}", at) for name, us, at in longest], scale)
        lines = max((label.line + 1 + LEADER_LINES for label in self.labels), default=0.0)
        self.header_in = LABEL_LINE_IN * lines
        self.concurrent_in = CONCURRENT_IN if len(self.lanes) > 1 else 0.0
        self.height_in = self.header_in + LANE_IN * max(len(self.lanes), 1) + self.concurrent_in

    def draw(self, axes: Axes) -> None:
        lanes_in = LANE_IN * max(len(self.lanes), 1)
        axes.set_ylim(lanes_in + self.concurrent_in, -self.header_in)
        axes.set_xlim(-self.scale.us(6), self.scale.extent_us + self.scale.us(6))
        self._draw_serial(axes, lanes_in)
        for row, bars in enumerate(self.lanes.values()):
            self._draw_lane(axes, row * LANE_IN, bars)
            axes.axhline(row * LANE_IN, color="#bbbbbb", linewidth=0.6, zorder=0.5)
        word = "phases" if self.analysis.spans.variant == "phases" else SERIAL
        ticks = {-LABEL_LINE_IN * (LEADER_LINES + 0.45): word} if self.labels else {}
        if self.concurrent_in:
            self._draw_concurrent(axes, lanes_in)
            ticks[lanes_in + CONCURRENT_IN / 2] = "concurrent"
        names = [self.analysis.spans.lanes[lane] for lane in self.lanes]
        ticks.update({(row + 0.5) * LANE_IN: name for row, name in enumerate(names)})
        axes.set_yticks(list(ticks), list(ticks.values()), fontproperties=FONT)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=FONT.get_size())
        axes.xaxis.set_major_locator(MaxNLocator(nbins=14))
        axes.set_title(self._title(), loc="left", fontsize=9.5, pad=5)
        axes.spines[["top", "right"]].set_visible(False)

    def _title(self) -> str:
        windows, index = self.analysis.windows, self.iteration
        words = [f"iteration {index}: {windows.duration_us[index]:.2f} us"]
        if not windows.complete[index]:
            words.append("its end is not in the trace")
        if index in windows.outliers:
            words.append(f"{windows.outliers[index]:.2f}x the median")
        if len(self.lanes) > 1:
            words.append(self.analysis.concurrent_words(index))
        return ", ".join(words)

    def _draw_serial(self, axes: Axes, bottom: float) -> None:
        for bar in self.serial:
            look = self.looks[bar.name]
            axes.broken_barh(
                _spans(bar), (0, bottom), facecolor=look.colour, hatch=look.hatch, edgecolor=EDGE_COLOUR,
                linewidth=0.5, alpha=0.75, zorder=1,
            )  # fmt: skip
        for label in self.labels:
            y = -LABEL_LINE_IN * (label.line + LEADER_LINES + 0.45)
            foot = float(np.clip(label.bar_us, label.left_us, label.left_us + 2 * (label.text_us - label.left_us)))
            axes.plot(
                [label.bar_us, foot], [0, -LABEL_LINE_IN * (label.line + LEADER_LINES)], color=EDGE_COLOUR, lw=0.7
            )
            axes.text(label.text_us, y, label.text, ha="center", va="center", fontproperties=FONT, bbox=BEHIND_TEXT)

    def _draw_lane(self, axes: Axes, top: float, bars: list[Strip]) -> None:
        rows = sub_rows(bars, self.scale.extent_us)
        height = LANE_IN * 0.8 / (1 + max(rows, default=0))
        for bar, row in zip(bars, rows, strict=True):
            look, y = self.looks[bar.name], top + LANE_IN * 0.1 + row * height
            axes.broken_barh(
                _spans(bar), (y, height * 0.94), facecolor=look.colour, hatch=look.hatch, edgecolor="white",
                linewidth=0.4, zorder=3,
            )  # fmt: skip
            self._label_fragments(axes, bar, y + height * 0.47, two_lines=not max(rows))

    def _label_fragments(self, axes: Axes, bar: Strip, y: float, two_lines: bool) -> None:
        colour = _text_colour(self.looks[bar.name].colour)
        longest = np.argsort(bar.start_us - bar.end_us, kind="stable")[:MAX_BAR_LABELS]
        for start, end, us in zip(bar.start_us[longest], bar.end_us[longest], bar.us[longest], strict=True):
            if self.scale.px(end - start) < MIN_LABEL_PX:
                break
            name, told = short_name(bar.name), f"{_us(us)} us"
            for text in (f"{name}\n{told}" if two_lines else f"{name} {told}", name, told.removesuffix(" us")):
                if max(self.scale.text_us(line) for line in text.split("\n")) <= end - start:
                    axes.text(
                        (start + end) / 2, y, text, ha="center", va="center", color=colour, fontproperties=FONT,
                        linespacing=1.15, zorder=5,
                    )  # fmt: skip
                    break

    def _draw_concurrent(self, axes: Axes, top: float) -> None:
        start_us, end_us = self.analysis.concurrent.of(self.iteration)
        origin = self.analysis.windows.start_us[self.iteration]
        whole = _joined("", 0, start_us - origin, end_us - origin, self.scale)
        axes.axhline(top, color="#777777", linewidth=0.8, zorder=0.5)
        axes.broken_barh(_spans(whole), (0, top), facecolor="black", alpha=0.13, zorder=4, linewidth=0)
        axes.broken_barh(_spans(whole), (top + 0.05, CONCURRENT_IN - 0.1), facecolor=CONCURRENT_COLOUR, zorder=3)
        free = -np.inf  # right end of the last text that stands beside its bar
        for index, (start, end, us) in enumerate(zip(whole.start_us, whole.end_us, whole.us, strict=True)):
            if index >= MAX_BAR_LABELS:
                break
            text = f"{_us(us)} us"
            width, y = self.scale.text_us(text), top + CONCURRENT_IN / 2
            following = whole.start_us[index + 1] if index + 1 < len(whole.start_us) else self.scale.extent_us
            if width <= end - start:
                axes.text(
                    (start + end) / 2, y, text, ha="center", va="center", color="white", fontproperties=FONT, zorder=5
                )
            elif end >= free and end + width <= following:
                axes.text(end + self.scale.us(PAD_PX), y, text, ha="left", va="center", fontproperties=FONT, zorder=5)
                free = end + width


@dataclass(frozen=True)
class Strip:
    """What is drawn of one name: fragments joined over gaps that no eye can see, each with its true length `us`."""

    name: str
    lane: int
    start_us: Floats
    end_us: Floats
    us: Floats

    @property
    def middle_us(self) -> Floats:
        return (self.start_us + self.end_us) / 2


def _joined(name: str, lane: int, start_us: Floats, end_us: Floats, scale: Scale) -> Strip:
    """A million fragments become what the pixels can show."""
    if not len(start_us):
        return Strip(name, lane, start_us, end_us, start_us)
    apart = start_us[1:] - end_us[:-1] > scale.us(JOIN_PX)
    first = np.flatnonzero(np.concatenate([[True], apart]))
    last = np.append(first[1:], len(start_us)) - 1
    drawn_end_us = np.maximum(end_us[last], start_us[first] + scale.us(MIN_STRIP_PX))
    return Strip(name, lane, start_us[first], drawn_end_us, np.add.reduceat(end_us - start_us, first))


def _spans(strip: Strip) -> list[tuple[float, float]]:
    return list(zip(strip.start_us.tolist(), (strip.end_us - strip.start_us).tolist(), strict=True))


def _us(us: float) -> str:
    return f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def _text_colour(background: str) -> str:
    red, green, blue = to_rgb(background)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"


def extent_of(analysis: Analysis, iteration: int) -> float:
    """What the x axis of this iteration has to hold, us."""
    ends: list[Floats] = [bar.end_us for bar in analysis.bars(iteration)]
    return max([float(analysis.windows.duration_us[iteration]), 1e-3, *(float(end.max()) for end in ends)])
