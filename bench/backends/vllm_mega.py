"""Backend `vllm_deep_gemm_mega`: vLLM's class over DeepGEMM's mega kernel, dispatch to combine in one launch. sm_10x.

The name is this suite's; vLLM calls the choice `deep_gemm_mega_moe`. `call` is the module's forward: it stages the
input (e4m3, a power-of-two scale a 32 columns, into a symmetric buffer) and launches the kernel, so the quantisation is
always inside. Weights are fp4 with a power-of-two scale a 32 columns, loaded through the class's own weight_loader.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from bench.backends import vllm_layer
from bench.backends.vllm_limits import mega_memory_bytes, mega_verdict, set_environment
from bench.backends.vllm_sessions import settle
from lib.contract import Backend, Engine, Group, Missing, Phase, Session, Support, Variant
from lib.problem import Inputs, Problem, expert_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from lib.knobs import Knobs
    from lib.machine import Machine

CLASSES = (  # newest first: 0.33, 0.25, 0.20
    f"{vllm_layer.FUSED_MOE}.deep_gemm_mega_moe:DeepGemmMegaMoEExperts",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4MegaMoEExperts",
    "vllm.model_executor.models.deepseek_v4:DeepseekV4MegaMoEExperts",
)
STAGING = ("prepare_megamoe_inputs", "_stage_deepseek_v4_mega_moe_inputs")
BUFFER_CACHES = ("_symm_buffers", "_symm_buffer_cache")
LAYER = "moe_ep_bench.experts"  # the layer's name in vLLM's forward context
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGN_BIT = 8


def mega_class() -> Any:
    """The installed version's class. Raises Missing where there is none, or where its module does not import."""
    for path in CLASSES:
        module = path.partition(":")[0]
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name and module.startswith(error.name):
                continue  # this version has it elsewhere
            raise Missing(f"{module} does not import: {error}") from error
        except ImportError as error:
            raise Missing(f"{module} does not import: {error}") from error
        return vllm_layer.attribute(path)
    raise Missing(f"this vLLM has no mega MoE: none of {', '.join(CLASSES)}")


def packed_fp4(values: torch.Tensor) -> torch.Tensor:
    """Elements [M, N] on e2m1's grid to uint8 [M, N/2]: a sign and three bits each, the even column in the low half."""
    import torch

    grid = torch.tensor(E2M1, device=values.device)
    codes = torch.searchsorted(grid, values.abs().contiguous()).to(torch.uint8)
    codes += SIGN_BIT * (values < 0).to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def scale_exponents(scales: torch.Tensor) -> torch.Tensor:
    """fp32 powers of two to their e8m0 bytes, uint8."""
    import torch

    return (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)


class Staging:
    """Stands where the class's module looks up its staging, so that it can be run by itself, and left out once."""

    def __init__(self, module: Any) -> None:
        found = [name for name in STAGING if hasattr(module, name)]
        if not found:
            raise Missing(f"{module.__name__} has none of {', '.join(STAGING)} to step in for")
        self.module, self.name, self.library = module, found[0], getattr(module, found[0])
        self.left_out = False
        self.last: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        setattr(module, self.name, self)

    def __call__(self, *args: Any, **named: Any) -> None:
        if not self.left_out:
            self.last = (args, named)
            self.library(*args, **named)

    def again(self) -> None:
        """What the last call staged: its arguments are the harness's inputs and views of the symmetric buffer."""
        args, named = self.last
        self.library(*args, **named)

    def close(self) -> None:
        setattr(self.module, self.name, self.library)


class MegaSession(Session):
    """One point; the symmetric buffer is this point's own, since its capacity may choose the kernel's tiles."""

    kind = "moe"
    number_format = "mxfp8_mxfp4"
    dispatch_format = "mxfp8"
    combine_format = "bf16"
    quant_included = True
    capturable = "MEGA_TIMING has no graph"
    kernels = {"call": [""]}  # noqa: RUF012 - staging and the mega kernel are all that runs

    def __init__(self, engine: MegaEngine, problem: Problem, inputs: Inputs) -> None:
        self.engine, self.problem, self.inputs = engine, problem, inputs
        engine.layer.max_num_tokens = max(problem.tokens, 1)
        self.buffer = engine.layer.get_symm_buffer()  # collective, so not left to the first call
        self.out: torch.Tensor | None = None
        self.arguments = vllm_layer.known_arguments(engine.layer.forward, {"activation_clamp": None, "fast_math": True})
        self.phases = [Phase("stage", engine.staging.again), Phase("forward", self._forward)]
        self.context = contextlib.ExitStack()
        if hasattr(engine.layer, "_run_mega_moe"):  # 0.20: a custom op that finds the layer by name in the context
            override = vllm_layer.attribute("vllm.forward_context:override_forward_context")
            self.context.enter_context(override(SimpleNamespace(no_compile_layers={LAYER: engine.layer})))

    def call(self) -> None:
        inputs = self.inputs
        self.out = self.engine.layer(inputs.x, inputs.topk_weights, inputs.topk_idx, **self.arguments)

    def _forward(self) -> None:
        """The module's forward on what is staged already."""
        self.mark_arrival()
        self.engine.staging.left_out = True
        try:
            self.call()
        finally:
            self.engine.staging.left_out = False

    def bare_kernel(self) -> Callable[[], None]:
        """The kernel reads its input from the buffer and leaves it there (DeepGEMM: only its debug mode clears it)."""
        return self._forward

    def output(self) -> torch.Tensor:
        assert self.out is not None
        return self.out

    def poison(self) -> None:
        if self.out is not None:
            self.out.fill_(float("nan"))

    def transport(self) -> str:
        return "nvlink" if self.problem.world > 1 else "local"

    def versions(self) -> dict[str, str]:
        return self.engine.versions

    def close(self) -> None:
        self.context.close()
        for cache in (getattr(self.engine.layer, name, {}) for name in BUFFER_CACHES):
            for key in [key for key, buffer in cache.items() if buffer is self.buffer]:
                del cache[key]
        self.buffer.destroy()
        self.buffer = self.out = None


