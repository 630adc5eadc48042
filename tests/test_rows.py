"""What is in a row's file, what a kill or a full disk leaves of it, and what a resumed run makes of that."""

from __future__ import annotations

import csv
import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from lib import rows
from lib.rows import COLUMNS, HEADER, READ_AS_MISSING, RowFiles, SchemaError, WriteError, cell, csv_line, read_rows

STAMP = "20261130T190000Z"
EXTRA = {"samples": {"total_us": [[1.0, 2.0]]}, "knobs": {"TOKENS": "8"}, "fingerprint": {"cpu": "x"}}


def a_row(tokens: int = 8, **changes: object) -> dict[str, object]:
    plain = {"schema": 1, "stamp": STAMP, "section": "ref", "variant": "torch", "status": "ok", "tokens": tokens}
    return plain | {"reason": "", "num_sms": None, "lat_us_p50": 123.456789, "tainted": False} | changes


PLANNED = {"k0", "k1", "k2", "k3", "k4"}


def opened(folder: Path, resume: bool = False, planned: set[str] = PLANNED) -> RowFiles:
    files = RowFiles(folder, "bench", STAMP, "ref")
    files.open(resume, planned)
    return files


def written(folder: Path, *made: dict[str, object]) -> RowFiles:
    """Files that hold these rows, under the keys k0, k1, ..., closed again."""
    files = opened(folder)
    for number, row in enumerate(made):
        files.append(row, f"k{number}", EXTRA)
    files.close()
    return files


def mended(folder: Path) -> tuple[list[str], set[str], list[dict[str, str]]]:
    """Notices, keys and CSV rows after a resumed run opened the files; CSV and JSONL then agree line by line."""
    files = opened(folder, resume=True)
    files.close()
    found, torn = read_rows(files.csv)
    records, torn_records = rows.read_records(files.jsonl)
    assert not torn
    assert not torn_records
    assert [csv_line(record["row"]) for record in records] == files.csv.read_text().splitlines(keepends=True)[1:]
    assert len(found) == len(records)
    return files.notices, set(files.done), found


# -- cells


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (True, "1"),
        (False, "0"),
        (0, "0"),
        (12345678901, "12345678901"),
        (0.0, "0"),
        (1.0, "1"),
        (123.456789, "123.457"),
        (99999.4, "99999.4"),
        (123456.789, "123456.8"),
        (1.25e9, "1250000000.0"),
        (0.000123456789, "0.000123457"),
        (np.float64(2.5), "2.5"),
        ("two\nlines\tand  blanks ", "two lines and blanks"),
        ("", ""),
    ],
)
def test_a_cell_has_one_form(value: object, text: str) -> None:
    assert cell(value) == text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), np.float64("nan")])
def test_no_cell_is_nan_or_infinite(value: float) -> None:
    with pytest.raises(ValueError, match="never nan or inf"):
        cell(value)


@pytest.mark.parametrize("word", sorted(READ_AS_MISSING))
def test_a_word_that_pandas_takes_for_missing_is_refused(word: str, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(f'a,b\nx,"{word}"\n')
    assert pandas.read_csv(path)["b"].isna().all(), "pandas reads it after all: drop it from the list"
    with pytest.raises(ValueError, match="missing value"):
        cell(word)
    with pytest.raises(ValueError, match="missing value"):
        cell(f" {word}\n")
    assert cell(f"{word} at all") == f"{word} at all"


def test_the_list_of_such_words_is_that_of_the_installed_pandas() -> None:
    from pandas._libs.parsers import STR_NA_VALUES

    assert READ_AS_MISSING | {""} == STR_NA_VALUES


# -- lines


def test_a_row_is_one_line_whatever_it_holds() -> None:
    line = csv_line(a_row(reason='rank 1: "boom", said\r\nthe library;\n  twice'))
    assert line.count("\n") == 1
    assert line.endswith("\n")
    assert "\r" not in line
    (parsed,) = csv.DictReader([HEADER, line])
    assert parsed["reason"] == 'rank 1: "boom", said the library; twice'
    assert parsed["num_sms"] == ""


def test_the_header_has_every_column_once() -> None:
    assert HEADER.split(",") == [*COLUMNS[:-1], f"{COLUMNS[-1]}\n"]
    assert len(set(COLUMNS)) == len(COLUMNS)


def test_an_unknown_column_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match="lat_p50, speed"):
        csv_line(a_row(speed=1, lat_p50=2))


