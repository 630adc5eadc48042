"""The sessions of backend `mscclpp` (mscclpp.py), one a layout: what a call is, what came, how combine is staged."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from bench.backends import mscclpp_limits as limits
from bench.backends.mscclpp_limits import SCALE_BLOCK, capacity
from lib.contract import Phase, Received, Session, Unsupported
from lib.problem import Inputs, Problem

if TYPE_CHECKING:
    import torch

    from bench.backends.mscclpp import MscclppEngine

BLOCKS = "dispatch waits on the host for the receive counts"
COPIES = {"staging": [r"at::native", r"^Mem(cpy|set)"]}  # PyTorch's own, whichever phase they run in


class MscclppSession(Session):
    """What all layouts share: this point's communicator, the last dispatch's result, the output."""

    combine_format = "bf16"
    number_format = "bf16"
    # each sum runs over ranks or top-k slots in their order (combine/common.cuh, throughput_reduce_combine.cu)
    deterministic = True

    def __init__(self, engine: MscclppEngine, problem: Problem, inputs: Inputs, layout: str) -> None:
        self.engine, self.problem, self.inputs, self.layout = engine, problem, inputs, layout
        self.dispatch_format = engine.variant.dispatch_dtype
        self.moe: Any = engine.communicator(problem, layout)
        self.result: Any = None
        self.handle: Any = None
        self.kept: torch.Tensor | None = None
        self.out: torch.Tensor | None = None

    def call(self) -> None:
        self._dispatch()
        if self.staging_included:
            self._stage()
        self._combine()

    def _dispatch(self) -> None:
        self.mark_arrival()
        inputs = self.inputs
        self.result, self.handle = self.moe.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)

    def _stage(self) -> None:
        raise NotImplementedError

    def _combine(self) -> None:
        raise NotImplementedError

    def _stage_in_place(self) -> None:
        """Row * sum of its local weights, where the row stands; what came is kept, since received() tells it."""
        import torch

        rows = self.result.tokens
        if self.kept is None:
            self.kept = torch.empty_like(rows)
        self.kept.copy_(rows)
        # the product is made in float32 and rounded once
        torch.mul(self.kept, self.result.weights.sum(1, keepdim=True), out=rows)

    def output(self) -> torch.Tensor:
        assert self.out is not None
        return self.out

    def poison(self) -> None:
        """Peers write into these buffers, and read from them: no rank may still be in a call, nor start the next."""
        import torch

        self.engine.quiet()
        for tensor in (None if self.result is None else self.result.tokens, self.kept, self.out):
            if tensor is not None:
                tensor.view(torch.uint8).fill_(0xFF)  # NaN in bf16 and e4m3
        self.engine.quiet()

    def _valid_rows(self, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(source rank, row) of the valid rows in rank-major order: the first counts[r] of rank r's share."""
        import torch

        slots = capacity(self.problem)
        rank, slot = (torch.arange(slots, device=counts.device) < counts.unsqueeze(1)).nonzero(as_tuple=True)
        return rank, rank * slots + slot

    def transport(self) -> str:
        return "nvlink" if self.problem.world > 1 else "local"

    def versions(self) -> dict[str, str]:
        return {"mscclpp": self.engine.version}

    def close(self) -> None:
        # There is no destroy call, and views of its buffers keep a communicator alive. ht's destructor is a barrier of
        # all ranks, so it has to run here on each of them and not whenever a garbage collection comes.
        self.result = self.handle = self.kept = self.out = self.moe = None
        self.phases = []
        gc.collect()
        self.engine.quiet()


