"""What nightly.sh asks: python -m lib.nightly check | preflight | begin | words | gather | suspects | judge | ...

Standard library only. Words for `env` are one line a command, separated by tabs. Exit codes: README.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from lib import history, verdicts
from lib.gate import MIN_NIGHTS
from lib.history import BaselineError, Row, night_files, night_folders, read_verdicts, utc, verdict_files, write_whole
from lib.knob_types import UNTIMED
from lib.knobs import KNOBS, USAGE_ERROR, KnobErrors, Knobs, parse_knobs, shell_lines
from lib.machine import all_gpus, detect_facts, visible_gpus
from lib.preflight import disk_trouble, gpu_troubles
from lib.rows import SchemaError
from lib.talk import say, show
from lib.verdict_text import Verdict, document_lines, row_text
from lib.version import git_label, source_hash

RED_EXIT, SET_UP_EXIT, LOCKED_EXIT = 3, 4, 75
CODE_FILE = "code"  # of a night's folder: the commit and the sources that it was begun with
LOCK_FILE = ".nightly.lock"
FAILED_FILE = ".nightly.failed"  # why the last night has no verdict; a night that has one removes it
NIGHT_KNOBS = ("BASELINE", "STARTS", "KEEP")
UNFINISHED = timedelta(hours=12)  # a night that was cut short is gone on with until then; later it is another night
STALE = timedelta(hours=30)  # from one night's begin to the morning after the next; longer while a night is running
STALE_AT_WORK = timedelta(hours=36)
FULL_BYTES = 32_000_000  # a sweep that ends with less may have lost rows to the disk
REPEATED = ("ALGO", "TIMING", "MEGA_TIMING", "DISPATCH_DTYPE", "NUM_SMS")  # what a second run of a section is cut to
CUT_LISTS = ("REF_LIST", "COMM_LIST", "EXPERTS_LIST")  # MEGA_LIST stays: MEGA_IKR=1 may refuse a shorter one


def night_knobs() -> Knobs:
    return parse_knobs(os.environ, detect_facts(os.environ), sweep=True)


def check() -> int:
    """Knobs for the script, on stdout; wrong ones in a sentence each."""
    try:
        knobs = night_knobs()
    except KnobErrors as wrong:
        say("\n".join(wrong.errors))
        return USAGE_ERROR
    if knobs.nnodes > 1:
        say(f"NNODES={knobs.nnodes}: a night runs on one node; start ./nightly.sh on each with NNODES unset")
        return USAGE_ERROR
    if UNTIMED in {*knobs.timing, *knobs.mega_timing}:
        knob = f"{'' if UNTIMED in knobs.timing else 'MEGA_'}TIMING={UNTIMED}"
        knob = f"RANKS_PER_GPU={knobs.ranks_per_gpu}" if knobs.ranks_per_gpu > 1 else knob
        say(f"{knob}: a night judges durations, and this measures none; leave it unset")
        return USAGE_ERROR
    for notice in knobs.notices:
        if notice.partition(":")[0] not in NIGHT_KNOBS:
            say(f"notice: {notice}")
    sys.stdout.write("\n".join(shell_lines(knobs)) + "\n")
    return 0


def room(folder: str) -> int:
    """After a sweep with a red row: was it the disk? Then its start is not finished."""
    free = shutil.disk_usage(folder).free
    if free >= FULL_BYTES:
        return 0
    say(f"OUT_DIR={folder}: is full ({free / 1e6:.0f} MB free); make room, and the next call goes on with this night")
    return USAGE_ERROR


def lock(descriptor: str) -> int:
    """Lock the file that the script has open; the lock belongs to the open file, and so lasts until its last holder."""
    try:
        fcntl.flock(int(descriptor), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another nightly is at work in this OUT_DIR, or a sweep that it left behind")
        return LOCKED_EXIT
    return 0


# --- before the night -------------------------------------------------------------------------------------------------


def preflight(folder: str) -> int:
    """Disk, neighbours and clocks of the GPUs, and BASELINE, each told in a sentence."""
    knobs = night_knobs()
    if knobs.baseline:
        read_baseline(knobs.baseline)
    gpus = visible_gpus(knobs.cuda_visible_devices, all_gpus())[: knobs.gpus]
    troubles = [*disk_trouble(folder), *gpu_troubles(gpus)]
    for trouble in troubles:
        say(f"preflight: {trouble}")
    return SET_UP_EXIT if troubles else 0


def begin(folder: str, now: str, wanted: str) -> int:
    """The night to measure: one that was cut short, or a new one; its folder exists then. Prints its stamp."""
    nights = sorted(night_folders(Path(folder)) | night_files(Path(folder)))
    finished = verdict_files(Path(folder))
    if nights and utc(nights[-1]) > utc(now):
        say(f"clock: now is {now}, but OUT_DIR={folder} has a night {nights[-1]}; set the clock, or remove that night")
        return SET_UP_EXIT
    left = [night for night in night_folders(Path(folder)) if night not in finished]
    if wanted not in ("", "last", *left) or (wanted and not left):
        say(f"RESUME={wanted}: OUT_DIR={folder} has no such unfinished night; leave it unset for a new one")
        return USAGE_ERROR
    night = left[-1] if left and wanted == "last" else wanted
    if left and not wanted and utc(now) - utc(left[-1]) < UNFINISHED:
        night = left[-1]
    if night and (other := other_code(Path(folder) / f"night_{night}")):
        if wanted:
            say(f"RESUME={wanted}: night {night} was begun with {other}; leave it unset for a new night")
            return USAGE_ERROR
        say(f"notice: night {night} was begun with {other}, so it is not gone on with")
        night = ""
    for old in left:
        if old != night:
            say(f"notice: night {old} was never finished; it stays as it is, and no verdict counts on it")
    if night:
        say(f"going on with night {night}, which was cut short")
    else:
        taken = [name for name in nights if name[:16] == now]
        night = f"{now}-{len(taken) + 1}" if taken else now
        (Path(folder) / f"night_{night}").mkdir()
        (Path(folder) / f"night_{night}" / CODE_FILE).write_text(f"{git_label()} {source_hash()}\n")
    show([night])
    return 0


def other_code(night: Path) -> str:
    """What a night was begun with, if that is not what would go on with it: half a night of each is no night."""
    try:
        began = (night / CODE_FILE).read_text().strip()
    except OSError:
        return ""  # killed before it was written
    now = f"{git_label()} {source_hash()}"
    return "" if began.split()[-1:] == now.split()[-1:] else f"other code ({began}, now {now})"


def words_of_start(start: str) -> int:
    """What start 1, 2, ... sets: sections and backends in turned order, so that no row is always the first."""
    knobs, turn = night_knobs(), int(start) - 1

    def turned(values: Sequence[str]) -> str:
        at = turn % len(values)
        return " ".join([*values[at:], *values[:at]])

    lists = [knob for knob in KNOBS if knob.name.endswith("_LIST") and set(knob.read_by) & set(knobs.sections)]
    told = [] if knobs.all_sections else [f"SECTION={turned(knobs.sections)}"]
    told += [f"{knob.name}={turned(getattr(knobs, knob.field_name))}" for knob in lists]
    show(["\t".join(told)])
    return 0


# --- after its starts -------------------------------------------------------------------------------------------------


def gather(folder: str, night: str) -> int:
    write_whole(Path(folder) / f"night_{night}.csv", history.as_text(history.gather(Path(folder), night)))
    return 0


def read_baseline(path: str) -> tuple[list[Row], list[str]]:
    """Raises BaselineError also where there is a header and nothing below it."""
    rows, notices = history.read_all(Path(path))
    if not rows:
        raise BaselineError(f"{path}: has a header and no rows; nothing to compare with")
    return rows, notices


def baseline_of(folder: Path, given: str, tonight: list[Row]) -> tuple[list[Row], str, list[str]]:
    """The baseline's rows, its path ("" = none), notices. Raises BaselineError on one that is there and not usable."""
    if given:
        rows, notices = read_baseline(given)
        return rows, given, notices
    accepted = sorted(folder.glob("baseline_*.csv"))
    keys = {history.machine_key(row) for row in tonight}
    mine = [path for path in accepted if path.stem.partition("_")[2] in keys] or (accepted if not tonight else [])
    rows, notices = [], []
    for path in mine:
        more, told = read_baseline(str(path))
        rows += more
        notices += told
    if not mine and accepted:
        names = ", ".join(path.name for path in accepted)
        notices.append(f"these rows are of {' '.join(sorted(keys))}, for which nothing is accepted; there is {names}")
    return rows, " ".join(map(str, mine)), notices


