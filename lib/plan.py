"""The plan: every case that was asked for, each with its verdict and its memory, before anything runs."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from lib.contract import OK, Backend, Support, Variant, missing, unsupported
from lib.knob_types import UNTIMED
from lib.problem import Problem
from lib.provenance import file_digest, library_environment, software
from lib.routing_spec import parse_routing
from lib.version import source_hash

if TYPE_CHECKING:
    from lib.knobs import Knobs
    from lib.machine import Machine

GB = 1e9
CPU_TIMINGS = ("e2e", "e2e_pipelined", UNTIMED)
HARNESS_COPIES = 12  # [T, H] float32 that check and oracle hold beside the session: payloads, references, outputs

# Knobs that a row's repro line always names, and those that it names if the user gave them.
ALWAYS = "WARMUP ITERS ROUTING SEED CHECK_REPEATS L2".split()
IF_GIVEN = (
    "RANKS_PER_GPU ITERS_PER_GRAPH EXCLUDE_QUANT MEGA_ACC PEAKS TRACE PYTHON COMM_PYTHON FI_PYTHON "
    "SETUP_TIMEOUT_S TIMEOUT_S NIC"
).split()
# What makes two cases of one shape different measurements, beside shape, variant and timing.
MEASURING = "ranks_per_gpu warmup iters iters_per_graph l2 check_repeats mega_acc exclude_quant trace peaks nic".split()


@dataclass(frozen=True)
class Section:
    """One section as its script declares it. `module` is where a worker finds the same declaration."""

    name: str
    module: str
    backends: Callable[[Knobs], list[Backend]]
    list_knob: str = ""  # the knob that lists this section's backends
    timing_knob: str = "TIMING"
    identity_experts: bool = False  # nothing is computed between dispatch and combine

    def timings(self, knobs: Knobs) -> tuple[str, ...]:
        return knobs.mega_timing if self.timing_knob == "MEGA_TIMING" else knobs.timing

    def find(self, name: str, knobs: Knobs) -> Backend:
        return next(backend for backend in self.backends(knobs) if backend.name == name)


@dataclass(frozen=True)
class Case:
    """One row to be: a variant at one point under one timing."""

    section: str
    backend: str
    variant: Variant
    problem: Problem
    timing: str
    support: Support
    memory_bytes: int
    checked: bool
    key: str
    repro: str
    identity_experts: bool = False


def points(knobs: Knobs, sweep: bool) -> tuple[int, ...]:
    """Tokens per rank of each point."""
    return knobs.seq_lens if sweep else (knobs.tokens,)


def base_problem(knobs: Knobs) -> Problem:
    return Problem(
        world=knobs.world,
        nodes=knobs.nnodes,
        tokens=knobs.tokens,
        num_experts=knobs.num_experts,
        topk=knobs.topk,
        hidden=knobs.hidden,
        inter=knobs.inter,
        seed=knobs.seed,
        routing=knobs.routing,
    )


def need_bytes(backend: Backend, variant: Variant, problem: Problem) -> int:
    """Memory of one rank: the backend's own, the inputs', and what the check holds beside them."""
    tokens = problem.tokens * problem.hidden * 4 * HARNESS_COPIES
    one_expert = 3 * problem.hidden * problem.inter * 4
    routing = problem.tokens * problem.num_experts * 8  # a shuffle of all experts a token, int64
    return backend.memory_bytes(variant, problem) + tokens + one_expert + routing


def verdict(
    backend: Backend, variant: Variant, problem: Problem, timing: str, knobs: Knobs, machine: Machine
) -> Support:
    """skipped (knob), unsupported (hardware, then shape), missing (package): the first that applies."""
    support = backend.supports(variant, machine, problem, knobs)
    if support.status in ("skipped", "unsupported"):
        return support
    need, there, why = need_bytes(backend, variant, problem), machine.rank_bytes(knobs.gpus, knobs.ranks_per_gpu), ""
    if machine.vendor == "cpu" and timing not in CPU_TIMINGS:
        why = f"TIMING={timing} needs a GPU; on a CPU there are {', '.join(CPU_TIMINGS)}"
    elif need > there:
        why = (
            f"needs {need / GB:.1f} GB a rank, {there / GB:.1f} GB is free (TOKENS={problem.tokens} "
            f"NUM_EXPERTS={problem.num_experts} HIDDEN={problem.hidden} INTER={problem.inter})"
        )
    if not why:
        return support
    return unsupported(f"{why}; {support.reason}" if support.reason else why)


def needs_packages(machine: Machine, packages: dict[str, str], why: Support = OK) -> Support:
    """A verdict with the packages that are not installed ({module: what brings it}) named, whatever else is wrong."""
    absent = [how for module, how in packages.items() if not machine.has(module)]
    hint = f"not installed: {', '.join(absent)}" if absent else ""
    if not why.ok:
        return Support(why.status, f"{why.reason}; {hint}" if hint else why.reason)
    return missing(hint) if hint else OK


def case_key(section: str, variant: Variant, problem: Problem, timing: str, knobs: Knobs, machine: Machine) -> str:
    """`k` + hash of all that makes the case what it is: device, code, packages and libraries' variables included."""
    whole = {
        "section": section,
        "variant": asdict(variant),
        "problem": asdict(problem),
        "routing_file": file_digest(parse_routing(problem.routing).path),
        "timing": timing,
        "knobs": {name: getattr(knobs, name) for name in MEASURING},
        "device": machine.device,
        "code": source_hash(),
        "software": software(),
        "environment": library_environment(),
    }
    text = json.dumps(whole, sort_keys=True, default=str)
    return f"k{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def repro_line(
    section: Section, backend: Backend, variant: Variant, problem: Problem, timing: str, knobs: Knobs
) -> str:
    """One line that makes the same case when it runs in the repository as it stands."""
    text = knobs.as_text()
    words = {"SECTION": section.name, "GPUS": str(knobs.gpus)}
    if knobs.cuda_visible_devices is not None:
        words["CUDA_VISIBLE_DEVICES"] = knobs.cuda_visible_devices
    if section.list_knob:
        words[section.list_knob] = backend.name
    if variant.algo:
        words["ALGO"] = variant.algo
    words |= {"TOKENS": str(problem.tokens), "NUM_EXPERTS": str(problem.num_experts), "TOPK": str(problem.topk)}
    words |= {"HIDDEN": str(problem.hidden), "INTER": str(problem.inter), section.timing_knob: timing}
    if variant.dispatch_dtype and section.name == "comm":
        words["DISPATCH_DTYPE"] = variant.dispatch_dtype
    if variant.num_sms is not None:
        words["NUM_SMS"] = str(variant.num_sms)
    words |= {name: value for name, value in variant.options if name.isupper()}
    if knobs.nnodes > 1:  # node 0's line; the others run it with their own NODE_RANK
        words |= {name: text[name] for name in ("NNODES", "MASTER_ADDR", "MASTER_PORT")} | {"NODE_RANK": "0"}
    words |= {name: text[name] for name in ALWAYS}
    words |= {name: text[name] for name in IF_GIVEN if name in knobs.given}
    return " ".join(f"{name}={shlex.quote(value) if value else ''}" for name, value in words.items()) + " ./run.sh"


