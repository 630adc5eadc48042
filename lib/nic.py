"""RDMA devices of this node: what NIC chooses among, what each library is told of it, and how far they are from a GPU.

Standard library only. Everything is read from /sys; nothing is opened.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

RDMA_ROOT = Path("/sys/class/infiniband")
PCI_ROOT = Path("/sys/bus/pci/devices")
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
EXCLUDE = "^"
SIOCGIFADDR = 0x8915  # <linux/sockios.h>
IFREQ_BYTES, IFREQ_ADDRESS = 256, slice(20, 24)


# -- choosing


@cache
def rdma_devices(root: Path = RDMA_ROOT) -> tuple[str, ...]:
    """Names of this node's RDMA devices, () where there is none."""
    return tuple(sorted(path.name for path in root.iterdir())) if root.is_dir() else ()


def named(nic: str) -> list[str]:
    """The names in NIC, without the mark of an exclude list and without ports (`mlx5_0:1`)."""
    return [name.partition(":")[0] for name in nic.removeprefix(EXCLUDE).split(",") if name]


def chosen(nic: str, devices: Sequence[str]) -> list[str]:
    """The devices that NIC leaves: those listed, in the order given, or all that are not excluded."""
    names = named(nic)
    if nic.startswith(EXCLUDE):
        return [device for device in devices if device not in names]
    return [name for name in dict.fromkeys(names) if name in devices]


def unknown(nic: str, devices: Sequence[str]) -> list[str]:
    return [name for name in named(nic) if name not in devices]


# -- telling the libraries


def _as_given(nic: str, left: Sequence[str]) -> str:
    return nic


def _names_alone(nic: str, left: Sequence[str]) -> str:
    return (EXCLUDE if nic.startswith(EXCLUDE) else "") + ",".join(named(nic))


def _exact(nic: str, left: Sequence[str]) -> str:
    """NCCL takes names for prefixes (mlx5_1 is mlx5_10 too) unless a `=` stands before the list."""
    return f"{EXCLUDE}={nic[1:]}" if nic.startswith(EXCLUDE) else f"={nic}"


def _with_ports(nic: str, left: Sequence[str]) -> str:
    """UCX names a device with its port, and has no exclude list in its older versions: what is left is listed."""
    ports = dict(entry.partition(":")[::2] for entry in nic.removeprefix(EXCLUDE).split(","))
    return ",".join(f"{name}:{ports.get(name) or 1}" for name in left)


def _switch_on(nic: str, left: Sequence[str]) -> str:
    return "1"


# Sources: MORI's rdma.cpp, NCCL's and NVSHMEM's "Environment Variables", UCX's ucp_context.c. NVSHMEM since 3 reads its
# list only where the mapping of NICs to ranks is switched on.
SPELLINGS: dict[str, Callable[[str, Sequence[str]], str]] = {
    "MORI_RDMA_DEVICES": _names_alone,
    "NCCL_IB_HCA": _exact,
    "NVSHMEM_HCA_LIST": _as_given,
    "NVSHMEM_ENABLE_NIC_PE_MAPPING": _switch_on,
    "UCX_NET_DEVICES": _with_ports,
}


def nic_environment(nic: str, devices: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """NIC in each library's own words; a variable that the user has set stays as it is."""
    left = chosen(nic, devices)
    if not nic or not left:
        return {}
    return {name: spell(nic, left) for name, spell in SPELLINGS.items() if not env.get(name)}


# -- the fingerprint


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # a device without such a property


def _ports(device: Path) -> list[dict[str, str]]:
    root = device / "ports"
    ports = sorted(root.iterdir()) if root.is_dir() else []
    parts = ("state", "rate", "link_layer")
    return [{"port": port.name} | {part: _read(port / part).split(": ")[-1] for part in parts} for port in ports]


def pci_distance(one: Path, other: Path) -> str:
    """How two PCI devices are connected, in nvidia-smi's words: PIX, PXB, PHB, NODE, SYS; "" if one is not there.

    one, other: their folders under /sys/bus/pci/devices (symbolic links into the tree of buses).
    """
    if not one.exists() or not other.exists():
        return ""
    paths = [path.resolve().parts for path in (one, other)]
    shared = 0
    while shared < min(map(len, paths)) and paths[0][shared] == paths[1][shared]:
        shared += 1
    root = next((index for index, part in enumerate(paths[0]) if part.startswith("pci")), len(paths[0]))
    if shared > root + 1:  # below a common port of one root complex: count the bridges between them
        # each path goes on by bridge, ..., device: a pair under one switch has an upstream and a downstream port each
        bridges = max(len(path) - shared for path in paths)
        return "PIX" if bridges <= 2 else "PXB"
    if shared > root:
        return "PHB"
    nodes = [_read(path / "numa_node") for path in (one, other)]
    return "NODE" if nodes[0] == nodes[1] and nodes[0] not in ("", "-1") else "SYS"


def nic_fingerprint(gpu_buses: Sequence[str], root: Path = RDMA_ROOT, pci: Path = PCI_ROOT) -> list[dict[str, object]]:
    """Each RDMA device with its ports, and its distance to each GPU in the run's order.

    gpu_buses: PCI bus ids, NVML's spelling (00000000:3B:00.0).
    """
    found: list[dict[str, object]] = []
    for name in rdma_devices(root):
        distances = [pci_distance(pci / sysfs_name(bus), root / name / "device") if bus else "" for bus in gpu_buses]
        found.append({"name": name, "ports": _ports(root / name), "gpu_distance": distances})
    return found


def sysfs_name(bus: str) -> str:
    """NVML writes a domain of eight digits in upper case, /sys one of four in lower case."""
    domain, _, rest = bus.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


# -- interfaces of the host's own words


def interfaces() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


def interface_of(address: str) -> str:
    """The interface that has this address of this node, "" if none has."""
    if ":" in address:
        wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        lines = [line.split() for line in _read(IPV6_ADDRESSES).splitlines()]
        return next((parts[5] for parts in lines if parts[0] == wanted), "")
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in interfaces():
            request = struct.pack(f"{IFREQ_BYTES}s", name.encode())
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[IFREQ_ADDRESS]) == address:
                return name
    return ""
