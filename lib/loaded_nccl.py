"""The libnccl that is loaded in this process. `torch.cuda.nccl.version()` is a constant of PyTorch's compilation."""

from __future__ import annotations

import ctypes
from pathlib import Path

from lib.contract import Missing

Version = tuple[int, int, int]
NEEDED: Version = (2, 30, 7)  # what the tested wheels of DeepEP 2 and NCCL-EP are built for


def loaded_nccl() -> Version | None:
    """(major, minor, patch) as the loaded library tells it, None where no libnccl is mapped."""
    path = next((name for name in _mapped() if Path(name).name.startswith("libnccl.so")), None)
    if path is None:
        return None
    number = ctypes.c_int()
    ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def _mapped() -> list[str]:
    return [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]


def text(version: Version) -> str:
    return ".".join(map(str, version))


def require_nccl(who: str) -> str:
    """The version of the loaded libnccl; Missing if it is older than `who` needs, or not there."""
    found = loaded_nccl()
    if found is None or found < NEEDED:
        there = f"libnccl {text(found)} is loaded" if found else "no libnccl is loaded"
        needed = text(NEEDED)
        raise Missing(f"{there}, {who} needs {needed}: put nvidia-nccl-cu13=={needed} before PyTorch's on PYTHONPATH")
    return text(found)
