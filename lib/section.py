"""The coordinator of one section: knobs -> plan -> rows of what can't run -> worker groups -> exit code.

It creates no GPU context and imports no library that is measured; standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lib.follower import follow
from lib.guard import NotItsChildError, die_with_parent
from lib.interrupt import SIGNALS, Interrupted
from lib.knob_types import UNTIMED
from lib.knobs import KnobErrors, Knobs, parse_knobs
from lib.launch import Events, Failure, Limits, Request, WorkerGroup
from lib.launcher import Launcher, detect_launcher, joined_problem
from lib.machine import Machine, detect_facts, detect_machine, fingerprint
from lib.meeting import make_card, trouble_here
from lib.monitor import Monitor
from lib.nodes import NOT_MET, Hub, NodeLostError, NotMetError, RefusedError
from lib.peaks_file import read_peaks, write_peaks
from lib.plan import Case, Section, groups, make_plan, plan_lines
from lib.progress import make_progress
from lib.provenance import moved
from lib.ranks_environment import worker_environment
from lib.routing_spec import parse_routing
from lib.rows import COLUMNS, NOT_RUN, SCHEMA, LockedError, RowFiles, SchemaError, WriteError
from lib.talk import say, show
from lib.trace_files import remove_unfinished
from lib.version import git_label
from lib.wire import pack_case, pack_knobs

OK_EXIT, FAILED_EXIT, USAGE_EXIT, NOTHING_EXIT, LOCKED_EXIT, INTERRUPTED_EXIT = 0, 1, 2, 4, 75, 130
RED = ("failed", "wrong", "timeout")


class Run:
    """One section of one run: its plan, its files, and what has become of each case."""

    def __init__(
        self,
        section: Section,
        knobs: Knobs,
        machine: Machine,
        launcher: Launcher,
        cases: list[Case],
        hub: Hub | None = None,
    ) -> None:
        self.section, self.knobs, self.machine, self.launcher, self.cases = section, knobs, machine, launcher, cases
        self.hub = hub  # of the other members, where there are some
        self.stamp = os.environ.get("MOE_EP_STAMP") or time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.files = RowFiles(Path(knobs.out_dir), prefix(), self.stamp, section.name)
        self.git = git_label()
        self.fingerprint = fingerprint(machine) | (hub.fingerprints() if hub else {})
        self.eager: dict[str, str] = {}  # case key -> why its graph could not be captured
        self.peaks: dict[str, Any] | None = None
        self.monitor = Monitor(machine.gpus)

    # -- rows

    def write(self, case: Case, status: str, reason: str, columns: dict[str, Any], samples: dict[str, Any]) -> None:
        row = self.case_columns(case) | columns | {"status": status, "reason": reason}
        record = {"samples": samples, "knobs": self.knobs.as_text(), "fingerprint": self.fingerprint}
        with SIGNALS.held():
            self.files.append(row, case.key, record)
        latency = columns.get("lat_us_p50")
        outcome = f"{status}: {reason}" if reason else status
        if status == "ok" and latency:
            outcome = f"ok, p50 {latency:.1f} us"
        elif status == "ok":
            outcome = "ok, checked" if columns.get("check") == "ok" else "ok"
        self.log(f"{label(case)}: {outcome}")
        if status in NOT_RUN:
            self.progress.skip()
        else:
            self.progress.case(label(case), outcome)

    def note(self, text: str) -> None:
        self.log(text)
        self.progress.note(text)

    def log(self, text: str) -> None:
        try:
            self.log_file.write(f"{time.strftime('%H:%M:%S', time.gmtime())} {text}\n".encode())
        except OSError as error:  # a full disk: the rows decide what becomes of the run
            self.progress.note(f"the log cannot be written ({error.strerror}): {text}")

    def case_columns(self, case: Case) -> dict[str, Any]:
        """What is known of a case without running it."""
        variant, problem, knobs = case.variant, case.problem, self.knobs
        return {
            "schema": SCHEMA,
            "stamp": self.stamp,
            "section": self.section.name,
            "variant": variant.name,
            "timing": case.timing,
            **{name: value for name, value in asdict(variant).items() if name in COLUMNS},
            **{name: value for name, value in asdict(problem).items() if name in COLUMNS},
            "warmup": knobs.warmup,
            "iters": knobs.iters,
            "iters_per_graph": knobs.iters_per_graph if case.timing == "graph" else None,
            "l2": knobs.l2 if self.machine.gpus else None,
            "device": self.machine.device,
            "git": self.git,
            "repro": case.repro,
        }

    # -- running

    def execute(self) -> int:
        """Every planned case gets its row, whatever happens. Returns the exit code."""
        self.files.open(resume=bool(self.knobs.resume), planned={case.key for case in self.cases})
        there = sum(case.key in self.files.done for case in self.cases)
        self.progress = make_progress(self.section.name, len(self.cases), there)
        with self.files.log.open("ab", buffering=0) as self.log_file:
            if self.hub is not None:
                self.hub.log = self.log_file.write
            try:
                self._log_header()
                # run.sh has shown the knobs' notices once for all sections
                tell = self.log if "MOE_EP_STAMP" in os.environ else self.note
                for notice in self.knobs.notices:
                    tell(notice)
                for notice in self.files.notices:
                    self.note(notice)
                if self.monitor.contended:
                    self.note(f"contended: {self.monitor.contended}; the rows are marked and make no baseline")
                for notice in self.hub.notices() if self.hub else []:
                    self.note(notice)
                if there:
                    self.note(f"resumed: {there} of {len(self.cases)} cases are there already")
                return self._run([case for case in self.cases if case.key not in self.files.done])
            finally:
                self.monitor.close()
                self.progress.close()
                remove_unfinished(Path(self.knobs.out_dir), self.stamp, self.section.name)
                self.files.close()

    def _log_header(self) -> None:
        text = self.knobs.as_text()
        given = {name: text.get(name, "") for name in sorted(self.knobs.given)}
        self.log(f"run {self.stamp}, section {self.section.name}, {len(self.cases)} cases, code {self.git}")
        self.log(f"machine {json.dumps(self.fingerprint)}")
        self.log(f"knobs given {json.dumps(given)}")

    def _run(self, todo: list[Case]) -> int:
        try:
            if os.environ.get("MOE_EP_INTERRUPTED") == "1":
                raise Interrupted
            for case in todo:
                if not case.support.ok:
                    self.write(case, case.support.status, case.support.reason, {}, {})
            runnable = list(groups(todo))
            if self.machine.gpus and any(case.timing != UNTIMED for group in runnable for case in group):
                self.peaks = self._find_peaks()
            for group in runnable:
                self._run_group(group)
        except Interrupted:
            self._give_up(todo, "")
            return INTERRUPTED_EXIT
        except NodeLostError as lost:
            self._give_up(todo, f"{lost}; RESUME continues")
            self.note(f"{lost}: the run ends here; RESUME continues it")
            return INTERRUPTED_EXIT if lost.interrupted else FAILED_EXIT
        return self.exit_code()

    def _give_up(self, todo: list[Case], reason: str) -> None:
        for case in todo:
            if case.key not in self.files.done:
                status = "interrupted" if case.support.ok else case.support.status
                self.write(case, status, case.support.reason or reason, {}, {})

    def _run_group(self, cases: list[Case]) -> None:
        """One variant: a fresh worker group after every failure until no case is left."""
        left = list(cases)
        while left:
            count = len(left)
            group, failure = self._serve(left)
            left = left[group.current :]
            if failure is None and len(left) == count:
                failure = Failure("failed", "the worker group ended without reporting its case (see the log)")
            if failure is not None and failure.status == "teardown":
                self.note(failure.reason)
            elif failure is not None and failure.status == "eager" and left:
                self.eager[left[0].key] = failure.reason
            elif failure is not None and left:
                failed = left if failure.whole_variant else left[:1]
                for case in failed:
                    self.write(case, failure.status, failure.reason, {}, {})
                left = left[len(failed) :]
            if self.hub is not None and (lost := self.hub.lost()):
                raise lost

    def _serve(self, cases: list[Case]) -> tuple[WorkerGroup, Failure | None]:
        first, knobs = cases[0], self.knobs
        backend = self.section.find(first.backend, knobs)
        capacity = max(case.problem.tokens for case in cases)
        message = {
            "module": self.section.module,
            "knobs": pack_knobs(knobs),
            "capacity": capacity,
            "cases": [pack_case(case) for case in cases],
            "task": "cases",
            "peaks": self.peaks,
            "eager": self.eager,
            "stamp": self.stamp,
        }
        wanted = backend.env(first.variant, first.problem.at(capacity), knobs)
        request = self._request(message, wanted)
        self.log(f"{first.variant.name}: a worker group of {request.ranks} ranks for {len(cases)} cases")

        def on_result(index: int, result: dict[str, Any]) -> None:
            if trouble := moved_under(cases[index]):
                self.write(cases[index], "failed", trouble, {}, {})
                return
            marks = self.monitor.columns() if result["status"] == "ok" else {}
            columns = result["columns"] | (self.hub.worst_marks(marks) if self.hub and marks else marks)
            self.write(cases[index], result["status"], result["reason"], columns, result["samples"])
            for note in result.get("notes", ()):
                self.note(note)
            if facts := result["samples"].get("facts"):
                self.log(f"{label(cases[index])}: {json.dumps(facts)}")

        def on_phase(index: int, phase: str) -> None:
            self.progress.phase(label(cases[index]), phase)
            if phase == "time":
                self.monitor.watch()
            elif phase == "recheck":
                self.monitor.take()
            if self.hub is not None and self.machine.gpus:
                self.hub.mark(phase)

        group = WorkerGroup(request, Events(on_result, on_phase, self.note))
        return group, group.run()

    def _request(self, message: dict[str, Any], wanted: dict[str, str]) -> Request:
        knobs = self.knobs
        return Request(
            mark=self.stamp,
            ranks=knobs.world,
            environment=worker_environment(knobs, self.machine, self.hub.interface if self.hub else ""),
            wanted=wanted,
            message=message,
            limits=Limits(knobs.setup_timeout_s, knobs.timeout_s),
            launcher=self.launcher,
            log=self.log_file,
            hub=self.hub,
        )

    def _find_peaks(self) -> dict[str, Any] | None:
        """From PEAKS=file, from an earlier section of this run, or measured now in a group of its own."""
        asked, path = self.knobs.peaks, Path(self.knobs.out_dir) / f"peaks_{self.stamp}.json"
        if asked == "off":
            return None
        if self.knobs.nnodes > 1:
            self.note("no speed of light over several nodes: the wire that is measured is that of one node")
            return None
        if asked != "measure":
            path = Path(asked)
        if path.exists():
            return read_peaks(path)
        found: dict[str, Any] = {}
        self.note("measuring this machine's peaks")
        message = {"task": "peaks", "cases": [None]}
        events = Events(lambda _, result: found.update(result["peaks"]), lambda _index, _phase: None, self.note)
        failure = WorkerGroup(self._request(message, {}), events).run()
        if not found:
            self.note(f"no peaks, so no speed of light: {failure.reason if failure else 'nothing was reported'}")
            return None
        return write_peaks(path, found, self.stamp)

    def exit_code(self) -> int:
        statuses = [self.files.done[case.key] for case in self.cases]
        if any(status in RED for status in statuses):
            return FAILED_EXIT
        if "ok" in statuses:
            return OK_EXIT
        reasons = sorted({case.support.reason for case in self.cases if case.support.reason})
        say(f"{self.section.name}: nothing could run here: {'; '.join(reasons) or 'no case was planned'}")
        return NOTHING_EXIT


def moved_under(case: Case) -> str:
    return moved(parse_routing(case.problem.routing).path)


def label(case: Case) -> str:
    return f"{case.variant.name} {case.timing} T={case.problem.tokens}"


def prefix() -> str:
    return os.environ.get("MOE_EP_PREFIX", "bench")


def run_section(section: Section) -> int:
    """What a section's script calls. Returns the exit code (README, "Exit codes")."""
    try:
        SIGNALS.catch()
        if shell := os.environ.get("MOE_EP_SHELL_PID"):
            die_with_parent(int(shell), signal.SIGTERM)  # run.sh killed: end in order, with every row written
        return _run_section(section)
    except Interrupted:
        return INTERRUPTED_EXIT
    except NotItsChildError:
        say(wrapped_python(section.name, os.environ))
        return USAGE_EXIT
    except KnobErrors as error:
        for line in error.errors:
            say(line)
        return USAGE_EXIT
    except (RefusedError, NotMetError) as error:
        say("\n".join(f"{section.name}: {line}" for line in error.lines))
        return USAGE_EXIT if isinstance(error, RefusedError) else NOT_MET
    except (SchemaError, FileExistsError) as error:
        say(f"RESUME: {error}")
        return USAGE_EXIT
    except LockedError as error:
        say(str(error))
        return LOCKED_EXIT
    except WriteError as error:
        say(f"{error}; the row that could not be saved:")
        say(error.line.rstrip("\n"))
        return FAILED_EXIT
    except Exception as error:  # noqa: BLE001 - a user gets a sentence; DEBUG shows the traceback
        if os.environ.get("DEBUG"):
            traceback.print_exc()
        say(f"{section.name}: internal error: {type(error).__name__}: {error} (DEBUG=1 shows where)")
        return FAILED_EXIT
    finally:
        SIGNALS.ignore()