class MegaEngine(Engine):
    """The layer with its weights in the kernel's layout, and the EP group that it asks vLLM for."""

    def __init__(self, group: Group, capacity: Problem) -> None:
        self.group = group
        environment = set_environment(power_of_two_scales=True)
        made = mega_class()
        self.versions = vllm_layer.loaded_versions(power_of_two_scales=True) | environment
        if "deep_gemm" not in self.versions:
            raise Missing("vLLM finds no DeepGEMM: neither its own copy nor an installed one imports")
        self.staging = Staging(sys.modules[made.__module__])
        self.state = vars(importlib.import_module("vllm.distributed.parallel_state"))
        # all that the class asks of vLLM's parallel state; vLLM's own start-up would make groups of its own
        self.state["_EP"] = SimpleNamespace(
            device_group=group.pg, cpu_group=group.host_pg, world_size=group.world, rank_in_group=group.rank
        )
        self.layer = self._layer(made, capacity)
        self._load(capacity)

    def _layer(self, made: Any, capacity: Problem) -> Any:
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=max(capacity.tokens, 1)),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
        wanted = {
            "num_experts": capacity.num_experts,
            "num_local_experts": capacity.local_experts,
            "experts_start_idx": self.group.rank * capacity.local_experts,
            "top_k": capacity.topk,
            "hidden_size": capacity.hidden,
            "intermediate_size": capacity.inter,
            "prefix": LAYER,
        }
        home = sys.modules[made.__module__]
        if hasattr(home, "MEGA_MOE_MXFP4"):  # from 0.33 on the format and the activation are given
            wanted |= {"weight_format": home.MEGA_MOE_MXFP4, "activation": home.MegaMoEActivation()}
        with self.group.device:
            return made(config, **wanted)

    def _load(self, capacity: Problem) -> None:
        """Each local expert's three matrices as a checkpoint holds them: gate w1, up w3, down w2."""
        from lib.formats import quantize

        layer, rank, local = self.layer, self.group.rank, capacity.local_experts
        for expert in range(rank * local, (rank + 1) * local):
            w13, w2 = expert_weights(capacity, expert, self.group.device)
            gate, up = w13.chunk(2, dim=0)
            for shard, name, matrix in (("w1", "w13", gate), ("w3", "w13", up), ("w2", "w2", w2)):
                quantized = quantize("mxfp4", matrix)
                assert quantized.scales is not None
                parts = {"weight": packed_fp4(quantized.values), "weight_scale": scale_exponents(quantized.scales)}
                for kind, loaded in parts.items():
                    full = f"{name}_{kind}"
                    layer.weight_loader(getattr(layer, full), loaded, full, shard, expert)
        if hasattr(layer, "finalize_weights"):  # up to 0.25; later weights are loaded in the kernel's layout
            layer.finalize_weights()

    def bind(self, problem: Problem, inputs: Inputs) -> MegaSession:
        session = MegaSession(self, problem, inputs)
        settle(self.group)  # all ranks compile together, and the kernel's barrier waits for 300 s
        session.call()
        settle(self.group)
        return session

    def close(self) -> None:
        self.staging.close()
        self.state["_EP"] = None


class MegaBackend(Backend):
    name = "vllm_deep_gemm_mega"
    family = "vllm"

    def variants(self, knobs: Knobs) -> list[Variant]:
        left_out = not knobs.vllm_mega and knobs.all_sections
        options = (("skipped", "VLLM_MEGA=0"),) if left_out else ()
        return [Variant(self.name, "vllm", "deep_gemm_mega", "", "mxfp8", "bf16", options=options)]

    def supports(self, variant: Variant, machine: Machine, problem: Problem, knobs: Knobs) -> Support:
        if reason := variant.option("skipped"):
            return Support("skipped", reason)
        return mega_verdict(machine, problem)

    def memory_bytes(self, variant: Variant, problem: Problem) -> int:
        return mega_memory_bytes(problem)

    def open(self, group: Group, variant: Variant, capacity: Problem, knobs: Knobs) -> MegaEngine:
        return MegaEngine(group, capacity)
