"""What people read of verdicts: a line for each row that is not plainly OK, and the one line of the morning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lib.talk import printable

VERDICTS = ("REGRESSED", "LOST", "INCOMPARABLE", "NO_BASELINE", "INCONCLUSIVE", "IMPROVED", "OK")  # worst first
SHOWN_ROWS = 40
NO_NEW_ROW, MANY = "no new row since", 5  # more rows than that without a new one are told in one line
BLIND_PCT = 20.0  # a green night says it where its rows' scatter would hide a larger loss than this

Verdict = dict[str, Any]


def row_text(verdict: Verdict) -> str:
    texts = [verdict["section"], verdict["variant"], verdict["dispatch_dtype"], verdict["timing"]]
    sms = f" {verdict['num_sms']} SMs" if verdict["num_sms"] not in ("", "0") else ""
    return f"{' '.join(text for text in texts if text)}{sms} T={verdict['tokens']}"


def verdict_text(verdict: Verdict) -> str:
    figures = ""
    if verdict["change_pct"] is not None:
        figures = (
            f"  {verdict['baseline_median']:.6g} -> {verdict['new_median']:.6g}, {verdict['change_pct']:+.1f} % "
            f"(threshold {verdict['threshold_pct']:.1f} %)"
        )
    why = f"  {verdict['reason']}" if verdict["reason"] else ""
    return f"{verdict['verdict']:<12}  {row_text(verdict)}  {verdict['metric']}{figures}{why}"


def one_line(green: bool, night: str, verdicts: Sequence[Verdict], suspects: Sequence[str]) -> str:
    """Colour, night and machine, counts, the worst row, the first suspect."""
    counts = Counter(verdict["verdict"] for verdict in verdicts)
    told = ", ".join(f"{counts[word]} {word}" for word in VERDICTS if counts[word]) or "no row at all"
    parts = [f"{'green' if green else 'RED'} {night.strip()}: {told}"]
    worst = next((verdict for verdict in verdicts if verdict["red"]), None)
    if worst is not None:
        change = "" if worst["change_pct"] is None else f" {worst['change_pct']:+.1f} %"
        parts.append(f"{row_text(worst)}{change}" + (f" ({worst['reason']})" if worst["reason"] else ""))
    elif verdicts and not green:
        parts.append(f"no row could be judged ({verdicts[0]['reason']})")
    hazy = [verdict for verdict in verdicts if green and (verdict["threshold_pct"] or 0) > BLIND_PCT]
    if hazy:
        most = max(hazy, key=lambda verdict: verdict["threshold_pct"])
        rows = f"{len(hazy)} row{'s' if len(hazy) > 1 else ''}"
        parts.append(
            f"{rows} could lose {BLIND_PCT:.0f} % unseen: {row_text(most)} up to {most['threshold_pct']:.0f} %"
        )
    if suspects and not green:
        parts.append(f"first suspect: {suspects[0]}")
    return " | ".join(parts)


def document_lines(document: Mapping[str, Any]) -> list[str]:
    """Rows that are not plainly OK, what differs, notices, and the one line last."""
    told = [verdict for verdict in document["verdicts"] if verdict["verdict"] != "OK" or verdict["reason"]]
    absent = [verdict for verdict in told if verdict["reason"].startswith(NO_NEW_ROW)]
    lines = []
    if len(absent) > MANY:
        told = [verdict for verdict in told if verdict not in absent]
        lines = [f"LOST          {len(absent)} rows of the baseline have no new row, the first: {row_text(absent[0])}"]
    lines += [verdict_text(verdict) for verdict in told[:SHOWN_ROWS]]
    if len(told) > SHOWN_ROWS:
        lines.append(f"... and {len(told) - SHOWN_ROWS} more, all in the JSON")
    lines += [f"differs: {entry}" for entry in document["suspects"]]
    lines += [f"notice: {entry}" for entry in document["notices"]]
    return [printable(line) for line in (*lines, document["line"])]  # a cell may hold a line end or a tab
