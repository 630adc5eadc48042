"""The mega MoE of the fake `vllm`: the class of each version, its weight loader, its symmetric buffer, its arithmetic.

What the kernel does with peers' memory is done here by gathering over gloo.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from lib import formats

FM = "vllm.model_executor.layers.fused_moe"
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
HOMES = {
    "0.20.0": ("vllm.model_executor.models.deepseek_v4", "DeepseekV4MegaMoEExperts"),
    "0.25.1": ("vllm.models.deepseek_v4.nvidia.model", "DeepseekV4MegaMoEExperts"),
    "0.33.0": (f"{FM}.deep_gemm_mega_moe", "DeepGemmMegaMoEExperts"),
}
OLD_STAGING = "_stage_deepseek_v4_mega_moe_inputs"


def unpacked(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """uint8 [M, N/2], the even column in the low half, and e8m0 bytes [M, N/32] to float32 [M, N]."""
    halves = torch.stack([codes & 0xF, codes >> 4], -1).flatten(-2)
    values = E2M1[(halves & 7).long()] * torch.where(halves >= 8, -1.0, 1.0)
    scales = (exponents.to(torch.int32) << 23).view(torch.float32)
    return values * scales.repeat_interleave(32, 1)


class SymmBuffer:
    def __init__(self, tokens: int, hidden: int, topk: int) -> None:
        self.tokens = tokens
        self.x = torch.full((tokens, hidden), float("nan"))
        self.x_sf = torch.zeros(tokens, hidden // 128, dtype=torch.int32)
        self.topk_idx = torch.zeros(tokens, topk, dtype=torch.int64)
        self.topk_weights = torch.zeros(tokens, topk)
        self.destroyed = False

    def destroy(self) -> None:
        assert not self.destroyed
        self.destroyed = True


def stage(hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *out: torch.Tensor) -> None:
    """Into the buffer's views; the values carry their scales here."""
    x, _, ids, weights = out
    if len(hidden_states):
        x.copy_(formats.roundtrip("mxfp8", hidden_states))
    ids.copy_(topk_ids)
    weights.copy_(topk_weights)


