"""AMD's GPUs as the kernel's KFD tells them in sysfs. Standard library only; no GPU context is created.

Never run on an AMD machine: the layout is that of the kernel's documentation and of rocminfo's source.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lib.machine import Gpu

SYS = Path("/sys")
NODES, RENDERERS, DRIVER = "class/kfd/kfd/topology/nodes", "class/drm", "module/amdgpu/version"
NO_COMPUTE_CAPABILITY = (0, 0)


@dataclass(frozen=True)
class AmdGpu(Gpu):
    vendor: ClassVar[str] = "rocm"


def amd_gpus(sys: Path = SYS) -> tuple[AmdGpu, ...]:
    """In the driver's order. A node that this container may not read is none of its GPUs."""
    nodes = sys / NODES
    if not nodes.is_dir():
        return ()
    driver = _text(sys / DRIVER)
    found: list[AmdGpu] = []
    for folder in sorted(nodes.iterdir(), key=lambda folder: int(folder.name)):
        told = _properties(folder / "properties")
        if not told.get("simd_count"):
            continue  # a CPU
        device = sys / RENDERERS / f"renderD{told.get('drm_render_minor', 0)}" / "device"
        total, used = (int(_text(device / f"mem_info_vram_{name}") or 0) for name in ("total", "used"))
        name, uuid = f"AMD {arch(told['gfx_target_version'])}", f"GPU-{told.get('unique_id', 0):016x}"
        found.append(AmdGpu(len(found), name, uuid, NO_COMPUTE_CAPABILITY, total, total - used, driver))
    return tuple(found)


def arch(version: int) -> str:
    """90402 is gfx942: major, minor and stepping in two decimal digits each, the last two shown in base 16."""
    major, rest = divmod(version, 10000)
    minor, stepping = divmod(rest, 100)
    return f"gfx{major}{minor:x}{stepping:x}"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _properties(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
