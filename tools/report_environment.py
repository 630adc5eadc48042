"""What differed between runs beside the measured code: the first thing to look at when figures differ."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tools.report_data import Results, Row

FACT_COLUMNS = ("device", "world", "nodes", "git", "transport", "timer", "peak_source")
PEAK_TOLERANCE = 0.02  # measured peaks repeat within this; a larger difference is told
MIB = 1 << 20

Facts = dict[str, str]


@dataclass(frozen=True)
class Difference:
    """One fact that two runs do not share."""

    older: str
    newer: str
    fact: str
    before: str
    after: str


def facts_by_run(results: Results) -> dict[str, Facts]:
    """Run -> facts, oldest run first. Several values of one fact within a run are joined by commas."""
    values: dict[str, dict[str, set[str]]] = {run: defaultdict(set) for run in results.runs}
    stamps: dict[str, str] = {}
    for row in results.rows:
        stamps[row["stamp"]] = row["run"]
        for fact, value in _row_facts(row):
            values[row["run"]][fact].add(value)
    for stamp, fingerprint in results.fingerprints.items():
        if stamp in stamps:
            for fact, value in _flat(fingerprint):
                values[stamps[stamp]][fact].add(value)
    return {run: {fact: ", ".join(sorted(found)) for fact, found in facts.items()} for run, facts in values.items()}


def _row_facts(row: Row) -> list[tuple[str, str]]:
    """Device and code of every row; what was loaded, of those that ran. A peak's source is a run, its size a fact."""
    facts = [(name, row[name]) for name in FACT_COLUMNS if row[name] and name not in ("transport", "peak_source")]
    if row["transport"]:
        facts.append((f"transport of {row['variant']}", row["transport"]))
    for part in row["versions"].split("; "):
        name, _, version = part.rpartition(" ")
        if name:
            facts.append((name, version))
    return facts


def _flat(fingerprint: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Machine facts of a record that rows do not have themselves."""
    facts = [(name, str(fingerprint[name])) for name in ("driver", "cpu", "kernel", "libc") if fingerprint.get(name)]
    memory = fingerprint.get("memory_bytes")
    if isinstance(memory, int):
        facts.append(("memory", f"{memory // MIB} MiB"))
    return facts


def differences(older: str, before: Facts, newer: str, after: Facts) -> list[Difference]:
    """Facts that both runs have, and not alike; one that only one has is no difference: other variants ran."""
    shared = [fact for fact in before if fact in after and before[fact] != after[fact]]
    return [Difference(older, newer, fact, before[fact], after[fact]) for fact in shared]


def run_differences(results: Results) -> list[Difference]:
    """From run to run, newest first; each fact is compared with the last run that had it."""
    last: dict[str, tuple[str, str]] = {}
    found = []
    for run, facts in facts_by_run(results).items():
        for fact, value in facts.items():
            if fact in last and last[fact][1] != value:
                found.append(Difference(last[fact][0], run, fact, last[fact][1], value))
            last[fact] = (run, value)
    return found[::-1] + peak_differences(results)


def peak_differences(results: Results) -> list[Difference]:
    """Measured peaks of the runs that differ by more than PEAK_TOLERANCE from the ones before."""
    order = sorted({row["peak_source"] for row in results.rows if row["peak_source"] in results.peaks})
    found = []
    for older, newer in itertools.pairwise(order):
        for name in ("wire_gbps", "hbm_gbps", "barrier_us"):
            before, after = results.peaks[older].get(name), results.peaks[newer].get(name)
            if not (isinstance(before, float) and isinstance(after, float) and before > 0):
                continue
            if abs(after / before - 1) > PEAK_TOLERANCE:
                found.append(Difference(older, newer, f"peak {name}", f"{before:.4g}", f"{after:.4g}"))
    return found


def baseline_differences(results: Results, baseline: Results) -> list[Difference]:
    """What the newest run and the newest of the baseline do not share."""
    ours, theirs = facts_by_run(results), facts_by_run(baseline)
    if not ours or not theirs:
        return []
    (older, before), (newer, after) = list(theirs.items())[-1], list(ours.items())[-1]
    return differences(f"baseline {older}", before, newer, after)
