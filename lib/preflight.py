"""What would spoil a night, told before it: disk, neighbours and clocks of the GPUs. Standard library only.

NVML is read through nvidia-ml-py where it imports, else through `nvidia-smi`; on a CPU there is nothing of either.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from lib.machine import MIB, SMI_TIMEOUT_S, Gpu
from lib.monitor import NEIGHBOUR_BYTES, NEIGHBOUR_UTILISATION, SLOWING, neighbours, nvml

LEAST_FREE_BYTES = 1_000_000_000  # a night of 150 rows and 8 starts, raw samples included, takes some 100 MB
SMI_QUERY = "index,memory.used,utilization.gpu,clocks_throttle_reasons.active"


def disk_trouble(folder: str) -> list[str]:
    free = shutil.disk_usage(folder).free
    if free >= LEAST_FREE_BYTES:
        return []
    there, need = f"{free / 1e9:.2f} GB is free", f"a night may need {LEAST_FREE_BYTES / 1e9:.0f} GB"
    return [f"OUT_DIR={folder}: {there}, {need}; make room, lower KEEP, or give another folder"]


def gpu_troubles(gpus: Sequence[Gpu]) -> list[str]:
    """Neighbours, and clocks that are held down before anything of ours runs."""
    if not gpus:
        return []
    library = nvml()
    if library is None:
        return smi_troubles({gpu.index for gpu in gpus})
    who = neighbours(tuple(gpus))
    told = [beside(who)] if who else []
    for gpu in gpus:
        handle = library.nvmlDeviceGetHandleByIndex(gpu.index)
        told += held_down(gpu.index, library.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return told


def beside(who: str) -> str:
    return f"{who}; a night beside a neighbour says nothing, end it or choose others by CUDA_VISIBLE_DEVICES"


def held_down(index: int, reasons: int) -> list[str]:
    if not reasons & SLOWING:
        return []
    return [f"GPU {index}: its clock is held down before we start (NVML reasons {reasons:#x}): power, heat or a brake"]


def smi_troubles(indices: set[int]) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={SMI_QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"neither nvidia-ml-py nor nvidia-smi tells who uses the GPUs ({type(error).__name__})"]
    told = []
    for line in answer.stdout.strip().splitlines():
        index, used_mib, busy, reasons = (part.strip() for part in line.split(","))
        if int(index) not in indices:
            continue
        if int(used_mib) * MIB > NEIGHBOUR_BYTES or int(busy) > NEIGHBOUR_UTILISATION:
            told.append(beside(f"GPU {index}: {int(used_mib) * MIB / 1e9:.1f} GB in use, {busy} % busy"))
        told += held_down(int(index), int(reasons, 16))
    return told
