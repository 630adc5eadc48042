"""RANKS_PER_GPU and TIMING=none: rows that are checked and not timed, from the knobs to the gate."""

from __future__ import annotations

import os
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from knob_helpers import CPU, HOPPER, error, parsed
from machine_helpers import GB, machine
from nights import baseline, night, quiet

from bench import ref
from lib import measure, nightly, plan
from lib.device import cuda_group
from lib.knobs import MachineFacts
from lib.machine import detect_machine
from lib.ranks_environment import SHARED_GPU, worker_environment
from lib.rows import read_rows
from lib.verdicts import judge_all

ROOT = Path(__file__).resolve().parent.parent
ONE_H200 = MachineFacts(1, (9, 0))
SMALL = {"HIDDEN": "256", "INTER": "128", "NUM_EXPERTS": "8", "TOPK": "2", "TOKENS": "8"}


def test_one_gpu_holds_two_ranks_that_are_checked_and_not_timed() -> None:
    knobs = parsed(ONE_H200, RANKS_PER_GPU="2")
    assert (knobs.gpus, knobs.world, knobs.timing, knobs.mega_timing) == (2, 2, ("none",), ("none",))
    assert parsed(HOPPER, RANKS_PER_GPU="4", GPUS="8").gpus == 8
    assert parsed(HOPPER, RANKS_PER_GPU="1").timing == ("e2e",)


def test_ranks_of_a_launcher_are_not_multiplied() -> None:
    assert parsed(MachineFacts(1, (9, 0), local_world_size=2), RANKS_PER_GPU="2").gpus == 2


@pytest.mark.parametrize(("knob", "value"), [("TIMING", "none graph"), ("MEGA_TIMING", "e2e")])
def test_a_timing_of_ranks_that_share_a_gpu_is_refused(knob: str, value: str) -> None:
    timed = value.split()[-1]
    assert error(ONE_H200, RANKS_PER_GPU="2", **{knob: value}) == (
        f"{knob}={timed}: ranks that share a GPU (RANKS_PER_GPU=2) are checked, not timed; "
        f"set {knob}=none or RANKS_PER_GPU=1"
    )


def test_more_ranks_than_the_gpus_hold_are_refused_with_the_number() -> None:
    assert error(ONE_H200, RANKS_PER_GPU="2", GPUS="4") == (
        "GPUS=4: there are only 1 GPUs, 2 ranks each; GPUS=2 or fewer work"
    )
    assert error(HOPPER, CUDA_VISIBLE_DEVICES="0", RANKS_PER_GPU="2", GPUS="4").startswith("CUDA_VISIBLE_DEVICES=0:")


def test_ranks_fill_the_gpus_that_they_share() -> None:
    assert error(HOPPER, RANKS_PER_GPU="2", GPUS="1") == (
        "RANKS_PER_GPU=2: does not divide GPUS=1, which counts ranks; set it to 1"
    )
    assert error(HOPPER, RANKS_PER_GPU="3", GPUS="8").endswith("GPUS=8, which counts ranks; set it to 1, 2, 4 or 8")
    assert error(HOPPER, RANKS_PER_GPU="17") == "RANKS_PER_GPU=17: must be a whole number 1..16"


def test_neighbouring_ranks_are_on_one_gpu_and_no_other_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lib.machine.all_gpus", lambda: machine(8).gpus)
    found = detect_machine(parsed(HOPPER, RANKS_PER_GPU="2", GPUS="4"), {})
    assert [gpu.index for gpu in found.gpus] == [0, 1]
    placed = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: placed.append(device.index))
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *words, **more: None)
    monkeypatch.setattr("torch.distributed.new_group", lambda *words, **more: None)
    monkeypatch.setenv("MOE_EP_RANKS_PER_GPU", "2")
    for rank in range(4):
        cuda_group(rank, 4, rank, 1, timedelta(1))
    assert placed == [0, 0, 1, 1]


def test_a_cpu_has_no_gpu_to_share_and_says_so() -> None:
    knobs = parsed(CPU, RANKS_PER_GPU="2")
    assert (knobs.ranks_per_gpu, knobs.gpus, knobs.timing) == (1, 2, ("e2e",))
    assert any(notice.startswith("RANKS_PER_GPU") for notice in knobs.notices)


def test_ranks_share_the_memory_of_their_gpu() -> None:
    found = machine(1, free_gb=140)
    assert [found.rank_bytes(2, shared) for shared in (1, 2, 4)] == [140 * GB, 70 * GB, 35 * GB]


def test_only_ranks_that_share_a_gpu_are_told_so() -> None:
    shared = worker_environment(parsed(ONE_H200, RANKS_PER_GPU="2"), machine(1), "")
    alone = worker_environment(parsed(ONE_H200), machine(1), "")
    assert shared.items() >= {**SHARED_GPU, "MOE_EP_RANKS_PER_GPU": "2"}.items()
    assert not SHARED_GPU.keys() & (alone.keys() - os.environ.keys())


