"""Every fi_mega variant on two ranks over the fake library, by the harness's own device methods on a host clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import fi_mega
from lib import device_timing
from lib.contract import Group, Support, Variant
from lib.knobs import Knobs, MachineFacts, parse_knobs
from lib.measure import Bench, measure_case
from lib.plan import Case
from lib.problem import Problem
from tests import fake_flashinfer
from tests.fake_flashinfer import State

CPU = torch.device("cpu")
PAIR = Problem(world=2, nodes=1, tokens=6, num_experts=8, topk=2, hidden=256, inter=128, seed=0, routing="uniform")
OLD, NEW = fake_flashinfer.FILES
SHORT = {"WARMUP": "1", "ITERS": "3", "CHECK_REPEATS": "1"}
EVERY = "deep_gemm_mega mxfp8_cutedsl nvfp4_cutedsl sm90_push_fp8 sm90_pull_fp8"
SETTINGS: dict[str, dict[str, str]] = {
    "plain": {"MEGA_LIST": EVERY},
    "pipelined": {"MEGA_LIST": "sm90_push_fp8 sm90_pull_fp8", "MEGA_TIMING": "e2e_pipelined"},
    "ikr": {"MEGA_LIST": "mxfp8_cutedsl nvfp4_cutedsl sm90_pull_fp8", "MEGA_IKR": "1", "MEGA_TIMING": "kernel"},
    "wire nvfp4": {"MEGA_LIST": "nvfp4_cutedsl", "MEGA_COMBINE_DTYPE": "nvfp4"},
    "wire mxfp8": {"MEGA_LIST": "nvfp4_cutedsl", "MEGA_COMBINE_DTYPE": "mxfp8"},
    "auto": {"MEGA_LIST": "nvfp4_cutedsl sm90_pull_fp8", "MEGA_KNOBS": "auto"},
    "object": {"MEGA_LIST": "nvfp4_cutedsl", "MEGA_KNOBS": '{"flag_batch": 16, "epi_flag_batch": [2, 4]}'},
    "fields": {"MEGA_LIST": "sm90_pull_fp8", "MEGA_KNOBS": '{"swap_ab": true, "mma_tiler_mnk": [256, 32, 128]}'},
    "bf16 wires": {
        "MEGA_LIST": "sm90_push_fp8",
        "MEGA_KNOBS": '{"payload_dtype": "bf16", "combine_dtype": "bf16", "grouped_combine": false}',
    },
    "unchecked": {"MEGA_LIST": "sm90_pull_fp8", "MEGA_ACC": "0", "MEGA_TIMING": "kernel"},
}
TIMINGS = ("e2e", "kernel")  # of "plain"
SHAPES: dict[str, dict[str, Any]] = {
    "masks and an empty rank": {"routing": "uniform,mask=0.4,empty=1"},
    "all to one rank": {"routing": "onehot"},
    "all masked": {"routing": "uniform,mask=1"},
    "no tokens": {"tokens": 0},
}
SHAPED = ("sm90_push_fp8", "sm90_pull_fp8", "nvfp4_cutedsl")
FAULTS = ("corrupt_row", "skip_weights", "stale_stage")


class Event:
    """A CUDA event of a device that is done as soon as the host is."""

    def __init__(self, **options: bool) -> None:
        self.at_ns = 0

    def record(self) -> None:
        self.at_ns = time.perf_counter_ns()

    def elapsed_time(self, end: Event) -> float:
        return (end.at_ns - self.at_ns) / 1e6


class Graph:
    """Replays what was captured, which here is the work itself."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.replay = work


def pretend_device() -> None:
    """lib.device_timing on a host clock; this process does nothing else."""
    device_timing.event = lambda external=False: Event()  # type: ignore[assignment,misc]
    device_timing.HOST_WARM_UP_NS = 0
    device_timing.PIPELINED_MIN_CALLS, device_timing.PIPELINED_CHAINS = 18, 1
    device_timing.torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    device_timing.torch.cuda._sleep = lambda cycles: None  # type: ignore[assignment]
    device_timing.capture = lambda work, tools: Graph(work)  # type: ignore[assignment,return-value]


def knobs_of(**env: str) -> Knobs:
    facts = MachineFacts(gpu_count=2, sm=(9, 0))
    return parse_knobs({"SECTION": "fi_mega", "GPUS": "2", **SHORT, **env}, facts)


def bench_of(group: Group, knobs: Knobs, flushed: list[int]) -> Bench:
    def agree(problem: str) -> str:
        problems: list[Any] = [None] * group.world
        dist.all_gather_object(problems, problem)
        return next(filter(None, problems), "")

    tools = device_timing.DeviceTools(dist.barrier, lambda: None, None, agree, lambda: lambda: flushed.append(1))
    return Bench(group, knobs, device_timing.METHODS, tools, None)


