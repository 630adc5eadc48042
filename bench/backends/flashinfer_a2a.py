"""Backend `flashinfer`: FlashInfer's MoeAlltoAll over memory that the GPUs of one node map. API of 0.6.18.post1.

Copy rule: any payloads, a token once a destination rank, into [R, T] slots a source rank handed out by atomics anew
in each dispatch; rows, ids and weights (and scales in fp8) travel as payloads of their own. Combine reads the peers'
rows and sums them: the caller weighs, and since the slots move, inside the call. A dispatch can't be repeated without
its combine. Masked choices are not the library's: see `routed`.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from bench.backends.session import (
    FP8_BYTES,
    SCALE_BLOCK,
    CommSession,
    local_weight,
    nvidia_reason,
    spoil,
    stand_still,
    weighted,
)
from lib.contract import Backend, Engine, Group, Missing, Received, Support, Variant, unsupported
from lib.plan import needs_packages
from lib.problem import Inputs, Problem

if TYPE_CHECKING:
    import torch

    from lib.knobs import Knobs
    from lib.machine import Machine

PACKAGES = {"flashinfer": "FlashInfer (pip install flashinfer-python)"}
TOPK = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)  # moeAlltoAllKernels.cu, SWITCH_TOP_K
MAX_RANKS = 64  # moeAlltoAllKernels.h, kMaxRanks
MAX_TOPK = 22  # moeAlltoAllKernels.h, kMaxTopK: two int32 a token and choice in the workspace
WIDEST_LOAD = 16  # moeAlltoAllKernels.cu, vectorized_dispatch: bytes
INVALID = -1  # what the library writes over the ids of slots without a token
BF16_BYTES, INT32_BYTES = 2, 4


def routed(ids: torch.Tensor, own_expert: int) -> torch.Tensor:
    """The ids [T, K] that choose a token's ranks, int32, without a masked one.

    The library takes -1 for an expert of rank 0. A masked choice becomes the token's first other one, whose rank gets
    the token already; a token that is masked whole goes to its own rank (`own_expert`), over no wire, and weighs 0.
    """
    import torch

    chosen = ids >= 0
    first = ids.gather(1, chosen.int().argmax(1, keepdim=True))
    fallback = torch.where(first >= 0, first, own_expert)
    return torch.where(chosen, ids, fallback).int().contiguous()


def widest_load(payload: torch.Tensor) -> int:
    """Bytes of the loads that the library copies a payload's rows with: the largest power of two that divides one."""
    row_bytes = payload.shape[1] * payload.element_size()
    return min(WIDEST_LOAD, row_bytes & -row_bytes)


class FlashInferSession(CommSession):
    """dispatch, identity into the workspace, combine from it. What a rank sends lies in its peers' memory."""

    capturable = ""
    # the sum is made in the order of the token's own choices, wherever the rows lie
    deterministic = True
    kernels = {  # noqa: RUF012 - a constant of the class
        "dispatch": [r"moeA2APrepareDispatch", r"moeA2ADispatch", r"moeA2ASanitize"],
        "combine": [r"moeA2APrepareCombine", r"moeA2ACombine"],
        "staging": [r"at::native"],
    }

    def __init__(self, engine: FlashInferEngine, problem: Problem, inputs: Inputs) -> None:
        import torch

        super().__init__(engine.group, problem, inputs, engine.variant.dispatch_dtype)
        self.engine, self.exchange = engine, engine.exchange
        self.slots = max(problem.tokens, 1)
        self.routing = routed(inputs.topk_idx, self.first_expert)
        self.out = inputs.x.new_zeros(inputs.x.shape)
        self.declare("identity", included=True, quantize=self.dispatch_format == "fp8")
        values, scales = self.payload if isinstance(self.payload, tuple) else (self.payload, None)
        # e4m3 as the bytes that it is: the library looks at sizes alone
        values = values if scales is None else values.view(torch.uint8)
        sent = {"rows": values, "scales": scales, "ids": inputs.topk_idx.int(), "weights": inputs.topk_weights}
        # the wider a payload's loads, the earlier it lies: then each begins where its loads may begin
        self.sent = dict(sorted(((n, t) for n, t in sent.items() if t is not None), key=lambda p: -widest_load(p[1])))
        self.came: dict[str, torch.Tensor] = {}

    def _dispatch(self) -> None:
        import torch

        self.mark_arrival()
        came = self.exchange.dispatch(
            self.routing,
            list(self.sent.values()),
            self.slots,
            invalid_token_expert_id=INVALID,
            expert_id_payload_index=list(self.sent).index("ids"),
        )
        self.came = dict(zip(self.sent, came, strict=True))
        if self.dispatch_format == "fp8":
            self.came["rows"] = self.came["rows"].view(torch.float8_e4m3fn)
        if self.staged is None:
            self.staged = self.exchange.get_combine_payload_tensor_in_workspace(
                self.slots, self.problem.hidden, self.inputs.x.dtype
            )

    def _here(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids >= self.first_expert) & (ids < self.end_expert)

    def _identity(self) -> None:
        assert self.staged is not None
        mine = local_weight(self._here(self.came["ids"]), self.came["weights"])
        weighted(self.came["rows"], mine, self.came.get("scales"), self.staged)

    def _combine(self) -> None:
        self.exchange.combine(self.staged, self.slots, payload_in_workspace=True, output=self.out)

    def received(self) -> Received:
        """A slot holds a token if any of its ids is one; a token that is masked whole is no copy of the routing's."""
        import torch

        ids = self.came["ids"].long()
        source, slot = (ids >= 0).any(2).nonzero(as_tuple=True)
        ids, weights, scales = ids[source, slot], self.came["weights"][source, slot], self.came.get("scales")
        here = self._here(ids)
        return Received(
            rows=self.came["rows"][source, slot],
            source_rank=source,
            source_token=None,
            experts=torch.where(here, ids, -1),
            weights=torch.where(here, weights, 0.0),
            scales=None if scales is None else scales[source, slot],
            format=self.dispatch_format,
        )

    def poison(self) -> None:
        """Peers write into these buffers, and read them, at their own time: all ranks stand still meanwhile."""
        stand_still(self.group)
        for tensor in (*self.came.values(), self.staged, self.out):
            spoil(tensor)
        stand_still(self.group)

    def transport(self) -> str:
        return self.engine.transport

    def versions(self) -> dict[str, str]:
        return {"flashinfer": self.engine.version}

    def close(self) -> None:
        super().close()
        self.came = {}


