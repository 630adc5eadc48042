"""What every rank of a worker group gets beside the environment of the command that started it."""

from __future__ import annotations

import os

from lib import nic
from lib.knobs import Knobs
from lib.machine import Machine

# The process group's own time-out is longer than both clocks together, so that the coordinator is the one who speaks.
GROUP_TIMEOUT_MARGIN_S = 60
LOOPBACK = "lo"
# Ranks that share a GPU: PyTorch's symmetric memory and NCCL (from 2.30) else refuse two of them on one device.
SHARED_GPU = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def worker_environment(knobs: Knobs, machine: Machine, interface: str) -> dict[str, str]:
    """`interface`: by which this node reaches the others, "" for a run of one node. What the user has set stays."""
    environment = dict(os.environ)
    environment["MOE_EP_GROUP_TIMEOUT_S"] = str(knobs.setup_timeout_s + knobs.timeout_s + GROUP_TIMEOUT_MARGIN_S)
    environment["MOE_EP_NODES"] = str(knobs.nnodes)
    environment["MOE_EP_VENDOR"] = machine.vendor
    environment["MOE_EP_RANKS_PER_GPU"] = str(knobs.ranks_per_gpu)
    if knobs.ranks_per_gpu > 1:
        environment |= SHARED_GPU
    environment.setdefault("OMP_NUM_THREADS", str(max(machine.cores // knobs.gpus, 1)))
    # gloo else looks up the host's name, which may not resolve, or to an address that no other node reaches
    if way := LOOPBACK if knobs.nnodes == 1 else interface:
        environment.setdefault("GLOO_SOCKET_IFNAME", way)
    if knobs.nnodes > 1 and "GLOO_SOCKET_IFNAME" in environment:
        environment.setdefault("MORI_SOCKET_IFNAME", environment["GLOO_SOCKET_IFNAME"])
    return environment | nic.nic_environment(knobs.nic, nic.rdma_devices(), environment)
