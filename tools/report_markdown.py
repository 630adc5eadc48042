"""The report in a few lines of Markdown, for a chat or a CI summary: what is red, who wins where, what did not run."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tools.report_cases import win_spans
from tools.report_history import history
from tools.report_model import Report, counted, percent, row_label

SIGNS = {"red": "🔴", "amber": "🟡", "green": "🟢", "grey": "⚪"}
LINES = 10  # of each list; the page has the rest
_SPECIAL = re.compile(r"[\\`*\[\]<>|~]")  # an underscore within a word is none of Markdown's business


def markdown(report: Report) -> str:
    """Headline first; a list is cut after LINES, and says so."""
    parts = [f"## {SIGNS[report.level]} {plain(report.options.title)}: {plain(report.headline)}"]
    for section, since in report.stale_words:
        parts.append(f"**No data{' of ' + plain(section) if section else ''} since {since:%Y-%m-%d %H:%M} UTC.**")
    told = [plain(each) for each in (report.status_text, *report.cautions) if each]
    if told:
        parts.append(" · ".join(told))
    if report.gate:
        parts += _gate(report)
    gates = [
        f"{each.line} ({each.mode} of {each.stamp}: {each.candidate}, {each.reference})" for each in report.end_to_end
    ]
    parts += _list("End to end", gates)
    parts += _list("Red rows", [f"{row_label(row)}: {row['status']}, {row['reason']}" for row in report.red])
    spans = [f"{panel.label}: {'; '.join(win_spans(panel))}" for panel in report.panels if panel.ranking]
    parts += _list("Fastest", spans)
    parts += _compared(report)
    parts += _list("Changed level", _changes(report))
    parts += _list("Not run", _not_run(report))
    parts += [plain(f"Note: {notice}") for notice in report.results.notices]
    if report.options.page:
        parts.append(f"Page: {plain(report.options.page)}")
    return "\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    """A text from a file as text: one line, no markup, and nobody is called by an @ in it."""
    return _SPECIAL.sub(r"\\\g<0>", " ".join(text.split())).replace("&", "&amp;").replace("@", "&#64;")


def _list(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    shown = [f"- {plain(line)}" for line in lines[:LINES]]
    if len(lines) > LINES:
        shown.append(f"- and {len(lines) - LINES} more on the page")
    return [f"**{title}**\n\n" + "\n".join(shown)]


def _not_run(report: Report) -> list[str]:
    """One line a variant and status, with the first of its reasons."""
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for each in report.not_run:
        groups.setdefault((each["variant"], each["status"]), []).append(each)
    lines = []
    for (variant, status), members in groups.items():
        count = sum(int(each["count"]) for each in members)
        more = f" (and {counted(len(members) - 1, 'other reason')})" if len(members) > 1 else ""
        lines.append(f"{variant}: {count} {status}, {members[0]['reason']}{more}")
    return lines


def _gate(report: Report) -> list[str]:
    gate = report.gate
    assert gate is not None
    counts = ", ".join(f"{count} {word}" for word, count in gate.counts.items())
    lines = []
    for verdict in gate.red:
        change = "" if verdict.change_pct is None else f" {percent(verdict.change_pct)}"
        lines.append(f"{verdict.word}{change}: {row_label(verdict.key)}. {verdict.reason}")
    return [plain(gate.line), plain(f"Verdicts: {counts}"), *_list("Red verdicts", lines)]


def _compared(report: Report) -> list[str]:
    if report.baseline is None or report.gate:
        return []
    lines = []
    for pair in report.compared:
        medians = f"{pair.baseline_us:.1f} to {pair.new_us:.1f} us"
        lines.append(f"{percent(pair.change_pct)} ({medians}): {row_label(pair.case.current[0])}")
    title = f"Beside the baseline: {counted(len(report.compared), 'case')}, no verdict"
    return _list(title, lines) or [f"**{title}**"]


def _changes(report: Report) -> list[str]:
    """The newest change point of each case that has one."""
    pasts = [history(case) for case in report.cases.values() if len(case.rows) > 1]
    found = [(past.changes[-1], row_label(past.case.current[0])) for past in pasts if past.changes]
    found.sort(key=lambda each: -abs(each[0].pct))
    return [f"{percent(change.pct)} from {change.run}: {label}" for change, label in found]
