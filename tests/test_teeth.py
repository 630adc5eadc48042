"""The check has teeth: a result that is broken in any of these ways ends `wrong`, and the honest one ends `ok`.

All fakes share one group of two ranks (tests/teeth_ranks.py), where a section would give each its own; how a wrong
result becomes a row and an exit code is in test_faults.py.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from harness import QUICK, ROOT, SLOW_MACHINE_S, TINY, clean_environment

from tests.fakes import TEETH
from tests.teeth_ranks import PIPELINED

FLAVOURS = [("combine", "bf16"), ("combine", "fp8"), ("moe", "bf16")]  # kind of output, dispatch wire
STEADY = ("combine", "bf16", "e2e_pipelined")
SHAPE = {"HIDDEN": "128", "TOKENS": "6", "DISPATCH_DTYPE": "bf16 fp8"}  # 128: one block of an fp8 scale
BEFORE, AFTER = "before timing: ", "after timing: "
MESSAGES = {
    "corrupts_a_received_row": BEFORE + "rank 1: token 5 of rank 1 has at value 127 ",
    "corrupts_the_output": BEFORE + "rank 1: ",
    "returns_its_input": BEFORE,
    "combines_once": BEFORE,
    "shows_the_last_output": BEFORE + "rank 1: ",
    "replays_the_last_dispatch": BEFORE,
    "weighs_twice": BEFORE,
    "skips_timed_calls": AFTER + "rank 0: the rows that the timed calls dispatched differ from before",
    "skips_timed_combine": AFTER + "rank 0: the output of the timed calls differs from before",
    "skips_timed_dispatch": AFTER + "rank 0: the rows that the timed calls dispatched differ from before",
    "skips_timed_phases": AFTER + "rank 0: the rows that the timed phases dispatched differ from before",
    "gives_up_once_timed": AFTER,
    "changes_inputs_in_timing": AFTER + "rank 1: the inputs were changed during timing",
    "drifts_in_timing": AFTER + "rank 1: the output of the timed calls differs from before",
    "phases_tell_another_story": BEFORE,
}
Results = dict[tuple[str, str, str, str], dict[str, str]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results by (kind, dispatch dtype, fake, timing)."""
    folder = tmp_path_factory.mktemp("teeth")
    env = clean_environment() | TINY | QUICK | SHAPE
    env |= {"TIMING": "e2e e2e_pipelined", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"MOE_EP_FAKE_DIR": str(folder), "MOE_EP_RUN": "teeth"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.teeth_ranks", str(rank), str(folder / "rendezvous")],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=SLOW_MACHINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], told
    lines = map(json.loads, told[0][0].splitlines())
    return {(result["kind"], result["dtype"], result["fake"], result["timing"]): result for result in lines}


@pytest.mark.parametrize(("kind", "dtype"), FLAVOURS)
@pytest.mark.parametrize("fake", TEETH)
def test_a_broken_result_is_wrong(results: Results, kind: str, dtype: str, fake: str) -> None:
    result = results[kind, dtype, fake, "e2e"]
    assert result["status"] == "wrong"
    assert result["reason"].startswith(MESSAGES[fake])


@pytest.mark.parametrize("fake", [fake for fake in PIPELINED if fake in TEETH])
def test_a_result_broken_in_the_steady_state_is_wrong(results: Results, fake: str) -> None:
    result = results["combine", "bf16", fake, "e2e_pipelined"]
    assert result["status"] == "wrong"
    assert result["reason"].startswith(MESSAGES[fake])


@pytest.mark.parametrize(("kind", "dtype", "timing"), [(*flavour, "e2e") for flavour in FLAVOURS] + [STEADY])
def test_the_honest_one_is_ok(results: Results, kind: str, dtype: str, timing: str) -> None:
    result = results[kind, dtype, "honest", timing]
    assert (result["status"], result["reason"]) == ("ok", "")
