"""From rows to verdicts: which rows are the same case, what became of each, and the one line of the morning."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from lib import gate
from lib.history import MARKS, BaselineError, Row, machine_key, read_verdicts, verdict_files
from lib.knob_types import UNTIMED
from lib.repro import asked_timing, options
from lib.rows import NOT_RUN
from lib.verdict_text import NO_NEW_ROW, VERDICTS, Verdict, one_line

SCHEMA = 1
OK_EXIT, RED_EXIT = 0, 3
ALWAYS_RED = VERDICTS[:4]
NIGHTS_WITHOUT_VERDICT = 3  # in a row, and the row is red
# Two rows with these alike are the same case; `asked` and `options` are of the repro line (lib/repro.py). Those of
# ALIKE must agree too, but only an ok row has them for certain.
IDENTITY = tuple(
    """asked options section variant comm compute_kernel algo world nodes tokens num_experts topk hidden inter
    dispatch_dtype combine_dtype num_sms layout handle routing seed warmup iters iters_per_graph l2 device""".split()
)
INPUTS = itemgetter(*IDENTITY[2:])
ALIKE = ("timing", "routing_sha", "quant_included", "staging_included", "timer")
MADE_WITH = ("git", "versions")  # of which a night has one: a pull between two starts makes two halves of nights
SHOWN = tuple(
    """section variant algo timing world nodes tokens num_experts topk hidden inter dispatch_dtype combine_dtype num_sms
    layout handle routing seed warmup iters iters_per_graph l2 routing_sha device""".split()
)
FIRST_SUSPECTS = ("versions", "transport", "git")  # compared and told, never a reason not to compare

Key = tuple[str, ...]


# --- which rows are the same case -------------------------------------------------------------------------------------


def identity(row: Row) -> Key:
    return asked_timing(row), options(row), *INPUTS(row)


def case_id(key: Key) -> str:
    """`c` + hash: how a case is found again in other nights' verdicts."""
    return f"c{hashlib.blake2b(json.dumps(key).encode(), digest_size=8).hexdigest()}"


def grouped(rows: Iterable[Row]) -> dict[Key, list[Row]]:
    found: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        found[identity(row)].append(row)
    return dict(found)


def differences(old: Row, new: Row) -> list[str]:
    """What makes two rows another case, each as `name: old -> new`."""
    pairs = [("timing", asked_timing(old), asked_timing(new)), ("options", options(old), options(new))]
    pairs += [(name, old[name], new[name]) for name in IDENTITY[2:]]
    if old["status"] == new["status"] == "ok":
        pairs += [(name, old[name], new[name]) for name in ALIKE]
    told = [f"{name}: {before or 'blank'} -> {after or 'blank'}" for name, before, after in pairs if before != after]
    return list(dict.fromkeys(told))


def pair_leftovers(old: dict[Key, list[Row]], new: dict[Key, list[Row]]) -> dict[Key, Key]:
    """{new key: baseline key} of rows that nothing matches, but that are one case under another setting.

    The same section, variant and tokens; with one differing field if such a pair is there, else the first.
    """
    places = [IDENTITY.index(name) for name in ("section", "variant", "tokens")]
    left_old, left_new = [key for key in old if key not in new], [key for key in new if key not in old]
    # in a field that is the same everywhere no two keys differ, so leaving it out would pair nothing
    values = [set(column) for column in zip(*left_old, *left_new, strict=True)]
    free = [index for index, found in enumerate(values) if index not in places and len(found) > 1]
    pairs: dict[Key, Key] = {}

    def pair(places: Sequence[int]) -> None:
        part, taken = itemgetter(*places), set(pairs.values())
        if len(pairs) == min(len(left_old), len(left_new)):
            return
        index: dict[Key, list[Key]] = defaultdict(list)
        for key in reversed(left_old):
            if key not in taken:
                index[part(key)].append(key)
        for key in left_new:
            if key not in pairs and (there := index.get(part(key))):
                pairs[key] = there.pop()

    for dropped in free:
        pair([place for place in range(len(IDENTITY)) if place != dropped])
    pair(places)
    return pairs