class ExpertMajorSession(MscclppSession):
    """ll, a slot an expert. Slots are handed out by atomics, anew in each dispatch; combine applies the weights."""

    kernels = {"dispatch": [r"expertMajorDispatchKernel"], "combine": [r"CombineKernel"], **COPIES}  # noqa: RUF012

    def __init__(self, engine: MscclppEngine, problem: Problem, inputs: Inputs, layout: str) -> None:
        super().__init__(engine, problem, inputs, layout)
        self.capturable = engine.ll_capturable
        self.out = inputs.x.new_zeros(inputs.x.shape)
        self.phases = [Phase("dispatch", self._dispatch), Phase("combine", self._combine)]
        if self.dispatch_format == "fp8":
            self.phases.insert(1, Phase("dequantize", self._stage, timed=False))
            self.staging_included = self.quant_included = True
            self._dispatch()
            # the routing of a point is fixed, so are an expert's counts
            self.used_slots = int(self.result.layout.num_tokens_per_expert.max())

    def _stage(self) -> None:
        """The slots that are in use, dequantised to the bf16 that combine takes."""
        import torch

        rows, scales = self.result.tokens, self.result.quant.block_scales
        if self.kept is None:
            self.kept = torch.zeros(rows.shape, dtype=torch.bfloat16, device=rows.device)
        used = slice(0, self.used_slots)
        # e4m3 is exact in bf16; the product is made in float32 and rounded once, straight into its place
        blocks = rows[:, used].to(torch.bfloat16).unflatten(-1, (-1, SCALE_BLOCK))
        place = self.kept[:, used].unflatten(-1, (-1, SCALE_BLOCK))
        torch.mul(blocks, scales[:, used].unsqueeze(-1), out=place)

    def weighed_rows(self) -> torch.Tensor | None:
        rows: torch.Tensor | None = self.kept if self.dispatch_format == "fp8" else self.result.tokens
        return rows

    def _combine(self) -> None:
        self.moe.combine(self.weighed_rows(), self.handle, out=self.out)

    def received(self) -> Received:
        """Of the handle: source token of each slot [L, slots], and [L, R] first slot << 32 | count of a source rank."""
        import torch

        context = self.handle._context
        ranges = context.layout_range
        begins, counts = ranges >> 32, ranges & 0xFFFFFFFF
        slot = torch.arange(context.src_info.shape[1], device=ranges.device).view(1, 1, -1)
        inside = (slot >= begins.unsqueeze(2)) & (slot < (begins + counts).unsqueeze(2))  # [L, R, slots]
        expert, rank, position = inside.nonzero(as_tuple=True)
        quant = self.result.quant
        return Received(
            rows=self.result.tokens[expert, position],
            source_rank=rank,
            source_token=context.src_info[expert, position].long(),
            experts=(expert + self.engine.group.rank * self.problem.local_experts).unsqueeze(1),
            weights=None,
            scales=None if quant is None else quant.block_scales[expert, position].contiguous(),
            format=self.dispatch_format,
        )


class RankMajorSession(MscclppSession):
    """ll, a slot a source rank: which one is decided by atomics, so what combine gets is staged in each call."""

    staging_included = True
    kernels = {"dispatch": [r"rankMajorDispatchKernel"], "combine": [r"CombineKernel"], **COPIES}  # noqa: RUF012

    def __init__(self, engine: MscclppEngine, problem: Problem, inputs: Inputs, layout: str) -> None:
        super().__init__(engine, problem, inputs, layout)
        self.capturable = engine.ll_capturable
        self.direct = engine.variant.option("combine_mode") == "direct_send"
        self.out = inputs.x.new_zeros(inputs.x.shape)
        stage = Phase("identity", self._stage, timed=False)
        self.phases = [Phase("dispatch", self._dispatch), stage, Phase("combine", self._combine)]

    def _stage(self) -> None:
        """rank_local_reduce takes one row a token, in place; direct_send one weighted row a selection, [R*T, K, H]."""
        import torch

        if not self.direct:
            self._stage_in_place()
            return
        rows, weights = self.result.tokens, self.result.weights
        torch.mul(rows.unsqueeze(1), weights.unsqueeze(2), out=self.result.combine_input_buffer)

    def _combine(self) -> None:
        self.moe.combine(self.result.combine_input_buffer, self.handle, out=self.out)

    def received(self) -> Received:
        """Ids are global, with E for other ranks' experts and for padding."""
        import torch

        rank, row = self._valid_rows(self.result.layout.num_tokens_per_rank)
        ids = self.result.topk_ids[row].long()
        rows = self.result.tokens if self.direct else self.kept
        assert rows is not None
        return Received(
            rows=rows[row],
            source_rank=rank,
            source_token=None,
            experts=torch.where(ids < self.problem.num_experts, ids, -1),
            weights=self.result.weights[row],
            format=self.dispatch_format,
        )


