"""Backend `deepep`: DeepEP's legacy Buffer, high-throughput (ht, NVLink) and low-latency (ll). Upstream v1.2.1's API.

Copy rules: ht sends a token once a destination rank, with its K ids and weights beside it; ll sends it once a chosen
expert, with a 16-byte header. Weights: ht's combine is a plain sum, so the identity experts staged here apply them;
ll's combine applies them itself. Dispatch blocks the host in ht (receive counts come back to the CPU) unless a cached
handle gives the layout, which is the variant `+cached`. Limits and sizes are in deepep_limits.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.backends.deepep_dequant import Dequantizer
from bench.backends.deepep_handles import ht_sources, ll_sources
from bench.backends.deepep_limits import (
    BF16_BYTES,
    DEFAULT_SMS,
    SCALE_BLOCK,
    high_throughput_reason,
    ht_buffer_bytes,
    ll_buffer_bytes,
    ll_slots,
    low_latency_reason,
)
from bench.backends.session import nvidia_reason
from lib.contract import Backend, Engine, Group, Missing, Phase, Received, Session, Support, Variant, unsupported
from lib.plan import needs_packages
from lib.problem import Inputs, Problem

if TYPE_CHECKING:
    import torch

    from lib.knobs import Knobs
    from lib.machine import Machine

PACKAGES = {"deep_ep": "DeepEP (https://github.com/deepseek-ai/DeepEP)"}


def dequantized(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """rows [..., H] e4m3 and scales [..., H/128] float32 to bf16."""
    import torch

    blocks = rows.float().unflatten(-1, (-1, SCALE_BLOCK)) * scales.unsqueeze(-1)
    return blocks.flatten(-2).to(torch.bfloat16)


class DeepEPSession(Session):
    """What both modes share: the engine's buffer, the received rows, the staged identity, the output."""

    combine_format = "bf16"
    number_format = "bf16"

    def __init__(self, engine: DeepEPEngine, problem: Problem, inputs: Inputs) -> None:
        self.engine, self.problem, self.inputs = engine, problem, inputs
        self.buffer = engine.buffer
        self.dispatch_format = engine.variant.dispatch_dtype
        self.rows: torch.Tensor | None = None
        self.scales: torch.Tensor | None = None
        self.staged: torch.Tensor | None = None
        self.out: torch.Tensor | None = None

    def call(self) -> None:
        self._dispatch()
        self._combine()

    def _dispatch(self) -> None:
        raise NotImplementedError

    def _combine(self) -> None:
        raise NotImplementedError

    def output(self) -> torch.Tensor:
        assert self.out is not None
        return self.out

    def _keep(self, received: Any) -> None:
        """DeepEP gives rows, or rows and scales."""
        self.rows, self.scales = received if isinstance(received, tuple) else (received, None)

    def poison(self) -> None:
        """DeepEP allocates its results itself: what is still held of them here is overwritten."""
        import torch

        if self.rows is not None:
            self.rows.view(torch.uint8).fill_(0xFF)
        if self.out is not None:
            self.out.fill_(float("nan"))

    def transport(self) -> str:
        return "nvlink" if self.problem.world > 1 else "local"

    def versions(self) -> dict[str, str]:
        return {"deep_ep": self.engine.version}

    def close(self) -> None:
        # `phases` refers back to self, so without this the tensors would stay until a garbage collection
        self.rows = self.scales = self.staged = None


