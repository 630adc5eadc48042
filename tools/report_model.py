"""What a report tells, whether as a page or as Markdown: is anything red, what ran, what did not, and what to doubt."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property

from lib.rows import NOT_RUN, STATUSES
from tools.report_cases import RED, Case, Key, Panel, find_cases, find_panels, marks
from tools.report_data import Results, Row, stamp_time
from tools.report_e2e import EndToEnd
from tools.report_verdicts import Compared, Gate, compare


@dataclass(frozen=True)
class Options:
    now: datetime
    stale_hours: float = 36.0
    title: str = "moe-ep-bench"
    page: str = ""  # path of the HTML page, for the Markdown


@dataclass
class Report:
    """What both the page and the Markdown tell."""

    results: Results
    options: Options
    gate: Gate | None
    baseline: Results | None
    end_to_end: list[EndToEnd] = field(default_factory=list)
    cases: dict[Key, Case] = field(init=False)
    panels: list[Panel] = field(init=False)

    def __post_init__(self) -> None:
        self.cases = find_cases(self.results.rows)
        self.panels = find_panels(self.cases.values())
        self.current = [row for case in self.cases.values() for row in case.current]
        self.counts = Counter(row["status"] for row in self.current)
        self.red = [row for status in RED for row in self.current if row["status"] == status]
        self.marked = Counter(mark for row in self.current if row["status"] == "ok" for mark in marks(row))
        self.compared: list[Compared] = []
        self.alone = 0
        if self.baseline is not None and self.gate is None:
            self.compared, self.alone = compare(self.cases, self.baseline)

    @property
    def newest(self) -> datetime | None:
        """When the newest run started."""
        return max(self.newest_of.values(), default=None)

    @cached_property
    def newest_of(self) -> dict[str, datetime]:
        """Section -> when its newest run started: a section that nobody measures any more must not look alive."""
        found: dict[str, datetime] = {}
        for section, run in sorted({(row["section"], row["run"]) for row in self.results.rows}):
            if time := stamp_time(run):
                found[section] = max(time, found.get(section, time))
        return found

    def stale(self, newest: datetime | None) -> bool:
        """Older than Options.stale_hours; 0 turns the question off."""
        hours = self.options.stale_hours
        return bool(hours and newest and self.options.now - newest > timedelta(hours=hours))

    @property
    def stale_words(self) -> list[tuple[str, datetime]]:
        """("" or a section, since when): one for everything, or one for each section that fell behind."""
        if self.newest and self.stale(self.newest):
            return [("", self.newest)]
        return [(section, newest) for section, newest in self.newest_of.items() if self.stale(newest)]

    @property
    def level(self) -> str:
        """`red`, `amber`, `green`, or `grey` where nothing ran."""
        if self.red or self.red_end_to_end or (self.gate and (self.gate.red or self.gate.exit)):
            return "red"
        if not self.counts["ok"]:
            return "amber" if self.counts["interrupted"] else "grey"
        return "amber" if self.cautions else "green"

    @property
    def red_end_to_end(self) -> list[EndToEnd]:
        return [verdict for verdict in self.end_to_end if verdict.red]

    @property
    def cautions(self) -> list[str]:
        """What makes figures less than they look: marks that keep a row from a baseline, light overtaken, a cut run."""
        named = ("throttled", "contended", "tainted", "above 100 % of light")
        found = [f"{counted(self.marked[mark], 'row')} {mark}" for mark in named if self.marked[mark]]
        if self.counts["interrupted"]:
            found.append(f"{counted(self.counts['interrupted'], 'row')} interrupted")
        return found

    @property
    def headline(self) -> str:
        """The answer to "is anything red?" in a few words."""
        if not self.results.rows and not self.red_end_to_end:
            return "No rows"
        parts = []
        if self.gate and self.gate.red:
            words = Counter(verdict.word for verdict in self.gate.red)
            parts.append("red verdicts: " + ", ".join(f"{count} {word}" for word, count in words.items()))
        elif self.gate and self.gate.exit:
            parts.append(f"the gate ended with {self.gate.exit}")
        if self.red:
            told = ", ".join(f"{self.counts[status]} {status}" for status in RED if self.counts[status])
            parts.append(f"{counted(len(self.red), 'row')} red: {told}")
        if self.red_end_to_end:
            parts.append(f"{counted(len(self.red_end_to_end), 'end-to-end gate')} not passed")
        if not parts:
            return "Nothing is red" if self.counts["ok"] else "Nothing ran"
        text = "; ".join(parts)
        return text[0].upper() + text[1:]

    @property
    def status_text(self) -> str:
        return ", ".join(f"{self.counts[status]} {status}" for status in STATUSES if self.counts[status])

    @property
    def not_run(self) -> list[dict[str, str]]:
        """Rows that were not measured, by variant and reason, with the cases that each stands for."""
        groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
        for row in self.current:
            if row["status"] in (*NOT_RUN, "interrupted"):
                groups[(row["section"], row["variant"], row["status"], row["reason"])].append(row)
        return [
            {"section": section, "variant": variant, "status": status, "reason": reason or "stopped by the user",
             "cases": _cases_text(rows), "count": str(len(rows))}
            for (section, variant, status, reason), rows in groups.items()
        ]  # fmt: skip


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def percent(value: float) -> str:
    """With its sign; what rounds to nothing has none."""
    return f"{value:+.1f} %" if abs(value) >= 0.05 else "0.0 %"


def _cases_text(rows: Sequence[Row]) -> str:
    """`timing e2e, graph · tokens 4096 · dispatch bf16, fp8`."""
    parts = []
    for heading, name in (("timing", "timing"), ("tokens", "tokens"), ("dispatch", "dispatch_dtype")):
        values = list(dict.fromkeys(row[name] for row in rows))
        parts.append(f"{heading} {', '.join(values)}")
    return " · ".join(parts)


def row_label(row: Row) -> str:
    parts = [row["section"], row["variant"], row["timing"], row["dispatch_dtype"], f"{row['tokens']} tokens"]
    return " · ".join(part for part in parts if part)