def judged(folder: str, night: str, given: str) -> tuple[dict[str, Any], list[Verdict]]:
    tonight, told = history.read(Path(folder) / f"night_{night}.csv")
    old, path, notices = baseline_of(Path(folder), given, tonight)
    machine = history.machine_key(tonight[0]) if tonight else ""
    streaks = verdicts.earlier_streaks(Path(folder), night, machine)
    starts = [path.name for path in (Path(folder) / f"night_{night}").glob("*") if path.name.isdecimal()]
    rows, suspects = verdicts.judge_all(old, tonight, streaks=streaks, starts=starts)
    return verdicts.document(night, old, tonight, rows, path, [*told, *notices]), suspects


def suspects_of(folder: str, night: str, given: str) -> int:
    """The second run's words, a line for each section that has a suspect."""
    _, suspects = judged(folder, night, given)
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for verdict in suspects:
        knobs = dict(word.split("=", 1) for word in shlex.split(verdict["repro"]) if "=" in word)
        for knob in (*CUT_LISTS, *REPEATED):
            if knob in knobs:
                found[knobs["SECTION"]][knob].append(knobs[knob])
        found[knobs["SECTION"]]["SEQ_LENS"].append(knobs["TOKENS"])
        change = verdict["change_pct"]
        say(
            f"suspect: {row_text(verdict)} {verdict['reason'] if change is None else f'{change:+.1f} %'}; it runs again"
        )
    lines = []
    for section, knobs_of in found.items():
        texts = [f"{knob}={' '.join(dict.fromkeys(values))}" for knob, values in knobs_of.items()]
        lines.append("\t".join([f"SECTION={section}", *texts]))
    if lines:
        show(lines)
    return 0


