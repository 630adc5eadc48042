"""vLLM's modular MoE kernel built by hand, for one rank: config, weights, prepare/finalize, experts.

What differs between 0.20 and 0.33 is found by inspection (fields of a dataclass, parameters of a call), never by
version number. No VllmConfig, parallel state or engine of vLLM's is needed for it, except what ll_context says.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from bench.backends.vllm_limits import SCALE_BLOCK, version_label
from lib.contract import Group, Missing, Unsupported
from lib.problem import Problem, expert_weights
from lib.provenance import package_version

if TYPE_CHECKING:
    import torch

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
BLOCK_SHAPE = [SCALE_BLOCK, SCALE_BLOCK]
FP8_UTILS = "vllm.model_executor.layers.quantization.utils.fp8_utils"
HT_CLASS = f"{FUSED_MOE}.prepare_finalize.deepep_ht:DeepEPHTPrepareAndFinalize"
LL_CLASS = f"{FUSED_MOE}.prepare_finalize.deepep_ll:DeepEPLLPrepareAndFinalize"
EXPERTS = {  # (algo, experts) -> where the class is, in all versions
    ("ht", "deepgemm"): f"{FUSED_MOE}:DeepGemmExperts",
    ("ht", "triton"): f"{FUSED_MOE}:TritonExperts",
    ("ht", "trtllm"): f"{FUSED_MOE}.experts.trtllm_fp8_moe:TrtLlmFp8ExpertsModular",
    ("ll", "deepgemm"): f"{FUSED_MOE}:BatchedDeepGemmExperts",
    ("ll", "triton"): f"{FUSED_MOE}:BatchedTritonExperts",
}
ALL2ALL = {"ht": "deepep_high_throughput", "ll": "deepep_low_latency"}  # vLLM's --all2all-backend


def attribute(path: str) -> Any:
    """`module:name` of vLLM. Raises Missing, with the installed version, where it is not there."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Missing(f"vLLM {package_version('vllm') or '?'}: {path} is not there ({error})") from error


def loaded_versions(power_of_two_scales: bool) -> dict[str, str]:
    """Of vLLM, and of the DeepGEMM that it found: one that is installed beside it goes before its own copy.

    Raises Unsupported where this vLLM will not use the scales that its operands were made for.
    """
    found = {"vllm": version_label(package_version("vllm") or "unknown")}
    # asked first: it is what makes vLLM point DeepGEMM at its cache folder before the import
    used = attribute("vllm.utils.deep_gemm:is_deep_gemm_e8m0_used")()
    if used != power_of_two_scales:
        raise Unsupported(f"vLLM {found['vllm']} has power-of-two scales {'on' if used else 'off'}, these experts not")
    deep_gemm = attribute("vllm.utils.deep_gemm:_import_deep_gemm")()
    if deep_gemm is not None:
        origin = "vendored" if deep_gemm.__name__.startswith("vllm.") else "installed"
        found["deep_gemm"] = f"{getattr(deep_gemm, '__version__', 'unknown')} ({origin})"
    return found


