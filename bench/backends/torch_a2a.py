"""Backend `torch`: dispatch and combine by `all_to_all_single`, experts by PyTorch's grouped matmul. Needs torch alone.

Copy rule: each token goes at most once to a rank, with its K local expert ids and K weights beside it. Counts are
exchanged first and read by the host, so dispatch blocks it. In section comm the combine's input is staged untimed
(row x sum of its local weights, what identity experts would leave); in section ref the experts stand there instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lib.contract import Backend, Engine, Group, Phase, Received, Session, Support, Variant, unsupported
from lib.plan import needs_packages
from lib.problem import Inputs, Problem, local_weights

if TYPE_CHECKING:
    import torch

    from lib.formats import Quantized
    from lib.knobs import Knobs
    from lib.machine import Machine

    Weight = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

FP8_SM = (9, 0)
BF16_BYTES = 2
SCALE_BLOCK = 128  # columns that share one fp32 scale on the fp8 wire
PACKAGES = {"torch": "torch (pip install torch)", "numpy": "numpy (pip install numpy)"}


class TorchSession(Session):
    """One point. All buffers are this call's; nothing is cached between calls."""

    deterministic = True
    combine_format = "bf16"
    capturable = "the host reads the receive counts to size the exchange"
    kernels = {"call": [""]}  # noqa: RUF012 - whatever runs in a call is this backend's: PyTorch's kernels have many names

    def __init__(self, engine: TorchEngine, problem: Problem, inputs: Inputs) -> None:
        self.engine, self.problem, self.inputs = engine, problem, inputs
        self.dispatch_format = engine.variant.dispatch_dtype
        self.kind = "moe" if engine.weights else "combine"
        self.number_format = "fp8_rowwise" if engine.variant.name == "torch_fp8" else "bf16"
        between = Phase("experts", self._experts) if engine.weights else Phase("identity", self._identity, timed=False)
        self.phases = [
            Phase("dispatch", self._dispatch, blocks_host=True),
            between,
            Phase("combine", self._combine),
        ]
        self.rows: torch.Tensor | None = None
        self.results: torch.Tensor | None = None  # what combine sends back, one bf16 row a received copy
        self.out = inputs.x.new_zeros(inputs.x.shape)
        self.wire: torch.Tensor = inputs.x
        self.wire_scales: torch.Tensor | None = None
        if self.dispatch_format == "fp8":
            # DeepEP's own tests hand dispatch a quantised pair, so the cast is not charged to the exchange here either.
            self.phases.insert(0, Phase("quantize", self._quantize, timed=False))
            self.quant_included = False

    def call(self) -> None:
        self._dispatch()
        if self.kind == "moe":
            self._experts()
        self._combine()

    def output(self) -> torch.Tensor:
        return self.out

    # -- dispatch

    def _quantize(self) -> None:
        from lib.formats import quantize

        quantized = quantize("fp8", self.inputs.x)
        self.wire, self.wire_scales = quantized.values, quantized.scales

    def _dispatch(self) -> None:
        import torch

        world, local = self.problem.world, self.problem.local_experts
        ids, weights = self.inputs.topk_idx, self.inputs.topk_weights
        owner = torch.where(ids >= 0, ids // local, -1)
        goes = (owner.unsqueeze(0) == torch.arange(world, device=ids.device).view(-1, 1, 1)).any(2)  # [R, T]
        self.send_counts = goes.sum(1)
        destination, self.sent_token = goes.nonzero(as_tuple=True)  # by destination, then by token
        # ids and weights of the experts on the destination, -1 and 0 elsewhere, as one int32 row a copy
        mine = owner[self.sent_token] == destination.unsqueeze(1)
        local_ids = torch.where(mine, ids[self.sent_token] - destination.unsqueeze(1) * local, -1).int()
        local_weights_ = torch.where(mine, weights[self.sent_token], 0.0)
        meta = [self.sent_token.int().unsqueeze(1), local_ids, local_weights_.view(torch.int32)]
        if self.wire_scales is not None:
            meta.append(self.wire_scales[self.sent_token].view(torch.int32))
        self.mark_arrival()
        self.recv_counts = self._exchange_counts(self.send_counts)
        self.send_splits, self.recv_splits = self.send_counts.tolist(), self.recv_counts.tolist()
        self.rows = self._exchange(self.wire[self.sent_token], self.send_splits, self.recv_splits)
        self._unpack(self._exchange(torch.cat(meta, 1), self.send_splits, self.recv_splits))

    def _unpack(self, meta: torch.Tensor) -> None:
        import torch

        topk = self.problem.topk
        self.source_token = meta[:, 0].long()
        self.local_ids = meta[:, 1 : 1 + topk].long()
        self.local_weights = meta[:, 1 + topk : 1 + 2 * topk].contiguous().view(torch.float32)
        self.scales = meta[:, 1 + 2 * topk :].contiguous().view(torch.float32)

    def _exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        import torch
        import torch.distributed as dist

        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.engine.group.pg)
        return received

    def _exchange(self, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Rows to their ranks, as bytes: gloo refuses float8."""
        import torch
        import torch.distributed as dist

        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out.view(torch.uint8), rows.view(torch.uint8), receive, send, group=self.engine.group.pg)
        return out

    # -- between dispatch and combine

    def _received_bf16(self) -> torch.Tensor:
        import torch

        assert self.rows is not None
        if self.dispatch_format != "fp8":
            return self.rows
        blocks = self.rows.float().view(*self.scales.shape, SCALE_BLOCK) * self.scales.unsqueeze(2)
        return blocks.view(self.rows.shape).to(torch.bfloat16)

    def _identity(self) -> None:
        import torch

        weighted = self._received_bf16().float() * self.local_weights.sum(1, keepdim=True)
        self.results = weighted.to(torch.bfloat16)

    def _experts(self) -> None:
        self.results = self.engine.experts(self._received_bf16(), self.local_ids, self.local_weights)

    # -- combine

    def _combine(self) -> None:
        import torch

        assert self.results is not None
        back = self._exchange(self.results, self.recv_splits, self.send_splits)
        total = torch.zeros(self.out.shape, dtype=torch.float32, device=self.out.device)
        start = 0
        for count in self.send_splits:
            # One rank's rows are distinct tokens, and ranks are added in order: the sum is deterministic.
            stop = start + count
            total.index_add_(0, self.sent_token[start:stop], back[start:stop].float())
            start = stop
        self.out.copy_(total)

    # -- for the check

    def poison(self) -> None:
        """NaN in all that is kept between calls; `results` too, unless call() combines what was staged before it."""
        import torch

        self.out.fill_(float("nan"))
        if self.rows is not None:
            self.rows.view(torch.uint8).fill_(0xFF)
        if self.kind == "moe" and self.results is not None:
            self.results.fill_(float("nan"))

    def received(self) -> Received:
        import torch

        assert self.rows is not None
        world, local, rank = self.problem.world, self.problem.local_experts, self.engine.group.rank
        sources = torch.arange(world, device=self.rows.device)
        experts = torch.where(self.local_ids >= 0, self.local_ids + rank * local, -1)
        return Received(
            rows=self.rows,
            source_rank=torch.repeat_interleave(sources, self.recv_counts.to(sources.device)),
            source_token=self.source_token,
            experts=experts,
            weights=self.local_weights,
            scales=self.scales if self.dispatch_format == "fp8" else None,
            format=self.dispatch_format,
        )

    def transport(self) -> str:
        import torch.distributed as dist

        return str(dist.get_backend(self.engine.group.pg))


class TorchEngine(Engine):
    """The group, and in section ref this rank's weights w13 [L, 2I, H] and w2 [L, H, I]: bf16, or e4m3 and scales."""

    def __init__(self, group: Group, variant: Variant, weights: tuple[Weight, Weight] | None, experts: int) -> None:
        self.group, self.variant, self.weights, self.local_experts = group, variant, weights, experts

    def bind(self, problem: Problem, inputs: Inputs) -> TorchSession:
        return TorchSession(self, problem, inputs)

    def experts(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The local experts' weighted sum of each received copy.

        rows [n, H] bf16 · ids [n, K] local expert or -1 · weights [n, K] float32. Returns [n, H] bf16.
        """
        import torch
        from torch.nn.functional import silu

        assert self.weights is not None
        w13, w2 = self.weights
        count, topk = ids.shape
        flat = ids.flatten()
        order = torch.argsort(flat, stable=True)  # by expert, -1 first
        skipped = (flat < 0).sum()
        order = order[skipped:]
        ends = torch.bincount(flat[order], minlength=self.local_experts).cumsum(0).int()
        out = torch.zeros(count, rows.shape[1], dtype=torch.float32, device=rows.device)
        if len(order) > 0:
            gate, up = self.product(rows[order // topk], w13, ends).chunk(2, 1)
            hidden = (silu(gate.float()) * up.float()).to(torch.bfloat16)
            partial = self.product(hidden, w2, ends).float() * weights.flatten()[order].unsqueeze(1)
            # Slot by slot, so that a row's terms are added in a fixed order.
            slots = torch.zeros(count * topk, rows.shape[1], dtype=torch.float32, device=rows.device)
            slots[order] = partial
            out = slots.view(count, topk, -1).sum(1)
        return out.to(torch.bfloat16)

    def product(self, rows: torch.Tensor, weight: Weight, ends: torch.Tensor) -> torch.Tensor:
        """rows [n, k] bf16 times each group's weight [L, m, k], groups ending at `ends`. Returns [n, m] bf16."""
        import torch
        from torch.nn.functional import grouped_mm

        if isinstance(weight, torch.Tensor):
            return grouped_mm(rows, weight.transpose(1, 2), offs=ends)
        from lib.formats import quantize

        values, scales = weight
        quantized = quantize("fp8_rowwise", rows)
        return torch._scaled_grouped_mm(
            quantized.values,
            values.transpose(1, 2),
            as_vector(quantized),
            scales,
            offs=ends,
            out_dtype=torch.bfloat16,
        )


def as_vector(quantized: Quantized) -> torch.Tensor:
    assert quantized.scales is not None
    return quantized.scales.flatten()


def rowwise(weight: torch.Tensor) -> Weight:
    """[L, m, k] bf16 to e4m3 with one fp32 scale a row: values [L, m, k], scales [L, m]."""
    import torch

    from lib.formats import quantize

    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(weight.shape[:2], dtype=torch.float32, device=weight.device)
    for expert in range(weight.shape[0]):
        quantized = quantize("fp8_rowwise", weight[expert])
        values[expert], scales[expert] = quantized.values, as_vector(quantized)
    return values, scales


class TorchBackend(Backend):
    """`with_experts`: section ref (dispatch, experts, combine); without: section comm (dispatch, combine).

    `fp8`: the experts multiply in e4m3 with one scale a row, by PyTorch's scaled grouped matmul; dispatch stays bf16.
    """

    family = "torch"

    def __init__(self, with_experts: bool, fp8: bool = False) -> None:
        self.with_experts, self.fp8 = with_experts, fp8
        self.name = "torch_fp8" if fp8 else "torch"

    def variants(self, knobs: Knobs) -> list[Variant]:
        dtypes = ("bf16",) if self.with_experts else knobs.dispatch_dtype
        product = "torch_scaled_grouped_mm" if self.fp8 else "torch_grouped_mm"
        kernel = product if self.with_experts else ""
        base = Variant(self.name, comm="torch", compute_kernel=kernel, combine_dtype="bf16", layout="token_major")
        return [replace(base, dispatch_dtype=dtype) for dtype in dtypes]

    def supports(self, variant: Variant, machine: Machine, problem: Problem, knobs: Knobs) -> Support:
        if self.fp8 and (machine.sm is None or machine.sm < FP8_SM):
            here = f"sm_{machine.sm[0]}{machine.sm[1]}" if machine.sm else "a CPU"
            why = unsupported(
                f"PyTorch's rowwise-scaled grouped matmul needs sm_{FP8_SM[0]}{FP8_SM[1]}, this is {here}"
            )
            return needs_packages(machine, PACKAGES, why)
        if variant.dispatch_dtype == "fp8" and problem.hidden % SCALE_BLOCK:
            why = unsupported(f"HIDDEN={problem.hidden} is not a multiple of {SCALE_BLOCK} (columns of one fp8 scale)")
            return needs_packages(machine, PACKAGES, why)
        return needs_packages(machine, PACKAGES)

    def memory_bytes(self, variant: Variant, problem: Problem) -> int:
        """Worst case of any routing: every rank's every token comes here, and with it all of its experts."""
        copies = problem.tokens * problem.world
        row_bytes = problem.hidden * BF16_BYTES
        buffers = copies * (row_bytes * 4 + problem.topk * 16)
        if not self.with_experts:
            return buffers
        selections = copies * min(problem.topk, problem.local_experts)
        activations = selections * (row_bytes + problem.inter * 2 * (BF16_BYTES + 4) + problem.hidden * 4 * 3)
        kept = 1 if self.fp8 else BF16_BYTES
        made = BF16_BYTES if self.fp8 else 0  # the bf16 weights while they are converted
        return problem.weight_bytes(kept + made) + buffers + activations

    def open(self, group: Group, variant: Variant, capacity: Problem, knobs: Knobs) -> TorchEngine:
        weights: tuple[Weight, Weight] | None = None
        if self.with_experts:
            w13, w2 = local_weights(capacity, group.rank, group.device)
            weights = (rowwise(w13), rowwise(w2)) if self.fp8 else (w13, w2)
        return TorchEngine(group, variant, weights, capacity.local_experts)
