"""Sessions of NCCL-EP, one class a layout. What the layouts are is told in nccl_ep.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.backends.nccl_ep_limits import BF16_BYTES, SCALE_BLOCK, capacity, ht_slots
from bench.backends.session import CommSession, local_weight, spoil, stream_pointer, weighted
from lib.contract import Received
from lib.problem import Inputs, Problem

if TYPE_CHECKING:
    import torch

    from bench.backends.nccl_ep import NcclEpEngine


class NcclEpSession(CommSession):
    """One group and one handle a point: buffers and the routing exchange are sized by the group's capacity."""

    capturable = ""

    def __init__(self, engine: NcclEpEngine, problem: Problem, inputs: Inputs) -> None:
        super().__init__(engine.group, problem, inputs, engine.variant.dispatch_dtype)
        self.engine, self.ep, self.variant = engine, engine.ep, engine.variant
        self.fp8 = self.dispatch_format == "fp8"
        self.capacity = capacity(self.variant, problem)
        self.recv_ids: torch.Tensor | None = None
        self.recv_weights: torch.Tensor | None = None
        high = self.variant.algo == "ht"
        self.ep_group = self.ep.Group.create(
            engine.comm,
            self.ep.GroupConfig(
                algorithm=self.ep.Algorithm.HIGH_THROUGHPUT if high else self.ep.Algorithm.LOW_LATENCY,
                num_experts=problem.num_experts,
                max_dispatch_tokens_per_rank=self.capacity,
                max_recv_tokens_per_rank=ht_slots(self.variant, problem) if high else 0,
                max_token_bytes=problem.hidden * BF16_BYTES,
                max_num_sms=self.variant.num_sms or 0,
            ),
        )
        self.out = inputs.x.new_zeros(inputs.x.shape)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer that the library writes. Zeros: what it leaves alone must be no number of a row."""
        import torch

        return torch.zeros(shape, dtype=dtype, device=self.inputs.x.device)

    def rows_of(self, *shape: int) -> None:
        """The received rows, with their scales in fp8."""
        import torch

        hidden = self.problem.hidden
        self.rows = self.empty(*shape, hidden, dtype=torch.float8_e4m3fn if self.fp8 else torch.bfloat16)
        self.scales = self.empty(*shape, hidden // SCALE_BLOCK, dtype=torch.float32) if self.fp8 else None

    def describe(self, kind: Any, **tensors: torch.Tensor | None) -> Any:
        """A bundle of tensor descriptors, made once: they hold the addresses that a captured graph reads."""
        made = {name: None if tensor is None else self.ep.Tensor(tensor) for name, tensor in tensors.items()}
        return kind(**made)

    def connect(self, layout: Any, at_handle: Any, at_dispatch: Any, recipe: Any, inputs: Any, outputs: Any) -> None:
        """Make the handle, and keep what each call passes. `at_handle`, `at_dispatch`: LayoutInfo or None."""
        self.ids_descriptor = self.ep.Tensor(self.inputs.topk_idx)
        self.at_handle, self.at_dispatch = at_handle, at_dispatch
        self.dispatch_inputs, self.dispatch_outputs = inputs, outputs
        self.dispatch_config = self.ep.DispatchConfig(quantization_recipe=recipe)
        self.handle = self.ep_group.create_handle(
            layout, self.ids_descriptor, layout_info=at_handle, stream=stream_pointer(self.group.device)
        )

    def connect_combine(self, source: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        self.combine_inputs = self.describe(self.ep.CombineInputs, tokens=source)
        self.combine_outputs = self.describe(self.ep.CombineOutputs, tokens=self.out, topk_weights=weights)

    def _dispatch(self) -> None:
        self.mark_arrival()
        self._launch()

    def _launch(self) -> None:
        self.handle.dispatch(
            self.dispatch_inputs,
            self.dispatch_outputs,
            layout_info=self.at_dispatch,
            config=self.dispatch_config,
            stream=stream_pointer(self.group.device),
        )

    def _combine(self) -> None:
        self.handle.combine(self.combine_inputs, self.combine_outputs, stream=stream_pointer(self.group.device))

    def poison(self) -> None:
        super().poison()
        spoil(self.recv_ids)
        spoil(self.recv_weights)

    def transport(self) -> str:
        if self.group.world == 1:
            return "local"
        # not n_lsa_teams: nccl4py 0.6.0 asks for its properties by a version that libnccl 2.30.7 refuses
        near = self.engine.comm.team_lsa.n_ranks
        return "nvlink" if near == self.group.world else f"rdma ({-(-self.group.world // max(near, 1))} NVLink domains)"

    def versions(self) -> dict[str, str]:
        return self.engine.versions

    def close(self) -> None:
        import torch

        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)
        self.handle.destroy()
        self.ep_group.destroy()
        super().close()
        # the descriptors hold the buffers, and these are by expert the largest of the machine
        self.dispatch_inputs = self.dispatch_outputs = self.combine_inputs = self.combine_outputs = None
        self.recv_ids = self.recv_weights = None


class ExpertSlots(NcclEpSession):
    """ll by expert: [L, R * capacity, H] slots. Combine applies the weights to the received rows as they lie."""

    kernels = {  # noqa: RUF012 - a constant of the class
        "dispatch": [r"ll_dispatch"],
        "combine": [r"ll_combine"],
        "copies": [r"^Memcpy", r"^Memset"],
        "staging": [r"at::native"],
    }

    def __init__(self, engine: NcclEpEngine, problem: Problem, inputs: Inputs) -> None:
        import torch

        super().__init__(engine, problem, inputs)
        ep, local = self.ep, problem.local_experts
        self.rows_of(local, problem.world * self.capacity)
        self.counts = self.empty(local, dtype=torch.int32)
        self.connect(
            ep.Layout.EXPERT_MAJOR,
            None,
            self.describe(ep.LayoutInfo, expert_counters=self.counts),
            ep.DispatchQuantizationRecipe.DS_FP8E3M4 if self.fp8 else ep.DispatchQuantizationRecipe.NONE,
            self.describe(ep.DispatchInputs, tokens=inputs.x),
            self.describe(ep.DispatchOutputs, tokens=self.rows, scales=self.scales),
        )
        assert self.rows is not None
        self.connect_combine(self.place(self.rows.shape) if self.fp8 else self.rows, inputs.topk_weights)
        self.declare("dequantize" if self.fp8 else "", included=True)
        if self.fp8:
            self.quant_included = True
            self.used_slots = self.rows.shape[1]
            self.call()
            self.used_slots = int(self.counts.max())  # the routing of a point is fixed, so are an expert's counts

    def _identity(self) -> None:
        """The slots that are in use, to bf16: which row lies where is another matter in each dispatch."""
        assert self.rows is not None
        assert self.scales is not None
        assert self.staged is not None
        used = slice(0, self.used_slots)
        weighted(self.rows[:, used], None, self.scales[:, used], self.staged[:, used])

    def weighed_rows(self) -> torch.Tensor | None:
        return self.staged if self.fp8 else self.rows

    def received(self) -> Received:
        import torch

        assert self.rows is not None
        slots = torch.arange(self.rows.shape[1], device=self.rows.device)
        expert, slot = (slots < self.counts.unsqueeze(1)).nonzero(as_tuple=True)
        return Received(
            rows=self.rows[expert, slot],
            source_rank=None,
            source_token=None,
            experts=(expert + self.first_expert).unsqueeze(1),
            weights=None,
            scales=None if self.scales is None else self.scales[expert, slot],
            format=self.dispatch_format,
        )


class RankSlots(NcclEpSession):
    """ll by source rank: [R, capacity, H] slots, a token once, with its ids and weights. The caller weighs."""

    kernels = ExpertSlots.kernels

    def __init__(self, engine: NcclEpEngine, problem: Problem, inputs: Inputs) -> None:
        import torch

        super().__init__(engine, problem, inputs)
        ep, world = self.ep, problem.world
        self.rows_of(world, self.capacity)
        self.counts = self.empty(world, dtype=torch.int32)
        self.recv_ids = self.empty(world, self.capacity, problem.topk, dtype=torch.int32).fill_(-1)
        self.recv_weights = self.empty(world, self.capacity, problem.topk, dtype=torch.float32)
        info = ep.LayoutInfo(src_rank_counters=ep.Tensor(self.counts), recv_topk_idx_kind=ep.ExpertIdKind.LOCAL)
        self.connect(
            ep.Layout.RANK_MAJOR,
            None,
            info,
            ep.DispatchQuantizationRecipe.DS_FP8E3M4 if self.fp8 else ep.DispatchQuantizationRecipe.NONE,
            self.describe(ep.DispatchInputs, tokens=inputs.x, topk_weights=inputs.topk_weights),
            self.describe(
                ep.DispatchOutputs,
                tokens=self.rows,
                scales=self.scales,
                topk_weights=self.recv_weights,
                topk_idx=self.recv_ids,
            ),
        )
        assert self.rows is not None
        self.connect_combine(self.place(self.rows.shape))
        self.declare("identity", included=True)
        self.quant_included = True if self.fp8 else None

    def _identity(self) -> None:
        assert self.rows is not None
        assert self.recv_ids is not None
        assert self.recv_weights is not None
        mine = local_weight(self.recv_ids >= 0, self.recv_weights)
        weighted(self.rows, mine, self.scales, self.place(self.rows.shape))

    def received(self) -> Received:
        import torch

        assert self.rows is not None
        assert self.recv_ids is not None
        assert self.recv_weights is not None
        slots = torch.arange(self.capacity, device=self.rows.device)
        source, slot = (slots < self.counts.unsqueeze(1)).nonzero(as_tuple=True)
        ids, weights = self.recv_ids[source, slot].long(), self.recv_weights[source, slot]
        return Received(
            rows=self.rows[source, slot],
            source_rank=source,
            source_token=None,
            experts=torch.where(ids >= 0, ids + self.first_expert, -1),
            weights=torch.where(ids >= 0, weights, 0.0),
            scales=None if self.scales is None else self.scales[source, slot],
            format=self.dispatch_format,
        )


class HighThroughput(NcclEpSession):
    """ht: [slots, H] rows of which the first `total` are used, flat or by expert. The caller weighs.

    The order of a flat sequence follows from the routing. By expert it is settled where the routing is exchanged, so
    the staging is inside the call unless that is kept.
    """

    kernels = {  # noqa: RUF012 - a constant of the class
        "routing": [r"convert_topk", r"scan", r"build_em", r"ncclDevKernel", r"ncclSym"],
        "combine": [r"ht_combine", r"local_reduce", r"permute_reduce"],
        "dispatch": [r"ht_dispatch", r"local_dup", r"permute_dup", r"sparse_to_dense", r"dense_to_sparse"],
        "copies": [r"^Memcpy", r"^Memset"],
        "staging": [r"at::native"],
    }

    def __init__(self, engine: NcclEpEngine, problem: Problem, inputs: Inputs) -> None:
        import torch

        super().__init__(engine, problem, inputs)
        ep, slots = self.ep, ht_slots(self.variant, problem)
        self.cached, self.by_expert = self.variant.handle == "cached", self.variant.layout == "expert_major"
        self.declare(
            "identity", included=self.by_expert and not self.cached, blocks_host=not self.by_expert, quantize=self.fp8
        )
        self.rows_of(slots)
        self.total = self.empty(1, dtype=torch.int32)
        self.counts = self.empty(problem.local_experts, dtype=torch.int32) if self.by_expert else None
        if self.by_expert:
            self.recv_weights = self.empty(slots, dtype=torch.float32)
        else:
            self.recv_weights = self.empty(slots, problem.topk, dtype=torch.float32)
            self.recv_ids = self.empty(slots, problem.topk, dtype=torch.int64).fill_(-1)
        values, scales = self.payload if self.fp8 else (self.payload, None)
        recipes = ep.DispatchQuantizationRecipe
        self.connect(
            ep.Layout.EXPERT_MAJOR if self.by_expert else ep.Layout.FLAT,
            self.describe(ep.LayoutInfo, recv_total_counter=self.total, expert_counters=self.counts),
            None,
            recipes.FWD if self.fp8 else recipes.NONE,
            self.describe(ep.DispatchInputs, tokens=values, scales=scales, topk_weights=inputs.topk_weights),
            self.describe(
                ep.DispatchOutputs,
                tokens=self.rows,
                scales=self.scales,
                topk_weights=self.recv_weights,
                topk_idx=self.recv_ids,
            ),
        )
        assert self.rows is not None
        self.connect_combine(self.place(self.rows.shape))

    def _dispatch(self) -> None:
        self.mark_arrival()
        if not self.cached:
            stream = stream_pointer(self.group.device)
            self.handle.update(self.ids_descriptor, layout_info=self.at_handle, stream=stream)
        self._launch()

    def _identity(self) -> None:
        assert self.rows is not None
        assert self.recv_weights is not None
        if self.by_expert:
            mine = self.recv_weights.unsqueeze(1)
        else:
            assert self.recv_ids is not None
            mine = local_weight(self.recv_ids >= 0, self.recv_weights)
        weighted(self.rows, mine, self.scales, self.place(self.rows.shape))

    def received(self) -> Received:
        import torch

        assert self.rows is not None
        assert self.recv_weights is not None
        used = slice(0, int(self.total))
        weights = self.recv_weights[used]
        if self.counts is not None:
            slots = torch.arange(len(weights), device=weights.device)
            ends = self.counts.long().cumsum(0)
            experts = (torch.searchsorted(ends, slots, right=True) + self.first_expert).unsqueeze(1)
            weights = weights.unsqueeze(1)
        else:
            assert self.recv_ids is not None
            ids = self.recv_ids[used]
            experts = torch.where(ids >= 0, ids + self.first_expert, -1)
            weights = torch.where(ids >= 0, weights, 0.0)
        return Received(
            rows=self.rows[used],
            source_rank=None,
            source_token=None,
            experts=experts,
            weights=weights,
            scales=None if self.scales is None else self.scales[used],
            format=self.dispatch_format,
        )
