"""Stands in for run_sweep.sh in tests of nightly.sh: writes the rows of one sweep at once, or does as FAKE_* says.

FAKE_P50: latency; FAKE_STATUS: of the row; FAKE_EXIT: status; FAKE_PLAN_EXIT: status of the dry run; FAKE_LOG: a file
for the knobs it was called with; FAKE_HANG: a file to make, and then to sleep, if it is not there yet.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib.rows import HEADER, csv_line

get = os.environ.get
KNOBS = "SECTION REF_LIST SEQ_LENS TIMING OUT_DIR RESUME BASELINE STARTS KEEP".split()
FIXED = {
    "schema": "1",
    "section": "ref",
    "variant": "torch",
    "comm": "torch",
    "timing": "e2e",
    "world": "1",
    "nodes": "1",
    "tokens": "8",
    "seed": "0",
    "device": "CPU (fake, 2 cores)",
    "repro": "SECTION=ref REF_LIST=torch GPUS=1 TOKENS=8 TIMING=e2e ./run.sh",
}
OK = {"status": "ok", "check": "ok", "routing_sha": "r1", "versions": "python 3.11; torch 2.13.0", "git": "g1"}
FAILED = {"reason": "rank 0 raised", "git": "g1"}


def sweep_row(stamp: str, seed: str, p50: float = 100.0, status: str = "ok") -> dict[str, str]:
    """The same seed (of a sweep: its folder's name, such as 1-ref) is the same latency, on every machine."""
    noise = random.Random(seed).gauss(0, 0.004)
    figures = OK | {"lat_us_p50": f"{p50 * (1 + noise):.6g}"} if status == "ok" else FAILED | {"status": status}
    return {**FIXED, "stamp": stamp, **figures}


def main() -> int:
    if sys.argv[1:] == ["--plan"]:
        return int(get("FAKE_PLAN_EXIT", "0"))
    out = Path(os.environ["OUT_DIR"])
    with Path(os.environ["FAKE_LOG"]).open("a") as log:
        log.write(json.dumps({name: os.environ[name] for name in KNOBS if name in os.environ}) + "\n")
    if (hang := get("FAKE_HANG")) and not Path(hang).exists():
        Path(hang).touch()
        time.sleep(30)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    row = sweep_row(stamp, out.name, float(get("FAKE_P50", "100")), get("FAKE_STATUS", "ok"))
    (out / f"sweep_{stamp}_ref.csv").write_text(HEADER + csv_line(row))
    return int(get("FAKE_EXIT", "0"))


if __name__ == "__main__":
    sys.exit(main())