def make_plan(section: Section, knobs: Knobs, machine: Machine, sweep: bool) -> list[Case]:
    """Cases in running order: the points of a variant stand together, so one worker group serves them."""
    base = base_problem(knobs)
    cases = []
    for backend in section.backends(knobs):
        for variant in backend.variants(knobs):
            for timing in section.timings(knobs):
                for tokens in points(knobs, sweep):
                    problem = base.at(tokens)
                    cases.append(
                        Case(
                            section=section.name,
                            backend=backend.name,
                            variant=variant,
                            problem=problem,
                            timing=timing,
                            support=verdict(backend, variant, problem, timing, knobs, machine),
                            memory_bytes=need_bytes(backend, variant, problem),
                            checked=section.timing_knob != "MEGA_TIMING" or knobs.mega_acc,
                            key=case_key(section.name, variant, problem, timing, knobs, machine),
                            repro=repro_line(section, backend, variant, problem, timing, knobs),
                            identity_experts=section.identity_experts,
                        )
                    )
    return cases


def groups(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Runnable cases cut into what one worker group may serve: neighbours of one variant."""
    current: list[Case] = []
    for case in cases:
        if not case.support.ok:
            continue
        if current and (case.backend, case.variant) != (current[0].backend, current[0].variant):
            yield current
            current = []
        current.append(case)
    if current:
        yield current


def plan_lines(cases: Sequence[Case]) -> list[str]:
    """The dry run: every case with its verdict and its memory a rank."""
    header = ("variant", "timing", "tokens", "GB a rank", "verdict")
    rows = [
        (
            case.variant.name,
            case.timing,
            str(case.problem.tokens),
            f"{case.memory_bytes / GB:.2f}",
            f"{case.support.status}: {case.support.reason}" if case.support.reason else case.support.status,
        )
        for case in cases
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header) - 1)]
    lines = []
    for *cells, last in [header, *rows]:
        lines.append("  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), last]))
    return lines
