"""Nights one after another: a recorded fortnight, the clock, acceptance, retention, what is told before a night."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from nights import baseline, judged, measured, night, quiet, row, stamp, write_nights

from lib import history, monitor, nightly, preflight
from lib.gate import MIN_NIGHTS
from lib.history import Row
from lib.machine import Gpu
from tests.record_fortnight import ACCEPTED_AFTER, FORTNIGHT, NIGHTS, SLOW_NIGHT
from tools import gate_simulation as simulation

LAST_NIGHT = 14


def replay(folder: Path, rows: list[Row]) -> Iterator[tuple[int, dict[str, object]]]:
    """(number, verdicts) of each night as nightly.sh would judge it; the first ACCEPTED_AFTER become the baseline."""
    for number, name in enumerate(sorted({made["night"] for made in rows}), 1):
        write_nights(folder, [made for made in rows if made["night"] == name])
        yield number, judged(folder, name)
        if number == ACCEPTED_AFTER:
            assert nightly.main(["accept", str(folder), ""]) == 0


def red_nights(folder: Path, rows: list[Row]) -> tuple[list[int], dict[int, dict[str, object]]]:
    told = dict(replay(folder, rows))
    assert all(told[number]["counts"].keys() == {"NO_BASELINE"} for number in range(1, ACCEPTED_AFTER + 1))  # type: ignore[attr-defined]
    judged_nights = {number: document for number, document in told.items() if number > ACCEPTED_AFTER}
    return [number for number, document in judged_nights.items() if document["exit"]], judged_nights


# -- a fortnight


def test_of_a_recorded_fortnight_on_a_cpu_exactly_the_slowed_night_is_red(tmp_path: Path) -> None:
    rows, _ = history.read(FORTNIGHT)
    assert len({made["night"] for made in rows}) == NIGHTS
    red, told = red_nights(tmp_path / "out", rows)
    assert red == [SLOW_NIGHT]
    assert "REGRESSED" in str(told[SLOW_NIGHT]["line"])


def h200_fortnight(slow: float, seed: int) -> list[Row]:
    """14 nights of the committed H200 rows, each start scattered as rows of its kind do, one night slower."""
    rng = random.Random(seed)
    share = simulation.night_over_start()
    scatter: dict[tuple[str, bool], float] = {}
    several = [key for key, stamps in simulation.measured_starts().items() if sum(map(len, stamps.values())) > 1]
    for key, sd in zip(several, simulation.start_sds(), strict=True):
        scatter[simulation.kind(key)] = sd
    rows = []
    for made in measured():
        key = simulation.kind(tuple(made[name] for name in simulation.SAME))
        if made["status"] != "ok" or key not in scatter:
            continue
        for number in range(1, LAST_NIGHT + 1):
            mood = rng.gauss(0, share)
            factor = slow if number == SLOW_NIGHT else 1
            for again in (0, 1) if number > ACCEPTED_AFTER else (0,):
                for start in range(1, 5):
                    noise = math.exp(scatter[key] * (mood + rng.gauss(0, 1)))
                    place = {"night": stamp(number), "start": str(start), "again": str(again)}
                    rows.append(place | made | {"lat_us_p50": f"{float(made['lat_us_p50']) * factor * noise:.6g}"})
    return rows


@pytest.mark.parametrize("seed", [1, 2])
def test_of_a_fortnight_of_h200_rows_exactly_the_night_ten_per_cent_slower_is_red(seed: int, tmp_path: Path) -> None:
    red, told = red_nights(tmp_path / "out", h200_fortnight(1.1, seed))
    assert red == [SLOW_NIGHT]
    verdicts = [found for found in told[SLOW_NIGHT]["verdicts"] if found["red"]]  # type: ignore[attr-defined]
    assert len(verdicts) >= 10
    assert all(found["timing"] == "graph" or found["tokens"] == "4096" for found in verdicts)


# -- between nights


def test_three_throttled_nights_in_a_row_are_red_and_a_good_one_ends_the_row(tmp_path: Path) -> None:
    write_nights(tmp_path, baseline())
    nightly.main(["accept", str(tmp_path), ""])
    codes = []
    for number, mark in enumerate("1101110", 10):
        write_nights(tmp_path, night(number, quiet(seed=number), throttled=mark))
        codes.append(judged(tmp_path, stamp(number))["verdicts"][0]["red"])
    assert codes == [False, False, False, False, False, True, False]


def test_a_baseline_changes_by_accept_only(tmp_path: Path) -> None:
    write_nights(tmp_path, baseline())
    assert nightly.main(["accept", str(tmp_path), ""]) == 0
    (path,) = tmp_path.glob("baseline_*.csv")
    before = path.read_bytes()
    write_nights(tmp_path, night(9, quiet(seed=9)))
    assert judged(tmp_path, stamp(9))["exit"] == 0
    assert path.read_bytes() == before
    nightly.main(["accept", str(tmp_path), ""])
    assert stamp(9) in path.read_text()


def test_accept_leaves_out_rows_that_were_red_unless_a_night_is_named(tmp_path: Path) -> None:
    write_nights(tmp_path, baseline())
    nightly.main(["accept", str(tmp_path), ""])
    write_nights(tmp_path, night(9, quiet(150, seed=1), quiet(150, seed=2)))
    assert judged(tmp_path, stamp(9))["exit"] == 3
    (path,) = tmp_path.glob("baseline_*.csv")
    nightly.main(["accept", str(tmp_path), ""])
    assert stamp(9) not in path.read_text()
    nightly.main(["accept", str(tmp_path), stamp(9)])
    assert {made["night"] for made in history.read(path)[0]} == {stamp(9)}


def test_too_few_accepted_nights_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_nights(tmp_path, baseline(3))
    assert nightly.main(["accept", str(tmp_path), ""]) == 0
    assert f"3 nights, {stamp(1)} to {stamp(3)}; {MIN_NIGHTS} are needed" in capsys.readouterr().out


def test_nothing_to_accept_is_exit_3(tmp_path: Path) -> None:
    assert nightly.main(["accept", str(tmp_path), ""]) == 3
    write_nights(tmp_path, baseline(9, throttled="1"))
    assert nightly.main(["accept", str(tmp_path), ""]) == 3


def test_each_machine_has_its_own_baseline_and_another_machines_is_named(tmp_path: Path) -> None:
    write_nights(tmp_path, baseline() + baseline(device="NVIDIA B200", world="8"))
    nightly.main(["accept", str(tmp_path), ""])
    names = sorted(path.name for path in tmp_path.glob("baseline_*"))
    assert names == ["baseline_nvidia-b200-x8.csv", "baseline_nvidia-h200-x2.csv"]
    write_nights(tmp_path, night(9, quiet(), device="NVIDIA H20"))
    document = judged(tmp_path, stamp(9))
    assert (document["exit"], document["counts"]) == (3, {"NO_BASELINE": 1})
    assert "nvidia-h20-x2, for which nothing is accepted" in document["notices"][0]
    other = judged(tmp_path, stamp(9), str(tmp_path / "baseline_nvidia-h200-x2.csv"))
    assert other["counts"] == {"INCOMPARABLE": 1}


def test_a_night_without_any_row_is_red_and_says_since_when(tmp_path: Path) -> None:
    write_nights(tmp_path, baseline())
    nightly.main(["accept", str(tmp_path), ""])
    history.write_whole(tmp_path / f"night_{stamp(9)}.csv", history.NIGHT_HEADER)
    document = judged(tmp_path, stamp(9))
    assert document["exit"] == 3
    assert f"no new row since {stamp(5)}" in document["line"]


@pytest.mark.parametrize("text", ["", history.NIGHT_HEADER, "a,b\n1,2\n"], ids=["empty", "header only", "columns"])
def test_a_spoilt_baseline_fails_closed(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "baseline_nvidia-h200-x2.csv").write_text(text)
    write_nights(tmp_path, night(9, quiet()))
    assert nightly.main(["judge", str(tmp_path), stamp(9), ""]) == 3
    assert "baseline_nvidia-h200-x2.csv" in capsys.readouterr().err


def test_a_torn_history_loses_its_last_line_only(tmp_path: Path) -> None:
    write_nights(tmp_path, baseline())
    nightly.main(["accept", str(tmp_path), ""])
    write_nights(tmp_path, night(9, quiet(seed=9, starts=5)))
    path = tmp_path / f"night_{stamp(9)}.csv"
    path.write_text(path.read_text()[:-7])
    document = judged(tmp_path, stamp(9))
    assert (document["exit"], document["verdicts"][0]["starts"]) == (0, 4)
    assert "torn last line" in document["notices"][0]


def test_a_write_that_the_disk_refuses_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "night.csv"
    history.write_whole(path, "whole\n")

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        history.write_whole(path, "half")
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("night.csv", "whole\n")]


def test_only_the_newest_nights_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    write_nights(tmp_path, baseline(9))
    for number in range(1, 10):
        (tmp_path / f"night_{stamp(number)}" / "1").mkdir(parents=True)
        (tmp_path / f"verdicts_{stamp(number)}.json").write_text("{}")
    others = ["baseline_x.csv", "night_mine.csv", "bench_20261101T020000Z_ref.csv", "notes.txt"]
    for name in others:
        (tmp_path / name).touch()
    assert nightly.main(["prune", str(tmp_path), "6"]) == 0
    assert list(history.night_files(tmp_path)) == [stamp(number) for number in range(4, 10)]
    assert (
        list(history.night_folders(tmp_path))
        == list(history.verdict_files(tmp_path))
        == list(history.night_files(tmp_path))
    )
    assert all((tmp_path / name).exists() for name in others)


# -- before a night


def begin(folder: Path, now: str, wanted: str = "") -> int:
    return nightly.main(["begin", str(folder), now, wanted])


@pytest.mark.parametrize("beside", ["x", "night_99999999T999999Z", "night_20261301T000000Z.csv"])  # no dates, no nights
def test_a_new_night_has_a_folder_and_its_stamp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], beside: str
) -> None:
    (tmp_path / beside).mkdir()
    assert begin(tmp_path, stamp(1)) == 0
    assert capsys.readouterr().out == f"{stamp(1)}\n"
    assert (tmp_path / f"night_{stamp(1)}").is_dir()


def test_a_night_that_was_cut_short_is_gone_on_with_for_half_a_day(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(tmp_path, stamp(1))
    begin(tmp_path, stamp(1, hour=9))
    assert capsys.readouterr().out.splitlines() == [stamp(1)] * 2
    begin(tmp_path, stamp(2))
    answer = capsys.readouterr()
    assert answer.out == f"{stamp(2)}\n"
    assert f"night {stamp(1)} was never finished" in answer.err
    begin(tmp_path, stamp(9), wanted=stamp(1))
    assert capsys.readouterr().out == f"{stamp(1)}\n"
    assert begin(tmp_path, stamp(9), wanted=stamp(5)) == 2


def test_a_night_that_was_begun_with_other_code_is_not_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path, stamp(1))
    monkeypatch.setattr(nightly, "source_hash", lambda: "sother")
    assert begin(tmp_path, stamp(1, hour=3)) == 0
    answer = capsys.readouterr()
    assert answer.out.splitlines()[-1] == stamp(1, hour=3)
    assert f"night {stamp(1)} was begun with other code (" in answer.err
    monkeypatch.setattr(nightly, "source_hash", lambda: "sthird")
    assert begin(tmp_path, stamp(1, hour=4), wanted=stamp(1)) == 2
    assert "leave it unset for a new night" in capsys.readouterr().err


def test_a_second_night_in_one_second_has_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin(tmp_path, stamp(1))
    (tmp_path / f"verdicts_{stamp(1)}.json").write_text("{}")
    begin(tmp_path, stamp(1))
    assert capsys.readouterr().out.splitlines()[-1] == f"{stamp(1)}-2"


def test_a_clock_that_went_back_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_nights(tmp_path, baseline())
    assert begin(tmp_path, stamp(2)) == 4
    assert capsys.readouterr().err.startswith(f"clock: now is {stamp(2)}, but OUT_DIR=")
    assert not (tmp_path / f"night_{stamp(2)}").exists()


def test_a_full_disk_is_told_before_the_night(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2_000_000))
    assert nightly.main(["preflight", str(tmp_path)]) == 4
    assert "0.00 GB is free" in capsys.readouterr().err


GPU = Gpu(0, "NVIDIA H200", "GPU-1", (9, 0), 141 << 30, 140 << 30, "580")


class Nvml:
    """What preflight asks of NVML."""

    def __init__(self, reasons: int = 0, used: int = 0) -> None:
        self.reasons, self.used = reasons, used

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802 - NVML's names
        return index

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:  # noqa: N802
        return self.reasons

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=self.used)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=0)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=4242)]


@pytest.mark.parametrize(
    ("reasons", "used", "words"), [(0, 0, ""), (0x40, 0, "held down"), (0x1, 0, ""), (0, 10 << 30, "pids 4242")]
)
def test_neighbours_and_held_clocks_are_told_by_nvml(
    reasons: int, used: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Nvml(reasons, used)
    monkeypatch.setattr(preflight, "nvml", lambda: library)
    monkeypatch.setattr(monitor, "nvml", lambda: library)
    told = preflight.gpu_troubles([GPU])
    assert bool(told) == bool(words)
    assert words in "".join(told)


def test_without_nvml_nvidia_smi_tells_and_a_cpu_has_nothing_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho "0, 9000, 0, 0x0000000000000000"\necho "1, 3, 0, 0x0000000000000008"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(preflight, "nvml", lambda: None)
    told = preflight.smi_troubles({0, 1})
    assert [("9.4 GB" in told[0]), ("GPU 1" in told[1])] == [True, True]
    assert preflight.gpu_troubles([]) == []
    smi.unlink()
    assert "neither" in preflight.gpu_troubles([GPU])[0]


# -- after it


def test_the_second_run_is_cut_to_the_sections_and_points_of_the_suspects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = [made | {"tokens": str(tokens), "repro": repro(tokens)} for tokens in (8, 64, 128) for made in baseline()]
    write_nights(tmp_path, old)
    nightly.main(["accept", str(tmp_path), ""])
    new = [
        row(9, start, 100 if tokens == 8 else 120, tokens=str(tokens), repro=repro(tokens))
        for tokens in (8, 64, 128)
        for start in range(1, 5)
    ]
    write_nights(tmp_path, new)
    capsys.readouterr()
    assert nightly.main(["suspects", str(tmp_path), stamp(9), ""]) == 0
    answer = capsys.readouterr()
    words = answer.out.strip().split("\t")
    assert words == ["SECTION=comm", "COMM_LIST=deepep", "ALGO=ll", "TIMING=graph", "SEQ_LENS=64 128"]
    assert answer.err.count("suspect: ") == 2


def repro(tokens: int) -> str:
    return f"SECTION=comm GPUS=2 COMM_LIST=deepep ALGO=ll TOKENS={tokens} TIMING=graph ./run.sh"


def test_no_backend_is_always_the_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SECTION", "ref comm")
    monkeypatch.setenv("COMM_LIST", "torch deepep mori")
    seen = []
    for start in ("1", "2", "3"):
        assert nightly.main(["words", start]) == 0
        seen.append(capsys.readouterr().out.strip().split("\t"))
    assert [words[0] for words in seen] == ["SECTION=ref comm", "SECTION=comm ref", "SECTION=ref comm"]
    assert [words[-1] for words in seen] == [
        "COMM_LIST=torch deepep mori",
        "COMM_LIST=deepep mori torch",
        "COMM_LIST=mori torch deepep",
    ]


def test_the_verdicts_are_json_that_any_reader_takes(tmp_path: Path) -> None:
    write_nights(tmp_path, night(9, quiet()))
    judged(tmp_path, stamp(9))
    text = (tmp_path / f"verdicts_{stamp(9)}.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["schema"] == 1
