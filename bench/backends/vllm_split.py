"""Backends `deepgemm`, `triton`, `trtllm`: DeepEP's dispatch and combine around vLLM's experts, by its modular kernel.

`call` is the kernel's public `apply`. The staged phases are the three private steps that `apply` takes in turn
(_prepare, _fused_experts, _finalize); their sum differs from the total by the clock reads between them and, where the
host is the limit, by its time there. Copy rules and weights: as DeepEP's mode, ht's after the experts have weighed and
reduced each rank's part, ll's in combine.

Input quantisation: in ht vLLM quantises on the token's own rank before dispatch, through a name of its module, which
is where EXCLUDE_QUANT=1 and the staged phases step in. In ll it is fused in DeepEP's dispatch kernel and stays in.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from bench.backends import vllm_layer
from bench.backends.deepep import package_version as deep_ep_version
from bench.backends.deepep_handles import ht_sources, ll_sources
from bench.backends.deepep_limits import DEFAULT_SMS, SCALE_BLOCK, ht_buffer_bytes
from bench.backends.vllm_limits import set_environment, split_memory_bytes, split_slots, split_verdict
from lib.contract import Backend, Engine, Group, Missing, Phase, Received, Session, Support, Variant
from lib.machine import package_version
from lib.problem import Inputs, Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from lib.knobs import Knobs
    from lib.machine import Machine

LL_TRTLLM = "ALGO=ll delivers batched experts, which trtllm does not take"
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
        # `phases` and the patched step refer back to this session: without this its tensors would stay a while
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


class SplitEngine(Engine):
    """DeepEP's Buffer of one mode, this rank's weights in the experts' format, and vLLM's process-wide pieces."""

    def __init__(self, group: Group, variant: Variant, experts: str, capacity: Problem, knobs: Knobs) -> None:
        self.group, self.variant, self.experts = group, variant, experts
        self.algo, self.exclude_quant = variant.algo, knobs.exclude_quant
        power_of_two = wants_power_of_two_scales(experts, group.device)
        self.operand_format = "fp8_e8m0" if power_of_two else "fp8"
        environment = set_environment(power_of_two)
        deep_ep = import_deep_ep()
        self.buffer = make_buffer(deep_ep, group, capacity, self.algo)
        self.versions = vllm_layer.loaded_versions() | {"deep_ep": deep_ep_version()} | environment
        if experts == "deepgemm" and "deep_gemm" not in self.versions:
            raise Missing("vLLM finds no DeepGEMM: neither its own copy nor an installed one imports")
        if experts == "trtllm":
            self.versions["flashinfer"] = package_version("flashinfer-python")
        vllm_layer.attribute("vllm.v1.worker.workspace:init_workspace_manager")(group.device)
        self.silu = vllm_layer.silu()
        # ll's batched experts need no map: DeepEP sorted by local expert already
        self.expert_map = vllm_layer.expert_map(capacity, group) if self.algo == "ht" else None
        self.quantisation: InputQuantisation | None = None
        if self.algo == "ht":
            self.quantisation = InputQuantisation(sys.modules[vllm_layer.attribute(vllm_layer.HT_CLASS).__module__])
        else:
            self.vllm_config = vllm_layer.make_vllm_config(group)
        self._make_weights(capacity, power_of_two)

    def _make_weights(self, capacity: Problem, power_of_two: bool) -> None:
        block = "fp8_block_e8m0" if power_of_two else "fp8_block"
        made = vllm_layer.quantized_weights(capacity, self.group.rank, self.group.device, block)
        config = vllm_layer.moe_config(capacity, self.group, self.algo, split_slots(capacity))
        self.weights = vllm_layer.for_kernel(made, self.experts, power_of_two, config)
        self.quant_config = vllm_layer.quant_config(self.weights)

    def kernel_for(self, problem: Problem) -> Any:
        """A kernel of this point's own capacity, so that a sweep's row is the row of a run of one point."""
        return vllm_layer.modular_kernel(
            problem, self.group, self.algo, self.experts, split_slots(problem), self.buffer, self.weights
        )

    def bind(self, problem: Problem, inputs: Inputs) -> SplitSession:
        kind: Callable[..., SplitSession] = LowLatencySession if self.algo == "ll" else HighThroughputSession
        session = kind(self, problem, inputs)
        first_run(session, self.group)
        return session

    def close(self) -> None:
        if self.quantisation is not None:
            self.quantisation.close()
        vllm_layer.attribute("vllm.v1.worker.workspace:reset_workspace_manager")()
        self.buffer.destroy()


def wants_power_of_two_scales(experts: str, device: torch.device) -> bool:
    """On sm_10x DeepGEMM multiplies with packed power-of-two scales; on sm_90 fp32 scales cost nothing and are exact.

    vLLM's own default is power-of-two on both: a server on sm_90 rounds its scales up, which changes no kernel there.
    """
    import torch

    if device.type != "cuda" or experts != "deepgemm":
        return False
    return torch.cuda.get_device_capability(device)[0] == 10


def import_deep_ep() -> Any:
    import torch  # noqa: F401 - DeepEP's extension needs torch's libraries loaded

    try:
        import deep_ep
    except ImportError as error:
        raise Missing(f"deep_ep does not import: {error}") from error
    return deep_ep


def make_buffer(deep_ep: Any, group: Group, capacity: Problem, algo: str) -> Any:
    """The Buffer as vLLM's all2all managers make it on one node, without the NVLink bytes that ll does not use."""
    if algo == "ht":
        deep_ep.Buffer.set_num_sms(DEFAULT_SMS)
        size = ht_buffer_bytes(capacity, None)
        return deep_ep.Buffer(
            group.pg, num_nvl_bytes=size, num_rdma_bytes=0, num_qps_per_rank=1, explicitly_destroy=True
        )
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        split_slots(capacity), capacity.hidden, group.world, capacity.num_experts
    )
    return deep_ep.Buffer(
        group.pg,
        num_nvl_bytes=0,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=capacity.local_experts,
        allow_nvlink_for_low_latency_mode=True,
        explicitly_destroy=True,
    )


class SplitBackend(Backend):
    """One kind of experts; ALGO chooses DeepEP's mode."""

    family = "vllm"

    def __init__(self, experts: str) -> None:
        self.name = experts

    def variants(self, knobs: Knobs) -> list[Variant]:
        layouts = {"ht": "token_major", "ll": "expert_major"}
        found = []
        for algo in knobs.algos:
            refused = (algo, self.name) == ("ll", "trtllm")
            options = (("unsupported", LL_TRTLLM),) if refused else ()
            name = f"deepep_{algo}+{self.name}"
            layout = layouts[algo]
            found.append(Variant(name, "deepep", self.name, algo, "fp8", "bf16", layout=layout, options=options))
        return found

    def supports(self, variant: Variant, machine: Machine, problem: Problem, knobs: Knobs) -> Support:
        return split_verdict(self.name, variant, machine, problem)

    def memory_bytes(self, variant: Variant, problem: Problem) -> int:
        return split_memory_bytes(self.name, variant, problem)

    def open(self, group: Group, variant: Variant, capacity: Problem, knobs: Knobs) -> SplitEngine:
        return SplitEngine(group, variant, self.name, capacity, knobs)