def judge(folder: str, night: str, given: str) -> int:
    document, _ = judged(folder, night, given)
    write_whole(Path(folder) / f"verdicts_{night}.json", json.dumps(document, indent=1, allow_nan=False) + "\n")
    (Path(folder) / FAILED_FILE).unlink(missing_ok=True)
    show(document_lines(document))
    return int(document["exit"])


# --- baseline, retention, staleness -----------------------------------------------------------------------------------


def accept(folder: str, since: str) -> int:
    """The nights of the history, from `since` on if given, become the baseline of their machines.

    Without `since`, rows that were red in their night stay out. Raises BaselineError where there is nothing.
    """
    nights = {night: path for night, path in night_files(Path(folder)).items() if night >= since}
    if not nights:
        what = f"no night since {since}" if since else "no night"
        raise BaselineError(f"OUT_DIR={folder}: {what} to accept; run ./nightly.sh first")
    machines: dict[str, list[Row]] = defaultdict(list)
    for night, path in nights.items():
        rows, _ = history.read(path)
        left_out = set() if since else regressed(Path(folder), night)
        for row in rows:
            if verdicts.may_be_baseline(row) and verdicts.case_id(verdicts.identity(row)) not in left_out:
                machines[history.machine_key(row)].append(row)
    if not machines:
        raise BaselineError(f"OUT_DIR={folder}: the nights {' '.join(nights)} have no row that may be a baseline")
    for machine, rows in machines.items():
        path = Path(folder) / f"baseline_{machine}.csv"
        write_whole(path, history.as_text(rows))
        stamps = sorted({row["night"] for row in rows})
        few = f"; {MIN_NIGHTS} are needed before it judges, accept again then" if len(stamps) < MIN_NIGHTS else ""
        show([f"{path}: {len(stamps)} nights, {stamps[0]} to {stamps[-1]}{few}"])
    return 0


def regressed(folder: Path, night: str) -> set[str]:
    path = verdict_files(folder).get(night)
    if path is None:
        return set()
    return {row["case"] for row in read_verdicts(path)["verdicts"] if row["verdict"] == "REGRESSED"}


def prune(folder: str, keep: str) -> int:
    if gone := history.prune(Path(folder), int(keep)):
        say(f"KEEP={keep}: removed {len(gone)} nights, up to {gone[-1]}")
    return 0


def failed(folder: str, now: str, code: str) -> int:
    """A night that ended before its verdict: a red line for cron's mail, kept for --status."""
    line = f"RED {now} no verdict: nightly ended with {code}; what it said is on stderr"
    show([line])
    if folder:
        write_whole(Path(folder) / FAILED_FILE, line + "\n")
    return int(code)


def at_work(folder: Path) -> bool:
    """Is a nightly, or a sweep that it left behind, at work in this folder?"""
    try:
        with (folder / LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def status(folder: str, now: str) -> int:
    """The last night's line again; a last night that is too old, or that ended without a verdict, is a failure."""
    files = verdict_files(Path(folder)) if Path(folder).is_dir() else {}
    working = at_work(Path(folder))
    if not working and (told := Path(folder) / FAILED_FILE).is_file():
        show([told.read_text().strip()])
        return RED_EXIT
    if not files:
        show([f"RED no night in {folder}: no new row, ever"])
        return RED_EXIT
    night, path = list(files.items())[-1]
    begun = max(night_folders(Path(folder)), default="")
    if begun > night and not working:
        show([f"RED night {begun} was begun and has no verdict; the last one is {night}'s"])
        return RED_EXIT
    try:
        document = read_verdicts(path)
    except BaselineError as error:
        show([f"RED {error}"])
        return RED_EXIT
    age = utc(now) - utc(night)
    if age < timedelta(0):
        show([f"RED the last night, {night}, is of a time to come: the clock went back, or {path} is not a night's"])
        return RED_EXIT
    if age > (STALE_AT_WORK if working else STALE):
        show(
            [f"RED no new row since {night} ({age.days} days): is cron running? The last line was: {document['line']}"]
        )
        return RED_EXIT
    show([document["line"]])
    return int(document["exit"])


COMMANDS: dict[str, Callable[..., int]] = {
    "check": check,
    "lock": lock,
    "room": room,
    "preflight": preflight,
    "begin": begin,
    "words": words_of_start,
    "gather": gather,
    "suspects": suspects_of,
    "judge": judge,
    "accept": accept,
    "prune": prune,
    "failed": failed,
    "status": status,
}


def main(arguments: Sequence[str]) -> int:
    command, *rest = arguments
    try:
        return COMMANDS[command](*rest)
    except (BaselineError, SchemaError, ValueError) as error:  # the last: a figure or a JSON that somebody edited
        say(f"{command}: {error}")
        return RED_EXIT
    except OSError as error:
        say(f"{command}: {error.strerror}: {error.filename or 'OUT_DIR'}")
        return SET_UP_EXIT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
