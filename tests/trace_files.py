"""Small traces in the formats that lib/trace.py reads, with round numbers that a test can state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]

# kernel -> start, end, us since the start of the iteration; the odd warps run `inter`, the even ones `intra`
BOTH_BEFORE = {"ep_dispatch_copy_to_staging": (0, 10)}
INTER = {"dispatch_inter_node_send": (12, 40), "dispatch_inter_node_recv": (40, 160), "dispatch_sync": (162, 172)}
INTRA = {"dispatch_intra": (13, 90), "dispatch_sync": (90, 172)}
BOTH_BETWEEN = {"combine_sync": (175, 185), "ep_combine_sync_barrier": (186, 190)}
INTER_BACK, INTRA_BACK = {"combine_inter_node": (200, 330)}, {"combine_intra_node": (200, 270)}
BOTH_AFTER = {"ep_combine_all": (340, 349)}
PERIOD_US, DURATION_US = 380, 349
CONCURRENT_US = {"dispatch": 77, "combine": 70}


def span(name: str, tid: int | None, start: float, end: float) -> list[Event]:
    """A B and an E event, as a kernel profiler writes them."""
    thread = {"pid": 0} if tid is None else {"pid": 0, "tid": tid}
    return [
        {"name": name, "cat": "gpu_kernel", "ph": "B", "ts": float(start), **thread},
        {"name": name, "cat": "gpu_kernel", "ph": "E", "ts": float(end), **thread},
    ]


def complete(name: str, tid: int, start: float, duration: float, cat: str = "kernel", pid: int = 0) -> Event:
    """An X event, as torch.profiler writes them."""
    return {
        "name": name,
        "cat": cat,
        "ph": "X",
        "ts": start,
        "dur": duration,
        "pid": pid,
        "tid": tid,
        "args": {"a": [{}]},
    }


def v1_events(iterations: int = 3, warps: int = 4, slow: dict[int, float] | None = None) -> list[Event]:
    """A v1 trace; `slow`: iteration -> factor on its length."""
    events, origin = [], 0.0
    for iteration in range(iterations):
        factor = (slow or {}).get(iteration, 1.0)
        for warp in range(warps):
            own = {**INTER, **BOTH_BETWEEN, **INTER_BACK} if warp % 2 else {**INTRA, **BOTH_BETWEEN, **INTRA_BACK}
            for name, (start, end) in {**BOTH_BEFORE, **own, **BOTH_AFTER}.items():
                events += span(name, warp, origin + factor * start, origin + factor * end)
        origin += factor * PERIOD_US
    return by_time(events)


def by_time(events: list[Event]) -> list[Event]:
    """Sorted as exporters do, an E before a B of the same time."""
    return sorted(events, key=lambda event: (event["ts"], event["ph"] != "E"))


def write(path: Path, events: list[Any], **more: Any) -> Path:
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", **more}, indent=2))
    return path
