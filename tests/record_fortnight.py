"""Records tests/fortnight_cpu.csv: 14 real nights of section ref on this machine's CPU, one slowed by 50 %.

    python -m tests.record_fortnight FOLDER     about five minutes; needs leave for a real-time priority

Dates come from a simulated clock (tests/fake_clock), the slow night from tests/slow_site; nightly.sh runs as it is.
After the fifth night the nights so far are accepted. An interrupted recording goes on where it was.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from lib import history

ROOT = Path(__file__).resolve().parent.parent
FORTNIGHT = ROOT / "tests" / "fortnight_cpu.csv"
FIRST_NIGHT = 1793498400  # 2026-11-01 02:00:00 UTC
DAY_S = 86_400
NIGHTS, ACCEPTED_AFTER, SLOW_NIGHT = 14, 5, 10
ALONE = ("chrt", "-f", "10", "taskset", "-c", "1")  # a core of its own: others work on the recording machine
KNOBS = {
    "SECTION": "ref",
    "REF_LIST": "torch",
    "GPUS": "1",  # a rank that waits for another on a shared machine measures the neighbours
    "SEQ_LENS": "8 32",
    "HIDDEN": "128",
    "INTER": "64",
    "NUM_EXPERTS": "8",
    "TOPK": "2",
    "ITERS": "400",
    "CHECK_REPEATS": "2",
    "OMP_NUM_THREADS": "1",
}


def nightly(folder: Path, night: int, *arguments: str) -> int:
    path = f"{ROOT}/tests/fake_clock:{Path(sys.executable).parent}:/usr/bin:/bin"
    clock = {"FAKE_EPOCH": str(FIRST_NIGHT + (night - 1) * DAY_S), "FAKE_STARTED": str(int(time.time()))}
    slow = {"PYTHONPATH": str(ROOT / "tests" / "slow_site")} if night == SLOW_NIGHT else {}
    environment = {"PATH": path, "HOME": os.environ["HOME"], "OUT_DIR": str(folder), **KNOBS, **clock, **slow}
    return subprocess.run([*ALONE, ROOT / "nightly.sh", *arguments], env=environment, check=False).returncode


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for night in range(len(history.verdict_files(folder)) + 1, NIGHTS + 1):
        code = nightly(folder, night)
        sys.stderr.write(f"night {night}: exit {code}\n")
        if night == ACCEPTED_AFTER:
            nightly(folder, night, "--accept")
    rows = [row for path in history.night_files(folder).values() for row in history.read(path)[0]]
    history.write_whole(FORTNIGHT, history.as_text(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