# -- files


def test_pandas_reads_a_file_without_options(tmp_path: Path) -> None:
    measured: dict[str, Any] = {"slowest_rank": 1, "acc_loss_pct": 0.5, "git": "g5e12345", "routing_sha": "r0012345"}
    refused: dict[str, Any] = {"status": "missing", "reason": "not installed: DeepEP, vLLM", "git": "g12345678"}
    last = a_row(**refused) | {"lat_us_p50": None, "tainted": None}
    files = written(tmp_path, a_row(**measured), a_row(64, **measured, num_sms=24), last)
    frame = pandas.read_csv(files.csv)
    assert list(frame.columns) == list(COLUMNS)
    assert len(frame) == 3
    for name in ("schema", "tokens"):
        assert frame[name].dtype.kind == "i", name
    for name in ("lat_us_p50", "acc_loss_pct", "num_sms", "slowest_rank", "tainted"):  # a blank makes integers floats
        assert frame[name].dtype.kind == "f", name
    assert list(frame["git"]) == ["g5e12345", "g5e12345", "g12345678"]
    assert list(frame["routing_sha"][:2]) == ["r0012345"] * 2
    assert list(frame["stamp"]) == [STAMP] * 3
    assert frame["reason"][2] == "not installed: DeepEP, vLLM"
    assert frame["lat_us_p50"].isna().tolist() == [False, False, True]
    assert frame["kernel_us"].isna().all()


def test_hashes_need_their_letter(tmp_path: Path) -> None:
    """The reason for `g` and `r`: without them pandas makes numbers of some."""
    path = tmp_path / "x.csv"
    path.write_text("git,routing_sha\n5e12345,0012345\n")
    bare = pandas.read_csv(path)
    assert bare["git"].dtype.kind == "f"
    assert bare["routing_sha"][0] == 12345


def test_a_record_holds_the_row_and_what_the_csv_has_no_room_for(tmp_path: Path) -> None:
    files = written(tmp_path, a_row(), a_row(64, status="missing", reason="not installed: vLLM"))
    records, torn = rows.read_records(files.jsonl)
    assert not torn
    assert [record["key"] for record in records] == ["k0", "k1"]
    assert all(set(record) == {"key", "row", "samples", "knobs", "fingerprint"} for record in records)
    assert records[0]["row"]["lat_us_p50"] == 123.456789
    found, _ = read_rows(files.csv)
    for record, row in zip(records, found, strict=True):
        assert {name: cell(record["row"].get(name)) for name in COLUMNS} == row


def test_nothing_that_exists_is_overwritten(tmp_path: Path) -> None:
    files = written(tmp_path, a_row())
    before = files.csv.read_bytes(), files.jsonl.read_bytes()
    with pytest.raises(FileExistsError):
        opened(tmp_path)
    files.csv.unlink()
    with pytest.raises(FileExistsError):
        opened(tmp_path)
    assert files.jsonl.read_bytes() == before[1]
    assert not files.csv.exists()


def test_a_second_run_cannot_write_the_files_of_a_running_one(tmp_path: Path) -> None:
    first = opened(tmp_path)
    with pytest.raises(rows.LockedError, match=f"bench_{STAMP}_ref.csv is being written by another run"):
        opened(tmp_path, resume=True)
    first.append(a_row(), "k0", EXTRA)
    first.close()
    assert mended(tmp_path) == ([], {"k0"}, read_rows(first.csv)[0])


def test_files_that_were_mended_are_locked_too(tmp_path: Path) -> None:
    """Mending replaces the file, and a lock belongs to the old one."""
    written(tmp_path, a_row(), a_row(status="interrupted"))
    first = opened(tmp_path, resume=True)
    assert first.notices
    with pytest.raises(rows.LockedError):
        opened(tmp_path, resume=True)
    first.close()


# -- resuming


def test_a_whole_file_is_resumed_as_it_is(tmp_path: Path) -> None:
    files = written(tmp_path, a_row(), a_row(64))
    before = files.csv.read_bytes(), files.jsonl.read_bytes()
    notices, done, _ = mended(tmp_path)
    assert (notices, done) == ([], {"k0", "k1"})
    assert (files.csv.read_bytes(), files.jsonl.read_bytes()) == before