class ThroughputSession(MscclppSession):
    """ht, a token once a rank in source order, packed (token-major) or in a share a source rank (rank-major)."""

    staging_included = True
    kernels = {  # noqa: RUF012 - a constant of the class
        "dispatch": [
            r"prepareThroughput",
            r"exchangeThroughputCounts",
            r"CachedThroughputPrefix",
            r"throughputDispatch",
        ],
        "combine": [r"throughputReduceCombine"],
        **COPIES,
    }

    def __init__(self, engine: MscclppEngine, problem: Problem, inputs: Inputs, layout: str) -> None:
        self._refuse_routing(layout, problem)
        super().__init__(engine, problem, inputs, layout)
        self.cached = engine.variant.handle == "cached"
        self.capturable = "" if self.cached else BLOCKS
        self.first: Any = None
        dispatch = Phase("dispatch", self._dispatch, blocks_host=not self.cached)
        stage = Phase("identity", self._stage, timed=False)
        self.phases = [dispatch, stage, Phase("combine", self._combine)]
        self._dispatch()
        if self.cached:
            self.first = self.handle
            self._dispatch()
            # a handle that does not match is ignored without a word, and the host waits as before
            if self.handle._dispatch_cache is not self.first._dispatch_cache:
                raise RuntimeError("mscclpp ignored the cached handle of the same routing")

    @staticmethod
    def _refuse_routing(layout: str, problem: Problem) -> None:
        from lib.routing import make_routing
        from lib.traffic import count_copies

        routing = make_routing(problem)
        sent = [routing.tokens_of(rank) for rank in range(problem.world)]
        received = count_copies(routing.topk_idx, problem).received.tolist()
        if reason := limits.routed_reason(layout, problem, sent, received):
            raise Unsupported(reason)

    def _dispatch(self) -> None:
        self.mark_arrival()
        x, ids, weights = self.inputs.x, self.inputs.topk_idx, self.inputs.topk_weights
        self.result, self.handle = self.moe.dispatch(x, ids, weights, previous_handle=self.first)

    def _stage(self) -> None:
        self._stage_in_place()

    def _combine(self) -> None:
        # out= would be one more copy; rows of another tensor than the receive pool's too
        self.out = self.moe.combine(self.result.tokens, self.handle)

    def received(self) -> Received:
        """Ids are local, -1 = not here. Counts a source rank: given in rank-major order, else of the cached prefix."""
        import torch

        rank = self.engine.group.rank
        if self.layout == "rank_major":
            source, row = self._valid_rows(self.result.layout.num_tokens_per_rank)
        else:
            ends = self.handle._dispatch_cache["rank_prefix_matrix"][:, rank].long()
            counts = torch.diff(ends, prepend=ends.new_zeros(1))
            source = torch.repeat_interleave(torch.arange(len(counts), device=ends.device), counts)
            row = torch.arange(len(source), device=ends.device)
        assert self.kept is not None
        ids = self.result.topk_ids[row]
        return Received(
            rows=self.kept[row],
            source_rank=source,
            source_token=None,
            experts=torch.where(ids >= 0, ids + rank * self.problem.local_experts, -1),
            weights=self.result.weights[row],
            format=self.dispatch_format,
        )

    def broken_promise(self) -> str:
        """Rank-major combines to the very bits of token-major, as upstream's own bench demands (PR 860)."""
        import torch

        if self.layout != "rank_major":
            return ""
        try:
            reference = ThroughputSession(self.engine, self.problem, self.inputs, "token_major")
        except Unsupported:
            return ""  # token-major can't run this routing, so there is nothing to compare with
        self.call()
        reference.call()
        equal = torch.equal(self.output().view(torch.int16), reference.output().view(torch.int16))
        reference.close()
        return "" if equal else "rank-major combined to other bits than token-major, which the library promises"

    def close(self) -> None:
        self.first = None
        super().close()
