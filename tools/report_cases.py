"""Sorts rows into cases, and cases into panels: what may stand in one plot, and which variant wins where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from tools.report_data import Row, number

# Together: every input column of the schema, the repro line's options, and the device. Rows that agree in all of them
# measured the same thing.
SERIES_COLUMNS = ("variant", "comm", "compute_kernel", "algo", "num_sms", "layout", "handle", "options")
FORMAT_COLUMNS = ("dispatch_dtype", "combine_dtype")
PANEL_COLUMNS = tuple(
    """
    section timing world nodes num_experts topk hidden inter routing seed warmup iters iters_per_graph l2 device
    """.split()
)
WORK = "work"
INSIDE = (("quant", "quant_included"), ("staging", "staging_included"))
ASKED_FORMATS = "comm"  # there the user asks for a format; elsewhere it belongs to the variant, and variants compete
RED = ("wrong", "failed", "timeout")
LATENCY = "lat_us_p50"
# Leads up to this are called level. Two starts of the same 21 cases on one machine (docs/measured/comm_h200x2*.csv) lay
# 1.4 % apart at most by graph, more than 10 % in every fourth case by the host-driven methods.
LEVEL_RATIO = {"graph": 1.03, "kernel": 1.03}
LEVEL_RATIO_HOST = 1.10
NAMES_TOLD = 4  # of variants that are level

Key = tuple[str, ...]


@dataclass
class Case:
    """All rows of one case, oldest run first. The newest run's rows are what the case is now."""

    tokens: int | None  # None: the cell is no number, and the case stands in tables only
    rows: list[Row] = field(default_factory=list)

    @cached_property
    def current(self) -> list[Row]:
        newest = self.rows[-1]["run"]
        return [row for row in self.rows if row["run"] == newest]

    def now(self, column: str) -> float | None:
        """Median over the newest run's ok rows: several starts of a night, or a graph that fell back to this timing."""
        return middle(self.current, column)


def middle(rows: Iterable[Row], column: str) -> float | None:
    values = [value for row in rows if row["status"] == "ok" and (value := number(row, column)) is not None]
    return median(values) if values else None


@dataclass
class Panel:
    """Cases that differ by variant and tokens only: what one plot may show. `series`: label -> its cases by tokens."""

    label: str
    head: Mapping[str, str]
    series: dict[str, list[Case]] = field(default_factory=dict)

    @property
    def cases(self) -> list[Case]:
        return [case for cases in self.series.values() for case in cases]

    def points(self, column: str) -> dict[str, dict[int, float]]:
        """{series label: {tokens: value}} of what has a value above 0."""
        found: dict[str, dict[int, float]] = {}
        for label, cases in self.series.items():
            values = {case.tokens: value for case in cases if case.tokens is not None and (value := case.now(column))}
            if kept := {tokens: value for tokens, value in values.items() if value > 0}:
                found[label] = kept
        return found

    @cached_property
    def ranking(self) -> dict[int, list[tuple[str, float]]]:
        """Tokens -> (series label, p50 in us), fastest first."""
        ranks: dict[int, list[tuple[str, float]]] = defaultdict(list)
        for label, values in self.points(LATENCY).items():
            for tokens, value in values.items():
                ranks[tokens].append((label, value))
        return {tokens: sorted(ranks[tokens], key=lambda pair: pair[1]) for tokens in sorted(ranks)}


def case_key(row: Row) -> Key:
    return tuple(setting(row, name) for name in (*PANEL_COLUMNS, *FORMAT_COLUMNS, *SERIES_COLUMNS, "tokens"))


def setting(row: Row, column: str) -> str:
    """A row whose graph fell back names the graph's iterations, which did not decide what was measured."""
    return "" if column == "iters_per_graph" and row["timing"] != "graph" else row[column]


def _panel_names(section: str) -> tuple[str, ...]:
    return (*PANEL_COLUMNS, *FORMAT_COLUMNS) if section == ASKED_FORMATS else PANEL_COLUMNS


def work(rows: Sequence[Row]) -> str:
    """What a figure of section comm contains beyond moving rows: only variants that do the same compete.

    A cached handle needs no layout, no counts and no ids; some totals hold the input's quantisation or the staging.
    """
    row = next((row for row in reversed(rows) if row["status"] == "ok"), rows[-1])
    if row["section"] != ASKED_FORMATS:
        return ""
    handle = "cached handle" if row["handle"] == "cached" else "fresh"
    inside = [name for name, column in INSIDE if row[column] == "1"]
    return " + ".join([handle, *inside])


def find_cases(rows: Iterable[Row]) -> dict[Key, Case]:
    """Rows are in the order of their runs. A case that a run has twice (RESUME after a change) is what it was last."""
    cases: dict[Key, Case] = {}
    last = {(row["place"], row["run"], row["stamp"], row["repro"], case_key(row)): row for row in rows}
    for (*_, key), row in last.items():
        if key not in cases:
            tokens = number(row, "tokens")
            cases[key] = Case(int(tokens) if tokens is not None and tokens >= 0 and tokens == int(tokens) else None)
        cases[key].rows.append(row)
    return cases


