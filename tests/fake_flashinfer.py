"""A `flashinfer.moe_ep` for machines without a GPU: its mega layers on CPU tensors, their exchange over gloo.

Signatures and config fields are those recorded from the real wheels (tests/signatures), so a call or a field that this
version would refuse is refused here; what else is refused is the library's own: int64 ids and a second stage before
compute by push, weights of another layer, a layer that starts the runtime again, tokens beyond max_tokens_per_rank.
"""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import silu
from torch.utils._pytree import tree_map_only

from lib.formats import round_e2m1, roundtrip
from tests.recorded import enforced, recorded, recorded_dataclass, recorded_function, recorded_module

FILES = {"0.6.18.post1": "flashinfer_0.6.18.json", "0.7.4": "flashinfer_0.7.4.json"}
PUSH, PULL = "sm90_fp8_fp8_bf16_push_cuda", "sm90_fp8_fp8_bf16_pull_cutedsl"
MXFP8, NVFP4 = "sm100_mxfp8_mxfp8_bf16_cutedsl", "sm100_nvfp4_nvfp4_bf16_cutedsl"
DEEPGEMM = "sm100_fp8_fp4_bf16_deepgemm"
CONFIGS = {
    PUSH: "Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig",
    PULL: "Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig",
    MXFP8: "Sm100_Mxfp8_Mxfp8_Bf16_Cutedsl_MegaMoeConfig",
    NVFP4: "Sm100_Nvfp4_Nvfp4_Bf16_Cutedsl_MegaMoeConfig",
    DEEPGEMM: "Sm100_Fp8_Fp4_Bf16_Deepgemm_MegaMoeConfig",
}
THUNKS = {
    PULL: "hopper_fp8_mega_launch_thunk",
    MXFP8: "mxfp8_mega_launch_thunk",
    NVFP4: "nvfp4_mega_launch_thunk",
}
CUTEDSL = tuple(THUNKS)
FORMATS = {
    PUSH: ("fp8", "fp8_block"),
    PULL: ("fp8", "fp8_block"),
    MXFP8: ("mxfp8", "mxfp8"),
    DEEPGEMM: ("mxfp8", "mxfp4"),
}
TUNED = {"flag_batch": 8, "token_back_mode": "reuse_dispatch_warps"}  # what knobs="auto" finds
NINJA = "Ninja build failed. Ninja output:\n[1/2] nvcc ops.cu\nops.cu(7): error: no such thing\nninja: build stopped."


class State:
    """What the tests set and read, of this process."""

    fault = ""  # of rank 1: corrupt_row, skip_weights, stale_stage
    broken_build = False
    kernels: list[str]  # calls of kernel objects, in order
    runtime: frozenset[str]


State.kernels, State.runtime = [], frozenset()


class MoEEpConfigError(ValueError):
    """The library's own."""


def plain_nvfp4(x: torch.Tensor, norm: float = 1.0) -> torch.Tensor:
    """moe_nvfp4_swapab/runner_common.py, nvfp4_quantize_per_block_16, and back: no fp32 scale, e4m3 of amax / 6."""
    blocks = x.float().unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1, keepdim=True) / 6 * norm).clamp(max=448).to(torch.float8_e4m3fn).float()
    inverse = torch.where(scale > 0, norm / scale, torch.zeros_like(scale))
    return (round_e2m1(blocks * inverse) * scale).flatten(-2)  # times norm still: an alpha has to take it out


def quantized(kernel: str, x: torch.Tensor, leg: int) -> torch.Tensor:
    return plain_nvfp4(x) if kernel == NVFP4 else roundtrip(FORMATS[kernel][leg], x)


def interleaved(w13: torch.Tensor) -> torch.Tensor:
    """fp8_fp8_bf16_pull_cutedsl/weights.py, _interleave_gate_up_8."""
    half = w13.shape[0] // 2
    return torch.stack([torch.stack([w13[i : i + 8], w13[half + i : half + i + 8]]) for i in range(0, half, 8)])


