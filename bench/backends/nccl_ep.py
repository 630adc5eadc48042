"""Backend `nccl_ep`: NCCL's device-side EP (nccl.ep of nccl-extensions), low-latency (ll) and high-throughput (ht).

Copy rules: a token once a destination rank on the wire in both. ll lays it out in slots an expert, or a source rank
(`+rank_major`), handed out by atomics anew in each dispatch; ht in one flat sequence by a prefix sum over the routing,
or grouped by expert (`+expert_major`). Weights: ll by expert applies them in combine; elsewhere combine is a plain
sum, and the identity experts staged here apply them. ht's dispatch includes the exchange of the routing unless it is
kept (`+cached`); outside a CUDA graph it waits on the host for the receive count. Limits are in nccl_ep_limits.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.backends.nccl_ep_limits import (
    high_throughput_reason,
    ht_memory_bytes,
    ll_memory_bytes,
    low_latency_reason,
    low_latency_sms_reason,
)
from bench.backends.nccl_ep_sessions import ExpertSlots, HighThroughput, NcclEpSession, RankSlots
from bench.backends.session import nvidia_reason
from lib.contract import Backend, Engine, Group, Missing, Support, Unsupported, Variant, unsupported
from lib.loaded_nccl import require_nccl
from lib.plan import needs_packages
from lib.problem import Inputs, Problem

if TYPE_CHECKING:
    from lib.knobs import Knobs
    from lib.machine import Machine

PACKAGES = {"nccl.ep": "NCCL-EP (pip install nccl-extensions nccl4py)"}


class NcclEpEngine(Engine):
    """A communicator of NCCL's own for the variant; each point makes its group on it."""

    def __init__(self, group: Group, variant: Variant, largest: Problem) -> None:
        nccl = require_nccl("nccl_ep")
        core, self.ep = import_nccl_ep()
        self.group, self.variant = group, variant
        check_sms(group, variant, largest)
        self.versions = {
            "nccl_ep": str(self.ep.get_lib_version()),
            "nccl4py": str(getattr(core, "__version__", "unknown")),
            "nccl": nccl,
        }
        self.comm = core.Communicator.init(group.world, group.rank, shared_id(core, group))

    def bind(self, problem: Problem, inputs: Inputs) -> NcclEpSession:
        if self.variant.algo == "ht":
            return HighThroughput(self, problem, inputs)
        return (RankSlots if self.variant.layout == "rank_major" else ExpertSlots)(self, problem, inputs)

    def close(self) -> None:
        self.comm.destroy()


def import_nccl_ep() -> tuple[Any, Any]:
    """nccl.core and nccl.ep, with the library behind them loaded."""
    try:
        import nccl.core
        import nccl.ep

        nccl.ep.get_lib_version()
    except (ImportError, AssertionError, OSError, RuntimeError) as error:
        raise Missing(f"nccl.ep does not load: {str(error) or type(error).__name__}") from error
    return nccl.core, nccl.ep


def shared_id(core: Any, group: Group) -> Any:
    """Rank 0's unique id on every rank, as bytes over the harness's own group."""
    import torch.distributed as dist

    words = [core.get_unique_id().as_bytes if group.rank == 0 else None]
    dist.broadcast_object_list(words, src=0, group=group.host_pg)
    return core.UniqueId.from_bytes(words[0])


def check_sms(group: Group, variant: Variant, problem: Problem) -> None:
    """The SM budget against this GPU, which the coordinator does not know; 0 = all of them in ll, 16 in ht."""
    import torch

    if group.device.type != "cuda":
        return
    there = int(torch.cuda.get_device_properties(group.device).multi_processor_count)
    asked = variant.num_sms or 0
    if asked > there:
        raise Unsupported(f"NUM_SMS={asked}: this GPU has {there} SMs")
    if variant.algo == "ll" and (reason := low_latency_sms_reason(asked or there, problem)):
        raise Unsupported(reason)


class NcclEpBackend(Backend):
    name = "nccl_ep"
    family = "nccl_ep"

    def variants(self, knobs: Knobs) -> list[Variant]:
        found = []
        for algo in knobs.algos:
            for dtype in knobs.dispatch_dtype:
                for sms in knobs.num_sms:
                    base = Variant(f"nccl_ep_{algo}", "nccl_ep", algo=algo, dispatch_dtype=dtype, combine_dtype="bf16")
                    base = replace(base, num_sms=sms, layout="flat" if algo == "ht" else "expert_major")
                    other = "expert_major" if algo == "ht" else "rank_major"
                    for made in (base, replace(base, name=f"{base.name}+{other}", layout=other)):
                        found.append(made)
                        if algo == "ht":
                            found.append(replace(made, name=f"{made.name}+cached", handle="cached"))
        return found

    def supports(self, variant: Variant, machine: Machine, problem: Problem, knobs: Knobs) -> Support:
        reason = self._reason(variant, machine, problem)
        return needs_packages(machine, PACKAGES, unsupported(reason) if reason else Support())

    def _reason(self, variant: Variant, machine: Machine, problem: Problem) -> str:
        if reason := nvidia_reason(machine):
            return reason
        if problem.nodes > 1:
            return f"this version drives nccl_ep on one node, this is {problem.nodes}"
        return (high_throughput_reason if variant.algo == "ht" else low_latency_reason)(variant, problem)

    def memory_bytes(self, variant: Variant, problem: Problem) -> int:
        return (ht_memory_bytes if variant.algo == "ht" else ll_memory_bytes)(variant, problem)

    def open(self, group: Group, variant: Variant, capacity: Problem, knobs: Knobs) -> NcclEpEngine:
        return NcclEpEngine(group, variant, capacity)
