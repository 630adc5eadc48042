"""The table at the end of a run: what ran first, a reason where there is no figure, and no column that says nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lib.rows import HEADER, RowFiles, SchemaError
from lib.summary import REASON_CHARACTERS, main, summary

STAMP = "20261130T190000Z"
SHAPE = {"world": 2, "num_experts": 32, "topk": 4, "hidden": 512, "inter": 256, "routing": "uniform"}
COMMON = {"section": "ref", "device": "CPU (x, 2 cores)", "timing": "e2e", "tokens": 8, "git": "g0123abc", **SHAPE}
FIGURES = {"lat_us_p50": 1234.56, "dispatch_us": 200.0, "acc_loss_pct": 0.4}
OK = {"variant": "torch", "status": "ok", "check": "ok", **FIGURES}


def a_csv(folder: Path, *rows: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    files = RowFiles(folder, "bench", STAMP, "ref")
    files.open(resume=False)
    for number, row in enumerate(rows):
        files.append(COMMON | row, f"k{number}", {})
    files.close()
    return files.csv


def test_the_header_names_every_commit_and_version_that_the_rows_were_made_with(tmp_path: Path) -> None:
    """RESUME may have gone on after a pull, or with another interpreter."""
    first = OK | {"versions": "python 3.11.7; torch 2.13.0", "git": "g1"}
    path = a_csv(tmp_path, first, first, OK | {"versions": "python 3.11.7; torch 2.11.0", "git": "g2+"})
    assert summary(path)[0].endswith("| python 3.11.7; torch 2.13.0, 2.11.0 | g1, g2+")


def test_one_header_line_tells_machine_shape_and_versions(tmp_path: Path) -> None:
    path = a_csv(tmp_path, {"variant": "x", "status": "missing", "reason": "no x"}, OK | {"versions": "torch 2.13.0"})
    shape = "world=2 num_experts=32 topk=4 hidden=512 inter=256 routing=uniform"
    assert summary(path)[0] == f"ref | CPU (x, 2 cores) | {shape} | torch 2.13.0 | g0123abc"


def test_figures_stand_under_their_headings_and_blank_columns_are_left_out(tmp_path: Path) -> None:
    _, heading, line, _ = summary(a_csv(tmp_path, OK))
    assert heading.split() == ["variant", "status", "p50", "us", "dispatch", "acc", "loss", "%", "check"]
    assert line.split() == ["torch", "ok", "1234.6", "200.0", "0.40", "ok"]
    assert heading.index("p50 us") + len("p50 us") == line.index("1234.6") + len("1234.6")
    assert heading.index("check") + len("check") == len(line)


def test_a_label_is_shown_where_it_differs(tmp_path: Path) -> None:
    _, heading, first, second, _ = summary(a_csv(tmp_path, OK, OK | {"tokens": 64}))
    assert heading.split()[:3] == ["variant", "tokens", "status"]
    assert (first.split()[1], second.split()[1]) == ("8", "64")


def test_what_ran_comes_first_and_a_reason_stands_where_figures_would(tmp_path: Path) -> None:
    long = "died of what no line can hold, " * 9
    path = a_csv(tmp_path, {"variant": "b", "status": "failed", "reason": long}, OK)
    lines = summary(path)
    assert [line.split()[0] for line in lines[2:4]] == ["torch", "b"]
    assert lines[3].endswith("…")
    assert len(lines[3].partition("failed  ")[2]) == REASON_CHARACTERS
    assert lines[4] == f"rows: {path}   1 ok, 1 failed"
    assert lines[1].index("p50 us") < 40, "a long reason must not push the figures away"


def test_what_did_not_run_is_a_line_a_reason_with_its_variants(tmp_path: Path) -> None:
    absent = [{"variant": f"v{n}", "status": "missing", "reason": "not installed: V"} for n in range(5)]
    other = {"variant": "w", "status": "unsupported", "reason": "needs an NVIDIA GPU"}
    lines = summary(a_csv(tmp_path, *absent, other, OK))
    assert lines[3:5] == [
        "missing  v0, v1, v2 and 2 more: not installed: V",
        "unsupported  w: needs an NVIDIA GPU",
    ]
    (tmp_path / "none").mkdir()
    assert len(summary(a_csv(tmp_path / "none", other))) == 3, "no table where nothing ran"


def test_a_torn_line_is_mentioned_and_an_empty_file_too(tmp_path: Path) -> None:
    path = a_csv(tmp_path, OK)
    with path.open("a") as file:
        file.write("1,2026")
    assert summary(path)[-1] == "(a torn last line was left out)"
    empty = tmp_path / "empty.csv"
    empty.write_text(HEADER)
    assert summary(empty) == [f"{empty}: no rows"]


def test_a_strange_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(SchemaError):
        summary(path)


def no_row(line: str) -> str:
    return "1,2\n"


def open_quote(line: str) -> str:
    return f'"{line}'


def one_cell_more(line: str) -> str:
    return f"{line[:-1]},x\n"


@pytest.mark.parametrize("edit", [no_row, open_quote, one_cell_more])
def test_a_line_that_is_no_row_is_a_sentence_and_the_other_files_are_shown(
    edit: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, edited = a_csv(tmp_path / "whole", OK), a_csv(tmp_path / "edited", OK, OK)
    *lines, last = edited.read_text().splitlines(keepends=True)
    edited.write_text("".join([*lines, edit(last)]))
    assert main([str(edited), str(whole)]) == 0
    told, _, table = capsys.readouterr().out.partition("\n\n")
    assert told == f"{edited}: no table ({edited}: line 3 is not a row; mend it or leave it out)"
    assert "torch" in table


def test_a_figure_that_is_no_number_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = a_csv(tmp_path, OK | {"lat_us_p50": "fast"})
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: no table (could not convert string to float: 'fast')\n"


def test_the_command_prints_a_block_a_file_and_passes_over_those_that_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = a_csv(tmp_path, OK)
    assert main([str(path), str(tmp_path / "none.csv"), str(path)]) == 0
    assert capsys.readouterr().out.count("rows: ") == 2


def test_what_an_ok_row_has_to_say_stands_under_the_table_and_its_figures_stay(tmp_path: Path) -> None:
    remark = "kernel: a graph replay of the whole round"
    path = a_csv(tmp_path, OK | {"reason": remark}, OK | {"reason": remark}, OK | {"variant": "y", "reason": "other"})
    lines = summary(path)
    assert [line.split()[2] for line in lines[2:5]] == ["1234.6"] * 3
    assert lines[5:7] == [f"  torch: {remark}", "  y: other"]


def test_a_torn_peaks_file_and_an_edited_status_leave_the_table_whole(tmp_path: Path) -> None:
    path = a_csv(tmp_path, OK, OK | {"variant": "edited"})
    path.write_text(path.read_text().replace(",edited,", ",edited,", 1).replace(",ok,,2,", ",Failed,,2,", 1))
    (tmp_path / f"peaks_{STAMP}.json").write_text('{"wire_gbps": 39')
    lines = summary(path)
    assert any(line.startswith("edited") for line in lines)
    assert "peaks" not in lines[0]