def expert_weights(kernel: str, w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if kernel != PULL:
        return quantized(kernel, w13, 1), quantized(kernel, w2, 1)
    pairs = interleaved(w13)
    back = quantized(kernel, pairs.flatten(0, 2), 1).view(pairs.shape)
    return torch.cat([back[:, 0].flatten(0, 1), back[:, 1].flatten(0, 1)]), quantized(kernel, w2, 1)


class Workspace:
    def __init__(self, kernel: str, config: Any, fleet: Any, knobs: dict[str, Any]) -> None:
        self.kernel, self.tokens, self.alive, self.count = kernel, fleet.max_tokens_per_rank, True, 0
        self.staged: Any = None
        self.kept: Any = None  # what an earlier call staged
        if kernel in CUTEDSL:
            self.output_activation = torch.zeros(self.tokens, fleet.token_hidden_size, dtype=torch.bfloat16)
            self._frontend = types.SimpleNamespace(config=types.SimpleNamespace(**knobs))

    def destroy(self) -> None:
        assert self.alive, "destroyed twice"
        self.alive = False
        dist.barrier()


def gathered(value: Any) -> list[Any]:
    """Every rank's value; as arrays, which pickle several times faster than tensors."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, tree_map_only(torch.Tensor, lambda tensor: tensor.numpy(), value))
    return tree_map_only(np.ndarray, torch.from_numpy, values)  # type: ignore[no-any-return]


def make_kernels(version: str) -> Callable[[Any], Any]:
    """create_mega_kernel of one version."""
    file = FILES[version]
    fields = {"in_kernel_fc2_reduce", "enable_in_kernel_fc2_reduce"}

    @enforced(file, {"calls"}, "MegaKernelBackend")
    class Kernel:
        calls: list[Any] = []  # noqa: RUF012 - what `enforced` fills

        def __init__(self, config: Any) -> None:
            assert type(config).__name__ == CONFIGS[config.kernel_name]
            self._config, self._name, self._weights = config, config.kernel_name, None
            self._pending = getattr(config, "knobs", None) == "auto"
            if self._pending:
                warnings.warn("knobs='auto' runs a COLLECTIVE multi-minute sweep", UserWarning, stacklevel=2)

        @property
        def _ikr(self) -> bool:
            return any(bool(getattr(self._config, name, False)) for name in fields)

        def bind_ep_bootstrap(self, bootstrap: Any) -> None:
            assert (bootstrap.rank, bootstrap.world_size) == (dist.get_rank(), dist.get_world_size())
            self._rank, self._world = bootstrap.rank, bootstrap.world_size

        def runtime_requirements(self, bootstrap: Any) -> frozenset[str]:
            return frozenset({"torch_dist"} | ({"nvshmem"} if self._name in CUTEDSL else set()))

        def validate_init(self, bootstrap: Any, fleet_params: Any) -> None:
            config = self._config
            if fleet_params.num_experts % bootstrap.world_size or config.top_k <= 0:
                raise MoEEpConfigError("num_experts must be divisible by world_size")
            if self._name == PUSH and config.top_k not in (1, 2, 4, 6, 8):
                raise MoEEpConfigError(f"top_k must be one of (1, 2, 4, 6, 8), got {config.top_k}")

        def preprocess_weights(self, weights: Any, fleet_params: Any) -> Any:
            assert weights.w13.dtype == weights.w2.dtype == torch.bfloat16
            assert weights.w13.shape[1:] == (2 * self._config.intermediate_size, fleet_params.token_hidden_size)
            pairs = [expert_weights(self._name, *pair) for pair in zip(weights.w13, weights.w2, strict=True)]
            made = (torch.stack([w13 for w13, _ in pairs]), torch.stack([w2 for _, w2 in pairs]))
            self._weights = types.SimpleNamespace(legs=made) if self._name == PUSH else ((made[0],), (made[1],))
            return self._weights

        def validate_transformed_weights(self, transformed_weights: Any, bootstrap: Any, fleet_params: Any) -> None:
            assert transformed_weights is not None
            self._weights = transformed_weights

        def prepare_workspace(self, bootstrap: Any, fleet_params: Any) -> Workspace:
            assert self.runtime_requirements(bootstrap) <= State.runtime, "the runtime was not started"
            if State.broken_build:
                raise RuntimeError(NINJA)
            given = getattr(self._config, "knobs", None)
            knobs = {"flag_batch": 4, "token_back_mode": "epi_warps", "in_kernel_fc2_reduce": self._ikr}
            known = {name: value for name, value in (given if isinstance(given, dict) else {}).items() if name in knobs}
            return Workspace(self._name, self._config, fleet_params, knobs | known)

        def validate_forward(self, t: Any, fleet_params: Any, quantize_input: bool) -> None:
            count = t.hidden_states.shape[0]
            assert quantize_input
            assert t.hidden_states.dtype == torch.bfloat16
            if count > fleet_params.max_tokens_per_rank:
                raise MoEEpConfigError(f"token count {count} exceeds max_tokens_per_rank")
            if t.topk_ids.shape != (count, self._config.top_k) or t.topk_weights.shape != t.topk_ids.shape:
                raise MoEEpConfigError("topk_ids and topk_weights must be [num_tokens, top_k]")
            wanted = torch.int32 if self._name == PUSH else torch.int64
            if t.topk_ids.dtype != wanted:
                raise MoEEpConfigError(f"topk_ids must be {wanted}, got {t.topk_ids.dtype}")
            if t.topk_weights.dtype != torch.float32:
                raise MoEEpConfigError("topk_weights must be torch.float32")

        def stage_inputs(self, t: Any, workspace: Workspace, quantize_input: bool) -> None:
            State.kernels.append("stage")
            assert workspace.alive, "workspace has been destroyed"
            if self._name == PUSH and workspace.staged is not None:
                raise RuntimeError("stage_inputs called twice for one round; call compute first")
            if State.fault == "stale_stage" and self._rank == 1 and workspace.kept is not None:
                workspace.staged = workspace.kept
            else:
                x = quantized(self._name, t.hidden_states, 0)
                workspace.staged, workspace.count = (x, t.topk_ids.long(), t.topk_weights.clone()), len(x)
            workspace.kept = workspace.staged
            if self._name == PUSH:
                workspace.came = gathered(workspace.staged)  # type: ignore[attr-defined]

        def compute(self, workspace: Workspace, transformed_weights: Any, output: Any) -> torch.Tensor:
            State.kernels.append("compute")
            assert workspace.alive, "workspace has been destroyed"
            if workspace.staged is None:
                raise RuntimeError("compute() requires a successful stage_inputs()")
            assert transformed_weights is self._weights, "compute received a different weight bundle"
            if self._pending:
                assert output is not None, "compute(output=None) is incompatible with knobs='auto'"
                vars(workspace._frontend.config).update(TUNED)
                self._pending = False
            self._launch(workspace)
            rows = workspace.result[: workspace.count]  # type: ignore[attr-defined]
            if self._name == PUSH:
                workspace.staged = None
            if output is None:
                return rows  # type: ignore[no-any-return]
            output.copy_(rows)
            return output  # type: ignore[no-any-return]

        def _launch(self, workspace: Workspace) -> None:
            """One round: every rank has to come, with tokens or without."""
            came = workspace.came if self._name == PUSH else gathered(workspace.staged)  # type: ignore[attr-defined]
            parts = [self._part(*tokens) for tokens in came]
            mine = [sent[self._rank] for sent in gathered(parts)]
            total = torch.stack(mine).sum(0).to(torch.bfloat16)
            if State.fault == "corrupt_row" and self._rank == 1 and len(total):
                total[0, 0] += 8
            if self._name not in CUTEDSL:
                workspace.result = total  # type: ignore[attr-defined]
                return
            out = workspace.output_activation
            if self._ikr:
                out.zero_()  # frontend.run and the thunk both do
                out[: workspace.count] += total
            else:
                out[: workspace.count] = total
            workspace.result = out  # type: ignore[attr-defined]

        def _part(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            """This rank's experts' weighted sum of one rank's tokens, as the combine wire brings it."""
            config = self._config
            w13s, w2s = self._weights.legs if self._name == PUSH else (self._weights[0][0], self._weights[1][0])
            out = torch.zeros(x.shape)
            if State.fault == "skip_weights" and self._rank == 1:
                weights = torch.ones_like(weights)
            for index, (w13, w2) in enumerate(zip(w13s, w2s, strict=True)):
                rows, slots = (ids == index + self._rank * len(w13s)).nonzero(as_tuple=True)
                gate, up = (x[rows] @ w13.T * getattr(config, "fc1_alpha", 1.0)).bfloat16().float().chunk(2, 1)
                middle, scale = silu(gate) * up, weights[rows, slots, None]
                if self._name == NVFP4:  # apply_topk_in_fc1
                    y = plain_nvfp4(middle * scale, config.fc1_norm_const) @ w2.T * config.fc2_alpha
                else:
                    y = quantized(self._name, middle, 0) @ w2.T * scale
                out.index_add_(0, rows, y)
            wires = {"mxfp8": "mxfp8", "nvfp4": "nvfp4_wire", "fp8": "fp8"}
            wire = wires.get(getattr(config, "combine_dtype", "bf16"), "bf16")
            return roundtrip(wire, out.bfloat16()).float()

        def destroy(self, workspace: Workspace) -> None:
            workspace.destroy()

    return Kernel


def make_layer(version: str, kernel_class: Any) -> Any:
    file = FILES[version]

    @enforced(file, {"calls"}, "MoEEpMegaLayer")
    class MoEEpMegaLayer:
        calls: list[Any] = []  # noqa: RUF012

        def __init__(self, bootstrap: Any, fleet_params: Any, weights: Any, backend: Any) -> None:
            assert not bootstrap.auto_bootstrap, "the layer starts the runtime once more"
            assert not backend.preprocess_weights
            assert backend.transformed_weights is not None, "preprocess_weights=False requires transformed_weights"
            assert weights is None, "the pack is not looked at"
            self._bootstrap, self._fleet, self._workspace = bootstrap, fleet_params, None
            self._kernel, self._transformed = kernel_class(backend.megakernel), backend.transformed_weights
            self._kernel.bind_ep_bootstrap(bootstrap)
            self._kernel.validate_init(bootstrap, fleet_params)
            self._kernel.validate_transformed_weights(self._transformed, bootstrap, fleet_params)

        def forward(self, t: Any, **more: Any) -> torch.Tensor:
            assert not any(more.values())
            self._kernel.validate_forward(t, self._fleet, quantize_input=True)
            if self._workspace is None:
                self._workspace = self._kernel.prepare_workspace(self._bootstrap, self._fleet)
            y = torch.empty(t.hidden_states.shape, dtype=torch.bfloat16)
            self._kernel.stage_inputs(t, self._workspace, quantize_input=True)
            return self._kernel.compute(self._workspace, self._transformed, output=y)  # type: ignore[no-any-return]

        def destroy(self) -> None:
            if self._workspace is not None:
                self._kernel.destroy(self._workspace)
                self._workspace = None

    return MoEEpMegaLayer


def bound(file: str, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes exactly the recorded calls."""
    signature = recorded_function(file, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        return made(**arguments.arguments)

    return call


def modules(version: str) -> dict[str, types.ModuleType]:
    """Every module of the fake, by name; parents of what is recorded included."""
    file = FILES[version]
    kernel_class = make_kernels(version)
    layer_class = make_layer(version, kernel_class)
    kernels: dict[int, Any] = {}  # workspace -> its kernel, for the thunks

    original = kernel_class.prepare_workspace

    def prepare(self: Any, *args: Any, **kwargs: Any) -> Workspace:
        workspace: Workspace = original(self, *args, **kwargs)
        kernels[id(workspace)] = self
        return workspace

    kernel_class.prepare_workspace = prepare

    def start_runtime(bootstrap: Any, requirements: frozenset[str]) -> object:
        assert not State.runtime, "NVSHMEM can't be started twice in a process"
        State.runtime = requirements
        dist.barrier()
        return object()

    def layer(bootstrap: Any, fleet_params: Any, weights: Any, fleet_knobs: Any, backend: Any) -> Any:
        assert not fleet_knobs
        return layer_class(bootstrap, fleet_params, weights, backend)

    def thunk(transformed_l1: Any, transformed_l2: Any, symm_buffer: Workspace) -> Callable[[], None]:
        assert symm_buffer.alive, "symm_buffer.destroy() was already called."
        return lambda: (State.kernels.append("thunk"), kernels[id(symm_buffer)]._launch(symm_buffer))[1]  # type: ignore[func-returns-value]

    made: dict[str, types.ModuleType] = {}

    def module(name: str) -> types.ModuleType:
        for end in [i for i, c in enumerate(name) if c == "."] + [len(name)]:
            if name[:end] not in made:
                made[name[:end]] = types.ModuleType(name[:end])
                made[name[:end]].__path__ = []
                parent, _, child = name[:end].rpartition(".")
                if parent:
                    setattr(made[parent], child, made[name[:end]])
        return made[name]

    module("flashinfer").__version__ = version  # type: ignore[attr-defined]
    top = module("flashinfer.moe_ep")
    for name in ("BootstrapConfig", "FleetParams", "MegaConfig", "MoEEpTensors", *CONFIGS.values()):
        setattr(top, name, recorded_dataclass(file, name))
    pack = recorded(file, "MoEWeightPack")["__new__"][0]
    top.MoEWeightPack = lambda *a, **k: types.SimpleNamespace(**pack.bind(*a, **k).arguments)  # type: ignore[attr-defined]
    top.MoEEpLayer = bound(file, "MoEEpLayer", layer)  # type: ignore[attr-defined]
    top.bootstrap_moe_ep_runtime = bound(file, "bootstrap_moe_ep_runtime", start_runtime)  # type: ignore[attr-defined]
    registry = module(recorded_module(file, "create_mega_kernel"))
    registry.create_mega_kernel = bound(file, "create_mega_kernel", kernel_class)  # type: ignore[attr-defined]
    for name in THUNKS.values():
        setattr(module(recorded_module(file, name)), name, bound(file, name, thunk))
    for name in ("nvshmem.core", "cutlass", "deep_gemm"):
        module(name)
    made["deep_gemm"].fp8_fp4_mega_moe = None  # type: ignore[attr-defined]
    return made


@contextlib.contextmanager
def installed(version: str) -> Iterator[None]:
    """The fake in sys.modules, and nothing of it afterwards."""
    fakes = modules(version)
    before = {name: sys.modules.get(name) for name in fakes}
    State.runtime, State.kernels, State.fault, State.broken_build = frozenset(), [], "", False
    sys.modules.update(fakes)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