def case_of(backend: Any, variant: Variant, timing: str, problem: Problem, knobs: Knobs) -> Case:
    return Case("fi_mega", backend.name, variant, problem, timing, Support(), 0, knobs.mega_acc, "k", "")


def measured(engine: Any, case: Case, bench: Bench, flushed: list[int]) -> dict[str, Any]:
    flushed.clear()
    result, session = measure_case(case, engine, bench, lambda phase: None, "")
    State.kernels.clear()
    if result["status"] == "ok":
        session.call()
    found = {
        "status": result["status"],
        "reason": result["reason"],
        "columns": result["columns"],
        "facts": result["samples"].get("facts", {}),
        "samples": sorted(result["samples"]),
        "alone": sorted(result["samples"].get("alone_us", {})),
        "flushed": len(flushed),
        "call": list(State.kernels),
        "phases": [(phase.name, phase.timed, phase.repeatable) for phase in session.phases],
    }
    session.close()
    return found


def opened(group: Group, version: str, knobs: Knobs, look: Callable[[Any, Any, Variant], None]) -> None:
    """Each variant in a fresh library, as each has a worker group of its own."""
    for backend in fi_mega.SECTION.backends(knobs):
        for variant in backend.variants(knobs):
            with fake_flashinfer.installed(version):
                engine = backend.open(group, variant, PAIR, knobs)
                look(backend, engine, variant)
                engine.close()


def all_settings(group: Group, version: str, settings: list[str], timings: tuple[str, ...] = ()) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for setting in settings:
        knobs, flushed = knobs_of(**SETTINGS[setting]), list[int]()
        bench = bench_of(group, knobs, flushed)

        def look(backend: Any, engine: Any, variant: Variant, setting: str = setting) -> None:
            for timing in timings or (TIMINGS if setting == "plain" else knobs.mega_timing):  # noqa: B023
                case = case_of(backend, variant, timing, PAIR, knobs)  # noqa: B023 - called before the next turn
                found[f"{setting}: {variant.name} {timing}"] = measured(engine, case, bench, flushed)  # noqa: B023

        opened(group, version, knobs, look)
    return found


def shapes_and_faults(group: Group) -> dict[str, Any]:
    knobs, flushed = knobs_of(**SETTINGS["plain"]), list[int]()
    bench, found = bench_of(group, knobs, flushed), {}

    def look(backend: Any, engine: Any, variant: Variant) -> None:
        for name, changes in SHAPES.items() if backend.name in SHAPED else ():
            case = case_of(backend, variant, "e2e", replace(PAIR, **changes), knobs)
            found[f"{variant.name}, {name}"] = measured(engine, case, bench, flushed)
        for fault in FAULTS:
            State.fault = fault
            case = case_of(backend, variant, "kernel", PAIR, knobs)
            found[f"{variant.name}, {fault}"] = measured(engine, case, bench, flushed)
            State.fault = ""

    opened(group, OLD, knobs, look)
    return found


def refusals(group: Group) -> dict[str, str]:
    """What the library itself refuses, and a build that breaks half way."""
    knobs, told = knobs_of(MEGA_LIST="sm90_push_fp8"), {}

    def look(backend: Any, engine: Any, variant: Variant) -> None:
        from lib.measure import make_inputs, make_routing

        case = case_of(backend, variant, "e2e", PAIR, knobs)
        inputs = make_inputs(case, make_routing(PAIR), group)
        session = engine.bind(PAIR, inputs)
        kernel, workspace = session.layer._kernel, session.layer._workspace
        told["compute before stage"] = said(lambda: kernel.compute(workspace, engine.weights, output=None))
        session._stage()
        told["stage twice"] = said(session._stage)
        session._forward()
        session.tensors.topk_ids = inputs.topk_idx
        told["int64 ids"] = said(session.call)
        session.close()
        State.broken_build = True
        told["broken build"] = said(lambda: engine.bind(PAIR, inputs))
        State.broken_build = False

    opened(group, OLD, knobs, look)
    return told


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as refused:  # noqa: BLE001 - whatever it is, the test reads it
        return f"{type(refused).__name__}: {refused}"
    return "nothing was said against it"


def rank_main(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    pretend_device()
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = Group(rank, 2, rank, 1, CPU, pg=dist.group.WORLD, host_pg=dist.group.WORLD)
    found = {
        "old": all_settings(group, OLD, list(SETTINGS)),
        "new": all_settings(group, NEW, ["plain", "ikr", "object"], ("kernel",)),
        "shapes": shapes_and_faults(group),
        "refusals": refusals(group),
    }
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort an interpreter that is ending