# --- one row ----------------------------------------------------------------------------------------------------------


def marks(row: Row) -> list[str]:
    return [name for name in MARKS if row[name] == "1"]


def may_be_baseline(row: Row) -> bool:
    return row["status"] == "ok" and row["check"] != "skipped" and not marks(row) and row["again"] == "0"


def values(rows: Iterable[Row], metric: str) -> list[float]:
    """Badness of each row that has the figure; a figure of 0 can't be compared as a share."""
    figures = [float(row[metric]) for row in rows if row[metric]]
    return [gate.badness(figure, metric) for figure in figures if figure > 0]


def blank_verdict(row: Row, metric: str) -> Verdict:
    shown = {name: row[name] for name in SHOWN} | {"graph": row["graph"].partition(":")[0]}
    figures = dict.fromkeys(("baseline_median", "new_median", "change_pct", "threshold_pct", "p_value"))
    counts = dict.fromkeys(("nights", "baseline_starts", "starts", "again", "streak"), 0)
    texts = {"verdict": "", "red": False, "reason": ""}
    more = {"last_ok": "", "differs": [], "repro": row["repro"]}
    judged_by = {"metric": metric, "better": gate.BETTER[metric]}
    return {"case": case_id(identity(row)), **shown, **judged_by, **texts, **figures, **counts, **more}


def judge_row(old: list[Row], new: list[Row], metric: str) -> tuple[Verdict | None, bool]:
    """One case: the baseline's rows and tonight's. Also whether it should be run again. None: it never ran, nor now.

    `streak` is 1 where tonight itself is the reason that there is no verdict.
    """
    base = [row for row in old if may_be_baseline(row)]
    verdict = blank_verdict((new or base or old)[-1], metric)
    ok = [row for row in new if row["status"] == "ok"]
    bad = [row for row in new if row["status"] not in ("ok", *NOT_RUN)]
    verdict["last_ok"] = max((row["night"] for row in base), default="")
    if not base:
        if not ok and not bad:
            return None, False
        first = "no baseline holds this row; ./nightly.sh --accept takes it in, and 5 accepted nights judge it"
        why = bad_text(bad) if bad else first
        return verdict | {"verdict": "NO_BASELINE", "reason": why}, False
    if not new:
        return verdict | {"verdict": "LOST", "reason": f"{NO_NEW_ROW} {verdict['last_ok']}"}, False
    again_ok = [row for row in ok if row["again"] == "1"]
    again_bad = [row for row in bad if row["again"] == "1"]
    wrong = [row for row in bad if row["status"] == "wrong"]
    if len(ok) + len(bad) < len(new) or wrong or (bad and (again_bad or len(again_ok) < gate.MIN_STARTS)):
        not_ok = wrong or bad or [row for row in new if row["status"] in NOT_RUN]
        return verdict | {"verdict": "LOST", "reason": bad_text(not_ok)}, bool(bad) and not wrong and not again_bad
    each = {itemgetter(*ALIKE)(row): row for row in ok}.values()  # in all else rows of one case are alike
    if told := list(dict.fromkeys(name for row in each for name in differences(base[-1], row))):
        eager = next((f" ({row['graph']})" for row in ok if row["graph"].startswith("eager")), "")
        return verdict | {"verdict": "INCOMPARABLE", "differs": told, "reason": "; ".join(told) + eager}, False
    verdict, suspect = judge_figures(verdict, base, ok, metric)
    if verdict["verdict"] in ("OK", "IMPROVED") and (doubt := doubts(ok, bad)):
        verdict |= {"verdict": "INCONCLUSIVE", "streak": 1, "reason": doubt}
    return verdict, suspect


def doubts(ok: list[Row], bad: list[Row]) -> str:
    """Why figures that look well vouch for nothing, "" if they do."""
    if bad:
        return f"{bad_text(bad)}; ok when run again"
    if unchecked := [row for row in ok if row["check"] == "skipped"]:
        return f"unchecked in {len(unchecked)} of {len(ok)} starts (MEGA_ACC=0): a fast wrong result would look as well"
    for column in MADE_WITH:
        if len(made := sorted({row[column] for row in ok})) > 1:
            return f"its starts were made with different {column}: {' and '.join(made)}"
    return ""


