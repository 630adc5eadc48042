"""RDMA devices: what NIC leaves, how each library is told, how far a device is from a GPU."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from knob_helpers import parsed
from machine_helpers import cpu

from lib import nic
from lib.ranks_environment import worker_environment

DEVICES = ("mlx5_0", "mlx5_1", "mlx5_10", "mlx5_2")


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("mlx5_2,mlx5_0", ["mlx5_2", "mlx5_0"]),  # in the order given
        ("mlx5_1:1", ["mlx5_1"]),
        ("mlx5_0,mlx5_0", ["mlx5_0"]),
        ("mlx5_7", []),
        ("^mlx5_2", ["mlx5_0", "mlx5_1", "mlx5_10"]),
        ("^mlx5_7", list(DEVICES)),
    ],
)
def test_a_list_includes_and_a_list_behind_a_caret_excludes(given: str, left: list[str]) -> None:
    assert nic.chosen(given, DEVICES) == left


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("mlx5_0,mlx5_1:2", ("mlx5_0,mlx5_1", "=mlx5_0,mlx5_1:2", "mlx5_0,mlx5_1:2", "mlx5_0:1,mlx5_1:2")),
        ("^mlx5_2", ("^mlx5_2", "^=mlx5_2", "^mlx5_2", "mlx5_0:1,mlx5_1:1,mlx5_10:1")),
    ],
)
def test_each_library_is_told_in_its_own_words(given: str, told: tuple[str, ...]) -> None:
    names = ("MORI_RDMA_DEVICES", "NCCL_IB_HCA", "NVSHMEM_HCA_LIST", "UCX_NET_DEVICES")
    expected = dict(zip(names, told, strict=True)) | {"NVSHMEM_ENABLE_NIC_PE_MAPPING": "1"}
    assert nic.nic_environment(given, DEVICES, {}) == expected


def test_a_variable_that_the_user_has_set_stays_and_no_list_tells_nothing() -> None:
    told = nic.nic_environment("mlx5_0", DEVICES, {"NCCL_IB_HCA": "mlx5_9"})
    assert "NCCL_IB_HCA" not in told
    assert told["MORI_RDMA_DEVICES"] == "mlx5_0"
    assert nic.nic_environment("", DEVICES, {}) == {}
    assert nic.nic_environment("mlx5_0", (), {}) == {}


# --- /sys -------------------------------------------------------------------------------------------------------------

ROOT_A = "devices/pci0000:3a/0000:3a:00.0"  # a root complex, and a port of it
SWITCH = f"{ROOT_A}/0000:3b:00.0"
GPU = f"{SWITCH}/0000:3c:00.0/0000:3d:00.0"


def make_sys(root: Path, **places: str) -> Path:
    """A /sys of devices by name, each with its place in the tree of buses, NUMA node 0 unless it says `@1`."""
    for name, place in places.items():
        path, _, node = place.partition("@")
        device = root / path
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node or 0}\n")
        link = root / "infiniband" / name / "device"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
        port = link.parent / "ports" / "1"
        port.mkdir(parents=True)
        for part, text in {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}.items():
            (port / part).write_text(text + "\n")
    (root / "pci").mkdir()
    (root / GPU).mkdir(parents=True)
    (root / GPU / "numa_node").write_text("0\n")
    (root / "pci" / "0000:3d:00.0").symlink_to(root / GPU)
    return root


def test_the_fingerprint_tells_ports_and_the_distance_to_each_gpu(tmp_path: Path) -> None:
    root = make_sys(
        tmp_path,
        mlx5_0=f"{SWITCH}/0000:3c:01.0/0000:3e:00.0",
        mlx5_1=f"{SWITCH}/0000:3c:02.0/0000:3f:00.0/0000:40:00.0/0000:41:00.0",
        mlx5_2="devices/pci0000:3a/0000:3a:01.0/0000:50:00.0",
        mlx5_3="devices/pci0000:5a/0000:5a:00.0/0000:60:00.0",
        mlx5_4="devices/pci0000:9a/0000:9a:00.0/0000:a0:00.0@1",
    )
    found = nic.nic_fingerprint(["00000000:3D:00.0", ""], root / "infiniband", root / "pci")
    distances = {device["name"]: device["gpu_distance"] for device in found}
    expected = ("PIX", "PXB", "PHB", "NODE", "SYS")
    assert distances == {f"mlx5_{number}": [words, ""] for number, words in enumerate(expected)}
    port = {"port": "1", "state": "ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    assert found[0]["ports"] == [port]


def test_a_node_without_rdma_devices_has_none(tmp_path: Path) -> None:
    assert nic.rdma_devices(tmp_path / "infiniband") == ()
    assert nic.nic_fingerprint([], tmp_path / "infiniband") == []


# --- interfaces -------------------------------------------------------------------------------------------------------


def test_the_interface_of_an_address_of_this_node_is_found() -> None:
    assert nic.interface_of("127.0.0.1") == nic.interface_of("::1") == "lo"
    assert nic.interface_of("192.0.2.1") == ""  # a documentation address, nobody's
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no way out, so no address beside the loopback's")
        assert nic.interface_of(probe.getsockname()[0]) in nic.interfaces()


def environment(monkeypatch: pytest.MonkeyPatch, nodes: str, interface: str, **env: str) -> dict[str, str]:
    for name in ("GLOO_SOCKET_IFNAME", "MORI_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return worker_environment(parsed(NNODES=nodes, MASTER_ADDR="a", MASTER_PORT="1"), cpu(), interface)


def test_gloo_speaks_on_the_interface_between_the_nodes_unless_the_user_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("GLOO_SOCKET_IFNAME", "MORI_SOCKET_IFNAME")

    def told(nodes: str, interface: str, **env: str) -> list[str | None]:
        return [environment(monkeypatch, nodes, interface, **env).get(name) for name in names]

    assert told("1", "") == ["lo", None]
    assert told("2", "ib0") == ["ib0", "ib0"]
    assert told("2", "") == [None, None]
    assert told("2", "ib0", GLOO_SOCKET_IFNAME="eth7") == ["eth7", "eth7"]
