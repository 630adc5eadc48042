"""FlashInfer's fused MoE (flashinfer.moe_ep): what its five backends share. 0.6.18 to 0.7.4.

Each session is a MoEEpLayer of the point's own size, since kernels and heuristics are chosen by max_tokens_per_rank;
the engine holds what is made once: the runtime (torch.distributed, NVSHMEM) and the converted weights. call() is
layer.forward: argument checks, staging (quantisation into the symmetric buffers), the kernel, the output copy. The
phases are the same two steps on the layer's own kernel object. The kernel applies the gate weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from bench.backends.fi_limits import NEEDS, capacity_of, conversion_bytes
from lib import mega_knobs
from lib.contract import Backend, Engine, Group, Missing, Phase, Session, Support, Unsupported, Variant, unsupported
from lib.problem import Inputs, Problem, local_weights

if TYPE_CHECKING:
    import torch

    from lib.knobs import Knobs
    from lib.machine import Machine

RENAMED = {"in_kernel_fc2_reduce": "enable_in_kernel_fc2_reduce"}  # 0.7: config field, old name -> new
COMPILER_LINE = re.compile(r"\berror\b|\bfatal\b|not found", re.IGNORECASE)


def fields_of(config: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def built(config: type, wanted: dict[str, Any]) -> Any:
    """A config dataclass of whichever version is installed. Raises Unsupported for a field that it does not have."""
    fields, given = fields_of(config), {}
    for name, value in wanted.items():
        known = name if name in fields else RENAMED.get(name, "")
        if known not in fields:
            raise Unsupported(f"{config.__name__} has no field {name} in this version of FlashInfer")
        given[known] = value
    return config(**given)


@contextlib.contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """A compiler's output ends in a line of the build tool's: the last line that names an error is what helps."""
    try:
        yield
    except (Missing, Unsupported):
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if len(lines) < 2:
            raise
        told = [line for line in lines[1:] if COMPILER_LINE.search(line)] or lines[-1:]
        raise RuntimeError(f"{what}: {lines[0]} ... {told[-1]}") from error


def imported(what: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except ImportError as error:
        raise Missing(f"{what} does not import: {str(error).splitlines()[0] if str(error) else error!r}") from error


class FiMegaSession(Session):
    """One point: a layer, its tensors, its output. Everything that runs in a call is the library's."""

    kind = "moe"
    kernels = {"call": [""]}  # noqa: RUF012 - a constant of the class
    quant_included = True
    staging_included = True
    repeatable = True  # compute() may run again on what was staged

    def __init__(self, engine: FiMegaEngine, problem: Problem, inputs: Inputs) -> None:
        import torch

        backend, variant = engine.backend, engine.variant
        self.engine, self.problem, self.inputs = engine, problem, inputs
        self.number_format, self.dispatch_format = backend.number_format, variant.dispatch_dtype
        self.combine_format = backend.combine_format(variant)
        self.tensors = engine.moe_ep.MoEEpTensors(
            hidden_states=inputs.x,
            topk_ids=inputs.topk_idx.to(getattr(torch, backend.id_dtype)),  # the routing of a point is fixed
            topk_weights=inputs.topk_weights,
        )
        self.phases = [
            Phase("stage", self._stage),
            Phase("forward", self._forward, repeatable=self.repeatable),
        ]
        self.owned = torch.zeros_like(inputs.x)  # the phases' output; call() gets a new one from the library
        self.out = self.owned
        started = time.monotonic()
        with one_line_errors("the first forward failed"):
            self.layer = engine.make_layer(problem)
            self.call()  # what is compiled, allocated or tuned at first use
            if inputs.x.device.type == "cuda":
                torch.cuda.synchronize()
        self.first_forward_s = time.monotonic() - started

    def call(self) -> None:
        self.out = self.layer.forward(self.tensors)

    def _stage(self) -> None:
        if not self.repeatable:
            self.mark_arrival()  # staging already sends
        self.layer._kernel.stage_inputs(self.tensors, self.layer._workspace, quantize_input=True)

    def _forward(self) -> None:
        if self.repeatable:
            self.mark_arrival()
        layer = self.layer
        self.out = layer._kernel.compute(layer._workspace, self.engine.weights, output=self.owned)

    def output(self) -> torch.Tensor:
        return self.out

    def poison(self) -> None:
        """Outputs, also the workspace's own. What is staged stays: TIMING=kernel launches on it again and again."""
        for tensor in (self.out, self.owned, getattr(self.layer._workspace, "output_activation", None)):
            if tensor is not None:
                tensor.fill_(float("nan"))

    def facts(self) -> dict[str, Any]:
        seconds = self.engine.seconds | {"first_forward": self.first_forward_s}
        return {
            "max_tokens_per_rank": capacity_of(self.problem),
            "kernel_knobs": self.chosen_knobs(),
            "setup_s": {name: round(value, 2) for name, value in seconds.items()},
        }

    def chosen_knobs(self) -> dict[str, Any]:
        """The tuning that runs, whoever chose it, as far as the library shows it."""
        config = getattr(getattr(self.layer._workspace, "_frontend", None), "config", None)
        config = config if config is not None else self.engine.config
        names = [*mega_knobs.NAMES[self.engine.backend.name], *mega_knobs.OWN_KNOB]
        found = {name: getattr(config, name) for name in names if hasattr(config, name)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def transport(self) -> str:
        return "nvlink" if self.problem.world > 1 else "local"

    def versions(self) -> dict[str, str]:
        from lib.provenance import package_version

        packages = (*self.engine.backend.packages, "flashinfer-python")
        found = {name: package_version(name) for name in sorted(packages)}
        found["flashinfer-python"] = found["flashinfer-python"] or self.engine.version
        return {name: version for name, version in found.items() if version}

    def close(self) -> None:
        """Collective: every rank closes its sessions in the same order."""
        self.layer.destroy()
        self.out = self.owned = self.tensors = self.layer = None  # type: ignore[assignment]
        self.phases = []
        release_memory(self.inputs.x.device)


class FiMegaEngine(Engine):
    """One kernel config, the runtime that it needs, and its weights in the kernel's own layout.

    The runtime is not finalised: upstream's own suites leave by os._exit because NVSHMEM's and CuTe's tear-down may
    abort, and so do our workers, once the last row is saved.
    """

    def __init__(self, backend: FiMegaBackend, group: Group, variant: Variant, capacity: Problem, knobs: Knobs) -> None:
        self.backend, self.group, self.variant = backend, group, variant
        self.seconds: dict[str, float] = {}
        self.check_gpu()
        with self._clocked("import"):
            self.moe_ep, create_mega_kernel = imported("flashinfer.moe_ep", load_moe_ep)
            self.version = flashinfer_version()
        backend.check_imports()
        self.config = built(self._config_class(), backend.config(variant, capacity, knobs))
        self.bootstrap = self._bootstrap()
        kernel = create_mega_kernel(self.config)
        kernel.bind_ep_bootstrap(self.bootstrap)
        with one_line_errors("the runtime did not start"), self._clocked("runtime"):
            requirements = kernel.runtime_requirements(self.bootstrap)
            self.runtime = self.moe_ep.bootstrap_moe_ep_runtime(self.bootstrap, requirements)
        fleet = self._fleet(capacity)
        kernel.validate_init(self.bootstrap, fleet)
        with one_line_errors("the weights could not be converted"), self._clocked("weights"):
            w13, w2 = local_weights(capacity, group.rank, group.device)
            backend.scale_weights(w13, w2)
            self.weights = kernel.preprocess_weights(self.moe_ep.MoEWeightPack(w13=w13, w2=w2), fleet)
        del w13, w2, kernel
        release_memory(group.device)

    def check_gpu(self) -> None:
        """0.6.18 starts NVSHMEM before it looks at the GPU, so nothing is built on one that can't run the kernel."""
        if self.group.device.type != "cuda":
            return
        import torch

        found = torch.cuda.get_device_capability(self.group.device)
        needs = NEEDS[self.backend.name]
        if found != needs.sm if needs.exactly else found[0] != needs.sm[0]:
            raise Unsupported(f"needs sm_{needs.sm[0]}{needs.sm[1]}, this is sm_{found[0]}{found[1]}")

    @contextlib.contextmanager
    def _clocked(self, what: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[what] = time.monotonic() - started

    def _config_class(self) -> type:
        found = getattr(self.moe_ep, self.backend.config_class, None)
        if found is None:
            raise Missing(f"FlashInfer {self.version} has no {self.backend.config_class}: needs 0.6.18 or newer")
        return found

    def _bootstrap(self) -> Any:
        wanted = {"world_size": self.group.world, "rank": self.group.rank, "auto_bootstrap": False}
        return built(self.moe_ep.BootstrapConfig, wanted | {"device": self.group.device.index})

    def _fleet(self, problem: Problem) -> Any:
        return built(
            self.moe_ep.FleetParams,
            {
                "num_experts": problem.num_experts,
                "max_tokens_per_rank": capacity_of(problem),
                "token_hidden_size": problem.hidden,
            },
        )

    def make_layer(self, problem: Problem) -> Any:
        backend = self.moe_ep.MegaConfig(
            megakernel=self.config, preprocess_weights=False, transformed_weights=self.weights
        )
        # the pack is not looked at where transformed weights are given
        return self.moe_ep.MoEEpLayer(self.bootstrap, self._fleet(problem), None, backend=backend)

    def bind(self, problem: Problem, inputs: Inputs) -> FiMegaSession:
        return self.backend.session(self, problem, inputs)


def release_memory(device: torch.device) -> None:
    """What is no longer referred to goes back to the driver: NVSHMEM's heap does not grow out of PyTorch's cache."""
    gc.collect()  # a layer refers to itself
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()


def load_moe_ep() -> tuple[Any, Any]:
    """The package, and its documented way to one kernel without a layer."""
    import flashinfer.moe_ep
    from flashinfer.moe_ep.core.kernel.registry import create_mega_kernel

    return flashinfer.moe_ep, create_mega_kernel


def flashinfer_version() -> str:
    import flashinfer

    return str(getattr(flashinfer, "__version__", "unknown"))


class FiMegaBackend(Backend):
    """What differs between the five: a config class, formats, limits."""

    family = "flashinfer"
    config_class: str
    session: type[FiMegaSession] = FiMegaSession
    dispatch: str  # wire format of dispatch (lib/traffic.py)
    number_format: str  # of the operands (lib/oracle.py)
    id_dtype = "int64"
    packages: tuple[str, ...] = ()  # distributions whose versions a row names, beside FlashInfer

    def variants(self, knobs: Knobs) -> list[Variant]:
        """MEGA_IKR and MEGA_COMBINE_DTYPE make a suffix where the backend has them; no option touches another."""
        options: tuple[tuple[str, str], ...] = ()
        suffix, combine = "", self.combine_dtype(knobs)
        if knobs.mega_ikr and self.name in mega_knobs.IKR_BACKENDS:
            suffix, options = "+ikr", (("MEGA_IKR", "1"),)
        elif knobs.mega_combine_dtype != "bf16" and self.name in mega_knobs.COMBINE_DTYPE_BACKENDS:
            combine = knobs.mega_combine_dtype
            suffix, options = f"+combine_{combine}", (("MEGA_COMBINE_DTYPE", combine),)
        if tuned := mega_knobs.text_for(self.name, knobs):
            options += (("MEGA_KNOBS", tuned),)
        name = f"{self.name}{suffix}"
        return [Variant(name, "flashinfer", name, "", self.dispatch_dtype(knobs), combine, options=options)]

    def dispatch_dtype(self, knobs: Knobs) -> str:
        return self.dispatch

    def combine_dtype(self, knobs: Knobs) -> str:
        return "bf16"

    def combine_format(self, variant: Variant) -> str:
        """The combine wire's name in lib/traffic.py and lib/oracle.py."""
        return "nvfp4_wire" if variant.combine_dtype == "nvfp4" else variant.combine_dtype

    def supports(self, variant: Variant, machine: Machine, problem: Problem, knobs: Knobs) -> Support:
        found = NEEDS[self.name].verdict(machine, problem)
        reason = self.shape_reason(variant, problem, knobs)
        return unsupported(reason) if reason and found.status != "unsupported" else found

    def shape_reason(self, variant: Variant, problem: Problem, knobs: Knobs) -> str:
        return ""

    def buffer_bytes(self, problem: Problem) -> int:
        raise NotImplementedError

    def memory_bytes(self, variant: Variant, problem: Problem) -> int:
        kept = problem.weight_bytes(NEEDS[self.name].kept_bytes)
        return max(conversion_bytes(problem, NEEDS[self.name].kept_bytes), kept + self.buffer_bytes(problem))

    def env(self, variant: Variant, problem: Problem, knobs: Knobs) -> dict[str, str]:
        """The knob cache off: what ran yesterday must not choose today's kernel."""
        return {"FLASHINFER_MOE_EP_KNOB_CACHE": "off"}

    def config(self, variant: Variant, problem: Problem, knobs: Knobs) -> dict[str, Any]:
        return {"intermediate_size": problem.inter, "top_k": problem.topk}

    def check_imports(self) -> None:
        """Raise Missing where a package that the kernel needs later does not import."""

    def scale_weights(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        """Change the bf16 weights in place, before the library converts them."""

    def open(self, group: Group, variant: Variant, capacity: Problem, knobs: Knobs) -> FiMegaEngine:
        return FiMegaEngine(self, group, variant, capacity, knobs)


def given_knobs(backend: str, knobs: Knobs) -> dict[str, Any]:
    """The MEGA_KNOBS object as the library takes it, lists as tuples; {} where it is not for this backend."""
    if not mega_knobs.takes_object(backend, knobs):
        return {}
    assert isinstance(knobs.mega_knobs, dict)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in knobs.mega_knobs.items()}