class HighThroughputSession(DeepEPSession):
    """get_dispatch_layout + dispatch, or dispatch with a cached handle; then combine, a plain sum."""

    deterministic = True
    kernels = {"dispatch": [r"layout", r"dispatch"], "combine": [r"combine"]}  # noqa: RUF012 - a constant of the class

    def __init__(self, engine: DeepEPEngine, problem: Problem, inputs: Inputs) -> None:
        super().__init__(engine, problem, inputs)
        self.cached = engine.variant.handle == "cached"
        self.capturable = "" if self.cached else "dispatch waits on the host for the receive counts"
        self.payload: Any = inputs.x
        stage = Phase("identity", self._identity, timed=False)
        dispatch = Phase("dispatch", self._dispatch, blocks_host=not self.cached)
        self.phases = [dispatch, stage, Phase("combine", self._combine)]
        if self.dispatch_format == "fp8":
            self.phases.insert(0, Phase("quantize", self._quantize, timed=False))
            self.quant_included = False
            self._quantize()
        self.cached_handle: Any = None
        self._dispatch_fresh()
        self.cached_handle = self.handle

    def _quantize(self) -> None:
        from lib.formats import quantize

        quantized = quantize("fp8", self.inputs.x)
        if isinstance(self.payload, tuple):
            # in place: a captured graph reads the tensors that it was captured with
            self.payload[0].copy_(quantized.values)
            self.payload[1].copy_(quantized.scales)
        else:
            self.payload = (quantized.values, quantized.scales)

    def _dispatch(self) -> None:
        if not self.cached:
            self._dispatch_fresh()
            return
        config = self.engine.dispatch_config
        self.mark_arrival()
        received = self.buffer.dispatch(self.payload, handle=self.cached_handle, config=config)
        self._keep(received[0])

    def _dispatch_fresh(self) -> None:
        ids, weights = self.inputs.topk_idx, self.inputs.topk_weights
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(ids, self.problem.num_experts)
        self.mark_arrival()  # the layout is this rank's own kernel; it waits for nobody
        received, self.recv_ids, self.recv_weights, _, self.handle, _ = self.buffer.dispatch(
            self.payload,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
            config=self.engine.dispatch_config,
        )
        self._keep(received)

    def _identity(self) -> None:
        import torch

        mine = torch.where(self.recv_ids >= 0, self.recv_weights, 0.0).sum(1, keepdim=True)
        assert self.rows is not None
        rows = self.rows if self.scales is None else dequantized(self.rows, self.scales)
        weighted = (rows.float() * mine).to(torch.bfloat16)
        if self.staged is None or self.staged.shape != weighted.shape:
            self.staged = weighted
        else:
            self.staged.copy_(weighted)

    def _combine(self) -> None:
        if self.staged is None:
            self._identity()
        handle = self.cached_handle if self.cached else self.handle
        self.out, _, _ = self.buffer.combine(self.staged, handle, config=self.engine.combine_config)

    def received(self) -> Received:
        import torch

        assert self.rows is not None
        rank, local = self.engine.group.rank, self.problem.local_experts
        source_rank, source_token = ht_sources(self.handle, rank)
        return Received(
            rows=self.rows,
            source_rank=source_rank,
            source_token=source_token,
            experts=torch.where(self.recv_ids >= 0, self.recv_ids + rank * local, -1),
            weights=torch.where(self.recv_ids >= 0, self.recv_weights, 0.0),
            scales=self.scales,
            format=self.dispatch_format,
        )


class LowLatencySession(DeepEPSession):
    """low_latency_dispatch and low_latency_combine, no hooks. Slots are an expert's; combine applies the weights."""

    capturable = ""
    # the weighted sum over experts is added in the order of the token's own top-k slots
    deterministic = True
    kernels = {  # noqa: RUF012 - a constant of the class
        "dispatch": [r"::dispatch<"],
        "combine": [r"::combine<"],
        "staging": [r"dequantize_used_slots", r"at::native"],
    }

    def __init__(self, engine: DeepEPEngine, problem: Problem, inputs: Inputs) -> None:
        import torch

        super().__init__(engine, problem, inputs)
        self.max_tokens = ll_slots(problem)
        self.buffer.clean_low_latency_buffer(self.max_tokens, problem.hidden, problem.num_experts)
        self.out = inputs.x.new_zeros(inputs.x.shape)
        self.phases = [Phase("dispatch", self._dispatch), Phase("combine", self._combine)]
        if self.dispatch_format == "fp8":
            # Slots are handed out by atomics, anew in each dispatch: what combine gets has to come from this one.
            self.phases.insert(1, Phase("dequantize", self._dequantize, timed=False))
            self.staging_included = self.quant_included = True
            self._dispatch()
            assert self.rows is not None
            assert self.scales is not None
            self.staged = torch.zeros(self.rows.shape, dtype=torch.bfloat16, device=self.rows.device)
            self.dequantizer = Dequantizer(self.rows, self.scales, self.counts, self.staged)

    def _dispatch(self) -> None:
        self.mark_arrival()
        received, self.counts, self.handle, _, _ = self.buffer.low_latency_dispatch(
            self.inputs.x,
            self.inputs.topk_idx,
            self.max_tokens,
            self.problem.num_experts,
            use_fp8=self.dispatch_format == "fp8",
        )
        self._keep(received)

    def call(self) -> None:
        self._dispatch()
        if self.staging_included:
            self._dequantize()
        self._combine()

    def _dequantize(self) -> None:
        """The slots that are in use, to bf16, into a buffer of the shape that combine takes."""
        assert self.rows is not None
        assert self.scales is not None
        assert self.staged is not None
        self.dequantizer(self.rows, self.scales, self.counts, self.staged)

    def weighed_rows(self) -> torch.Tensor | None:
        return self.staged if self.dispatch_format == "fp8" else self.rows

    def _combine(self) -> None:
        ids, weights = self.inputs.topk_idx, self.inputs.topk_weights
        self.buffer.low_latency_combine(self.weighed_rows(), ids, weights, self.handle, out=self.out)

    def versions(self) -> dict[str, str]:
        found = super().versions()
        return found | {"dequantize": self.dequantizer.made_by} if self.staging_included else found

    def received(self) -> Received:
        assert self.rows is not None
        expert, position, rank, token = ll_sources(self.handle, self.rows.shape[1])
        return Received(
            rows=self.rows[expert, position],
            source_rank=rank,
            source_token=token,
            experts=(expert + self.engine.group.rank * self.problem.local_experts).unsqueeze(1),
            weights=None,
            scales=None if self.scales is None else self.scales[expert, position].contiguous(),
            format=self.dispatch_format,
        )


