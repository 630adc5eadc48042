"""What this machine is: devices, memory, installed packages, fingerprint. Standard library; no GPU context is created.

NVIDIA devices are read through nvidia-ml-py where it imports, else through `nvidia-smi`; neither makes a context.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lib import nic
from lib.provenance import library_environment, package_version, software

if TYPE_CHECKING:
    from lib.knobs import Knobs, MachineFacts

NVIDIA_DRIVER_NODE = Path("/dev/nvidiactl")
QUERY = "name,uuid,compute_cap,memory.total,memory.free,driver_version,pci.bus_id"
SMI_TIMEOUT_S = 20
MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    vendor: ClassVar[str] = "cuda"
    index: int
    name: str
    uuid: str
    sm: tuple[int, int]
    memory_bytes: int
    free_bytes: int
    driver: str
    bus: str = ""  # PCI bus id


@dataclass(frozen=True)
class Machine:
    """What verdicts are reached from. `bare` = planned by an interpreter that a real run would not use."""

    gpus: tuple[Gpu, ...]
    cpu: str
    cores: int
    memory_bytes: int
    available_bytes: int
    bare: bool = False
    modules: Mapping[str, bool] = field(default_factory=dict)  # tests put their answers here
    versions: Mapping[str, str] = field(default_factory=dict)  # and here

    @property
    def vendor(self) -> str:
        return self.gpus[0].vendor if self.gpus else "cpu"

    @property
    def has_what(self) -> str:
        """What a verdict says of the devices that are there instead of those that it needs."""
        return {"cuda": "CUDA GPUs", "rocm": "AMD GPUs", "cpu": "no GPU"}[self.vendor]

    @property
    def sm(self) -> tuple[int, int] | None:
        return self.gpus[0].sm if self.vendor == "cuda" else None

    @property
    def device(self) -> str:
        return self.gpus[0].name if self.gpus else f"CPU ({self.cpu}, {self.cores} cores)"

    def rank_bytes(self, local_ranks: int, ranks_per_gpu: int = 1) -> int:
        """Memory that one rank may take: its share of the fullest GPU's free memory, or of the host's."""
        if self.gpus:
            return min(gpu.free_bytes for gpu in self.gpus) // ranks_per_gpu
        return self.available_bytes // max(local_ranks, 1)

    def has(self, module: str) -> bool:
        """Whether the module can be found, without importing it."""
        if module in self.modules:
            return self.modules[module]
        if self.bare and module in ("torch", "numpy"):
            return True  # the first real run installs them
        package, _, part = module.partition(".")
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            return False
        if spec is None or not part:
            return spec is not None
        # find_spec of a dotted name would import what stands before the dot
        places = [Path(place, *part.split(".")) for place in spec.submodule_search_locations or ()]
        return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)

    def version(self, package: str) -> str:
        """The installed version of a distribution by its metadata, "" if it is not installed."""
        return self.versions[package] if package in self.versions else package_version(package)


def nvml() -> Any | None:
    """nvidia-ml-py, initialised, or None where it does not import or the driver does not answer."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _gpus_by_nvml() -> list[Gpu] | None:
    pynvml = nvml()
    if pynvml is None:
        return None

    def text(value: str | bytes) -> str:
        return value.decode() if isinstance(value, bytes) else value

    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        sm = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        name, uuid = text(pynvml.nvmlDeviceGetName(handle)), text(pynvml.nvmlDeviceGetUUID(handle))
        driver = text(pynvml.nvmlSystemGetDriverVersion())
        bus = text(pynvml.nvmlDeviceGetPciInfo(handle).busId)
        gpus.append(Gpu(index, name, uuid, (sm[0], sm[1]), memory.total, memory.free, driver, bus))
    return gpus


def _gpus_by_smi() -> list[Gpu]:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    command = [smi, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = []
    for index, line in enumerate(answer.stdout.strip().splitlines()):
        name, uuid, cc, total, free, driver, bus = [part.strip() for part in line.split(",")]
        major, _, minor = cc.partition(".")
        gpus.append(Gpu(index, name, uuid, (int(major), int(minor)), int(total) * MIB, int(free) * MIB, driver, bus))
    return gpus


@cache
def all_gpus() -> tuple[Gpu, ...]:
    """Every NVIDIA GPU of this machine, else every AMD one, whatever CUDA_VISIBLE_DEVICES says."""
    if not NVIDIA_DRIVER_NODE.exists():
        from lib.rocm import amd_gpus

        return amd_gpus()
    by_nvml = _gpus_by_nvml()
    return tuple(_gpus_by_smi() if by_nvml is None else by_nvml)


def visible_gpus(visible: str | None, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; like CUDA, it stops at the first unknown entry."""
    if visible is None:
        return gpus
    chosen: list[Gpu] = []
    for entry in visible.split(","):
        name = entry.strip()
        by_uuid = name.startswith("GPU-")
        found = [gpu for gpu in gpus if name == str(gpu.index) or (by_uuid and gpu.uuid.startswith(name))]
        if len(found) != 1:
            break
        chosen.append(found[0])
    return tuple(chosen)


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _meminfo_bytes(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _cgroup_limit_bytes() -> int | None:
    """The container's memory limit less what it uses, where there is one (cgroup v2)."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(int(limit) - used, 0)


def detect_facts(env: Mapping[str, str]) -> MachineFacts:
    """What the knobs' defaults depend on (lib/knobs.py)."""
    from lib.knobs import MachineFacts
    from lib.launcher import detect_launcher

    launcher = detect_launcher(env)
    gpus = all_gpus()
    return MachineFacts(
        gpu_count=len(gpus),
        sm=gpus[0].sm if gpus else None,
        local_world_size=launcher.local_world if launcher.joined else None,
        nodes=launcher.nodes,
        node_rank=launcher.node_rank,
        nics=nic.rdma_devices(),
    )


def detect_machine(knobs: Knobs, env: Mapping[str, str]) -> Machine:
    available = _meminfo_bytes("MemAvailable")
    limit = _cgroup_limit_bytes()
    gpus = visible_gpus(knobs.cuda_visible_devices, all_gpus())[: -(-knobs.gpus // knobs.ranks_per_gpu)]
    return Machine(
        gpus=gpus,
        cpu=cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_meminfo_bytes("MemTotal"),
        available_bytes=available if limit is None else min(available, limit),
        bare=env.get("MOE_EP_BARE") == "1",
    )


def fingerprint(machine: Machine) -> dict[str, object]:
    """What a row's record says of the machine: this allow-list, and of the environment what libraries are tuned by."""
    return {
        "device": machine.device,
        "gpus": [{"name": g.name, "sm": f"{g.sm[0]}.{g.sm[1]}", "memory_bytes": g.memory_bytes} for g in machine.gpus],
        "driver": machine.gpus[0].driver if machine.gpus else "",
        "nics": nic.nic_fingerprint([gpu.bus for gpu in machine.gpus]),
        "cpu": machine.cpu,
        "cores": machine.cores,
        "memory_bytes": machine.memory_bytes,
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "python": platform.python_version(),
        "packages": {name: version for name, version in software().items() if name != "python"},
        "environment": library_environment(),
    }
