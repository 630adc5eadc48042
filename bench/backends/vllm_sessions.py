"""Sessions of vllm_split: one point through vLLM's modular kernel, in DeepEP's ht or ll mode.

`call` is the kernel's public `apply`. The staged phases are the three private steps that `apply` takes in turn
(_prepare, _fused_experts, _finalize); their sum differs from the total by the clock reads between them and, where the
host is the limit, by its time there.

Input quantisation: in ht vLLM quantises on the token's own rank before dispatch, through a name of its module, which
is where EXCLUDE_QUANT=1 and the staged phases step in. In ll it is fused in DeepEP's dispatch kernel and stays in.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from bench.backends import vllm_layer
from bench.backends.deepep_handles import ht_sources, ll_sources
from bench.backends.deepep_limits import SCALE_BLOCK
from bench.backends.vllm_limits import split_slots
from lib.contract import Group, Missing, Phase, Received, Session
from lib.problem import Inputs, Problem
from lib.provenance import package_version

if TYPE_CHECKING:
    import torch

    from bench.backends.vllm_split import SplitEngine

EXPERTS_PHASE = "experts"


def settle(group: Group) -> None:
    """Every rank is here and its device idle, so that no kernel waits for a peer that is still compiling."""
    import torch
    import torch.distributed as dist

    if group.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier(group=group.host_pg)


def first_run(session: Session, group: Group) -> None:
    """Each phase once with the timed inputs: the experts compile between two meetings of the host, leaders first.

    In one go a rank that compiles for seconds would leave its peers in DeepEP's combine, which gives up after 100 s;
    the leader's kernels are in the cache when the others of its node look for them.
    """
    for phase in session.phases:
        if phase.name == EXPERTS_PHASE and group.local_rank == 0:
            phase.fn()
        settle(group)
        if phase.name != EXPERTS_PHASE or group.local_rank != 0:
            phase.fn()
        settle(group)


class InputQuantisation:
    """Stands where vLLM's ht module looks up its input quantisation: the library's own, or a pair made before.

    A pair: values [T, H] e4m3 and scales [T, H/128] fp32.
    """

    name = "moe_kernel_quantize_input"

    def __init__(self, module: Any) -> None:
        if not hasattr(module, self.name):
            raise Missing(f"vLLM {package_version('vllm')}: {module.__name__} has no {self.name} to step in for")
        self.module, self.library = module, getattr(module, self.name)
        self.ready: Any = None
        setattr(module, self.name, self)

    def __call__(self, rows: torch.Tensor, *args: Any, **named: Any) -> Any:
        return self.quantise(rows, *args, **named) if self.ready is None else self.ready

    def quantise(self, rows: torch.Tensor, *args: Any, **named: Any) -> Any:
        """The library's; a rank without tokens launches nothing (in serving an idle rank has one dummy token)."""
        import torch

        if rows.shape[0] == 0:
            scales = rows.new_empty(0, rows.shape[1] // SCALE_BLOCK, dtype=torch.float32)
            return rows.new_empty(rows.shape, dtype=torch.float8_e4m3fn), scales
        return self.library(rows, *args, **named)

    def close(self) -> None:
        setattr(self.module, self.name, self.library)


class SplitSession(Session):
    """What both modes share: the kernel bound to this point, its arguments, what its last dispatch brought."""

    kind = "moe"
    dispatch_format = "fp8"
    combine_format = "bf16"
    # Rows are placed by atomics in both modes; that each row's arithmetic is the same wherever it lies is likely, and
    # not shown. The output is compared within the format's limits.
    deterministic = False
    kernels = {  # noqa: RUF012 - a constant of the class
        "dispatch": [r"deep_ep::.*(dispatch|layout)"],
        "combine": [r"deep_ep::.*combine"],
        "quant": [r"^(?!.*(silu|act_and_mul)).*per_token_group_quant"],
        "experts": [""],  # whatever else runs in a call is the experts': vLLM's, DeepGEMM's, Triton's, PyTorch's
    }

    def __init__(self, engine: SplitEngine, problem: Problem, inputs: Inputs) -> None:
        self.engine, self.problem, self.inputs = engine, problem, inputs
        self.number_format = engine.operand_format
        self.kernel = engine.kernel_for(problem)
        self.impl = self.kernel.impl
        self.library_prepare = self.impl._prepare
        self.impl._prepare = self._prepare  # apply calls it by this name: what dispatch brought is shown to the check
        self.prepared: Any = None  # (rows, scales, counts, ids, weights)
        self.fused: torch.Tensor | None = None
        self.out: torch.Tensor | None = None
        weights = engine.weights
        self.arguments = {
            "hidden_states": inputs.x,
            "w1": weights.w13,
            "w2": weights.w2,
            "topk_weights": inputs.topk_weights,
            "topk_ids": inputs.topk_idx,
            "activation": engine.silu,
            "global_num_experts": problem.num_experts,
            "expert_map": engine.expert_map,
            "apply_router_weight_on_input": False,
        }
        self.finalize_extras = vllm_layer.known_arguments(
            self.impl._finalize, {"shared_experts": None, "shared_experts_input": None}
        )
        self.phases = self._phases()

    def _phases(self) -> list[Phase]:
        raise NotImplementedError

    def _prepare(self, *args: Any, **named: Any) -> Any:
        self.prepared = self.library_prepare(*args, **named)
        return self.prepared

    def call(self) -> None:
        self.out = self.kernel.apply(**self.arguments)

    def _dispatch(self) -> None:
        self.mark_arrival()
        inputs = self.inputs
        self.impl._prepare(
            inputs.x, inputs.topk_weights, inputs.topk_idx, self.problem.num_experts, self.engine.expert_map, False
        )

    def _experts(self) -> None:
        rows, scales, counts, ids, weights = self.prepared
        self.fused = self.impl._fused_experts(
            in_dtype=self.inputs.x.dtype,
            a1q=rows,
            a1q_scale=scales,
            w1=self.engine.weights.w13,
            w2=self.engine.weights.w2,
            topk_weights=weights,
            topk_ids=ids,
            activation=self.engine.silu,
            global_num_experts=self.problem.num_experts,
            local_num_experts=self.problem.local_experts,
            expert_map=self.engine.expert_map,
            apply_router_weight_on_input=False,
            expert_tokens_meta=counts,
        )

    def _combine(self) -> None:
        import torch

        _, _, _, ids, weights = self.prepared
        self.out = self.impl._finalize(
            output=torch.empty_like(self.inputs.x),
            fused_out=self.fused,
            hidden_states=self.inputs.x,
            topk_weights=weights,
            topk_ids=ids,
            apply_router_weight_on_input=False,
            **self.finalize_extras,
        )

    def output(self) -> torch.Tensor:
        assert self.out is not None
        return self.out

    def poison(self) -> None:
        import torch

        if self.prepared is not None:
            self.prepared[0].view(torch.uint8).fill_(0xFF)
        if self.out is not None:
            self.out.fill_(float("nan"))

    def _handle(self) -> Any:
        """DeepEP's, of the last dispatch: vLLM keeps one for each of two micro-batches, and there is one here."""
        return self.kernel.prepare_finalize.handles[0]

    def transport(self) -> str:
        return "nvlink" if self.problem.world > 1 else "local"

    def versions(self) -> dict[str, str]:
        return self.engine.versions

    def close(self) -> None:
        # `phases` and the patched step refer back to self: without this the tensors would stay a while
        self.impl._prepare = self.library_prepare
        self.prepared = self.fused = None


class HighThroughputSession(SplitSession):
    """Quantisation, then ht's exchange of (token, rank) copies, contiguous experts, ht's combine as a plain sum."""

    capturable = "dispatch waits on the host for the receive counts"

    def __init__(self, engine: SplitEngine, problem: Problem, inputs: Inputs) -> None:
        self.excluded = engine.exclude_quant
        self.quant_included = not self.excluded
        self.quantised: Any = None
        assert engine.quantisation is not None
        self.quantisation = engine.quantisation
        super().__init__(engine, problem, inputs)

    def _phases(self) -> list[Phase]:
        quantise = Phase("quant", self._quantise, timed=not self.excluded)
        dispatch = Phase("dispatch", self._dispatch, blocks_host=True)
        return [quantise, dispatch, Phase(EXPERTS_PHASE, self._experts), Phase("combine", self._combine)]

    def _quantise(self) -> None:
        config = self.engine.quant_config
        self.quantised = self.quantisation.quantise(
            self.inputs.x,
            config.a1_scale,
            quant_dtype=config.quant_dtype,
            per_act_token_quant=config.per_act_token_quant,
            block_shape=config.block_shape,
        )

    def call(self) -> None:
        self.quantisation.ready = self.quantised if self.excluded else None
        super().call()

    def _dispatch(self) -> None:
        self.quantisation.ready = self.quantised
        super()._dispatch()

    def received(self) -> Received:
        """vLLM numbers experts globally, and puts one of another rank where DeepEP has -1."""
        import torch

        rows, scales, _, ids, weights = self.prepared
        rank, local = self.engine.group.rank, self.problem.local_experts
        mine = (ids >= rank * local) & (ids < (rank + 1) * local)
        source_rank, source_token = ht_sources(self._handle(), rank)
        return Received(
            rows=rows,
            source_rank=source_rank,
            source_token=source_token,
            experts=torch.where(mine, ids, -1),
            weights=torch.where(mine, weights, 0.0),
            scales=scales,
            format=self.dispatch_format,
        )

    def close(self) -> None:
        super().close()
        self.quantisation.ready = self.quantised = None


class LowLatencySession(SplitSession):
    """ll's dispatch, which quantises, into an expert's slots; batched experts; ll's combine, which weighs."""

    capturable = ""
    quant_included = True

    def __init__(self, engine: SplitEngine, problem: Problem, inputs: Inputs) -> None:
        super().__init__(engine, problem, inputs)
        self.slots = split_slots(problem)
        engine.buffer.clean_low_latency_buffer(self.slots, problem.hidden, problem.num_experts)
        # in place for the session's life, as serving has it around a whole step
        self.context = contextlib.ExitStack()
        self.context.enter_context(
            vllm_layer.ll_context(engine.vllm_config, engine.group, tokens_of_ranks(engine.group, inputs))
        )

    def _phases(self) -> list[Phase]:
        # eagerly the batched Triton experts read each expert's count on the host to quantise between their products
        reads_counts = self.engine.experts == "triton"
        experts = Phase(EXPERTS_PHASE, self._experts, blocks_host=reads_counts)
        return [Phase("dispatch", self._dispatch), experts, Phase("combine", self._combine)]

    def received(self) -> Received:
        rows, scales, _, _, _ = self.prepared
        expert, position, source_rank, source_token = ll_sources(self._handle(), rows.shape[1])
        return Received(
            rows=rows[expert, position],
            source_rank=source_rank,
            source_token=source_token,
            experts=(expert + self.engine.group.rank * self.problem.local_experts).unsqueeze(1),
            weights=None,
            scales=unpacked_scales(scales)[expert, position].contiguous(),
            format=self.dispatch_format,
        )

    def close(self) -> None:
        self.context.close()
        super().close()


def tokens_of_ranks(group: Group, inputs: Inputs) -> list[int]:
    import torch.distributed as dist

    counts: list[Any] = [None] * group.world
    dist.all_gather_object(counts, inputs.x.shape[0], group=group.host_pg)
    return [int(count) for count in counts]


def unpacked_scales(scales: torch.Tensor) -> torch.Tensor:
    """fp32 scales [L, slots, H/128] of ll's: those of sm_10x are exponents, four an int32, the first lowest."""
    import torch

    if scales.dtype != torch.int32:
        return scales
    exponents = torch.stack([(scales >> shift) & 0xFF for shift in (0, 8, 16, 24)], dim=-1)
    return (exponents.flatten(-2) << 23).view(torch.float32)
