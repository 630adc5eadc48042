"""The dry run: the plan as people see it."""

from __future__ import annotations

from knob_helpers import CPU, swept
from machine_helpers import GB, cpu

from bench import ref
from lib.plan import make_plan, plan_lines


def test_the_dry_run_shows_every_case_with_memory_and_verdict() -> None:
    cases = make_plan(ref.SECTION, swept(CPU, SEQ_LENS="8 4096", REF_LIST="torch torch_fp8"), cpu(), sweep=True)
    header, *lines = plan_lines(cases)
    assert header.split() == ["variant", "timing", "tokens", "GB", "a", "rank", "verdict"]
    assert len(lines) == len(cases) == 4
    assert lines[1].split() == ["torch", "e2e", "4096", f"{cases[1].memory_bytes / GB:.2f}", "ok"]
    assert "  unsupported: PyTorch's rowwise-scaled grouped matmul needs sm_90, this is a CPU" in lines[2]
    verdicts_at = {line.index(case.support.status) for line, case in zip(lines, cases, strict=True)}
    assert verdicts_at == {header.index("verdict")}
