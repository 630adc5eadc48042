"""Compiles the kernels of `symm` for sm_90, without a GPU, as the H200 gets them: PTX and resources, as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.backends import symm_combine, symm_kernels
from bench.backends.symm_launch import MAX_COMBINE_TILE, MAX_TILE, PLAN_TOKENS, PLAN_WARPS, scan_tokens, tiling
from lib.problem import Problem

TYPES = {"x": "*bf16", "y": "*bf16", "out": "*bf16", "topk_idx": "*i64", "table": "*i64", "topk_weights": "*fp32"}
TYPES |= dict.fromkeys(("slots", "starts", "arrivals", "state", "index"), "*i32") | {"weights": "*fp32"}
SHAPE = {"world": 2, "hidden": 7168, "topk": 8}
ROUTING = {"local_experts": 128, "lanes": 8, "rank_lanes": 2}
SMS = 132


def problem(tokens: int) -> Problem:
    return Problem(2, 1, tokens, 256, 8, 7168, 2048, 0, "uniform")


def compiled(kernel: Any, constants: dict[str, Any], warps: int) -> dict[str, Any]:
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    types = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if types[name].startswith("*")}
    values = {(names.index(name),): value for name, value in constants.items()}
    made = triton.compile(
        ASTSource(kernel, types, constexprs=values, attrs=aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps},
    )
    scans = made.asm["ttir"].count("tt.scan")
    return {"warps": warps, "ptx": made.asm["ptx"], "scans": scans, **resources(made.asm["cubin"])}


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and bytes of local memory a thread, where spilled registers go."""
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(re.search(rf"\b{name}:(\d+)", said)[1]) for name in ("REG", "STACK", "LOCAL")}  # type: ignore[index]


def main() -> None:
    found = {}
    for tokens in (8, 128, 4096):
        point = problem(tokens)
        for (algo, dtype), most in MAX_TILE.items():
            push = tiling(point, SMS, most)
            cut = {"count": push.rows, "groups": push.groups, "scan": scan_tokens(point), "fp8": dtype == "fp8"}
            cut["plan"] = symm_kernels.FRESH if algo == "ht" else symm_kernels.UNPLANNED
            found[f"dispatch {algo} {dtype} {tokens}"] = compiled(
                symm_kernels.symm_dispatch, {**SHAPE, **ROUTING, **cut}, push.warps
            )
        back = tiling(point, SMS, MAX_COMBINE_TILE)
        for weighted in (False, True):
            cut = {"count": back.rows, "groups": back.groups, "tiles": back.tiles, "lag": back.lag}
            name = f"combine {'weighted' if weighted else 'plain'} {tokens}"
            found[name] = compiled(symm_combine.symm_combine, {**SHAPE, **cut, "weighted": weighted}, back.warps)
    scanning = {"count": PLAN_TOKENS, "scan": scan_tokens(problem(4096))}
    found["plan"] = compiled(symm_kernels.symm_plan, {**SHAPE, **ROUTING, **scanning}, PLAN_WARPS)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
