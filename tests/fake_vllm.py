"""A `vllm` for machines without a GPU: its modular MoE kernel over the fake DeepEP Buffer, on CPU tensors.

Signatures, and the fields of its dataclasses, are those recorded from the wheels of three versions (tests/signatures):
what a version would refuse is refused here, and what it names differently is named so here. The arithmetic is that of
a right block-fp8 kernel, computed token by token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from lib import formats
from tests import fake_vllm_mega
from tests.fake_vllm_experts import (
    BLOCK,
    E8M0,
    Experts,
    Fp8MoeBackend,
    MoEActivation,
    RoutingMethodType,
    State,
    of_activations,
)
from tests.recorded import recorded_api

VERSIONS = ("0.20.0", "0.25.1", "0.33.0")
FM = "vllm.model_executor.layers.fused_moe"
HT_MODULE, LL_MODULE = f"{FM}.prepare_finalize.deepep_ht", f"{FM}.prepare_finalize.deepep_ll"
FP8_UTILS = "vllm.model_executor.layers.quantization.utils.fp8_utils"


# -- prepare and finalize


class HighThroughput:
    def __init__(self, buffer: Any, num_dispatchers: int, dp_size: int, rank_expert_offset: int) -> None:
        assert num_dispatchers == dp_size
        self.buffer, self.world, self.offset = buffer, num_dispatchers, rank_expert_offset
        self.handles: list[Any] = [None, None]

    def prepare(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: int, quant: Any) -> Any:
        quantise = sys.modules[HT_MODULE].moe_kernel_quantize_input  # type: ignore[attr-defined]
        pair = quantise(x, quant.a1_scale, quant_dtype=quant.quant_dtype, per_act_token_quant=False, block_shape=BLOCK)
        config = type(self.buffer).get_dispatch_config(self.world)
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(topk_idx=ids, num_experts=experts)
        (rows, scales), got_ids, got_weights, counts, handle, _ = self.buffer.dispatch(
            x=pair,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
            config=config,
        )
        self.handles[0] = handle
        elsewhere = experts - 1 if self.offset == 0 else 0
        return rows, scales, counts, torch.where(got_ids < 0, elsewhere, got_ids + self.offset), got_weights

    def finalize(self, output: torch.Tensor, fused: torch.Tensor, weights: Any, ids: Any) -> None:
        config = type(self.buffer).get_combine_config(self.world)
        output.copy_(self.buffer.combine(x=fused, handle=self.handles[0], config=config)[0])


class LowLatency:
    def __init__(self, buffer: Any, max_tokens_per_rank: int, num_dispatchers: int, use_fp8_dispatch: bool) -> None:
        assert use_fp8_dispatch
        self.buffer, self.limit = buffer, max_tokens_per_rank
        self.handles: list[Any] = [None, None]

    def prepare(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: int, quant: Any) -> Any:
        received, counts, handle, _, _ = self.buffer.low_latency_dispatch(x, ids, self.limit, experts, use_fp8=True)
        self.handles[0] = handle
        return *received, counts, ids, weights

    def finalize(self, output: torch.Tensor, fused: torch.Tensor, weights: Any, ids: Any) -> None:
        self.buffer.low_latency_combine(fused, ids, weights, self.handles[0], out=output)


# -- the kernel


class ModularImpl:
    def __init__(self, prepare_finalize: Any, fused_experts: Any) -> None:
        self.prepare_finalize, self.fused_experts = prepare_finalize, fused_experts

    def apply(self, **given: Any) -> torch.Tensor:
        """Positional and by keyword as vLLM calls its own steps: a patched one has to take both."""
        x, names = given["hidden_states"], ("w1", "w2", "activation", "global_num_experts", "expert_map")
        weigh = given["apply_router_weight_on_input"]
        rows, scales, meta, ids, weights = self._prepare(
            x, given["topk_weights"], given["topk_ids"], given["global_num_experts"], given["expert_map"], weigh
        )
        fused = self._fused_experts(
            in_dtype=x.dtype,
            a1q=rows,
            a1q_scale=scales,
            topk_weights=weights,
            topk_ids=ids,
            local_num_experts=given["w1"].shape[0],
            apply_router_weight_on_input=weigh,
            expert_tokens_meta=meta,
            **{name: given[name] for name in names},
        )
        extras = {"shared_experts_input": None} | ({} if self.old else {"shared_experts": None})
        return self._finalize(torch.empty_like(x), fused, x, weights, ids, weigh, **extras)

    old = False  # 0.20's _finalize has no shared_experts

    def _prepare(self, **given: Any) -> Any:
        assert not given["apply_router_weight_on_input"]
        x, ids = given["hidden_states"], given["topk_ids"]
        assert (ids.dtype, given["topk_weights"].dtype) == (torch.int64, torch.float32)
        experts = given["global_num_experts"]
        return self.prepare_finalize.prepare(x, given["topk_weights"], ids, experts, self.fused_experts.quant_config)

    def _fused_experts(self, **given: Any) -> torch.Tensor:
        rows = given["a1q"]
        if rows.shape[0] == 0:
            return torch.empty_like(rows, dtype=given["in_dtype"])
        assert given["activation"] is MoEActivation.SILU
        return self.fused_experts.apply(rows, given["a1q_scale"], **given)

    def _finalize(self, **given: Any) -> torch.Tensor:
        output = given["output"]
        self.prepare_finalize.finalize(output, given["fused_out"], given["topk_weights"], given["topk_ids"])
        return output


def kernel_class(state: State) -> Any:
    impl = type("FusedMoEKernelModularImpl", (ModularImpl,), {"old": state.version == "0.20.0"})
    for name in ("_prepare", "_fused_experts", "_finalize"):
        path = f"{FM}.modular_kernel:FusedMoEKernelModularImpl.{name}"
        setattr(impl, name, state.method(path, getattr(ModularImpl, name)))

    class FusedMoEKernel:
        def __init__(self, prepare_finalize: Any, fused_experts: Any) -> None:
            batched = isinstance(prepare_finalize, LowLatency)
            assert fused_experts.batched == batched, "activation formats differ"
            self.impl, self.prepare_finalize = impl(prepare_finalize, fused_experts), prepare_finalize

        def apply(self, **given: Any) -> torch.Tensor:
            made: torch.Tensor = self.impl.apply(**given)
            return made

    enforce(state, FusedMoEKernel, f"{FM}.modular_kernel:FusedMoEKernel", "apply")
    return FusedMoEKernel


def enforce(state: State, made: Any, path: str, *methods: str) -> Any:
    """The constructor, and these methods, bind to their record."""
    made.__init__ = state.method(path, made.__init__)
    for name in methods:
        setattr(made, name, state.method(f"{path}.{name}", getattr(made, name)))
    return made


# -- functions and configs


def config_class(state: State, name: str) -> Any:
    """A dataclass of the fields that this version has."""
    fields: list[Any] = []
    for parameter in state.signatures[f"{FM}.config:{name}"].parameters.values():
        plain = (parameter.name, Any)
        has_default = parameter.default is not parameter.empty
        fields.append((*plain, dataclasses.field(default=parameter.default)) if has_default else plain)
    return dataclasses.make_dataclass(name, fields)


def quant_config(w1_scale: torch.Tensor, w2_scale: torch.Tensor, block_shape: list[int]) -> Any:
    scales = {"a1_scale": None, "w1_scale": w1_scale, "w2_scale": w2_scale}
    dtype = torch.float8_e4m3fn
    return SimpleNamespace(quant_dtype=dtype, per_act_token_quant=False, block_shape=block_shape, **scales)


def quantize_input(
    A: torch.Tensor,  # noqa: N803 - the library's names
    A_scale: Any,  # noqa: N803
    quant_dtype: torch.dtype,
    per_act_token_quant: bool,
    block_shape: list[int],
) -> Any:
    assert A.shape[0] > 0, "a grid of no blocks can't be launched"
    assert (A_scale, quant_dtype, per_act_token_quant, block_shape) == (None, torch.float8_e4m3fn, False, BLOCK)
    quantized = formats.quantize(of_activations(), A)
    return quantized.values, quantized.scales


def for_deepgemm(w13: Any, w2: Any, w13_scale: Any, w2_scale: Any, block_shape: tuple[int, int]) -> tuple[Any, ...]:
    """Scales that are powers of two already stay what they are; others would be rounded up here, in place."""
    assert block_shape == (128, 128)
    for scales in (w13_scale, w2_scale):
        assert (torch.frexp(scales).mantissa == 0.5).all()
    return w13, w2, w13_scale, w2_scale


def for_trtllm(fp8_backend: Any, layer: Any, **parts: Any) -> tuple[Any, ...]:
    """Up rows before gate rows, scales too; the shuffle within a tile is left out here."""
    assert fp8_backend is Fp8MoeBackend.FLASHINFER_TRTLLM
    assert (layer.weight_block_size, layer.activation.is_gated) == (BLOCK, True)
    assert layer.moe_config.num_local_experts == parts["w13"].shape[0]
    swapped = [torch.cat(parts[name].chunk(2, 1)[::-1], 1) for name in ("w13", "w13_scale")]
    return swapped[0], parts["w2"], swapped[1], parts["w2_scale"]


def set_forward_context(state: State) -> Callable[..., Any]:
    @contextlib.contextmanager
    def scope(attn_metadata: Any, vllm_config: Any, num_tokens: int, num_tokens_across_dp: torch.Tensor) -> Any:
        parallel = vllm_config.parallel_config
        assert num_tokens_across_dp.device.type == "cpu"
        assert num_tokens_across_dp[parallel.data_parallel_rank] == num_tokens
        assert len(num_tokens_across_dp) == parallel.data_parallel_size
        state.context = SimpleNamespace(dp_metadata=num_tokens_across_dp)
        try:
            yield
        finally:
            state.context = None

    return scope


def modules_of(state: State) -> dict[str, dict[str, Any]]:
    """Module -> its names."""

    def workspace(there: bool) -> Callable[..., None]:
        def change(device: Any = None) -> None:
            state.workspace = there

        return change

    def experts(path: str, **more: Any) -> Any:
        made = type(path.partition(":")[2], (Experts,), {"state": state, "__init__": Experts.__init__, **more})
        return enforce(state, made, path)

    def pair(path: str, base: Any) -> Any:
        made = type(path.partition(":")[2], (base,), {"__init__": base.__init__, "__module__": path.partition(":")[0]})
        return enforce(state, made, path)

    def function(path: str, call: Any) -> dict[str, Any]:
        return {path.partition(":")[2]: state.bound(path, call)}

    parallel = SimpleNamespace(data_parallel_size=1, data_parallel_rank=0)
    deep_gemm = SimpleNamespace(__name__="vllm.third_party.deep_gemm", __version__="2.5.0")
    names = {
        FM: {
            "DeepGemmExperts": experts(f"{FM}:DeepGemmExperts"),
            "TritonExperts": experts(f"{FM}:TritonExperts"),
            "BatchedDeepGemmExperts": experts(f"{FM}:BatchedDeepGemmExperts", batched=True),
            "BatchedTritonExperts": experts(f"{FM}:BatchedTritonExperts", batched=True),
        },
        f"{FM}.activation": {"MoEActivation": MoEActivation},
        f"{FM}.config": {
            "RoutingMethodType": RoutingMethodType,
            **{name: config_class(state, name) for name in ("FusedMoEConfig", "FusedMoEParallelConfig")},
            **function(f"{FM}.config:fp8_w8a8_moe_quant_config", quant_config),
        },
        f"{FM}.modular_kernel": {"FusedMoEKernel": kernel_class(state)},
        f"{FM}.experts.trtllm_fp8_moe": {
            "TrtLlmFp8ExpertsModular": experts(f"{FM}.experts.trtllm_fp8_moe:TrtLlmFp8ExpertsModular", up_first=True)
        },
        f"{FM}.oracle.fp8": {
            "Fp8MoeBackend": Fp8MoeBackend,
            **function(f"{FM}.oracle.fp8:convert_to_fp8_moe_kernel_format", for_trtllm),
        },
        HT_MODULE: {
            "DeepEPHTPrepareAndFinalize": pair(f"{HT_MODULE}:DeepEPHTPrepareAndFinalize", HighThroughput),
            **function(f"{FM}.utils:moe_kernel_quantize_input", quantize_input),
        },
        LL_MODULE: {"DeepEPLLPrepareAndFinalize": pair(f"{LL_MODULE}:DeepEPLLPrepareAndFinalize", LowLatency)},
        FP8_UTILS: function(f"{FP8_UTILS}:prepare_fp8_moe_layer_for_deepgemm", for_deepgemm),
        "vllm.config": {"VllmConfig": lambda: SimpleNamespace(parallel_config=parallel)},
        "vllm.forward_context": function("vllm.forward_context:set_forward_context", set_forward_context(state)),
        "vllm.utils.deep_gemm": {
            "_import_deep_gemm": lambda: deep_gemm,
            "is_deep_gemm_e8m0_used": lambda: os.environ[E8M0] == "1" and not state.refuses_scales,
        },
        "vllm.v1.worker.workspace": {
            **function("vllm.v1.worker.workspace:init_workspace_manager", workspace(True)),
            **function("vllm.v1.worker.workspace:reset_workspace_manager", workspace(False)),
        },
        "vllm.distributed.parallel_state": {"_EP": None},
    }
    return fake_vllm_mega.added(names, state)


@contextlib.contextmanager
def installed(version: str) -> Iterator[State]:
    """`import vllm` gives the fake of this version, and its metadata say so."""
    state = State(version, recorded_api(f"vllm_{version}.json"))
    made = modules_of(state)
    every = {".".join(path.split(".")[:depth]) for path in made for depth in range(1, path.count(".") + 2)}
    real_version = importlib.metadata.version
    for path in every:
        module = types.ModuleType(path)
        module.__dict__.update(made.get(path, {}))
        sys.modules[path] = module
    importlib.metadata.version = lambda name: version if name == "vllm" else real_version(name)
    try:
        yield state
    finally:
        importlib.metadata.version = real_version
        for path in every:
            del sys.modules[path]
