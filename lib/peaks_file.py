"""peaks_<stamp>.json: what lib/peaks.py measured, kept beside the rows. Standard library only, for coordinators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lib.knobs import KnobErrors

PEAK_NAMES = ("wire_gbps", "hbm_gbps", "matmul_tflops", "barrier_us", "source")  # what lib/roofline.py reads


def read_peaks(path: Path) -> dict[str, Any]:
    """Raises KnobErrors on a file that write_peaks did not make."""
    try:
        peaks = json.loads(path.read_text())
        missing = [name for name in PEAK_NAMES if name not in peaks]
    except (OSError, ValueError, TypeError):
        missing = ["JSON"]
    if missing:
        raise KnobErrors(
            [f"PEAKS={path}: is not a file of measured peaks (no {', '.join(missing)}); give measure or off"]
        )
    return dict(peaks)


def write_peaks(path: Path, peaks: dict[str, Any], stamp: str) -> dict[str, Any]:
    peaks = peaks | {"source": f"measured {stamp}"}
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(json.dumps(peaks, indent=1) + "\n")
    fresh.replace(path)
    return peaks
