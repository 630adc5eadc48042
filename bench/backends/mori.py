"""Backend `mori`: ROCm's MORI, EpDispatchCombineOp with four of its kernel types. API of 624002c8; AMD GPUs only.

Copy rules: a token goes once to each destination rank, all its K ids and weights beside it; between nodes v1 and
async_ll send it once to each destination node or rank, but v1_ll to every node whatever its experts are: T * nodes.
Weights: combine is a plain sum over destination ranks, so the identity experts staged here apply them. Which slot a
token gets is decided by atomics, anew in each dispatch, so the staging runs inside a call (`staging_included`). Nothing
waits on the host: how many rows come is read once, when a point is bound. There is no SM budget: v1's copy kernels and
async_ll's launch on all CUs. async_ll's receive calls belong to dispatch and to combine.
"""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, Any

from bench.backends import mori_limits as limits
from bench.backends.mori_limits import BF16_BYTES, FP32_BYTES, KERNELS, SCALE_BLOCK, capacity
from lib.contract import (
    Backend,
    Engine,
    Group,
    LibraryProfiler,
    Missing,
    Phase,
    Received,
    Session,
    Support,
    Unsupported,
    Variant,
    unsupported,
)
from lib.plan import needs_packages
from lib.problem import Inputs, Problem

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from lib.knobs import Knobs
    from lib.machine import Machine

PACKAGES = {"mori": "MORI (https://github.com/ROCm/mori)"}
GROUP_NAME = "default"  # the one that upstream's own programs register
NO_PROFILER = "MORI was built without its profiler: build it with ENABLE_PROFILER=ON"