def test_shared_ranks_are_another_case_and_its_repro_line_says_so() -> None:
    def case(**knobs: str) -> plan.Case:
        return plan.make_plan(ref.SECTION, parsed(HOPPER, TIMING="none", **knobs), machine(1), sweep=False)[0]

    alone, shared = case(GPUS="2"), case(RANKS_PER_GPU="2", GPUS="2")
    assert alone.key != shared.key
    assert "RANKS_PER_GPU" not in alone.repro
    assert "RANKS_PER_GPU=2" in shared.repro


def test_a_transport_says_that_no_link_was_used() -> None:
    class Named:
        def transport(self) -> str:
            return "nvlink"

    assert measure.transport(Named(), 1) == "nvlink"  # type: ignore[arg-type]
    assert measure.transport(Named(), 2) == "nvlink, ranks share a GPU"  # type: ignore[arg-type]


# -- a run


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    out = tmp_path_factory.mktemp("untimed")
    knobs = os.environ | SMALL | {"SECTION": "ref", "REF_LIST": "torch", "TIMING": "e2e none", "ITERS": "3"}
    command = [ROOT / "run.sh"]
    answer = subprocess.run(
        command,
        env=knobs | {"WARMUP": "1", "OUT_DIR": str(out)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert "torch none T=8: ok, checked" in answer.stdout + answer.stderr
    return read_rows(next(out.glob("*.csv")))[0]


def test_an_untimed_row_is_checked_counted_and_has_no_duration(rows: list[dict[str, str]]) -> None:
    timed, untimed = rows
    assert (untimed["timing"], untimed["status"], untimed["check"]) == ("none", "ok", "ok")
    assert timed["routing_sha"] == untimed["routing_sha"]
    assert timed["acc_loss_pct"] == untimed["acc_loss_pct"]
    blank = {name for name in timed if timed[name] and not untimed[name]}
    measured = {name for name in blank if not name.startswith("lat_us")}
    assert {name for name in timed if name.endswith(("_us", "_gbps")) and untimed[name]} == set()
    assert measured >= {"timer", "tokens_per_s", "tflops", "host_us", "dispatch_us"}
    kept = {name for name in timed if name.endswith(("_bytes_selection", "_bytes_dedup", "_bytes_wire"))}
    assert kept
    assert all(untimed[name] == timed[name] for name in kept)


# -- what judges durations


def test_a_night_of_nothing_timed_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nightly, "detect_facts", lambda env: ONE_H200)
    monkeypatch.setenv("RANKS_PER_GPU", "2")
    assert nightly.check() == 2
    assert capsys.readouterr().err == (
        "RANKS_PER_GPU=2: a night judges durations, and this measures none; leave it unset\n"
    )
    monkeypatch.setenv("RANKS_PER_GPU", "1")
    monkeypatch.setenv("TIMING", "graph none")
    assert nightly.check() == 2
    assert capsys.readouterr().err.startswith("TIMING=none: ")


def test_a_wrong_row_is_red_though_nothing_was_timed() -> None:
    wrong = {"timing": "none", "lat_us_p50": "", "variant": "checked", "status": "wrong", "reason": "row 2"}
    tonight = [*night(20, quiet(seed=77)), *(made | wrong for made in night(20, quiet(seed=5)))]
    red = [verdict for verdict in judge_all(baseline(), tonight)[0] if verdict["red"]]
    assert [verdict["variant"] for verdict in red] == ["checked"]
    assert "row 2" in red[0]["reason"]


def test_neither_timed_nor_checked_is_refused() -> None:
    assert error(SECTION="fi_mega", MEGA_TIMING="none", MEGA_ACC="0").startswith("MEGA_ACC=0: with MEGA_TIMING=none")


def test_the_default_number_of_ranks_fills_its_gpus() -> None:
    two = MachineFacts(2, (9, 0))
    assert parsed(two, RANKS_PER_GPU="2", NUM_EXPERTS="6", TOPK="2").gpus == 2
    assert parsed(two, RANKS_PER_GPU="4", NUM_EXPERTS="12", TOPK="2").gpus == 4
    sentence = error(HOPPER, CUDA_VISIBLE_DEVICES="0", RANKS_PER_GPU="2", GPUS="4")
    assert sentence.endswith("name 2 or set GPUS=2")


def test_rows_that_were_only_checked_get_no_verdict() -> None:
    untimed = [made | {"timing": "none", "lat_us_p50": "", "variant": "checked"} for made in night(20, quiet(seed=5))]
    verdicts, suspects = judge_all(baseline(), [*night(20, quiet(seed=77)), *untimed])
    assert [verdict["variant"] for verdict in verdicts] == [baseline()[0]["variant"]]
    assert suspects == []
