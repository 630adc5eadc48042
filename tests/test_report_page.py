"""The page and the Markdown: right answers, every text escaped, nothing from outside."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from report_rows import STAMP, night, row, write_rows

from tools import report_page
from tools.arguments import UsageError
from tools.report_data import read_results, stamp_time
from tools.report_markdown import markdown
from tools.report_model import Options, Report
from tools.report_page import render
from tools.report_verdicts import find_gate, read_gate

FRESH = Options((stamp_time(STAMP) or datetime.now(timezone.utc)) + timedelta(hours=1))
NASTY = "</script><script>alert(1)</script> \"quoted\" 'single' & $x_1$ <img src=x onerror=alert(2)> {{ 7*7 }}"


def report_of(tmp_path: Path, *rows: dict[str, object], options: Options = FRESH) -> Report:
    return Report(read_results([write_rows(tmp_path / "rows.csv", rows)]), options, None, None)


def verdict(**columns: object) -> dict[str, Any]:
    key = {name: str(row().get(name) or "") for name in ("section", "variant", "timing", "dispatch_dtype", "tokens")}
    figures = {"baseline_median": 100.0, "new_median": 112.0, "change_pct": 12.0, "threshold_pct": 3.0, "nights": 5}
    counts = {"baseline_starts": 20, "starts": 8, "again": 4}
    return {
        **key,
        **figures,
        **counts,
        "verdict": "REGRESSED",
        "red": True,
        "reason": "slower",
        "repro": "./run.sh",
    } | columns


def write_gate(path: Path, *verdicts: dict[str, Any], **columns: object) -> Path:
    told = {"schema": 1, "night": STAMP, "line": "1 of 1 rows regressed", "suspects": ["git: gold -> gnew"]}
    told |= {
        "notices": [],
        "counts": {"REGRESSED": len(verdicts)},
        "baseline": "baseline_x.csv",
        "verdicts": verdicts,
        "exit": 3,
    }
    path.write_text(json.dumps(told | columns))
    return path


def rows_json(page: str) -> dict[str, Any]:
    """The table of all rows, each as a mapping, with its words put back."""
    text = re.search(r'<script type="application/json" id="rows">(.*?)</script>', page, re.S)
    assert text
    data = json.loads(text[1])
    headings = [heading for heading, _ in data["columns"]]
    kinds = [kind for _, kind in data["columns"]]
    words = data["words"]
    read = {
        "t": lambda value: words[value],
        "n": lambda value: value,
        "r": lambda value: " ".join(words[each] for each in value),
    }
    data["rows"] = [
        {heading: read[kind](value) for heading, kind, value in zip(headings, kinds, line, strict=True)}
        for line in data["rows"]
    ]
    return data


# -- the answer at the top


@pytest.mark.parametrize(
    ("rows", "level", "headline"),
    [
        ([], "grey", "No rows"),
        ([row()], "green", "Nothing is red"),
        ([row(status="skipped", reason="left out by ALGO")], "grey", "Nothing ran"),
        ([row(), row(tokens=8, status="missing", reason="no x")], "green", "Nothing is red"),
        ([row(throttled=True)], "amber", "Nothing is red"),
        ([row(sol_pct=120.0)], "amber", "Nothing is red"),
        ([row(), row(tokens=8, status="interrupted")], "amber", "Nothing is red"),
        ([row(), row(tokens=8, status="wrong", check="wrong")], "red", "1 row red: 1 wrong"),
        (
            [row(tokens=1, status="failed"), row(tokens=2, status="timeout"), row()],
            "red",
            "2 rows red: 1 failed, 1 timeout",
        ),
    ],
)
def test_the_headline_says_whether_anything_is_red(
    tmp_path: Path, rows: list[dict[str, object]], level: str, headline: str
) -> None:
    report = report_of(tmp_path, *rows)
    assert (report.level, report.headline) == (level, headline)
    page = render(report)
    assert f'class="card verdict {level}"' in page
    assert f"<strong>{headline}</strong>" in page
    assert headline in markdown(report).splitlines()[0]


def test_a_failure_of_an_older_run_is_not_red_now(tmp_path: Path) -> None:
    assert report_of(tmp_path, row(stamp=night(1), status="failed"), row()).level == "green"


def test_the_fastest_variant_is_told_for_each_number_of_tokens(tmp_path: Path) -> None:
    rows = [row(tokens=8, lat_us_p50=10.0), row(tokens=8, variant="b", lat_us_p50=30.0), row(tokens=64, variant="b")]
    page = render(report_of(tmp_path, *rows))
    table = page[page.index('id="fastest"') : page.index('id="plots"')]
    assert re.findall(r'</svg>([^<]+)<br><span class="us">([^<]+)</span>', table) == [
        ("torch", "10 us"),
        ("b", "100 us"),
    ]
    assert "3.00\u00d7 ahead" in table
    assert "alone" in table


def test_every_row_that_did_not_run_has_its_reason(tmp_path: Path) -> None:
    reasons = {f"reason number {number}" for number in range(30)}
    rows = [row(tokens=tokens, status="unsupported", reason=each) for tokens, each in enumerate(sorted(reasons))]
    page = render(report_of(tmp_path, *rows))
    part = page[page.index('id="notrun"') : page.index('id="rows-head"')]
    assert set(re.findall(r"reason number \d+", part)) == reasons
    assert {each["reason"] for each in rows_json(page)["rows"]} == reasons


def test_every_row_has_its_repro_line(tmp_path: Path) -> None:
    lines = [f"SECTION=comm TOKENS={tokens}  ROUTING='zipf:1 x' ./run.sh" for tokens in range(5)]
    rows = [row(tokens=tokens, repro=line) for tokens, line in enumerate(lines)]
    read = rows_json(render(report_of(tmp_path, *rows)))["rows"]
    assert [each["repro"] for each in read] == [" ".join(line.split()) for line in lines]


def test_figures_of_the_table_are_those_of_the_rows(tmp_path: Path) -> None:
    red = row(tokens=8, status="failed", reason="rank 1 died")
    first, second = rows_json(render(report_of(tmp_path, row(lat_us_p50=1234.56), red)))["rows"]
    assert (first["status"], first["p50 us"]) == ("failed", None)
    assert (second["p50 us"], second["tokens"], second["variant"]) == (1234.56, 128, "torch")


# -- stale


def test_a_page_of_old_rows_says_since_when_there_is_no_data(tmp_path: Path) -> None:
    late = Options(FRESH.now + timedelta(hours=40))
    page = render(report_of(tmp_path, row(), options=late))
    banner = re.search(r'<div class="banner"[^>]*>No data since <span>([^<]+)</span>', page)
    assert banner
    assert banner[1] == "2026-11-30 19:00 UTC"
    assert " hidden>" not in banner[0]
    assert "**No data since 2026-11-30 19:00 UTC.**" in markdown(report_of(tmp_path, row(), options=late))
    assert " hidden>No data" in render(report_of(tmp_path, row()))


def test_a_section_that_fell_behind_is_told_by_name(tmp_path: Path) -> None:
    report = report_of(tmp_path, row(), row(section="ref", stamp=night(1)))
    assert [section for section, _ in report.stale_words] == ["ref"]
    assert re.search(r'<div class="banner" data-section [^>]*"\d*\.0">No data of section ref', render(report))
    assert "No data of ref since" in markdown(report)


def test_zero_hours_turn_the_banner_off(tmp_path: Path) -> None:
    page = render(report_of(tmp_path, row(), options=Options(FRESH.now + timedelta(days=900), stale_hours=0)))
    assert "No data" not in page


# -- verdicts and baselines


def test_verdicts_are_read_from_the_nights_file(tmp_path: Path) -> None:
    write_gate(tmp_path / f"verdicts_{STAMP}.json", verdict(), verdict(verdict="OK", red=False, reason=""))
    write_gate(tmp_path / f"verdicts_{night(1)}.json", night=night(1))
    path = write_rows(tmp_path / "a.csv", [row()])
    results = read_results([path])
    report = Report(results, FRESH, find_gate([path], results), None)
    assert (report.level, report.headline) == ("red", "Red verdicts: 1 REGRESSED")
    page = render(report)
    assert "1 of 1 rows regressed" in page
    assert "git: gold -&gt; gnew" in page
    assert "8 against 20 of 5 nights, 4 of them again" in page
    assert "REGRESSED +12.0 %: comm · torch · graph · bf16 · 128 tokens. slower" in markdown(report)


def test_an_old_nights_verdicts_are_not_those_of_the_newest_run(tmp_path: Path) -> None:
    write_gate(tmp_path / f"verdicts_{night(1)}.json", night=night(1))
    path = write_rows(tmp_path / "a.csv", [row(stamp=night(1)), row()])
    results = read_results([path])
    assert find_gate([path], results) is None
    assert f"verdicts_{night(1)}.json is not shown: {STAMP} is newer" in results.notices[0]


def test_a_gate_that_ended_red_is_red_even_if_no_row_is(tmp_path: Path) -> None:
    gate = read_gate(write_gate(tmp_path / "v.json"))
    report = Report(read_results([write_rows(tmp_path / "a.csv", [row()])]), FRESH, gate, None)
    assert (report.level, report.headline) == ("red", "The gate ended with 3")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2}', '{"schema": 1}', '{"schema": 1, "night": []}'])
def test_a_bad_file_of_verdicts_is_refused_and_never_read_as_green(tmp_path: Path, text: str) -> None:
    (tmp_path / f"verdicts_{STAMP}.json").write_text(text)
    path = write_rows(tmp_path / "a.csv", [row()])
    with pytest.raises(UsageError, match="verdicts_"):
        find_gate([path], read_results([path]))


def test_a_missing_file_of_verdicts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_gate(tmp_path / "verdicts_x.json")


def test_medians_beside_a_baseline_say_that_they_are_no_verdict(tmp_path: Path) -> None:
    ours = read_results([write_rows(tmp_path / "a.csv", [row(lat_us_p50=150.0)])])
    theirs = read_results([write_rows(tmp_path / "b.csv", [row(stamp=night(1), lat_us_p50=100.0)])])
    report = Report(ours, FRESH, None, theirs)
    assert report.level == "green", "a difference alone turns nothing red"
    page = render(report)
    assert "This is no verdict" in page
    assert "+50.0 %" in page
    assert "Beside the baseline: 1 case, no verdict" in markdown(report)


# -- texts of files are texts


def test_no_text_of_a_file_becomes_markup(tmp_path: Path) -> None:
    nasty = dict.fromkeys(("variant", "reason", "routing", "device", "versions", "git", "repro", "stamp"), NASTY)
    rows = [row(**nasty), row(**nasty, tokens=8, status="failed"), row(**nasty, tokens=9, status="skipped")]
    rows += [row(**nasty | {"stamp": "x" + NASTY, "git": "g2" + NASTY, "transport": NASTY, "lat_us_p50": 50.0})]
    gate = write_gate(tmp_path / "v.json", verdict(variant=NASTY, reason=NASTY), line=NASTY, suspects=[NASTY])
    path = write_rows(tmp_path / "rows.csv", rows)
    results = read_results([path])
    page = render(Report(results, Options(FRESH.now, title=NASTY), read_gate(gate), None))
    assert "<script>alert" not in page
    assert "<img" not in page
    assert page.count("<script") == 2, "the data and our own"
    assert not re.search(r'(data-tip|data-copy|title|aria-label)="[^"]*"quoted', page)
    assert "49" not in re.findall(r"onerror=alert\(2\)&gt; (\S+)", page)
    assert rows_json(page)["rows"][0]["variant"] == NASTY
    told = markdown(Report(results, Options(FRESH.now, title=NASTY), read_gate(gate), None))
    assert "<script>" not in told.replace("\\<", "")


def test_markdown_calls_nobody_and_keeps_names_readable(tmp_path: Path) -> None:
    report = report_of(tmp_path, row(), row(variant="deepep_ht", tokens=8, status="failed", reason="ask @team *now*"))
    told = markdown(report)
    assert "@team" not in told
    assert "\\*now\\*" in told
    assert "deepep_ht" in told


def test_long_lists_are_cut_in_markdown_and_say_so(tmp_path: Path) -> None:
    told = markdown(report_of(tmp_path, *(row(tokens=each, status="failed", reason="x") for each in range(25))))
    assert told.count("failed, x") == 10
    assert "and 15 more on the page" in told


# -- the page stands alone


def test_the_page_takes_nothing_from_outside_and_runs_only_its_own_script(tmp_path: Path) -> None:
    page = render(report_of(tmp_path, row()))
    assert not re.search(r'(src|href)="(?!#|data:)', page)
    assert "url(" not in page.replace("url(#", "")
    assert "@import" not in page
    assert re.search(r"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-[\w+/]+=*'", page)


def test_no_two_elements_share_an_id_and_every_inner_link_leads_somewhere(tmp_path: Path) -> None:
    rows = [row(variant=variant, tokens=tokens, timing=timing, iters_per_graph=None)
            for variant in "ab" for tokens in (1, 8) for timing in ("e2e", "kernel")]  # fmt: skip
    rows += [each | {"stamp": night(1)} for each in rows] + [row(tokens=9, status="failed"), row(status="skipped")]
    page = render(report_of(tmp_path, *rows))
    ids = re.findall(r'\bid="([^"]+)"', page)
    # the same glyph of a marker may be defined twice within one drawing, and is the same thing there
    ours = [each for each in ids if not re.fullmatch(r"[mp][0-9a-f]{10}", each)]
    assert len(ours) == len(set(ours))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)
    assert set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)


def test_drawings_have_no_colour_of_their_own(tmp_path: Path) -> None:
    page = render(report_of(tmp_path, row(), row(tokens=8), row(variant="b", tokens=8), row(stamp=night(1))))
    drawings = re.findall(r"<svg .*?</svg>", page, re.S)
    assert len(drawings) > 4
    assert not [found for drawing in drawings for found in re.findall(r"(?:fill|stroke): ?#[0-9a-f]+", drawing)]


def test_the_measured_peak_is_a_line_and_its_absence_is_told(tmp_path: Path) -> None:
    rows = [row(tokens=tokens, peak_source=f"measured {STAMP}") for tokens in (8, 64)]
    assert "No measured wire peak came with these rows" in render(report_of(tmp_path, *rows))
    (tmp_path / f"peaks_{STAMP}.json").write_text(json.dumps({"wire_gbps": 389.4, "source": f"measured {STAMP}"}))
    page = render(report_of(tmp_path, *rows))
    assert page.count("measured peak 389") == 2
    assert "No measured wire peak" not in page


def test_what_has_no_figures_has_no_plot(tmp_path: Path) -> None:
    bare = dict.fromkeys(("dispatch_us", "combine_us", "dispatch_wire_gbps", "combine_wire_gbps", "sol_pct"))
    page = render(report_of(tmp_path, row(**bare), row(**bare, tokens=8)))
    assert re.findall(r"<figcaption>([^<]+)", page) == ["Latency (p50) over tokens"]


@pytest.mark.parametrize("tokens", [[0], [0, 1], [0, 0], [1], [1, 2, 3, 4, 5], [8192]])
def test_any_tokens_can_be_drawn(tmp_path: Path, tokens: list[int]) -> None:
    page = render(report_of(tmp_path, *(row(tokens=each, lat_us_p50=10.0 + each) for each in tokens)))
    assert "<figcaption>Latency" in page


@pytest.mark.parametrize("cell", ["-5.0", "0", "1e-9", "1e300", "abc", "inf", "1e400"])
def test_odd_figures_break_no_plot(tmp_path: Path, cell: str) -> None:
    path = write_rows(tmp_path / "a.csv", [row(tokens=8), row(tokens=16, lat_us_p50=777.0), row(tokens=64)])
    path.write_text(path.read_text().replace("777", cell))
    page = render(Report(read_results([path]), FRESH, None, None))
    assert len(rows_json(page)["rows"]) == 3


@pytest.mark.parametrize("limit", ["PANELS_DRAWN", "CASES_DRAWN"])
def test_a_panel_that_is_not_drawn_keeps_its_figures_and_says_so(
    tmp_path: Path, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_page, limit, 2)
    page = render(report_of(tmp_path, *(row(hidden=16 * each, lat_us_p50=1000.0 + each) for each in range(1, 6))))
    assert page.count("<figcaption>Latency") == 2
    assert page.count("Not drawn: ") == 3
    assert page.count(">1005</td>") == 1


def test_history_and_its_change_points_are_on_the_page_and_in_markdown(tmp_path: Path) -> None:
    rows = [row(stamp=night(each), lat_us_p50=100.0 if each < 6 else 130.0) for each in range(10)]
    report = report_of(tmp_path, *rows)
    page = render(report)
    part = page[page.index('id="history"') :]
    assert f"+30.0 %</span> from {night(6)}" in part
    assert f"+30.0 % from {night(6)}: comm · torch" in markdown(report)