class MoriSession(Session):
    """One op a point. Received rows, the registered combine input and the output are the library's symmetric memory."""

    combine_format = "bf16"
    number_format = "bf16"
    staging_included = True
    capturable = ""  # upstream's benches capture both calls; launch arguments are copied into the graph
    kernels = {  # noqa: RUF012 - a constant of the class
        "dispatch": [r"EpDispatch"],
        "combine": [r"EpCombine"],
        "staging": [r"at::native", r"^Mem(cpy|set)", r"Copy(Device|Host)"],
    }

    def __init__(self, engine: MoriEngine, problem: Problem, inputs: Inputs) -> None:
        import torch

        self.engine, self.problem, self.inputs = engine, problem, inputs
        self.kernel = KERNELS[engine.variant.name]
        self.dispatch_format = engine.variant.dispatch_dtype
        self.every_node = self.kernel.every_node
        self._refuse_masks()
        self.op: Any = engine.op(problem)
        self.ids = inputs.topk_idx.to(torch.int32)
        self.payload: Any = (inputs.x, None)
        stage = Phase("identity", self._stage, timed=False)
        self.phases = [Phase("dispatch", self._dispatch), stage, Phase("combine", self._combine)]
        if self.dispatch_format == "fp8":
            self.phases.insert(0, Phase("quantize", self._quantize, timed=False))
            self.quant_included = False
            self._quantize()
        self.rows: torch.Tensor | None = None
        self.out: torch.Tensor | None = None
        self._dispatch()
        # the routing of a point is fixed, so is this count; combine sets the library's own back to 0
        self.count = int(self.received_count[0])
        self.staged = self._combine_input()
        self._stage()
        self._combine()

    def _refuse_masks(self) -> None:
        """A routing file may hold masked entries; every rank reads all of it, so all refuse together."""
        from lib.routing import make_routing

        if self.kernel.masks:
            return
        routing = make_routing(self.problem)
        if any((routing.topk_idx[rank, : routing.tokens_of(rank)] < 0).any() for rank in range(self.problem.world)):
            raise Unsupported(limits.masked_reason(self.engine.variant, self.problem))

    def _combine_input(self) -> torch.Tensor:
        """[R * T, H] bf16: the registered buffer that peers read, or one that combine copies from."""
        import torch

        if self.kernel.zero_copy:
            return self.op.get_registered_combine_input_buffer(torch.bfloat16, hidden_dim=self.problem.hidden)
        rows = self.problem.world * capacity(self.problem)
        return torch.zeros(rows, self.problem.hidden, dtype=torch.bfloat16, device=self.inputs.x.device)

    def _quantize(self) -> None:
        from lib.formats import quantize

        quantized = quantize("fp8", self.inputs.x)
        assert quantized.scales is not None
        if self.payload[1] is None:
            self.payload = (quantized.values.view(self.engine.fp8_dtype), quantized.scales)
            return
        # in place: a captured graph reads the tensors that it was captured with
        self.payload[0].copy_(quantized.values.view(self.engine.fp8_dtype))
        self.payload[1].copy_(quantized.scales)

    def call(self) -> None:
        self._dispatch()
        self._stage()
        self._combine()

    def _dispatch(self) -> None:
        self.mark_arrival()
        x, scales = self.payload
        result = self.op.dispatch(x, self.inputs.topk_weights, scales, self.ids)
        self.rows, self.recv_weights, self.scales, self.recv_ids, self.received_count = result
        if self.kernel.type_name == "AsyncLL":
            self.op.dispatch_recv()

    def _local(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights of the rows that came, [n, K]: -1 and 0 for experts of other ranks, which are sent along."""
        import torch

        first = self.engine.group.rank * self.problem.local_experts
        ids, weights = self.recv_ids[: self.count].long(), self.recv_weights[: self.count]
        mine = (ids >= first) & (ids < first + self.problem.local_experts)
        return torch.where(mine, ids, -1), torch.where(mine, weights, 0.0)

    def _stage(self) -> None:
        import torch

        assert self.rows is not None
        rows = self.rows[: self.count]
        if self.scales is not None:
            blocks = rows.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, SCALE_BLOCK))
            rows = (blocks * self.scales[: self.count].unsqueeze(-1)).flatten(-2).to(torch.bfloat16)
        # the product is made in float32 and rounded once
        torch.mul(rows, self._local()[1].sum(1, keepdim=True), out=self.staged[: self.count])

    def _combine(self) -> None:
        # the indices are this rank's own routing, not those that came: ROCm/mori issue 475
        combined, _ = self.op.combine(self.staged, None, self.ids)
        if self.kernel.type_name == "AsyncLL":
            self.op.combine_recv()
        self.out = combined[: len(self.ids)]

    def output(self) -> torch.Tensor:
        assert self.out is not None
        return self.out

    def poison(self) -> None:
        """Peers write into these buffers, and read from them: no rank may still be in a call, nor start the next."""
        import torch

        self.engine.quiet()
        for tensor in (self.rows, self.staged, self.out):
            if tensor is not None:
                tensor.view(torch.uint8).fill_(0xFF)  # NaN in bf16 and e4m3
        self.engine.quiet()

    def received(self) -> Received:
        """A position is source rank * (ranks * T) + token."""
        import torch

        assert self.rows is not None
        position = self.op.get_dispatch_src_token_pos()[: self.count].long()
        stride = self.op.max_num_tokens_to_send()
        ids, weights = self._local()
        rows = self.rows[: self.count]
        return Received(
            rows=rows if self.scales is None else rows.view(torch.float8_e4m3fn),
            source_rank=position // stride,
            source_token=position % stride,
            experts=ids,
            weights=weights,
            scales=None if self.scales is None else self.scales[: self.count],
            format=self.dispatch_format,
        )

    def library_profiler(self) -> LibraryProfiler | str:
        """MORI-VIZ. Slot ids restart at 0 in each of its source files, so this kernel's own names are given."""
        cpp = self.engine.mori.cpp
        if not hasattr(cpp, "get_debug_time_buf"):
            return NO_PROFILER
        from mori.kernel_profiler import export_to_perfetto

        def start() -> None:
            self.op.get_debug_time_buf().zero_()
            self.op.get_debug_time_offset().zero_()

        def write(path: Path) -> None:
            slots = getattr(cpp, self.kernel.slots, None)
            export_to_perfetto(self.op.get_debug_time_buf(), filename=str(path), slot_map=slots)

        return LibraryProfiler(start, write)

    def transport(self) -> str:
        if self.problem.world == 1:
            return "local"
        sdma = self.kernel.type_name == "AsyncLL" and os.environ.get("MORI_ENABLE_SDMA") == "1"
        inside = "xgmi (sdma)" if sdma else "xgmi"
        return f"{inside} + rdma" if self.problem.nodes > 1 else inside

    def versions(self) -> dict[str, str]:
        return {"mori": self.engine.version}

    def close(self) -> None:
        # the op's destructor gives its part of the symmetric heap back, and the next point's op takes it
        self.engine.quiet()
        self.rows = self.out = self.op = None
        self.staged = self.recv_weights = self.recv_ids = self.scales = self.received_count = None  # type: ignore[assignment]
        self.phases = []
        gc.collect()


class MoriEngine(Engine):
    """The symmetric heap over all points. Each point has its own op, whose buffers are sized by its tokens."""

    def __init__(self, group: Group, variant: Variant) -> None:
        try:
            import mori
            import mori.ops
            import mori.shmem
        except ImportError as error:
            raise Missing(f"mori does not import: {error}") from error
        import torch

        self.group, self.variant, self.mori = group, variant, mori
        self.version = str(mori.__version__)
        self.fp8_dtype = fp8_wire_dtype(group.device)
        torch._C._distributed_c10d._register_process_group(GROUP_NAME, group.pg)  # type: ignore[arg-type]
        # on the cco backend the buffers are no part of the heap
        self.heap = os.environ.get("MORI_EP_COMM", "").strip().lower() != "cco"
        if self.heap and (status := mori.shmem.shmem_torch_process_group_init(GROUP_NAME)):
            raise RuntimeError(f"MORI's symmetric heap did not start: status {status}")

    def op(self, problem: Problem) -> Any:
        """Collective; compiles the kernels at first use."""
        import torch

        ops, kernel = self.mori.ops, KERNELS[self.variant.name]
        config = ops.EpDispatchCombineConfig(
            data_type=torch.bfloat16,  # deprecated: launches go by the tensor's dtype
            rank=self.group.rank,
            world_size=self.group.world,
            hidden_dim=problem.hidden,
            scale_dim=limits.scale_dim(self.variant, problem),
            scale_type_size=FP32_BYTES,
            max_token_type_size=BF16_BYTES,
            max_num_inp_token_per_rank=capacity(problem),
            num_experts_per_rank=problem.local_experts,
            num_experts_per_token=problem.topk,
            warp_num_per_block=kernel.warp_num_per_block,
            block_num=kernel.block_num,
            use_external_inp_buf=not kernel.zero_copy,
            kernel_type=getattr(ops.EpDispatchCombineKernelType, kernel.type_name),
            gpu_per_node=limits.gpus_per_node(problem),
            rdma_block_num=kernel.rdma_block_num,
        )
        return ops.EpDispatchCombineOp(config)

    def quiet(self) -> None:
        """Until no rank has work in flight."""
        import torch
        import torch.distributed as dist

        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)
        dist.barrier(group=self.group.host_pg)

    def bind(self, problem: Problem, inputs: Inputs) -> MoriSession:
        return MoriSession(self, problem, inputs)

    def close(self) -> None:
        import torch

        if self.heap:
            self.mori.shmem.shmem_finalize()
        torch._C._distributed_c10d._unregister_process_group(GROUP_NAME)  # type: ignore[arg-type]


