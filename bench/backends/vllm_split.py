"""Backends `deepgemm`, `triton`, `trtllm`: DeepEP's dispatch and combine around vLLM's experts, by its modular kernel.

Copy rules: as DeepEP's mode. Weights: in ht the experts weigh and reduce each rank's part, and combine adds up; in ll
combine weighs. What is timed is in vllm_sessions.py, how the kernel is built in vllm_layer.py.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from bench.backends import vllm_layer
from bench.backends.deepep import package_version as deep_ep_version
from bench.backends.deepep_limits import DEFAULT_SMS, ht_buffer_bytes
from bench.backends.vllm_limits import set_environment, split_memory_bytes, split_slots, split_verdict
from bench.backends.vllm_sessions import (
    HighThroughputSession,
    InputQuantisation,
    LowLatencySession,
    SplitSession,
    first_run,
)
from lib.contract import Backend, Engine, Group, Missing, Support, Variant
from lib.problem import Inputs, Problem
from lib.provenance import package_version

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from lib.knobs import Knobs
    from lib.machine import Machine

LL_TRTLLM = "ALGO=ll delivers batched experts, which trtllm does not take"


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
        self.versions = vllm_layer.loaded_versions(power_of_two) | {"deep_ep": deep_ep_version()} | environment
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