def find_panels(cases: Iterable[Case]) -> list[Panel]:
    """Panels in the order of their first rows; within one, series in the order of their labels."""
    groups: dict[Key, dict[Key, list[Case]]] = defaultdict(lambda: defaultdict(list))
    heads: dict[Key, dict[str, str]] = {}
    for case in cases:
        row = case.rows[0]
        names = _panel_names(row["section"])
        key = (*(setting(row, name) for name in names), work(case.rows))
        heads[key] = dict(zip((*names, WORK), key, strict=True))
        rest = [name for name in FORMAT_COLUMNS if name not in names]
        groups[key][tuple(row[name] for name in (*SERIES_COLUMNS, *rest))].append(case)
    labels = _panel_labels(heads)
    panels = []
    for key, by_series in groups.items():
        named = series_labels(by_series)
        ordered = sorted(by_series, key=lambda each: named[each])
        series = {named[each]: sorted(by_series[each], key=lambda case: case.tokens or 0) for each in ordered}
        panels.append(Panel(labels[key], heads[key], series))
    return panels


def _panel_labels(heads: Mapping[Key, Mapping[str, str]]) -> dict[Key, str]:
    """Section and timing, the dispatch format where it was asked for; among those still alike, what they differ in."""
    alike: dict[str, list[Key]] = defaultdict(list)
    for key, head in heads.items():
        parts = (head["section"], head["timing"], head.get("dispatch_dtype", ""))
        alike[" · ".join(part for part in parts if part)].append(key)
    labels = {}
    for label, keys in alike.items():
        differing = differing_columns([heads[key] for key in keys])
        for key in keys:
            told = [
                value if name == WORK else f"{name} {value or 'none'}"
                for name, value in heads[key].items()
                if name in differing
            ]
            labels[key] = " · ".join([label, *told])
    return labels


def differing_columns(heads: Collection[Mapping[str, str]]) -> set[str]:
    """Columns that have two values or more among those that have the column at all."""
    values: dict[str, set[str]] = defaultdict(set)
    for head in heads:
        for name, value in head.items():
            values[name].add(value)
    return {name for name, found in values.items() if len(found) > 1}


def series_labels(keys: Iterable[Key]) -> dict[Key, str]:
    """Variant and SM budget; where two still look alike, also what they differ in."""
    names = (*SERIES_COLUMNS, *FORMAT_COLUMNS)
    by_label: dict[str, list[dict[str, str]]] = defaultdict(list)
    plain: dict[Key, str] = {}
    fields = {key: dict(zip(names, key, strict=False)) for key in keys}
    for key, head in fields.items():
        sms = head["num_sms"]
        plain[key] = head["variant"] + (f" · {sms} SMs" if sms not in ("", "0") else "")
        by_label[plain[key]].append(head)
    labels = {}
    for key, label in plain.items():
        differing = differing_columns(by_label[label]) - {"num_sms"}
        told = [f"{name} {fields[key][name] or 'none'}" for name in names if name in differing]
        labels[key] = " · ".join([label, *told])
    return labels


@dataclass(frozen=True)
class Win:
    """The fastest at these tokens. `lead`: the next one's p50 over its own, None where nobody else ran."""

    tokens: int
    label: str
    us: float
    second: str
    lead: float | None
    level: bool  # the lead is within what two starts differ by


def wins(panel: Panel) -> list[Win]:
    found = []
    for tokens, ranked in panel.ranking.items():
        (label, us), *others = ranked
        second, second_us = others[0] if others else ("", None)
        lead = second_us / us if second_us else None
        level = lead is not None and lead < LEVEL_RATIO.get(panel.head["timing"], LEVEL_RATIO_HOST)
        found.append(Win(tokens, label, us, second, lead, level))
    return found


def win_spans(panel: Panel) -> list[str]:
    """`deepep_ll at 8 to 256 tokens (next takes 2.10 to 3.40 times as long)`, one a stretch with the same winner.

    Points without a clear winner are a stretch of their own: `level at 1 to 4 tokens: a, b`.
    """
    spans: list[tuple[str, list[Win]]] = []
    for win in wins(panel):
        winner = "" if win.level else win.label
        if spans and spans[-1][0] == winner:
            spans[-1][1].append(win)
        else:
            spans.append((winner, [win]))
    return [_span_text(winner, span) for winner, span in spans]


def _span_text(winner: str, span: Sequence[Win]) -> str:
    first, last = span[0].tokens, span[-1].tokens
    where = f"at {first} tokens" if first == last else f"at {first} to {last} tokens"
    if not winner:
        names = list(dict.fromkeys(name for win in span for name in (win.label, win.second)))
        told = ", ".join(names) if len(names) <= NAMES_TOLD else f"{len(names)} variants"
        return f"level {where}: {told}"
    leads = sorted(win.lead for win in span if win.lead is not None)
    if not leads:
        return f"{winner} {where}, alone"
    low, high = (f"{lead:.2f}" for lead in (leads[0], leads[-1]))
    ahead = low if low == high else f"{low} to {high}"
    return f"{winner} {where} (next takes {ahead} times as long)"


MARKS = (
    ("throttled", "throttled"),
    ("contended", "contended"),
    ("tainted", "tainted"),
    ("launch_bound", "launch-bound"),
    ("staging_included", "staging included"),
)


def marks(row: Row) -> list[str]:
    """What a reader must know before comparing the row (docs/method.md, "What is marked")."""
    found = [text for column, text in MARKS if row[column] == "1"]
    if (number(row, "sol_pct") or 0) > 100:
        found.append("above 100 % of light")
    if row["status"] == "ok" and row["check"] == "skipped":
        found.append("not checked")
    if row["graph"].startswith("eager"):
        found.append("graph fell back")
    return found
