"""What --status says in the morning: the last night's line, or why there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from nights import baseline, judged, night, quiet, stamp, write_nights

from lib import nightly


@pytest.mark.parametrize(
    ("day", "hour", "code", "words"),
    [
        (9, 9, 0, "green"),  # the morning after
        (10, 9, 3, "RED no new row since 20261109T02"),  # a night was missed: 31 hours
        (12, 2, 3, "RED no new row since 20261109T02"),
    ],
)
def test_a_last_night_that_is_too_old_is_red(
    day: int, hour: int, code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_nights(tmp_path, baseline() + night(9, quiet(seed=9)))
    nightly.main(["accept", str(tmp_path), ""])
    judged(tmp_path, stamp(9))
    capsys.readouterr()
    assert nightly.main(["status", str(tmp_path), stamp(day, hour)]) == code
    assert capsys.readouterr().out.startswith(words)
    assert nightly.main(["status", str(tmp_path / "none"), stamp(day)]) == 3


def test_a_night_without_a_verdict_is_red_in_the_morning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_nights(tmp_path, baseline() + night(9, quiet(seed=9)))
    nightly.main(["accept", str(tmp_path), ""])
    judged(tmp_path, stamp(9))
    (tmp_path / f"night_{stamp(9, hour=4)}").mkdir()  # begun, and killed
    capsys.readouterr()
    assert nightly.main(["status", str(tmp_path), stamp(9, hour=9)]) == 3
    assert capsys.readouterr().out.startswith(f"RED night {stamp(9, hour=4)} was begun and has no verdict")
    (tmp_path / f"night_{stamp(9, hour=4)}").rmdir()
    assert nightly.main(["failed", str(tmp_path), stamp(9, hour=5), "2"]) == 2
    assert nightly.main(["status", str(tmp_path), stamp(9, hour=9)]) == 3
    assert (
        capsys.readouterr().out.splitlines()
        == [f"RED {stamp(9, hour=5)} no verdict: nightly ended with 2; what it said is on stderr"] * 2
    )
    judged(tmp_path, stamp(9))
    assert nightly.main(["status", str(tmp_path), stamp(9, hour=9)]) == 0


def test_a_damaged_verdict_file_is_a_sentence_and_red(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / f"verdicts_{stamp(9)}.json").write_text("{ torn")
    assert nightly.main(["status", str(tmp_path), stamp(9)]) == 3
    assert "is not what a night wrote; move it away" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"line": 1}', "", '{"machine": "", "line": "", "exit": 0}'])
def test_an_earlier_nights_damaged_verdicts_do_not_stop_tonights(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_nights(tmp_path, night(9, quiet()))
    (tmp_path / f"verdicts_{stamp(8)}.json").write_text(text)
    assert judged(tmp_path, stamp(9))["verdicts"]
    (tmp_path / f"verdicts_{stamp(9)}.json").write_text(text)
    assert nightly.main(["accept", str(tmp_path), ""]) == 3
    assert "move it away" in capsys.readouterr().err


def test_a_last_night_in_the_future_is_red(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_nights(tmp_path, night(9, quiet()))
    judged(tmp_path, stamp(9))
    assert nightly.main(["status", str(tmp_path), stamp(1)]) == 3
    assert "of a time to come" in capsys.readouterr().out