class DeepEPEngine(Engine):
    """The Buffer of one mode. ht and ll never share one: cleaning ll's buffer after ht traffic is the user's burden."""

    def __init__(self, group: Group, variant: Variant, capacity: Problem) -> None:
        try:
            import deep_ep
        except ImportError as error:
            raise Missing(f"deep_ep does not import: {error}") from error
        self.group, self.variant = group, variant
        self.version = str(getattr(deep_ep, "__version__", "")) or package_version()
        if variant.algo == "ll":
            size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
                ll_slots(capacity), capacity.hidden, group.world, capacity.num_experts
            )
            self.buffer = deep_ep.Buffer(
                group.pg,
                num_nvl_bytes=0,
                num_rdma_bytes=size,
                low_latency_mode=True,
                num_qps_per_rank=capacity.local_experts,
                explicitly_destroy=True,
            )
            return
        deep_ep.Buffer.set_num_sms(variant.num_sms or DEFAULT_SMS)
        size = ht_buffer_bytes(capacity, variant.num_sms)
        self.buffer = deep_ep.Buffer(group.pg, num_nvl_bytes=size, num_rdma_bytes=0, explicitly_destroy=True)
        self.dispatch_config = deep_ep.Buffer.get_dispatch_config(group.world)
        self.combine_config = deep_ep.Buffer.get_combine_config(group.world)

    def bind(self, problem: Problem, inputs: Inputs) -> DeepEPSession:
        kind = LowLatencySession if self.variant.algo == "ll" else HighThroughputSession
        return kind(self, problem, inputs)

    def close(self) -> None:
        self.buffer.destroy()


def package_version() -> str:
    """DeepEP's wheels come under several names; the module's distribution tells which one is loaded."""
    import importlib.metadata

    names = importlib.metadata.packages_distributions().get("deep_ep", [])
    return f"{names[0]} {importlib.metadata.version(names[0])}" if names else "unknown"


class DeepEPBackend(Backend):
    name = "deepep"
    family = "deepep"

    def variants(self, knobs: Knobs) -> list[Variant]:
        found = []
        for algo in knobs.algos:
            for dtype in knobs.dispatch_dtype:
                base = Variant(f"deepep_{algo}", "deepep", algo=algo, dispatch_dtype=dtype, combine_dtype="bf16")
                if algo == "ll":
                    found.append(replace(base, layout="expert_major"))
                    continue
                for sms in knobs.num_sms:
                    fresh = replace(base, layout="token_major", num_sms=sms)
                    found += [fresh, replace(fresh, name="deepep_ht+cached", handle="cached")]
        return found

    def supports(self, variant: Variant, machine: Machine, problem: Problem, knobs: Knobs) -> Support:
        return needs_packages(machine, PACKAGES, self._verdict(variant, machine, problem))

    def _verdict(self, variant: Variant, machine: Machine, problem: Problem) -> Support:
        if reason := nvidia_reason(machine):
            return unsupported(reason)
        if problem.nodes > 1:
            return unsupported(f"this adapter's buffers are those of one node, this run has {problem.nodes}")
        reason = low_latency_reason(problem) if variant.algo == "ll" else high_throughput_reason(variant, problem)
        return unsupported(reason) if reason else Support()

    def memory_bytes(self, variant: Variant, problem: Problem) -> int:
        row = problem.hidden * BF16_BYTES
        if variant.algo == "ll":
            slots = problem.local_experts * problem.world * ll_slots(problem)
            # received rows twice (at most two dispatch results are alive), and staged ones in fp8
            return ll_buffer_bytes(problem) + slots * row * 3
        return ht_buffer_bytes(problem, variant.num_sms) + problem.tokens * problem.world * row * 4

    def open(self, group: Group, variant: Variant, capacity: Problem, knobs: Knobs) -> DeepEPEngine:
        return DeepEPEngine(group, variant, capacity)