def test_a_torn_csv_line_is_written_again_from_its_record(tmp_path: Path) -> None:
    files = written(tmp_path, a_row(), a_row(64))
    whole = files.csv.read_bytes()
    files.csv.write_bytes(whole[:-40])
    assert read_rows(files.csv)[1]
    notices, done, found = mended(tmp_path)
    assert notices == [f"{files.csv.name}: a torn last line was dropped"]
    assert done == {"k0", "k1"}
    assert files.csv.read_bytes() == whole
    assert [row["tokens"] for row in found] == ["8", "64"]


def test_a_torn_record_is_dropped_and_its_case_is_run_again(tmp_path: Path) -> None:
    """A kill within the JSONL's write: the CSV line was not begun."""
    files = written(tmp_path, a_row(), a_row(64))
    files.jsonl.write_bytes(files.jsonl.read_bytes()[:-1])
    files.csv.write_text("".join(files.csv.read_text().splitlines(keepends=True)[:-1]))
    notices, done, found = mended(tmp_path)
    assert notices == [f"{files.jsonl.name}: a torn last line was dropped"]
    assert done == {"k0"}
    assert [row["tokens"] for row in found] == ["8"]


def test_a_csv_that_is_one_row_behind_its_records_gets_the_row(tmp_path: Path) -> None:
    files = written(tmp_path, a_row(), a_row(64))
    whole = files.csv.read_text()
    files.csv.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    assert mended(tmp_path)[1] == {"k0", "k1"}
    assert files.csv.read_text() == whole


def test_outstanding_rows_go_and_the_others_stay(tmp_path: Path) -> None:
    statuses = ["ok", "interrupted", "failed", "timeout", "wrong"]
    written(tmp_path, *(a_row(status=status) for status in statuses))
    notices, done, found = mended(tmp_path)
    assert notices == ["3 cases that failed or were cut short are run again"]
    assert done == {"k0", "k4"}
    assert [row["status"] for row in found] == ["ok", "wrong"]


def test_an_interrupted_row_that_this_run_will_not_make_stays(tmp_path: Path) -> None:
    """Resumed with other knobs, a run would else lose the list of what is outstanding."""
    files = written(tmp_path, *(a_row(status="interrupted") for _ in range(3)))
    again = opened(tmp_path, resume=True, planned={"k1", "k9"})
    again.close()
    assert [row["status"] for row in read_rows(files.csv)[0]] == ["interrupted", "interrupted"]
    assert set(again.done) == {"k0", "k2"}
    ran, stayed = again.notices
    assert ran == "1 cases that failed or were cut short are run again"
    assert stayed.startswith("2 outstanding cases are not in this plan and stay")


def test_rows_without_their_records_are_refused_and_kept(tmp_path: Path) -> None:
    """Mended from an empty JSONL, the CSV would lose what it holds."""
    files = written(tmp_path, a_row(), a_row(64))
    before = files.csv.read_text()
    files.jsonl.write_text("")
    with pytest.raises(SchemaError, match="bring it back"):
        opened(tmp_path, resume=True)
    assert files.csv.read_text() == before


KEYS, OK = (["k0"], {}, None), {"status": "ok"}
ROWS = ([["status", "ok"]], "ok", {"status": []}, OK | {"latency": 1}, OK | {"lat_us_p50": float("nan")})
EDITED = [{"key": key, "row": OK} for key in KEYS] + [{"key": "k1", "row": row} for row in ROWS]


@pytest.mark.parametrize("line", ['{"broken', "{}", "5", "\0\0\0", *map(json.dumps, EDITED)])
def test_a_damaged_record_is_named_by_file_and_line(line: str, tmp_path: Path) -> None:
    files = written(tmp_path, a_row(), a_row(64))
    whole = files.jsonl.read_text().splitlines()
    files.jsonl.write_text("\n".join([whole[0], line, whole[1]]) + "\n")
    with pytest.raises(SchemaError, match=r"jsonl: line 2 is not a record"):
        opened(tmp_path, resume=True)