class MegaExperts:
    caches: ClassVar[dict[Any, SymmBuffer]] = {}

    def __init__(self, vllm_config: Any, num_experts: int, prefix: str, **more: Any) -> None:
        self.shape, self.prefix, self.num_experts = SimpleNamespace(**more), prefix, num_experts
        self.max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        assert prefix not in vllm_config.compilation_config.static_forward_context
        vllm_config.compilation_config.static_forward_context[prefix] = self
        local, hidden, inter = more["num_local_experts"], more["hidden_size"], more["intermediate_size"]
        self.loaded: dict[tuple[str, str, int], torch.Tensor] = {}
        self.sizes = {"w1": (inter, hidden), "w3": (inter, hidden), "w2": (hidden, inter)}
        self.expected = local * 6
        for name in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"):
            setattr(self, name, SimpleNamespace(name=name))
        self.final = False
        if "weight_format" in more:
            assert (more["weight_format"], more["activation"].name) == ("mxfp4", "swiglu")
            self.final = True  # loaded in the kernel's layout

    def weight_loader(
        self, param: Any, loaded_weight: torch.Tensor, weight_name: str, shard_id: str, expert_id: int
    ) -> None:
        assert param.name == weight_name
        assert weight_name.startswith("w2_" if shard_id == "w2" else "w13_")
        rows, columns = self.sizes[shard_id]
        scale = weight_name.endswith("_scale")
        assert loaded_weight.dtype == torch.uint8
        assert loaded_weight.shape == (rows, columns // (32 if scale else 2))
        assert 0 <= expert_id - self.shape.experts_start_idx < self.shape.num_local_experts
        self.loaded[shard_id, "scale" if scale else "weight", expert_id] = loaded_weight.clone()

    def finalize_weights(self) -> None:
        assert len(self.loaded) == self.expected
        self.final = True

    def get_symm_buffer(self) -> SymmBuffer:
        key = (id(self), self.max_num_tokens)
        if key not in self.caches:
            dist.barrier(group=self._group())
            self.caches[key] = SymmBuffer(self.max_num_tokens, self.shape.hidden_size, self.shape.top_k)
        return self.caches[key]

    def _group(self) -> Any:
        group = sys.modules["vllm.distributed.parallel_state"]._EP  # type: ignore[attr-defined]
        assert group is not None, "expert parallel group is not initialized"
        return group.device_group

    def weight(self, shard: str, expert: int) -> torch.Tensor:
        return unpacked(self.loaded[shard, "weight", expert], self.loaded[shard, "scale", expert])

    def run(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        assert len(x) <= self.max_num_tokens
        assert self.final
        assert len(self.loaded) == self.expected
        buffer, count = self.get_symm_buffer(), len(x)
        home = sys.modules[type(self).__module__]
        staging = getattr(home, OLD_STAGING, None) or home.prepare_megamoe_inputs  # type: ignore[attr-defined]
        views = (buffer.x[:count], buffer.x_sf[:count], buffer.topk_idx[:count], buffer.topk_weights[:count])
        staging(x, weights, ids, *views)
        return self.kernel(buffer, count)

    def kernel(self, buffer: SymmBuffer, count: int) -> torch.Tensor:
        group = self._group()
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        mine = (buffer.x[:count].clone(), buffer.topk_idx[:count].clone(), buffer.topk_weights[:count].clone())
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, mine, group=group)
        parts: list[Any] = [None] * world
        dist.all_gather_object(parts, [self.local_part(*theirs) for theirs in everyone], group=group)
        total = sum((part[rank].float() for part in parts), torch.zeros(count, self.shape.hidden_size))
        return torch.as_tensor(total).bfloat16()

    def local_part(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Activation and gate weight before the second quantisation, as the kernel has them."""
        out = torch.zeros(x.shape)
        first = self.shape.experts_start_idx
        for expert in range(first, first + self.shape.num_local_experts):
            row, slot = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[row] @ self.weight(name, expert).T for name in ("w1", "w3"))
            middle = torch.nn.functional.silu(gate) * up * weights[row, slot, None]
            out.index_add_(0, row, formats.roundtrip("mxfp8", middle) @ self.weight("w2", expert).T)
        return out.bfloat16()


class Direct(MegaExperts):
    """0.25: forward runs the kernel."""

    def forward(
        self, hidden_states: Any, topk_weights: Any, topk_ids: Any, activation_clamp: Any, fast_math: bool
    ) -> torch.Tensor:
        assert (activation_clamp, fast_math) == (None, True)
        return self.run(hidden_states, topk_weights, topk_ids)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.forward(*args, **named)


class ByContext(Direct):
    """0.20: a custom op that finds the layer by its name in the forward context."""

    state: Any

    def forward(
        self, hidden_states: Any, topk_weights: Any, topk_ids: Any, activation_clamp: Any, fast_math: bool
    ) -> torch.Tensor:
        layer = self.state.context.no_compile_layers[self.prefix]
        assert (activation_clamp, fast_math) == (None, True)
        made: torch.Tensor = layer._run_mega_moe(hidden_states, topk_weights, topk_ids)
        return made

    def _run_mega_moe(self, *given: Any) -> torch.Tensor:
        return self.run(*given)


class Format(Direct):
    """0.33: the activation is the layer's own."""

    def forward(self, hidden_states: Any, topk_weights: Any, topk_ids: Any) -> torch.Tensor:  # type: ignore[override]
        return self.run(hidden_states, topk_weights, topk_ids)


def added(names: dict[str, dict[str, Any]], state: Any) -> dict[str, dict[str, Any]]:
    """`names` and the mega module of this version."""
    module, name = HOMES[state.version]
    base = {"0.20.0": ByContext, "0.25.1": Direct, "0.33.0": Format}[state.version]
    cache: dict[Any, SymmBuffer] = {}
    more = {"__module__": module, "state": state, "caches": cache, "__init__": base.__init__}
    more["_symm_buffers" if state.version == "0.33.0" else "_symm_buffer_cache"] = cache
    made: Any = type(name, (base,), more)
    path = f"{module}:{name}"
    made.__init__ = state.method(path, base.__init__)
    methods = ("forward", "weight_loader", "get_symm_buffer", "finalize_weights")
    for method in methods:
        if f"{path}.{method}" in state.signatures:
            setattr(made, method, state.method(f"{path}.{method}", getattr(base, method)))
        else:
            assert method == "finalize_weights"
            made.finalize_weights = property(lambda own: (_ for _ in ()).throw(AttributeError("finalize_weights")))
    staging = OLD_STAGING if state.version == "0.20.0" else "prepare_megamoe_inputs"
    signature = state.signatures[f"{module}:{staging}"]

    def staged(*args: Any, **named: Any) -> None:
        stage(*signature.bind(*args, **named).args)

    inside = {name: made, staging: staged}
    if state.version == "0.33.0":
        inside |= {"MEGA_MOE_MXFP4": "mxfp4", "MegaMoEActivation": lambda: SimpleNamespace(name="swiglu")}

    def override_forward_context(forward_context: Any) -> Any:
        return context(state, forward_context)

    overridden = {"override_forward_context": override_forward_context}
    return names | {module: inside, "vllm.forward_context": names["vllm.forward_context"] | overridden}


class context:  # noqa: N801 - a context manager
    def __init__(self, state: Any, value: Any) -> None:
        self.state, self.value = state, value

    def __enter__(self) -> None:
        self.state.context = self.value

    def __exit__(self, *_: object) -> None:
        self.state.context = None
