"""Puts the page together: what each part of the template shows. Words and order are here, looks in tools/templates."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.rows import STATUSES
from tools.report_cases import LATENCY, Panel, Win, wins
from tools.report_data import wire_peak_gbps
from tools.report_environment import Difference, baseline_differences, run_differences
from tools.report_history import History, history
from tools.report_looks import PHASES, Look, phase_css
from tools.report_model import Report, counted, percent, row_label
from tools.report_table import table_data
from tools.report_text import figure_text
from tools.report_verdicts import Gate, Verdict

if TYPE_CHECKING:
    from tools.report_svg import Drawing

LINES_OPEN = 8  # of red rows, and of those beside a baseline; the others at a click
TEMPLATES = Path(__file__).resolve().parent / "templates"
PANELS_DRAWN, CASES_DRAWN = 20, 1500  # drawing is the slow part, and the largest: per case 1.5 ms and 1.5 KB of a page
SPARKS_DRAWN, LINES_SHOWN = 100, 200
SHAPE = (
    ("device", "{}"), ("world", "{} ranks"), ("num_experts", "{} experts"), ("topk", "top-{}"),
    ("hidden", "hidden {}"), ("inter", "inter {}"), ("routing", "routing {}"), ("seed", "seed {}"),
)  # fmt: skip


def looks_of(panels: Sequence[Panel]) -> dict[str, Look]:
    """One look a series label, the same in every plot of the page. Those with a figure now have the first choice."""
    measured = {label for panel in panels for label in panel.points(LATENCY)}
    others = {label for panel in panels for label in panel.series} - measured
    return {label: Look(number) for number, label in enumerate([*sorted(measured), *sorted(others)])}


def shape_text(panels: Sequence[Panel]) -> str:
    """What all panels share of machine and shape."""
    told = []
    for name, form in SHAPE:
        values = {panel.head[name] for panel in panels}
        if len(values) == 1:
            told.append(form.format(*values))
    if any(panel.head["nodes"] not in ("", "1") for panel in panels):
        told.append("nodes " + ", ".join(sorted({panel.head["nodes"] for panel in panels})))
    return " · ".join(told)


def win_table(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """One block a section: tokens as columns, a panel a line, the fastest in each cell."""
    blocks: dict[str, list[tuple[int, Panel]]] = defaultdict(list)
    for number_, panel in enumerate(panels):
        if panel.ranking:
            blocks[panel.head["section"]].append((number_, panel))
    found = []
    for section, members in blocks.items():
        tokens = sorted({each for _, panel in members for each in panel.ranking})
        lines = []
        for number_, panel in members:
            by_tokens: dict[int, Win] = {win.tokens: win for win in wins(panel)}
            label = panel.label.removeprefix(f"{section} · ")
            lines.append({"label": label, "id": f"panel{number_}", "cells": [by_tokens.get(each) for each in tokens]})
        found.append({"section": section, "tokens": tokens, "lines": lines})
    return found


def draw_panel(panel: Panel, number_: int, looks: Mapping[str, Look], peak_gbps: float | None) -> list[Drawing]:
    from tools.report_bars import phases_plot
    from tools.report_plots import bandwidth_plot, latency_plot, light_plot

    salt = f"p{number_}"
    drawings = [
        latency_plot(panel, looks, salt + "a"),
        phases_plot(panel, salt + "b"),
        bandwidth_plot(panel, looks, salt + "c", peak_gbps),
        light_plot(panel, looks, salt + "d"),
    ]
    return [drawing for drawing in drawings if drawing]


def panel_views(report: Report, looks: Mapping[str, Look]) -> list[dict[str, Any]]:
    """Panels with something measured; the first PANELS_DRAWN of them with plots, the first of each section open."""
    views: list[dict[str, Any]] = []
    opened: set[str] = set()
    measured = [(number_, panel) for number_, panel in enumerate(report.panels) if panel.ranking]
    room = CASES_DRAWN
    for place, (number_, panel) in enumerate(measured):
        section = panel.head["section"]
        current = [row for case in panel.cases for row in case.current if row["status"] == "ok"]
        peak = wire_peak_gbps(report.results, current)
        drawn = place < PANELS_DRAWN and room >= len(panel.cases)
        room -= len(panel.cases) if drawn else 0
        runs = sorted({row["run"] for row in current})
        views.append(
            {
                "id": f"panel{number_}",
                "label": panel.label,
                "open": section not in opened,
                "drawings": draw_panel(panel, number_, looks, peak[0] if peak else None) if drawn else [],
                "drawn": drawn,
                "phases": [phase for phase in PHASES if panel.points(f"{phase}_us")],
                "ranking": _matrix(panel),
                "tokens": list(panel.ranking),
                "floors": panel.head["timing"] == "e2e_pipelined",
                "runs": f"{runs[0]} to {runs[-1]}" if len(runs) > 1 else runs[0],
                "mixed_runs": len(runs) > 1,
            }
        )
        opened.add(section)
    return views


def _matrix(panel: Panel) -> list[dict[str, Any]]:
    """A line a series: p50 and its ratio to the fastest at the same tokens, None where it has none."""
    points = panel.points(LATENCY)
    lines = []
    for label, values in points.items():
        cells = []
        for tokens, ranked in panel.ranking.items():
            us = values.get(tokens)
            cells.append(None if us is None else {"us": us, "ratio": us / ranked[0][1], "best": ranked[0][0] == label})
        lines.append({"label": label, "cells": cells, "loss": _loss(panel, label)})
    return lines


def _loss(panel: Panel, label: str) -> float | None:
    found = [value for case in panel.series[label] if (value := case.now("acc_loss_pct")) is not None]
    return max(found) if found else None


def history_views(report: Report) -> tuple[list[dict[str, Any]], int]:
    """Cases with two runs or more: changed ones first, then by how far the newest is off. Also how many there are."""
    from tools.report_bars import spark

    found: list[tuple[Panel, str, History]] = []
    for panel in report.panels:
        for label, cases in panel.series.items():
            histories = [history(case) for case in cases]
            found += [(panel, label, past) for past in histories if len(past.values_us) > 1]
    found.sort(key=lambda each: (not each[2].changes, -abs(each[2].last_pct or 0.0)))
    views = [
        {
            "panel": panel.label, "label": label, "tokens": past.case.tokens, "points": len(past.values_us),
            "svg": spark(past, f"h{place}"), "last": past.values_us[-1], "last_pct": past.last_pct,
            "changes": past.changes,
        }
        for place, (panel, label, past) in enumerate(found[:SPARKS_DRAWN])
    ]  # fmt: skip
    return views, len(found)


def environment(report: Report) -> list[Difference]:
    found = run_differences(report.results)
    if report.baseline is not None:
        found = baseline_differences(report.results, report.baseline) + found
    return found


def render(report: Report) -> str:
    """The page as HTML. Every text of a file is escaped by the template; only our own SVG, style and script are not."""
    import jinja2
    from markupsafe import Markup

    from tools.report_svg import styled

    loader = jinja2.FileSystemLoader(TEMPLATES)
    env = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    env.filters["figure"] = lambda value: "" if value is None else figure_text(value)
    env.filters["change"] = lambda value: "" if value is None else percent(value)
    env.filters["svg"] = Markup  # drawn by tools/report_svg.py, which escapes what comes from files
    script = (TEMPLATES / "report.js").read_text()
    with styled():
        looks = looks_of(report.panels)
        measured = {label for panel in report.panels for label in panel.points(LATENCY)}
        panels = panel_views(report, looks)
        past, past_count = history_views(report)
    return env.get_template("report.html.j2").render(
        report=report,
        gate=report.gate,
        shown_verdicts=_shown_verdicts(report.gate),
        looks=looks,
        used=[label for label in looks if label in measured],
        win_blocks=win_table(report.panels),
        panels=panels,
        history=past,
        history_count=past_count,
        environment=environment(report),
        shape=shape_text(report.panels),
        statuses=[(status, report.counts[status]) for status in STATUSES if report.counts[status]],
        row_label=row_label,
        counted=counted,
        phase_css=phase_css,
        lines_shown=LINES_SHOWN,
        lines_open=LINES_OPEN,
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        rows_json=Markup(_script_safe(table_data(report.results.rows))),
    )


def _shown_verdicts(gate: Gate | None) -> list[Verdict]:
    """All that are not plainly OK."""
    return [verdict for verdict in gate.verdicts if verdict.red or verdict.word != "OK"] if gate else []


def _script_safe(value: object) -> str:
    """JSON that can't end the script element it stands in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