def test_a_librarys_long_words_are_read_again_and_a_cell_of_megabytes_is_named(tmp_path: Path) -> None:
    files = written(tmp_path, a_row(reason="long " * 100_000, status="wrong"), a_row(64))
    assert len(read_rows(files.csv)[0][0]["reason"]) == 5 * 100_000 - 1
    files.csv.write_text(files.csv.read_text() + "x" * 17_000_000 + "\n")
    with pytest.raises(SchemaError, match=r"csv: line 4 is not a row \(field larger than .*; mend it"):
        opened(tmp_path, resume=True)


def test_a_row_for_a_file_that_was_removed_is_handed_back(tmp_path: Path) -> None:
    files = opened(tmp_path)
    files.csv.unlink()
    files.jsonl.unlink()
    with pytest.raises(WriteError, match="the file was removed") as lost:
        files.append(a_row(), "k0", EXTRA)
    assert lost.value.line == csv_line(a_row())


def test_rows_are_appended_after_mending(tmp_path: Path) -> None:
    files = written(tmp_path, a_row(), a_row(64, status="interrupted"))
    again = opened(tmp_path, resume=True)
    again.append(a_row(64), "k1", EXTRA)
    again.close()
    assert [row["tokens"] for row in read_rows(files.csv)[0]] == ["8", "64"]
    assert mended(tmp_path)[:2] == ([], {"k0", "k1"})
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([files.csv.name, files.jsonl.name])


@pytest.mark.parametrize("header", ["schema,stamp,latency\n", HEADER.replace("lat_us_p50", "lat_us"), "\n"])
def test_a_file_of_another_schema_is_refused_and_left_as_it_is(header: str, tmp_path: Path) -> None:
    files = written(tmp_path, a_row())
    strange = files.csv.read_text().replace(HEADER, header)
    files.csv.write_text(strange)
    with pytest.raises(SchemaError, match="header is not that of schema 1"):
        opened(tmp_path, resume=True)
    assert files.csv.read_text() == strange


# -- a disk that refuses


def full_disk_after(monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Writes to the file of that suffix: half of the first one succeeds, then there is no space."""
    write, begun = os.write, False

    def filling(descriptor: int, data: bytes) -> int:
        nonlocal begun
        if not Path(f"/proc/self/fd/{descriptor}").readlink().name.endswith(suffix):
            return write(descriptor, data)
        if begun:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        begun = True
        return write(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(rows.os, "write", filling)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_full_disk_leaves_no_torn_line_and_says_which_row_was_lost(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = written(tmp_path, a_row())
    whole = files.csv.read_bytes()
    again = opened(tmp_path, resume=True)
    with monkeypatch.context() as patch:
        full_disk_after(patch, suffix)
        with pytest.raises(WriteError) as caught:
            again.append(a_row(4096), "k1", EXTRA)
    again.close()
    assert str(caught.value) == f"OUT_DIR={tmp_path}: cannot write {files.csv.stem}{suffix} (No space left on device)"
    assert "4096" in caught.value.line
    assert files.csv.read_bytes() == whole
    assert not rows.read_records(files.jsonl)[1]
    # A record without its CSV line is a saved row; without the record there is none.
    assert mended(tmp_path)[1] == ({"k0"} if suffix == ".jsonl" else {"k0", "k1"})


def test_a_write_in_many_parts_is_still_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(rows.os, "write", lambda descriptor, data: write(descriptor, data[:97]))
    files = written(tmp_path, a_row())
    monkeypatch.undo()
    assert files.csv.read_text() == HEADER + csv_line(a_row())


@pytest.mark.parametrize("bad", [{"reason": "None"}, {"lat_us_p50": float("nan")}, {"no_such_column": 1}])
def test_a_row_that_is_refused_leaves_nothing_in_either_file(bad: dict[str, Any], tmp_path: Path) -> None:
    """Else a resumed run would find a record that it can't make a line of."""
    files = opened(tmp_path)
    with pytest.raises((ValueError, KeyError)):
        files.append(a_row(**bad), "k0", EXTRA)
    files.append(a_row(), "k1", EXTRA)
    files.close()
    assert mended(tmp_path)[1] == {"k1"}


def test_raw_samples_must_be_finite_too(tmp_path: Path) -> None:
    files = opened(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        files.append(a_row(), "k0", {"samples": {"total_us": [[float("nan")]]}})
    files.close()
    assert json.loads(files.jsonl.read_text() or "[]") == []
