"""Pretended machines, for verdicts and plans."""

from __future__ import annotations

from dataclasses import replace

from lib.machine import Gpu, Machine
from lib.rocm import NO_COMPUTE_CAPABILITY, AmdGpu

GB = 10**9
PACKAGES = tuple(
    """torch numpy triton vllm deep_ep deep_gemm flashinfer flashinfer.moe_ep cutlass nvshmem nccl.ep mscclpp mori
    cupy""".split()
)
VERSIONS = {"flashinfer-python": "0.6.18.post1", "nvidia-cutlass-dsl": "4.6.1"}


def machine(
    gpus: int = 0,
    sm: tuple[int, int] = (9, 0),
    free_gb: float = 140,
    host_gb: float = 64,
    installed: tuple[str, ...] = (),
) -> Machine:
    """A machine of `gpus` equal GPUs, on which exactly `installed` is found, beside torch and numpy."""
    name = {9: "NVIDIA H200", 10: "NVIDIA B200"}.get(sm[0], "NVIDIA A100")
    free = int(free_gb * GB)
    found = tuple(Gpu(index, name, f"GPU-{index:04d}-aaaa", sm, free, free, "580.95") for index in range(gpus))
    modules = {package: package in installed or package in ("torch", "numpy") for package in PACKAGES}
    return Machine(found, "Some CPU", 8, int(host_gb * GB), int(host_gb * GB), modules=modules, versions=VERSIONS)


def mi300(gpus: int, *installed: str, free_gb: float = 190) -> Machine:
    free = int(free_gb * GB)
    found = (AmdGpu(i, "AMD gfx942", f"GPU-{i:016x}", NO_COMPUTE_CAPABILITY, free, free, "6.10") for i in range(gpus))
    return replace(machine(installed=installed), gpus=tuple(found))


def cpu(**changes: float) -> Machine:
    return machine(**changes)  # type: ignore[arg-type]


def h200_pair(*installed: str) -> Machine:
    return machine(2, (9, 0), installed=installed)


def b200_quad(*installed: str) -> Machine:
    return machine(4, (10, 0), free_gb=180, installed=installed)