def fp8_wire_dtype(device: torch.device) -> torch.dtype:
    """The e4m3 that this GPU's kernels are compiled for. Dispatch moves the bytes as they are, e4m3fn's on each."""
    import torch

    arch = torch.cuda.get_device_properties(device).gcnArchName if device.type == "cuda" else ""
    return torch.float8_e4m3fnuz if arch.startswith("gfx94") else torch.float8_e4m3fn


class MoriBackend(Backend):
    name = "mori"
    family = "mori"

    def variants(self, knobs: Knobs) -> list[Variant]:
        """`intranode` and `v1` have no two modes; `v1_ll` and `async_ll` belong to ll."""
        return [
            Variant(name, "mori", "", "ll" if name.endswith("_ll") else "", dtype, "bf16", layout="token_major")
            for name in KERNELS
            if "ll" in knobs.algos or not name.endswith("_ll")
            for dtype in knobs.dispatch_dtype
        ]

    def supports(self, variant: Variant, machine: Machine, problem: Problem, knobs: Knobs) -> Support:
        return needs_packages(machine, PACKAGES, self._verdict(variant, machine, problem))

    def _verdict(self, variant: Variant, machine: Machine, problem: Problem) -> Support:
        if machine.vendor != "rocm":
            return unsupported(f"needs an AMD GPU (ROCm), this machine has {machine.has_what}")
        reason = limits.shape_reason(variant, problem)
        return unsupported(reason) if reason else Support()

    def memory_bytes(self, variant: Variant, problem: Problem) -> int:
        return limits.memory_bytes(variant, problem)

    def env(self, variant: Variant, problem: Problem, knobs: Knobs) -> dict[str, str]:
        """A heap that holds the largest point, tuned launches, and the profiler if it is asked for; yours win."""
        wanted = {
            "MORI_SHMEM_HEAP_SIZE": f"{limits.heap_size(variant, problem)}G",
            "MORI_EP_LAUNCH_CONFIG_MODE": "AUTO",
        }
        if variant.name == "mori+async_ll":
            wanted["MORI_ENABLE_SDMA"] = "1"  # without it upstream warns that this kernel is no good
        if knobs.trace == "library":
            wanted["ENABLE_PROFILER"] = "ON"
        return {name: os.environ.get(name) or value for name, value in wanted.items()}

    def open(self, group: Group, variant: Variant, capacity: Problem, knobs: Knobs) -> MoriEngine:
        return MoriEngine(group, variant)
