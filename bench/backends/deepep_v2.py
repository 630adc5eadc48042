"""Backend `deepep_v2`: DeepEP 2's ElasticBuffer over NVLink on one node. API and limits of 2.1.0.post20260801.

Copy rule: a token once a destination rank, with its K ids and weights beside it, into slots handed out by atomics;
a second kernel copies them into the tensor that the caller gets, expanded to one row a chosen expert in the layout
expert_major. Combine is a plain sum, first within a rank where rows are expanded: the caller weighs. Dispatch waits
on the host for the receive counts unless a handle is given (`+cached`), which keeps the slots as well.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.backends.session import (
    FP8_BYTES,
    SCALE_BLOCK,
    CommSession,
    device_sms,
    local_weight,
    nvidia_reason,
    weighted,
)
from lib.contract import Backend, Engine, Group, Missing, Received, Support, Unsupported, Variant, unsupported
from lib.loaded_nccl import require_nccl
from lib.plan import needs_packages
from lib.problem import Inputs, Problem

if TYPE_CHECKING:
    from lib.knobs import Knobs
    from lib.machine import Machine

PACKAGES = {"deep_ep": "DeepEP 2 (https://github.com/deepseek-ai/DeepEP)"}
DEFAULT_SMS = 24  # NUM_SMS=0: the library's own choice falls to 4 where `nvidia-smi nvlink -s` does not answer
MAX_TOPK = 32  # impls/dispatch.cuh, kNumTopk
HIDDEN_STEP = 256  # impls/combine.cuh: a warp's 16-byte vectors of a bf16 row
MAX_EXPERTS, MAX_LOCAL_EXPERTS = 2048, 256  # common/layout.cuh, WorkspaceLayout
META_BYTES = 512  # of a token beside its row: ids and weights of at most 32 choices, the source, alignment
BF16_BYTES = 2
BLOCKS = "dispatch waits on the host for the receive counts"


class DeepEPV2Session(CommSession):
    """dispatch, identity, combine in either layout. Fresh slots in each dispatch put the staging inside the call."""

    # the sum over ranks, and over a rank's expanded rows, is made in the order of the token's own choices
    deterministic = True
    # upstream tells the main kernels and their epilogues apart: so do these, in JSONL
    kernels = {  # noqa: RUF012 - a constant of the class
        "dispatch": [r"dispatch_impl"],
        "dispatch_epilogue": [r"dispatch_copy_epilogue"],
        "combine": [r"combine_impl"],
        "combine_epilogue": [r"combine_reduce_epilogue"],
        "staging": [r"at::native"],
    }

    def __init__(self, engine: DeepEPV2Engine, problem: Problem, inputs: Inputs) -> None:
        variant = engine.variant
        super().__init__(engine.group, problem, inputs, variant.dispatch_dtype)
        self.engine, self.buffer = engine, engine.buffer
        self.cached, self.expanded = variant.handle == "cached", variant.layout == "expert_major"
        self.capturable = "" if self.cached else BLOCKS
        fp8 = self.dispatch_format == "fp8"
        self.declare("identity", included=not self.cached, blocks_host=not self.cached, quantize=fp8)
        self.cached_handle: Any = None
        self._dispatch_fresh()
        self.cached_handle = self.handle

    def _dispatch(self) -> None:
        self.mark_arrival()
        if not self.cached:
            self._dispatch_fresh()
            return
        received = self.buffer.dispatch(
            self.payload, handle=self.cached_handle, num_sms=self.engine.num_sms, do_expand=self.expanded
        )
        self.keep(received[0])

    def _dispatch_fresh(self) -> None:
        received, self.recv_ids, self.recv_weights, self.handle, _ = self.buffer.dispatch(
            self.payload,
            topk_idx=self.inputs.topk_idx,
            topk_weights=self.inputs.topk_weights,
            num_experts=self.problem.num_experts,
            num_max_tokens_per_rank=self.engine.max_tokens,
            num_sms=self.engine.num_sms,
            do_expand=self.expanded,
        )
        self.keep(received)

    def _identity(self) -> None:
        assert self.rows is not None
        weights = self.recv_weights  # expanded: of a slot; else of a token's K choices, wherever they are
        mine = weights.unsqueeze(1) if self.expanded else local_weight(self.recv_ids >= 0, weights)
        weighted(self.rows, mine, self.scales, self.place(self.rows.shape))

    def _combine(self) -> None:
        if self.staged is None:
            self._identity()
        handle = self.cached_handle if self.cached else self.handle
        self.out, _, _ = self.buffer.combine(self.staged, handle, num_sms=self.engine.num_sms)

    def received(self) -> Received:
        """recv_src_metadata [n, 2 + K] int32: source rank * max_tokens + token, .., and expanded a slot a choice."""
        import torch

        assert self.rows is not None
        source = self.handle.recv_src_metadata[:, 0].long()
        rows, scales, weights = self.rows, self.scales, self.recv_weights
        if self.expanded:
            slots = self.handle.recv_src_metadata[:, 2:].long()
            copy, choice = (slots >= 0).nonzero(as_tuple=True)
            slot, source = slots[copy, choice], source[copy]
            ends = self.handle.psum_num_recv_tokens_per_expert.long()
            experts = torch.searchsorted(ends, slot, right=True).unsqueeze(1) + self.first_expert
            rows, weights = rows[slot], weights[slot].unsqueeze(1)
            scales = None if scales is None else scales[slot]
        else:
            mine = self.recv_ids >= 0
            experts = torch.where(mine, self.recv_ids + self.first_expert, -1)
            weights = torch.where(mine, weights, 0.0)
        return Received(
            rows=rows,
            source_rank=source // self.engine.max_tokens,
            source_token=source % self.engine.max_tokens,
            experts=experts,
            weights=weights,
            scales=scales,
            format=self.dispatch_format,
        )

    def transport(self) -> str:
        rdma_ranks, nvlink_ranks = self.buffer.get_physical_domain_size()
        if rdma_ranks > 1:
            return f"rdma ({rdma_ranks} x {nvlink_ranks} ranks)"
        return "nvlink" if nvlink_ranks > 1 else "local"

    def versions(self) -> dict[str, str]:
        return self.engine.versions


class DeepEPV2Engine(Engine):
    """The ElasticBuffer of one variant: kernels are compiled for its largest point, and each point uses those."""

    def __init__(self, group: Group, variant: Variant, capacity: Problem) -> None:
        nccl = require_nccl("deepep_v2")
        deep_ep = import_deep_ep()
        self.group, self.variant = group, variant
        self.versions = {"deep_ep": str(getattr(deep_ep, "__version__", "unknown")), "nccl": nccl}
        self.max_tokens = max(capacity.tokens, 1)
        self.num_sms = variant.num_sms or DEFAULT_SMS
        if (there := device_sms(group)) and self.num_sms > there:
            raise Unsupported(f"NUM_SMS={self.num_sms}: this GPU has {there} SMs")
        self.buffer = deep_ep.ElasticBuffer(
            group.pg,
            num_max_tokens_per_rank=self.max_tokens,
            hidden=capacity.hidden,
            num_topk=capacity.topk,
            use_fp8_dispatch=variant.dispatch_dtype == "fp8",
            allow_hybrid_mode=False,
            explicitly_destroy=True,
        )

    def bind(self, problem: Problem, inputs: Inputs) -> DeepEPV2Session:
        return DeepEPV2Session(self, problem, inputs)

    def close(self) -> None:
        self.buffer.destroy()


def import_deep_ep() -> Any:
    """DeepEP 2, whose import compares libraries and looks for nvcc with asserts of its own."""
    try:
        import deep_ep
    except (ImportError, AssertionError, OSError, RuntimeError) as error:
        raise Missing(f"deep_ep does not import: {str(error) or type(error).__name__}") from error
    if not hasattr(deep_ep, "ElasticBuffer"):
        found = getattr(deep_ep, "__version__", "this version")
        raise Missing(f"deep_ep {found} has no ElasticBuffer: DeepEP 2 is needed, {PACKAGES['deep_ep']}")
    return deep_ep


class DeepEPV2Backend(Backend):
    name = "deepep_v2"
    family = "deepep_v2"

    def variants(self, knobs: Knobs) -> list[Variant]:
        found = []
        for dtype in knobs.dispatch_dtype:
            for sms in knobs.num_sms:
                plain = Variant("deepep_v2", "deepep_v2", dispatch_dtype=dtype, combine_dtype="bf16", num_sms=sms)
                plain = replace(plain, layout="token_major")
                expanded = replace(plain, name="deepep_v2+expert_major", layout="expert_major")
                for fresh in (plain, expanded):
                    found += [fresh, replace(fresh, name=f"{fresh.name}+cached", handle="cached")]
        return found

    def supports(self, variant: Variant, machine: Machine, problem: Problem, knobs: Knobs) -> Support:
        reason = self._reason(variant, machine, problem)
        return needs_packages(machine, PACKAGES, unsupported(reason) if reason else Support())

    def _reason(self, variant: Variant, machine: Machine, problem: Problem) -> str:
        """Hardware, then shape; each would end a worker on an assert."""
        if reason := nvidia_reason(machine):
            return reason
        if problem.nodes > 1:
            return f"this version drives deepep_v2 on one node, this is {problem.nodes}"
        if problem.topk > MAX_TOPK:
            return f"TOPK={problem.topk}: deepep_v2 takes at most {MAX_TOPK}"
        if problem.hidden % HIDDEN_STEP:
            return f"HIDDEN={problem.hidden}: deepep_v2 takes a multiple of {HIDDEN_STEP}"
        if problem.num_experts > MAX_EXPERTS or problem.local_experts > MAX_LOCAL_EXPERTS:
            asked = f"NUM_EXPERTS={problem.num_experts}, {problem.local_experts} a rank"
            return f"{asked}: deepep_v2 takes at most {MAX_EXPERTS}, {MAX_LOCAL_EXPERTS} a rank"
        return ""

    def memory_bytes(self, variant: Variant, problem: Problem) -> int:
        """The buffer (csrc/elastic/buffer.hpp: dispatch's or combine's, the larger), and rows received and staged."""
        tokens, world, row = max(problem.tokens, 1), problem.world, problem.hidden * BF16_BYTES
        fp8 = variant.dispatch_dtype == "fp8"
        sent = problem.hidden * FP8_BYTES + problem.hidden // SCALE_BLOCK * 4 if fp8 else row
        buffer = max(world * tokens * (sent + META_BYTES), min(world, problem.topk) * tokens * (row + META_BYTES))
        copies = min(problem.topk, problem.local_experts) if variant.layout == "expert_major" else 1
        return buffer + world * tokens * copies * row * 3 + tokens * row

    def env(self, variant: Variant, problem: Problem, knobs: Knobs) -> dict[str, str]:
        """On one node the buffer needs no network: with GIN it refuses a machine without a NIC."""
        return {} if "EP_DISABLE_GIN" in os.environ else {"EP_DISABLE_GIN": "1"}

    def open(self, group: Group, variant: Variant, capacity: Problem, knobs: Knobs) -> DeepEPV2Engine:
        return DeepEPV2Engine(group, variant, capacity)
