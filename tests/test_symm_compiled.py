"""The kernels of `symm` as Triton compiles them for an H200, each thread followed on a CPU; and what follows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")

from tests.ptx_machine import Kernel, Machine, PtxError

ROOT = Path(__file__).resolve().parent.parent
CASES = """dispatch ht bf16, dispatch ht fp8, dispatch ll bf16, dispatch ll fp8, dispatch cached bf16, combine ht bf16,
    combine ht bf16 weighted, combine ll bf16"""


def in_a_process_of_its_own(code: str, cache: Path) -> str:
    """Triton compiles only where TRITON_INTERPRET was not set when it was imported."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def found(cache: Path) -> dict[str, str]:
    return dict(json.loads(in_a_process_of_its_own("from tests.symm_compiled import main; main()", cache)))


@pytest.mark.parametrize("case", [" ".join(case.split()) for case in CASES.split(",")])
def test_the_compiled_kernel_moves_every_row_and_adds_every_copy(found: dict[str, str], case: str) -> None:
    assert found[case] == ""


def test_no_compiled_kernel_was_left_out(found: dict[str, str]) -> None:
    assert len(found) == len(CASES.split(","))


BROKEN = {
    "a sum over the wrong lanes": (r"(shfl\.sync\.bfly\.b32\s+\S+\s+\S+) \d+,", r"\1 1,"),
    "a barrier that is gone": (r"bar\.sync \t0;", ""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_code_that_is_broken_is_told(name: str, cache: Path) -> None:
    code = f"""
import json, re
from tests import symm_compiled
class Broken(symm_compiled.Kernel):
    def __init__(self, text):
        broken = re.sub({BROKEN[name][0]!r}, {BROKEN[name][1]!r}, text)
        assert broken != text
        super().__init__(broken)
symm_compiled.Kernel = Broken
print(json.dumps(symm_compiled.found_in("ll bf16")))
"""
    assert any(json.loads(in_a_process_of_its_own(code, cache)).values())


# -- the machine


def program(*lines: str) -> Kernel:
    body = "\n".join(f"\t{line}" for line in lines)
    return Kernel(f".visible .entry k(\n\t.param .u64 k_param_0\n)\n{{\n{body}\n\tret;\n}}\n")


def run(*lines: str, threads: int = 64) -> np.ndarray:
    machine = Machine(1024)
    machine.launch(program("ld.param.b64 %rd9, [k_param_0];", *lines), 1, threads, [256])
    return machine.memory[256:].view(np.uint32)


OWN_PLACE = ("mov.u32 %r1, %tid.x;", "mul.wide.u32 %rd1, %r1, 4;", "add.s64 %rd2, %rd9, %rd1;")


def test_every_thread_has_registers_of_its_own() -> None:
    assert run(*OWN_PLACE, "st.global.b32 [ %rd2 + 0 ], { %r1 };")[:64].tolist() == list(range(64))


@pytest.mark.parametrize(
    ("shuffle", "expected"),
    [
        ("bfly.b32 %r2, %r1, 1, 31, -1", [1, 0, 3]),
        ("up.b32 %r2, %r1, 2, 0, -1", [0, 1, 0]),
        ("idx.b32 %r2, %r1, 5, 31, -1", [5, 5, 5]),
    ],
)
def test_lanes_are_shuffled_within_their_warp(shuffle: str, expected: list[int]) -> None:
    got = run(*OWN_PLACE, f"shfl.sync.{shuffle};", "st.global.b32 [ %rd2 + 0 ], { %r2 };")[:64]
    assert got[:3].tolist() == expected
    assert (got[32:] == got[:32] + 32).all()


def test_a_loop_ends_and_a_guard_keeps_threads_out() -> None:
    lines = ["mov.b32 %r2, 0;", "$L__loop:", "add.s32 %r2, %r2, 1;", "setp.lt.s32 %p1, %r2, 5;", "@%p1 bra \t$L__loop;"]
    got = run(*OWN_PLACE, *lines, "setp.lt.u32 %p2, %r1, 3;", "@%p2 st.global.b32 [ %rd2 + 0 ], { %r2 };")
    assert got[:5].tolist() == [5, 5, 5, 0, 0]


BAD = {
    "threads part": ["setp.lt.u32 %p1, %r1, 3;", "@%p1 bra \t$L__end;", "$L__end:"],
    "outside": ["st.global.b32 [ %rd2 + 4096 ], { %r1 };"],
    "not aligned": ["st.global.b32 [ %rd2 + 2 ], { %r1 };"],
    "without a barrier": ["shl.b32 %r2, %r1, 2;", "st.shared.b32 [%r2], %r1;", "ld.shared.b32 %r3, [global_smem];"],
    "does not end": ["$L__loop:", "bra.uni \t$L__loop;"],
    "KeyError": ["sin.approx.f32 %r2, %r1;"],
}


@pytest.mark.parametrize("words", BAD)
def test_what_no_gpu_would_do_is_an_error(words: str) -> None:
    with pytest.raises(PtxError, match=words):
        run(*OWN_PLACE, *BAD[words])


def test_a_barrier_lets_other_warps_read() -> None:
    lines = [
        "shl.b32 %r2, %r1, 2;",
        "st.shared.b32 [%r2], %r1;",
        "bar.sync \t0;",
        "ld.shared.b32 %r3, [global_smem+4];",
    ]
    assert set(run(*OWN_PLACE, *lines, "st.global.b32 [ %rd2 + 0 ], { %r3 };")[:64].tolist()) == {1}
