"""Backend `mscclpp`: MSCCL++'s MoECommunicator, latency (ll) and throughput (ht) mode. API of 3d02152b, feature/ep.

Copy rules: both modes send a token once a destination rank, its K ids and weights beside it. ll's expert-major layout
then copies it to a slot an expert on the receiving rank; its direct_send combine brings each selection back by itself.
Weights: in expert-major order combine applies them; else the caller does, and the identity experts staged here do.
NUM_SMS is the total of blocks: ll keeps two of them to schedule, so its combine has NUM_SMS - 2; ht works with all.

Three layouts combine from the very buffer that dispatch fills (both of ht's, whose combine would else copy into it, and
ll's rank-major with rank_local_reduce). There the staging runs inside a call and keeps a copy of the received rows, so
the total contains it (`staging_included`); the phase columns do not.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.backends import mscclpp_limits as limits
from bench.backends.mscclpp_sessions import ExpertMajorSession, MscclppSession, RankMajorSession, ThroughputSession
from bench.backends.session import nvidia_reason
from lib.contract import Backend, Engine, Group, Missing, Support, Unsupported, Variant, missing, unsupported
from lib.plan import needs_packages
from lib.problem import Inputs, Problem

if TYPE_CHECKING:
    from lib.knobs import Knobs
    from lib.machine import Machine

PACKAGES = {
    "mscclpp": "MSCCL++ with mscclpp.ep (https://github.com/microsoft/mscclpp, branch feature/ep)",
    "cupy": "CuPy (pip install cupy-cuda12x or cupy-cuda13x), which MSCCL++ imports",
}
ONE_EPOCH = "a graph keeps the library's epochs, one iteration would find its own old flags: ITERS_PER_GRAPH=2 or more"


class MscclppEngine(Engine):
    """The bootstrap over all points. Each point has its own MoECommunicator, whose buffers are sized by its tokens."""

    def __init__(self, group: Group, variant: Variant, knobs: Knobs) -> None:
        try:
            import mscclpp
            import mscclpp.ep
        except ImportError as error:
            raise Missing(f"mscclpp.ep does not import: {error}") from error
        self.group, self.variant, self.ep = group, variant, mscclpp.ep
        self.version = " ".join(mscclpp.version.values())
        self.ll_capturable = "" if knobs.iters_per_graph > 1 else ONE_EPOCH
        self._refuse_blocks()
        self.comm = mscclpp.CommGroup(torch_group=group.host_pg)

    def _refuse_blocks(self) -> None:
        """All blocks have to be resident at once; the library's kernels fill an SM's shared memory."""
        import torch

        blocks = self.variant.num_sms or (limits.LL_MAX_BLOCKS if self.variant.algo == "ll" else 0)
        if self.group.device.type == "cuda":
            sms = torch.cuda.get_device_properties(self.group.device).multi_processor_count
            if blocks > sms:
                raise Unsupported(f"NUM_SMS={self.variant.num_sms or 0}: {blocks} blocks, this GPU has {sms} SMs")

    def communicator(self, problem: Problem, layout: str) -> Any:
        """Collective. Buffers are allocated and mapped by initialize, which no graph may hold."""
        ep, latency = self.ep, self.variant.algo == "ll"
        options: dict[str, Any] = {"mode": ep.MoEMode.LATENCY if latency else ep.MoEMode.THROUGHPUT}
        if latency:
            options["combine_mode"] = getattr(ep.CombineMode, self.variant.option("combine_mode").upper())
            if self.variant.dispatch_dtype == "fp8":
                options["quant"] = ep.QuantConfig(format=ep.DispatchDataType.FP8_E4M3)
        made = ep.MoECommunicator(
            comm=self.comm,
            num_experts=problem.num_experts,
            hidden_size=problem.hidden,
            topk=problem.topk,
            max_tokens_per_rank=limits.capacity(problem),
            output_layout=getattr(ep.DispatchLayout, layout.upper()),
            num_blocks=self.variant.num_sms or None,
            **options,
        )
        if not made.is_available():
            raise Unsupported(f"the {problem.world} ranks are not in one domain of GPUs that map each other's memory")
        made.initialize()
        return made

    def quiet(self) -> None:
        """Until no rank has work in flight."""
        import torch
        import torch.distributed as dist

        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)
        dist.barrier(group=self.group.host_pg)

    def bind(self, problem: Problem, inputs: Inputs) -> MscclppSession:
        kinds = {"expert_major": ExpertMajorSession, "rank_major": RankMajorSession}
        kind = ThroughputSession if self.variant.algo == "ht" else kinds[self.variant.layout]
        return kind(self, problem, inputs, self.variant.layout)

    def close(self) -> None:
        self.comm = None
        gc.collect()


class MscclppBackend(Backend):
    name = "mscclpp"
    family = "mscclpp"

    def variants(self, knobs: Knobs) -> list[Variant]:
        return [
            replace(variant, num_sms=sms)
            for algo in knobs.algos
            for variant in (latency_variants(knobs) if algo == "ll" else throughput_variants())
            for sms in knobs.num_sms
        ]

    def supports(self, variant: Variant, machine: Machine, problem: Problem, knobs: Knobs) -> Support:
        found = needs_packages(machine, PACKAGES, self._verdict(variant, machine, problem))
        if found.ok and (reason := limits.build_reason()):
            return missing(reason)
        return found

    def _verdict(self, variant: Variant, machine: Machine, problem: Problem) -> Support:
        if reason := nvidia_reason(machine):
            return unsupported(reason)
        rule = limits.latency_reason if variant.algo == "ll" else limits.throughput_reason
        reason = rule(variant, problem)
        return unsupported(reason) if reason else Support()

    def memory_bytes(self, variant: Variant, problem: Problem) -> int:
        rule = limits.latency_bytes if variant.algo == "ll" else limits.throughput_bytes
        return rule(variant, problem)

    def open(self, group: Group, variant: Variant, capacity: Problem, knobs: Knobs) -> MscclppEngine:
        return MscclppEngine(group, variant, knobs)


def latency_variants(knobs: Knobs) -> list[Variant]:
    """Two layouts, two ways to combine; rank-major takes bf16 alone."""
    return [
        Variant(f"mscclpp_ll{suffix}", "mscclpp", "", "ll", dtype, "bf16", None, layout, "", (("combine_mode", mode),))
        for suffix, layout, mode in (
            ("", "expert_major", "rank_local_reduce"),
            ("+direct_send", "expert_major", "direct_send"),
            ("+rank_major", "rank_major", "rank_local_reduce"),
            ("+rank_major+direct_send", "rank_major", "direct_send"),
        )
        for dtype in (knobs.dispatch_dtype if layout == "expert_major" else ("bf16",))
    ]


def throughput_variants() -> list[Variant]:
    """Two layouts, each fresh and with a cached handle; bf16 alone."""
    return [
        Variant(f"mscclpp_ht{suffix}{cached and '+cached'}", "mscclpp", "", "ht", "bf16", "bf16", None, layout, cached)
        for layout, suffix in (("token_major", ""), ("rank_major", "+rank_major"))
        for cached in ("", "cached")
    ]
