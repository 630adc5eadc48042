"""What a report reads: files and folders, torn, doubled, foreign and mended by hand; and which rows are one case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_rows import STAMP, night, row, write_rows
from test_docs import COLUMN_ROWS

from lib.history import NIGHT_HEADER
from lib.rows import HEADER, csv_line
from tools.arguments import UsageError
from tools.report_cases import FORMAT_COLUMNS, PANEL_COLUMNS, SERIES_COLUMNS, find_cases, find_panels, win_spans, wins
from tools.report_data import number, read_results, stamp_order, stamp_time, wire_peak_gbps
from tools.report_environment import baseline_differences, run_differences
from tools.report_verdicts import compare

# -- files


def test_rows_of_two_files_are_read_oldest_run_first(tmp_path: Path) -> None:
    new = write_rows(tmp_path / "a.csv", [row(stamp=night(2))])
    old = write_rows(tmp_path / "b.csv", [row(stamp=night(1))])
    assert read_results([new, old]).runs == [night(1), night(2)]


def test_a_folder_gives_its_csvs_of_rows_and_no_other_table(tmp_path: Path) -> None:
    write_rows(tmp_path / "bench_x_comm.csv", [row()])
    (tmp_path / "other.csv").write_text("name,figure\nx,1\n")
    results = read_results([tmp_path])
    assert (len(results.rows), results.notices) == (1, [])


def test_rows_given_twice_count_once_and_that_is_told(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", [row(), row(tokens=8)])
    results = read_results([path, tmp_path])
    assert len(results.rows) == 2
    assert results.notices == ["a.csv: 2 rows are the same as rows read before, and count once"]


def test_two_machines_may_have_the_same_stamp(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "a.csv", [row(lat_us_p50=10.0)])
    other = write_rows(tmp_path / "b.csv", [row(lat_us_p50=30.0)])
    (case,) = find_cases(read_results([one, other]).rows).values()
    assert case.now("lat_us_p50") == 20.0


def test_another_schema_is_left_out_with_a_notice_beside_good_files(tmp_path: Path) -> None:
    write_rows(tmp_path / "good.csv", [row()])
    (tmp_path / "old.csv").write_text("schema,stamp\n0,x\n")
    results = read_results([tmp_path])
    assert len(results.rows) == 1
    assert "old.csv: its header is not that of schema" in results.notices[0]


@pytest.mark.parametrize("text", ["schema,stamp\n0,x\n", "", "\0\1\2", HEADER + "1," * 2 + "x" * 17_000_000 + "\n"])
def test_a_file_that_is_no_csv_of_rows_is_refused_when_it_is_all_there_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"x\.csv"):
        read_results([path])


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        read_results([tmp_path / "nothing"])


def test_a_torn_last_line_is_dropped_with_a_notice(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", [row(), row(tokens=8)])
    path.write_text(path.read_text()[:-5])
    results = read_results([path])
    assert (len(results.rows), results.notices) == (1, ["a.csv: a torn last line was left out"])


def test_a_line_that_lost_cells_by_hand_is_blank_there(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(HEADER + csv_line(row())[:200].rpartition(",")[0] + "\n")
    (read,) = read_results([path]).rows
    assert read["variant"] == "torch"
    assert read["repro"] == ""


def test_a_nights_file_has_the_night_as_its_run(tmp_path: Path) -> None:
    path = tmp_path / f"night_{night(3)}.csv"
    lines = [f"{night(3)},{start},0,{csv_line(row(stamp=f'{night(3)}-{start}'))}" for start in (1, 2)]
    path.write_text(NIGHT_HEADER + "".join(lines))
    results = read_results([tmp_path])
    assert results.runs == [night(3)]
    (case,) = find_cases(results.rows).values()
    assert len(case.current) == 2, "both starts are the newest run"


def test_only_keeps_rows_of_a_value(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", [row(), row(timing="e2e")])
    assert [each["timing"] for each in read_results([path], [("timing", "e2e")]).rows] == ["e2e"]


def test_stamps_sort_by_time_and_number() -> None:
    stamps = [f"{STAMP}-10", f"{STAMP}-9", STAMP, "odd", night(0)]
    assert sorted(stamps, key=stamp_order) == ["odd", night(0), STAMP, f"{STAMP}-9", f"{STAMP}-10"]
    assert stamp_time("20261399T990000Z") is None


@pytest.mark.parametrize(("text", "value"), [("1.5", 1.5), ("", None), ("abc", None), ("inf", None), ("nan", None)])
def test_a_cell_that_is_no_finite_number_is_blank(text: str, value: float | None) -> None:
    assert number({"tokens": text}, "tokens") == value


def test_the_peak_is_the_one_that_the_rows_name(tmp_path: Path) -> None:
    (tmp_path / f"peaks_{STAMP}.json").write_text(json.dumps({"wire_gbps": 389.0, "source": f"measured {STAMP}"}))
    (tmp_path / "peaks_other.json").write_text(json.dumps({"wire_gbps": 10.0, "source": "measured another"}))
    (tmp_path / "peaks_bad.json").write_text("{")
    path = write_rows(tmp_path / "a.csv", [row(peak_source=f"measured {STAMP}")])
    results = read_results([path])
    assert wire_peak_gbps(results, results.rows) == (389.0, f"measured {STAMP}")
    named = [results.rows[0] | {"peak_source": f"/elsewhere/peaks_{STAMP}.json"}]
    assert wire_peak_gbps(results, named) == (389.0, f"/elsewhere/peaks_{STAMP}.json")
    assert wire_peak_gbps(results, [results.rows[0] | {"peak_source": ""}]) is None


# -- cases and panels


def test_a_case_is_every_input_of_the_schema_with_the_options_and_the_device() -> None:
    inputs = {name for name, told in COLUMN_ROWS.items() if told[1] == "input"}
    assert {*PANEL_COLUMNS, *FORMAT_COLUMNS, *SERIES_COLUMNS, "tokens"} == inputs | {"device", "options"}


def panels_of(tmp_path: Path, *rows: dict[str, object]) -> dict[str, list[str]]:
    results = read_results([write_rows(tmp_path / "a.csv", rows)])
    return {panel.label: list(panel.series) for panel in find_panels(find_cases(results.rows).values())}


def test_timings_never_share_a_panel(tmp_path: Path) -> None:
    panels = panels_of(tmp_path, row(), row(timing="e2e", iters_per_graph=None), row(variant="deepep_ll"))
    assert panels == {"comm · graph · bf16": ["deepep_ll", "torch"], "comm · e2e · bf16": ["torch"]}


def test_shapes_and_machines_never_share_a_panel_and_the_label_tells_them_apart(tmp_path: Path) -> None:
    panels = panels_of(tmp_path, row(), row(hidden=2880), row(device="NVIDIA H100"))
    assert list(panels) == [
        "comm · graph · bf16 · hidden 7168 · device NVIDIA H200",
        "comm · graph · bf16 · hidden 2880 · device NVIDIA H200",
        "comm · graph · bf16 · hidden 7168 · device NVIDIA H100",
    ]


def test_formats_are_panels_where_they_are_asked_for_and_compete_elsewhere(tmp_path: Path) -> None:
    fused = {"section": "fi_mega", "timing": "e2e", "iters_per_graph": None}
    formats = [row(**fused, variant=name, dispatch_dtype=name) for name in ("mxfp8", "nvfp4")]
    panels = panels_of(tmp_path, row(), row(dispatch_dtype="fp8"), *formats)
    assert panels["fi_mega · e2e"] == ["mxfp8", "nvfp4"]
    assert "comm · graph · fp8" in panels


def test_an_sm_budget_is_a_series_of_its_own(tmp_path: Path) -> None:
    panels = panels_of(
        tmp_path, row(num_sms=0), row(num_sms=24), row(num_sms=0, layout="x"), row(num_sms=0, layout="y")
    )
    (series,) = panels.values()
    assert series == ["torch · 24 SMs", "torch · layout none", "torch · layout x", "torch · layout y"]


def test_a_graph_that_fell_back_joins_the_timing_that_was_used(tmp_path: Path) -> None:
    used = row(timing="e2e_pipelined", iters_per_graph=None, lat_us_p50=10.0)
    fell = row(timing="e2e_pipelined", iters_per_graph=50, graph="eager: it syncs", lat_us_p50=20.0)
    fell["repro"] = f"TIMING=graph {used['repro']}"
    (case,) = find_cases(read_results([write_rows(tmp_path / "a.csv", [used, fell])]).rows).values()
    assert case.now("lat_us_p50") == 15.0


def test_a_case_that_a_run_has_twice_is_what_it_was_last_and_no_mean_of_both(tmp_path: Path) -> None:
    """RESUME after a change of the code leaves both rows in the file."""
    old, new = row(lat_us_p50=10.0, git="g1"), row(lat_us_p50=500.0, git="g2")
    (case,) = find_cases(read_results([write_rows(tmp_path / "a.csv", [old, new])]).rows).values()
    assert case.now("lat_us_p50") == 500.0


def test_only_variants_whose_totals_hold_the_same_work_share_a_panel(tmp_path: Path) -> None:
    """A cached handle needs no layout, no counts and no ids; low-latency fp8 holds quantisation and staging."""
    panels = panels_of(
        tmp_path,
        row(variant="ht"),
        row(variant="ht+cached", handle="cached"),
        row(variant="ll", quant_included=1, staging_included=1),
        row(variant="ll2", quant_included=0, staging_included=0),
        row(variant="ll2", tokens=64, status="failed"),
    )
    assert panels == {
        "comm · graph · bf16 · fresh": ["ht", "ll2"],
        "comm · graph · bf16 · cached handle": ["ht+cached"],
        "comm · graph · bf16 · fresh + quant + staging": ["ll"],
    }


def test_kernel_options_of_the_repro_line_are_series_of_their_own(tmp_path: Path) -> None:
    plain = row(repro="SECTION=fi_mega MEGA_TIMING=kernel MEGA_ACC=1 ./run.sh")
    tuned = row(repro="SECTION=fi_mega MEGA_TIMING=kernel MEGA_KNOBS='{\"swap_ab\": true}' ./run.sh")
    (series,) = panels_of(tmp_path, plain, tuned).values()
    assert series == ["torch · options MEGA_KNOBS='{\"swap_ab\": true}'", "torch · options none"]


def test_the_fastest_is_told_with_its_lead_and_a_small_lead_is_level(tmp_path: Path) -> None:
    rows = [row(tokens=8, lat_us_p50=10.0), row(tokens=8, variant="b", lat_us_p50=10.2)]
    rows += [row(tokens=64, lat_us_p50=20.0), row(tokens=64, variant="b", lat_us_p50=10.0)]
    rows += [row(tokens=128, variant="b", lat_us_p50=15.0), row(tokens=128, status="failed")]
    results = read_results([write_rows(tmp_path / "a.csv", rows)])
    (panel,) = find_panels(find_cases(results.rows).values())
    assert [(win.tokens, win.label, win.lead, win.level) for win in wins(panel)] == [
        (8, "torch", 1.02, True),
        (64, "b", 2.0, False),
        (128, "b", None, False),
    ]
    assert win_spans(panel) == ["level at 8 tokens: torch, b", "b at 64 to 128 tokens (next takes 2.00 times as long)"]


def test_a_case_that_fails_now_has_no_point_from_yesterday(tmp_path: Path) -> None:
    rows = [row(stamp=night(1)), row(stamp=night(2), status="failed", reason="rank 1 died")]
    results = read_results([write_rows(tmp_path / "a.csv", rows)])
    (panel,) = find_panels(find_cases(results.rows).values())
    assert panel.points("lat_us_p50") == {}


# -- beside other runs


def test_a_baseline_meets_equal_cases_only(tmp_path: Path) -> None:
    ours = [
        row(lat_us_p50=110.0),
        row(timing="e2e", iters_per_graph=None),
        row(tokens=0),
        row(tokens=7, status="failed"),
    ]
    results = read_results([write_rows(tmp_path / "a.csv", ours)])
    theirs = [row(stamp=night(1), lat_us_p50=us) for us in (90.0, 100.0, 130.0)]
    baseline = read_results([write_rows(tmp_path / "b.csv", theirs)])
    found, alone = compare(find_cases(results.rows), baseline)
    assert [(pair.baseline_us, pair.new_us, round(pair.change_pct, 6)) for pair in found] == [(100.0, 110.0, 10.0)]
    assert alone == 2, "another timing and another number of tokens; a failed row is not compared"


def test_what_differs_between_runs_is_found_in_rows_fingerprints_and_peaks(tmp_path: Path) -> None:
    for number_, torch, driver, wire in ((1, "2.11.0", "580", 389.0), (2, "2.12.0", "590", 350.0)):
        stamp = night(number_)
        source = f"measured {stamp}"
        row_ = row(stamp=stamp, versions=f"python 3.12.3; torch {torch}; deep_ep x 1.2", peak_source=source)
        write_rows(tmp_path / f"sweep_{stamp}_comm.csv", [row_])
        record = {"key": "k", "row": {"stamp": stamp, "status": "ok"}, "fingerprint": {"driver": driver, "gpus": []}}
        (tmp_path / f"sweep_{stamp}_comm.jsonl").write_text(json.dumps(record) + "\n")
        (tmp_path / f"peaks_{stamp}.json").write_text(
            json.dumps({"wire_gbps": wire, "hbm_gbps": wire, "source": source})
        )
    told = {each.fact: (each.before, each.after) for each in run_differences(read_results([tmp_path]))}
    peaks = {"peak wire_gbps": ("389", "350"), "peak hbm_gbps": ("389", "350")}
    assert told == {"torch": ("2.11.0", "2.12.0"), "driver": ("580", "590")} | peaks


def test_the_baselines_environment_is_compared_too(tmp_path: Path) -> None:
    ours = read_results([write_rows(tmp_path / "a.csv", [row(git="gnew")])])
    theirs = read_results([write_rows(tmp_path / "b.csv", [row(stamp=night(1), git="gold")])])
    (found,) = baseline_differences(ours, theirs)
    assert (found.fact, found.before, found.after) == ("git", "gold", "gnew")