def known_arguments(call: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Those of `wanted` that this version's function, method or dataclass takes by name."""
    if dataclasses.is_dataclass(call):
        names = {field.name for field in dataclasses.fields(call) if field.init}
    else:
        names = set(inspect.signature(call).parameters)
    return {name: value for name, value in wanted.items() if name in names}


@dataclasses.dataclass
class Fp8Weights:
    """One rank's weights: w13 [L, 2I, H] and w2 [L, H, I] e4m3, and their fp32 scales a 128 x 128 block.

    The kernel's own layout may differ, once `for_kernel` converted them.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor


def quantized_weights(problem: Problem, rank: int, device: torch.device, fmt: str) -> Fp8Weights:
    """This rank's experts in the block format `fmt` of lib/formats.py, made one by one from their seeds."""
    import torch

    from lib.formats import quantize

    local, hidden, inter = problem.local_experts, problem.hidden, problem.inter

    def empty(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.empty(local, rows, columns, dtype=torch.float8_e4m3fn, device=device)
        blocks = (local, rows // SCALE_BLOCK, columns // SCALE_BLOCK)
        return values, torch.empty(blocks, dtype=torch.float32, device=device)

    w13, w13_scale = empty(2 * inter, hidden)
    w2, w2_scale = empty(hidden, inter)
    for index in range(local):
        made = expert_weights(problem, rank * local + index, device)
        for weight, values, scales in zip(made, (w13, w2), (w13_scale, w2_scale), strict=True):
            quantized = quantize(fmt, weight)
            assert quantized.scales is not None
            values[index], scales[index] = quantized.values, quantized.scales
    return Fp8Weights(w13, w2, w13_scale, w2_scale)


def for_kernel(weights: Fp8Weights, experts: str, power_of_two_scales: bool, config: Any) -> Fp8Weights:
    """The weights as the experts' kernel reads them, by vLLM's own conversion; nothing is left to the first call."""
    parts = (weights.w13, weights.w2, weights.w13_scale, weights.w2_scale)
    if experts == "deepgemm" and power_of_two_scales:
        convert = attribute(
            "vllm.model_executor.layers.quantization.utils.fp8_utils:prepare_fp8_moe_layer_for_deepgemm"
        )
        return Fp8Weights(*_in_order(convert(*parts, tuple(BLOCK_SHAPE))))
    if experts == "trtllm":
        backend = attribute(f"{FUSED_MOE}.oracle.fp8:Fp8MoeBackend").FLASHINFER_TRTLLM
        convert = attribute(f"{FUSED_MOE}.oracle.fp8:convert_to_fp8_moe_kernel_format")
        layer = SimpleNamespace(weight_block_size=BLOCK_SHAPE, moe_config=config, activation=silu())
        names = ("w13", "w2", "w13_scale", "w2_scale")
        named = dict(zip(names, parts, strict=True))
        made = convert(fp8_backend=backend, layer=layer, **named, w13_input_scale=None, w2_input_scale=None)
        return Fp8Weights(*_in_order(made))
    # DeepGEMM on sm_90 and Triton take fp32 block scales as they are (measured on 2x H200 with vLLM 0.25.1)
    return weights


def _in_order(made: tuple[Any, ...]) -> tuple[Any, ...]:
    w13, w2, w13_scale, w2_scale = made
    return w13, w2, w13_scale, w2_scale


def silu() -> Any:
    return attribute(f"{FUSED_MOE}.activation:MoEActivation").SILU


def moe_config(problem: Problem, group: Group, algo: str, slots: int) -> Any:
    """FusedMoEConfig of one rank: DP = EP = world, TP = 1."""
    import torch

    parallel_class = attribute(f"{FUSED_MOE}.config:FusedMoEParallelConfig")
    parallel = parallel_class(
        tp_size=1,
        pcp_size=1,
        dp_size=group.world,
        ep_size=group.world,
        tp_rank=0,
        pcp_rank=0,
        dp_rank=group.rank,
        ep_rank=group.rank,
        sp_size=1,
        use_ep=True,
        all2all_backend=ALL2ALL[algo],
        enable_eplb=False,
    )
    config_class = attribute(f"{FUSED_MOE}.config:FusedMoEConfig")
    wanted = {
        "num_experts": problem.num_experts,
        "experts_per_token": problem.topk,
        "hidden_dim": problem.hidden,
        "intermediate_size": problem.inter,  # its name from 0.25 on
        "intermediate_size_per_partition": problem.inter,  # its name in 0.20; later set by the class itself
        "num_local_experts": problem.local_experts,
        "num_logical_experts": problem.num_experts,
        "activation": silu(),
        "device": group.device,
        "routing_method": attribute(f"{FUSED_MOE}.config:RoutingMethodType").Renormalize,  # routing is done outside
        "moe_parallel_config": parallel,
        "in_dtype": torch.bfloat16,
        "max_num_tokens": slots,
    }
    return config_class(**known_arguments(config_class, wanted))


def quant_config(weights: Fp8Weights) -> Any:
    make = attribute(f"{FUSED_MOE}.config:fp8_w8a8_moe_quant_config")
    return make(w1_scale=weights.w13_scale, w2_scale=weights.w2_scale, block_shape=BLOCK_SHAPE)


def modular_kernel(
    problem: Problem, group: Group, algo: str, experts: str, slots: int, buffer: Any, weights: Fp8Weights
) -> Any:
    """FusedMoEKernel over DeepEP's Buffer. The class of the experts is named, so nothing falls back to another."""
    config, quant = moe_config(problem, group, algo, slots), quant_config(weights)
    make_experts = attribute(EXPERTS[algo, experts])
    if algo == "ht":
        make_prepare = attribute(HT_CLASS)
        offset = group.rank * problem.local_experts
        prepare = make_prepare(buffer, num_dispatchers=group.world, dp_size=group.world, rank_expert_offset=offset)
        built = make_experts(config, quant)
    else:
        make_prepare = attribute(LL_CLASS)
        prepare = make_prepare(buffer, max_tokens_per_rank=slots, num_dispatchers=group.world, use_fp8_dispatch=True)
        built = make_experts(config, quant, max_num_tokens=slots, num_dispatchers=group.world)
    return attribute(f"{FUSED_MOE}.modular_kernel:FusedMoEKernel")(prepare, built)


def expert_map(problem: Problem, group: Group) -> torch.Tensor:
    """int32 [E]: the local number of this rank's experts, -1 for all others."""
    import torch

    local = problem.local_experts
    mapped = torch.full((problem.num_experts,), -1, dtype=torch.int32, device=group.device)
    mapped[group.rank * local : (group.rank + 1) * local] = torch.arange(local, dtype=torch.int32, device=group.device)
    return mapped


def make_vllm_config(group: Group) -> Any:
    """A VllmConfig that says as much as DP metadata needs: how many ranks, and which this is."""
    config = attribute("vllm.config:VllmConfig")()
    config.parallel_config.data_parallel_size = group.world
    config.parallel_config.data_parallel_rank = group.rank
    return config


def ll_context(config: Any, group: Group, tokens: list[int]) -> AbstractContextManager[None]:
    """The forward context that serving sets around a model's step; `tokens` of each rank.

    Without it the batched DeepGEMM experts take every slot as expected, and so other, slower tiles.
    """
    import torch

    across = torch.tensor(tokens, dtype=torch.int32, device="cpu")
    set_context = attribute("vllm.forward_context:set_forward_context")
    made: AbstractContextManager[None] = set_context(
        None, config, num_tokens=tokens[group.rank], num_tokens_across_dp=across
    )
    return made