def bad_text(rows: list[Row]) -> str:
    first = rows[0]
    return f"{first['status']} in start {first['start']}" + (f": {first['reason']}" if first["reason"] else "")


def judge_figures(verdict: Verdict, base: list[Row], ok: list[Row], metric: str) -> tuple[Verdict, bool]:
    by_night: dict[str, list[Row]] = defaultdict(list)
    for row in base:
        by_night[row["night"]].append(row)
    nights = [values(rows, metric) for rows in by_night.values()]
    clean = [row for row in ok if not marks(row)]
    first = values((row for row in clean if row["again"] == "0"), metric)
    again = values((row for row in clean if row["again"] == "1"), metric)
    found = gate.judge(nights, first, again)
    if found.verdict == "REGRESSED" and found.suspect and any(row["again"] == "1" for row in ok):
        found = replace(found, verdict="INCONCLUSIVE", reason="the second run has too few usable starts", tonight=True)
    whole = [night for night in nights if len(night) >= gate.MIN_STARTS]
    verdict |= {
        "verdict": found.verdict,
        "reason": found.reason,
        "baseline_median": unturned(found.baseline_median, metric),
        "new_median": unturned(found.new_median, metric),
        "change_pct": None if found.loss is None else 100 * found.loss,
        "threshold_pct": None if found.threshold is None else 100 * found.threshold,
        "p_value": found.p_value,
        "nights": len(whole),
        "baseline_starts": sum(map(len, whole)),
        "starts": len(first) + len(again),
        "again": len(again),
        "streak": int(found.tonight),
    }
    if marked := Counter(mark for row in ok for mark in marks(row)):
        told = ", ".join(f"{name} in {count} of {len(ok)} starts" for name, count in marked.items())
        verdict["reason"] = "; ".join(part for part in (told, verdict["reason"]) if part)
    return verdict, found.suspect


def unturned(value: float | None, metric: str) -> float | None:
    return None if value is None else gate.badness(value, metric)  # turning twice gives the figure back


# --- all rows ---------------------------------------------------------------------------------------------------------


def judge_all(
    old: list[Row],
    new: list[Row],
    metric: str = gate.METRIC,
    streaks: Mapping[str, int] | None = None,
    starts: Iterable[str] = (),
) -> tuple[list[Verdict], list[Verdict]]:
    """Verdicts, worst first, and those of rows that should be run again before they are believed.

    Rows that were checked only (TIMING=none) have no figure, and no verdict unless they are red. `starts`: those that
    were made tonight, whether or not they have rows.
    """
    base = grouped(row for row in old if row["timing"] != UNTIMED)
    tonight = grouped(row for row in new if row["timing"] != UNTIMED or row["status"] not in ("ok", *NOT_RUN))
    add_lost_rows(tonight, set(starts))
    pairs = pair_leftovers(base, tonight)
    paired, verdicts, suspects = set(pairs.values()), [], []
    for key in [*tonight, *(key for key in base if key not in tonight and key not in paired)]:
        if key in pairs:
            verdict, suspect = incomparable(base[pairs[key]], tonight[key], metric)
        else:
            verdict, suspect = judge_row(base.get(key, []), tonight.get(key, []), metric)
        if verdict is None:
            continue
        settle(verdict, streaks or {})
        verdicts.append(verdict)
        if suspect:
            suspects.append(verdict)
    verdicts.sort(key=lambda verdict: (VERDICTS.index(verdict["verdict"]), -(verdict["change_pct"] or 0)))
    return verdicts, suspects


