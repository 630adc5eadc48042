"""tools/scaling.py: which rows stand side by side, what the table says, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_rows import row, write_rows

from lib.rows import read_rows
from tools.scaling import main

MEASURED = Path(__file__).resolve().parent.parent / "docs" / "measured"


def lines_of(text: str) -> list[list[str]]:
    """The cells of a Markdown table's rows, without the line under the heads."""
    rows = [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in cells] for cells in rows]


def at(world: int, us: float, **columns: object) -> dict[str, object]:
    return row(world=world, lat_us_p50=us, sol_pct=1000 / us, **columns)


def test_cases_stand_beside_themselves_at_other_numbers_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        at(2, 100),
        at(8, 150),
        at(4, 120),
        at(2, 50, variant="alone"),
        at(2, 70, variant="b"),
        at(4, 35, variant="b"),
    ]
    assert main([str(write_rows(tmp_path / "a.csv", rows))]) == 0
    heads, torch, b = lines_of(capsys.readouterr().out)
    assert heads[:5] == ["variant", "tokens", "EP2 lat_us_p50", "EP4 lat_us_p50", "EP8 lat_us_p50"]
    assert torch == ["torch", "128", "100.0", "120.0", "150.0", "1.50", "10.0", "8.3", "6.7"]
    assert b[:6] == ["b", "128", "70.0", "35.0", "", "0.50"]


@pytest.mark.parametrize(
    "other",
    [
        {"tokens": 8}, {"dispatch_dtype": "fp8"}, {"timing": "e2e"}, {"hidden": 4096}, {"device": "NVIDIA B200"},
        {"routing": "onehot"}, {"num_sms": 24}, {"status": "failed"}, {"timing": "none"},
        {"repro": "SECTION=comm RANKS_PER_GPU=2 ./run.sh"},
    ],
)  # fmt: skip
def test_what_differs_in_more_than_ranks_is_no_pair(
    other: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(write_rows(tmp_path / "a.csv", [at(2, 100), at(4, 120, **other)]))]) == 3
    assert capsys.readouterr().err.endswith("none of them at two numbers of ranks\n")


def test_marked_rows_do_not_count_and_nodes_have_columns_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [at(2, 10), at(4, 20), at(4, 900, nodes=2), at(4, 999, tainted=1)]
    rows += [row(world=world) for world in ("²", "", "9" * 5000, "0")]
    assert main([str(write_rows(tmp_path / "a.csv", rows))]) == 0
    heads, case = lines_of(capsys.readouterr().out)
    assert heads[2:5] == ["EP2 lat_us_p50", "EP4 lat_us_p50", "EP4 on 2 nodes lat_us_p50"]
    assert case[2:5] == ["10.0", "20.0", "900.0"]


def test_the_newest_run_counts_and_its_median(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = "20261201T000000Z"
    write_rows(tmp_path / "old.csv", [at(2, 100), at(4, 110)])
    write_rows(tmp_path / "new.csv", [at(2, 300, stamp=new)])
    assert main([str(tmp_path)]) == 0
    assert lines_of(capsys.readouterr().out)[1][2:5] == ["300.0", "110.0", "0.37"]


def test_another_metric_and_only_some_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [at(world, 100, dispatch_us=world, tokens=tokens) for world in (2, 4) for tokens in (8, 128)]
    path = str(write_rows(tmp_path / "a.csv", rows))
    assert main([path, "--metric", "dispatch_us", "--only", "tokens=8"]) == 0
    heads, only = lines_of(capsys.readouterr().out)
    assert heads[2] == "EP2 dispatch_us"
    assert only[:5] == ["torch", "8", "2.0", "4.0", "2.00"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere: there is no such file"),
        ([], "required: CSV"),
        (["x", "--metric", "speed"], "speed is no column"),
        (["x", "--only", "speed=1"], "must be COLUMN=VALUE"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_the_committed_rows_of_one_and_two_gpus_are_laid_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    files = [MEASURED / "fi_mega_h200x1.csv", MEASURED / "fi_mega_h200x2_8tokens.csv"]
    assert main([*map(str, files), "--only", "timing=kernel", "--only", "variant=sm90_push_fp8"]) == 0
    two = next(r for r in read_rows(files[1])[0] if (r["variant"], r["timing"]) == ("sm90_push_fp8", "kernel"))
    assert f" {float(two['lat_us_p50']):.1f} " in capsys.readouterr().out