def wrapped_python(section: str, env: Mapping[str, str]) -> str:
    """What to tell the user of an interpreter that is a script with python as its child."""
    own = f"{section.partition('_')[0].upper()}_PYTHON"  # COMM_PYTHON, FI_PYTHON
    knob = own if env.get(own) else "PYTHON"
    remedy = 'let it end with `exec python3 "$@"`, and put a tool such as compute-sanitizer in front of ./run.sh'
    which = f"{knob}={env[knob]}" if env.get(knob) else "PYTHON is unset, and python3 on PATH"
    return f"{which}: starts python as its child instead of becoming it; {remedy}"


def _run_section(section: Section) -> int:
    env = os.environ
    sweep = prefix() == "sweep"
    knobs = parse_knobs(env, detect_facts(env), sweep=sweep)
    launcher = detect_launcher(env).placed(knobs)
    machine = detect_machine(knobs, env)
    families = {backend.family for backend in section.backends(knobs)}
    if problem := joined_problem(launcher, knobs.gpus, env, len(knobs.sections), families):
        say(problem)
        return USAGE_EXIT
    if knobs.nnodes == 1 and (trouble := trouble_here(knobs, env)):  # of several nodes, node 0 tells everyone's
        say(f"{section.name}: {trouble}")
        return USAGE_EXIT
    if knobs.peaks not in ("measure", "off"):
        read_peaks(Path(knobs.peaks))  # refused now, before anything is measured
    if launcher.joined and launcher.follower and knobs.dry_run:
        return OK_EXIT  # the first rank shows the plan
    cases = make_plan(section, knobs, machine, sweep)
    if knobs.dry_run:
        text = [f"{section.name}: {len(cases)} cases on {machine.device}", *plan_lines(cases)]
        show(text)
        return OK_EXIT
    cut_short = env.get("MOE_EP_INTERRUPTED") == "1"  # node 0 writes its rows, and nobody need come for that
    if launcher.follower:
        return INTERRUPTED_EXIT if cut_short else follow(section.name, launcher, knobs, machine, cases)
    if launcher.members == 1 or cut_short:
        return Run(section, knobs, machine, launcher, cases).execute()
    with Hub(section.name, launcher, knobs) as hub:
        agreed = hub.meet(make_card(section.name, knobs, machine, cases, env), cases)
        run = Run(section, knobs, machine, launcher, agreed, hub)
        hub.code = run.execute()
        hub.farewell = [f"the rows are on node 0 ({hub.cards[0]['host']}): {run.files.csv}"]
        return hub.code