def add_lost_rows(tonight: dict[Key, list[Row]], starts: set[str]) -> None:
    """A failed row for each start that should have a case and has no row of it: its run was killed, or the disk full.

    A start should have it if it is one of `starts`, or has most of the section's cases.
    """
    place = IDENTITY.index("section")
    cases: dict[str, Counter[str]] = defaultdict(Counter)
    for key, rows in tonight.items():
        cases[key[place]].update({row["start"] for row in rows if row["again"] == "0"})
    absent = {"status": "failed", "reason": "that start wrote no row of it", "again": "0", "check": ""}
    planned = Counter(key[place] for key in tonight)
    for key, rows in tonight.items():
        most = {start for start, count in cases[key[place]].items() if 2 * count > planned[key[place]]}
        there = {row["start"] for row in rows if row["again"] == "0"}
        rows += [rows[-1] | absent | {"start": start} for start in sorted((most | starts) - there)]


def incomparable(old: list[Row], new: list[Row], metric: str) -> tuple[Verdict | None, bool]:
    """Rows of one case under two settings. If the baseline never had it, it is just a new row."""
    if not any(map(may_be_baseline, old)) or not any(row["status"] == "ok" for row in new):
        return judge_row([], new, metric)
    told = differences(old[-1], new[-1])
    return blank_verdict(new[-1], metric) | {
        "verdict": "INCOMPARABLE",
        "differs": told,
        "reason": "; ".join(told),
        "last_ok": old[-1]["night"],
    }, False


def settle(verdict: Verdict, streaks: Mapping[str, int]) -> None:
    """Red or not, with the nights before."""
    if verdict["streak"]:
        verdict["streak"] += streaks.get(verdict["case"], 0)
    late = verdict["streak"] >= NIGHTS_WITHOUT_VERDICT
    verdict["red"] = verdict["verdict"] in ALWAYS_RED or late
    if late:
        verdict["reason"] += f"; night {verdict['streak']} in a row without a verdict"


def first_suspects(old: list[Row], new: list[Row]) -> list[str]:
    """What differs between the baseline's last rows and tonight's of the same cases, libraries first."""
    last = {identity(row): row for row in old if row["status"] == "ok"}
    told: list[str] = []
    for column in FIRST_SUSPECTS:
        for row in new:
            before = last.get(identity(row))
            if before is None or row["status"] != "ok" or before[column] == row[column]:
                continue
            if column != "versions":
                told.append(f"{column}: {before[column] or 'blank'} -> {row[column] or 'blank'}")
                continue
            was, now = (dict(part.rpartition(" ")[::2] for part in r[column].split("; ")) for r in (before, row))
            for package in sorted(was.keys() | now.keys()):
                pair = was.get(package, "none"), now.get(package, "none")
                told += [f"{package}: {pair[0]} -> {pair[1]}"] if pair[0] != pair[1] else []
    return list(dict.fromkeys(told))


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """Green only if no row is red and at least one was vouched for."""
    if any(verdict["red"] for verdict in verdicts):
        return RED_EXIT
    return OK_EXIT if any(verdict["verdict"] in ("OK", "IMPROVED") for verdict in verdicts) else RED_EXIT


def document(
    night: str, old: list[Row], new: list[Row], verdicts: list[Verdict], baseline: str, notices: list[str]
) -> dict[str, Any]:
    """What verdicts_<night>.json holds (docs/nightly.md)."""
    machine = machine_key((new or old)[0]) if new or old else ""
    suspects, code = first_suspects(old, new), exit_code(verdicts)
    return {
        "schema": SCHEMA,
        "night": night,
        "machine": machine,
        "baseline": baseline,
        "baseline_nights": sorted({row["night"] for row in old}),
        "exit": code,
        "line": one_line(code == OK_EXIT, f"{night} {machine}", verdicts, suspects),
        "suspects": suspects,
        "notices": notices,
        "counts": dict(Counter(verdict["verdict"] for verdict in verdicts)),
        "verdicts": verdicts,
    }


def earlier_streaks(folder: Path, night: str, machine: str) -> dict[str, int]:
    """Of the night before on the same machine: for how many nights each row has been without a verdict."""
    for earlier, path in sorted(verdict_files(folder).items(), reverse=True):
        if earlier >= night:
            continue
        try:
            document = read_verdicts(path)
        except BaselineError:
            continue  # then the rows' streaks begin anew; --status and --accept name the file
        if document["machine"] == machine:
            return {verdict["case"]: verdict["streak"] for verdict in document["verdicts"]}
    return {}