class FlashInferEngine(Engine):
    """The workspace of the largest point. The library keeps it for the process and has no call to free it."""

    def __init__(self, group: Group, variant: Variant, capacity: Problem) -> None:
        self.group, self.variant, self.version = group, variant, installed_version()
        try:
            from flashinfer.comm.mapping import Mapping
            from flashinfer.comm.mnnvl import MnnvlConfig, MnnvlMemory, TorchDistBackend
            from flashinfer.comm.trtllm_moe_alltoall import MoeAlltoAll
        except (ImportError, AssertionError, OSError, RuntimeError) as error:
            raise Missing(f"flashinfer {self.version} has no MoeAlltoAll that imports: {error}") from error
        mapping = Mapping(
            world_size=group.world,
            rank=group.rank,
            gpus_per_node=group.world,
            tp_size=group.world,
            moe_tp_size=1,
            moe_ep_size=group.world,
        )
        self.exchange = MoeAlltoAll(
            mapping,
            max_num_tokens=max(capacity.tokens, 1),
            top_k=capacity.topk,
            num_experts=capacity.num_experts,
            hidden_size=capacity.hidden,
            mnnvl_config=MnnvlConfig(comm_backend=TorchDistBackend(group.host_pg)),
        )
        fabric = getattr(MnnvlMemory, "_fabric_supported", None)
        handles = "fabric handles" if fabric else "file descriptors"
        self.transport = f"nvlink ({handles})" if group.world > 1 else "local"

    def bind(self, problem: Problem, inputs: Inputs) -> FlashInferSession:
        return FlashInferSession(self, problem, inputs)


def installed_version() -> str:
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


class FlashInferBackend(Backend):
    name = "flashinfer"
    family = "flashinfer"

    def variants(self, knobs: Knobs) -> list[Variant]:
        return [
            Variant("flashinfer", "flashinfer", dispatch_dtype=dtype, combine_dtype="bf16", layout="rank_major")
            for dtype in knobs.dispatch_dtype
        ]

    def supports(self, variant: Variant, machine: Machine, problem: Problem, knobs: Knobs) -> Support:
        reason = self._reason(variant, machine, problem)
        return needs_packages(machine, PACKAGES, unsupported(reason) if reason else Support())

    def _reason(self, variant: Variant, machine: Machine, problem: Problem) -> str:
        if reason := nvidia_reason(machine):
            return reason
        if problem.nodes > 1:
            return f"this version drives flashinfer on one node, this is {problem.nodes}"
        if problem.world > MAX_RANKS:
            return f"flashinfer takes at most {MAX_RANKS} ranks, this is {problem.world}"
        if problem.topk not in TOPK:
            return f"TOPK={problem.topk}: flashinfer is compiled for {', '.join(map(str, TOPK))}"
        if variant.dispatch_dtype == "fp8" and problem.hidden % SCALE_BLOCK:
            return f"HIDDEN={problem.hidden}: fp8 needs a multiple of {SCALE_BLOCK}"
        return ""

    def memory_bytes(self, variant: Variant, problem: Problem) -> int:
        """The workspace (get_moe_workspace_size_per_rank without its counters), the output, and the staging's bf16."""
        tokens, row = max(problem.tokens, 1), problem.hidden * BF16_BYTES
        slots, choices = problem.world * tokens, 2 * problem.topk * INT32_BYTES
        aux = 2 * tokens * MAX_TOPK * INT32_BYTES
        dequantised = slots * problem.hidden * (BF16_BYTES + FP8_BYTES) if variant.dispatch_dtype == "fp8" else 0
        return aux + slots * (2 * row + choices) + tokens * row + dequantised

    def open(self, group: Group, variant: Variant, capacity: Problem, knobs: Knobs) -> FlashInferEngine:
        return FlashInferEngine(group, variant, capacity)
