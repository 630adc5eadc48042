"""A `mori` for machines without an AMD GPU: EpDispatchCombineOp on CPU tensors, its exchange over gloo.

Signatures are recorded from upstream's source at 624002c8 (tests/signatures); asserts and traps are the
library's own there. Slots are handed out in random order, the receive buffers are the library's and keep what an
earlier call left, and a masked entry goes where that kernel sends it.
"""

from __future__ import annotations

import contextlib
import enum
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from tests.fake_gather import gather, guarded_end
from tests.recorded import _told, enforced, recorded_dataclass, recorded_function

RECORD = "mori_624002c8.json"
FAULTS = ("corrupt_row", "swap_rows", "sum_twice")  # what `EpDispatchCombineOp.fault` may be, beside ""
CONFIG = recorded_dataclass(RECORD, "EpDispatchCombineConfig")
GIB = 1 << 30


class EpDispatchCombineKernelType(enum.Enum):
    IntraNode = 0
    InterNode = 1
    InterNodeV1 = 2
    InterNodeV1LL = 3
    AsyncLL = 4
    IntraNodeLL = 5


_alive: weakref.WeakSet[Any] = weakref.WeakSet()
_shmem: list[Any] = []  # the group of the symmetric heap while there is one


def heap_bytes(config: Any) -> int:
    """dispatch_combine.cpp: InitializeShmemBuf, InitializeTokenNumSignalBuf and InitializeOrderMapBuf, in its terms."""
    to_send = to_recv = config.world_size * config.max_num_inp_token_per_rank
    per_rank, nodes = config.max_num_inp_token_per_rank, config.world_size // config.gpu_per_node
    hidden_bytes, topk = config.hidden_dim * config.max_token_type_size, config.num_experts_per_token
    xfer_bytes = hidden_bytes + topk * 4 + topk * 4 + 4 + config.scale_dim * config.scale_type_size
    sizes = {"dispatch_out": to_recv * hidden_bytes, "combine_out": per_rank * hidden_bytes}
    kind = config.kernel_type.name
    if kind == "IntraNode":
        sizes["combine_inp"] = to_recv * xfer_bytes
    elif kind in ("InterNodeV1", "InterNodeV1LL"):
        sizes["dispatch_inp"], sizes["combine_inp"] = nodes * per_rank * xfer_bytes, to_recv * xfer_bytes
        sizes["staging"], sizes["dispatch_staging"] = 2 * nodes * per_rank * xfer_bytes, per_rank * xfer_bytes
    else:
        sizes["inputs and staging"] = 3 * to_send * xfer_bytes
    sizes["weights"] = 3 * to_recv * topk * 4
    sizes["scales"] = 2 * to_recv * config.scale_dim * config.scale_type_size
    sizes["indices"] = 2 * to_recv * topk * 4
    sizes["signals"] = 2 * config.world_size * 4 * 2 + config.world_size * 2 * 8 * 2 + nodes * 8 + 4
    sizes["sources"] = to_send * config.num_experts_per_rank * 4
    return sum(sizes.values())


@enforced(RECORD, {"calls", "fault"}, "EpDispatchCombineOp")
class EpDispatchCombineOp:
    calls: ClassVar[list[tuple[str, dict[str, Any]]]] = []
    fault: ClassVar[str] = ""  # of rank 1

    def __init__(self, config: Any) -> None:
        EpDispatchCombineOp.calls.append(("config", {name: _told(value) for name, value in vars(config).items()}))
        assert _shmem, "shmem is not initialised"
        self._config, self._group, self._kind = config, _shmem[0], config.kernel_type.name
        a_node, world = config.gpu_per_node, config.world_size
        assert a_node & (a_node - 1) == 0, "IsPowerOf2(config.gpuPerNode)"
        assert world % a_node == 0
        assert self._kind != "IntraNode" or world <= 8, "MAX_GPUS_PER_NODE"
        assert config.num_experts_per_token < 64, "numExpertPerToken < warpSize"
        assert not self._kind.startswith("InterNodeV1") or 0 < config.rdma_block_num < config.block_num
        heap = int(os.environ["MORI_SHMEM_HEAP_SIZE"].removesuffix("G")) * GIB
        assert heap_bytes(config) <= heap, "Out of static heap memory!"
        self._shuffle = torch.Generator().manual_seed(config.rank)
        rows = world * config.max_num_inp_token_per_rank
        self._rows = _garbage(rows, config.hidden_dim)
        self._registered = _garbage(rows, config.hidden_dim)
        self._combined = _garbage(config.max_num_inp_token_per_rank, config.hidden_dim)
        self._ids = torch.full((rows, config.num_experts_per_token), 1 << 20, dtype=torch.int32)
        self._weights = torch.full(self._ids.shape, float("nan"))
        self._scales = torch.full((rows, config.scale_dim), float("nan"))
        self._source = torch.full((rows,), -1, dtype=torch.int32)
        self._total, self._pending, self._tokens = torch.zeros(1, dtype=torch.int32), "", -1
        self._debug = torch.zeros(8, dtype=torch.int64)
        gather(self._group, None)
        _alive.add(self)

    def max_num_tokens_to_send(self) -> int:
        return int(self._config.world_size * self._config.max_num_inp_token_per_rank)

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int) -> torch.Tensor:
        assert (dtype, hidden_dim) == (torch.bfloat16, self._config.hidden_dim)
        return self._registered

    def get_dispatch_src_token_pos(self) -> torch.Tensor:
        return self._source

    def get_debug_time_buf(self) -> torch.Tensor:
        return self._debug

    def get_debug_time_offset(self) -> torch.Tensor:
        return self._debug[:2].int()

    def _owners(self, ids: torch.Tensor) -> torch.Tensor:
        """C++ divides towards zero: where a kernel does not look at the sign, -1 is an expert of rank 0."""
        owner = torch.div(ids, self._config.num_experts_per_rank, rounding_mode="trunc")
        return torch.where(ids >= 0, owner, -1) if self._kind in ("IntraNode", "InterNodeV1") else owner

    def dispatch(self, input: Any, weights: Any, scales: Any, indices: Any, **more: Any) -> tuple[Any, ...]:  # noqa: A002
        assert more == {
            "block_num": -1, "rdma_block_num": -1, "warp_per_block": -1,
            "call_local_expert_count": False, "routing": None, "return_routing": False,
        }  # fmt: skip
        made = self._config
        assert not self._pending, f"{self._pending} has not come yet"
        assert (indices.dtype, indices.shape) == (torch.int32, (len(input), made.num_experts_per_token))
        assert (weights.dtype, weights.shape) == (torch.float32, indices.shape)
        assert len(input) <= made.max_num_inp_token_per_rank
        assert input.shape[1] == made.hidden_dim
        assert input.is_contiguous()
        assert made.scale_type_size == 4
        assert (scales is None) == (made.scale_dim == 0)
        assert scales is None or (scales.dtype, scales.shape) == (torch.float32, (len(input), made.scale_dim))
        self._tokens = len(input)
        owner = self._owners(indices)
        self._sent = [(owner == rank).any(1).nonzero()[:, 0] for rank in range(made.world_size)]
        parts = [
            (t, input[t].view(torch.uint8), weights[t], indices[t], None if scales is None else scales[t])
            for t in self._sent
        ]
        came = [sent[made.rank] for sent in gather(self._group, parts)]
        self._receive(came, input.dtype)
        if self._kind == "AsyncLL":
            self._pending = "dispatch"
        rows = self._rows if input.dtype == torch.bfloat16 else self._quantised
        return rows, self._weights, None if scales is None else self._scales, self._ids, self._total

    def _receive(self, came: list[Any], dtype: torch.dtype) -> None:
        """Into slots in random order over all sources. Two dispatches without a combine add their counts up."""
        count, stride = sum(len(part[0]) for part in came), self.max_num_tokens_to_send()
        order = torch.randperm(count, generator=self._shuffle)
        data = torch.cat([part[1] for part in came])[order]
        if dtype == torch.bfloat16:
            self._rows[:count] = data.view(dtype)
            self._break(self._rows[:count])
        else:
            self._quantised = torch.full(self._rows.shape, 0xFF, dtype=torch.uint8).view(dtype)
            self._quantised[:count] = data.view(dtype)
            self._break(self._quantised[:count])
            self._scales[:count] = torch.cat([part[4] for part in came])[order]
        self._weights[:count] = torch.cat([part[2] for part in came])[order]
        self._ids[:count] = torch.cat([part[3] for part in came])[order]
        source = torch.cat([rank * stride + part[0] for rank, part in enumerate(came)])
        self._source[:count] = source[order].int()
        self._total += count
        self._count = count

    def _break(self, rows: torch.Tensor) -> None:
        """The fault, on rows [n, H] that came."""
        if self._config.rank == 1 and len(rows) > 1:
            data = rows.view(torch.uint8)
            if EpDispatchCombineOp.fault == "corrupt_row":
                data[0, -1] ^= 1
            elif EpDispatchCombineOp.fault == "swap_rows":
                data[[0, 1]] = data[[1, 0]]

    def dispatch_recv(self, **more: Any) -> None:
        assert self._pending == "dispatch", "dispatch_recv requires a prior dispatch/dispatch_send call"
        self._pending = ""

    def combine(self, input: Any, weights: Any, indices: Any, **more: Any) -> tuple[Any, None]:  # noqa: A002
        assert {
            more.pop(name) for name in ("block_num", "rdma_block_num", "warp_per_block", "use_external_inp_buf")
        } == {-1}
        assert more == {"call_reset": False, "routing": None}
        assert weights is None, "AsyncLL has no weighted combine, and the others' is not used"
        assert not self._pending, f"{self._pending} has not come yet"
        assert len(indices) == self._tokens, f"combine() indices has {len(indices)} rows (ROCm/mori#475)"
        count = int(self._total)  # 0 after a combine: then nothing is sent
        assert count <= self._count, "dispatched twice without a combine: the counts have added up"
        assert (input.dtype, input.shape[1]) == (torch.bfloat16, self._config.hidden_dim)
        source = input if self._config.use_external_inp_buf else self._registered
        stride = self.max_num_tokens_to_send()
        position, rows = self._source[:count].long(), source[:count]
        back = []
        for rank in range(self._config.world_size):
            mine = position // stride == rank
            back.append((position[mine] % stride, rows[mine].view(torch.uint8)))
        total = torch.zeros(self._tokens, self._config.hidden_dim)
        for answers in gather(self._group, back):
            token, data = answers[self._config.rank]
            total[token] += data.view(torch.bfloat16).float()
        if EpDispatchCombineOp.fault == "sum_twice" and self._config.rank == 1:
            total *= 2
        self._combined[: self._tokens] = total.to(torch.bfloat16)
        self._total.zero_()
        if self._kind == "AsyncLL":
            self._pending = "combine"
        return self._combined, None

    def combine_recv(self, **more: Any) -> None:
        assert self._pending == "combine", "combine_recv requires a prior combine/combine_send call"
        self._pending = ""


def _garbage(*shape: int) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    tensor.view(torch.uint8).fill_(0xFF)  # NaN
    return tensor


def _behind(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """`made` behind the signature of a recorded function."""
    signature = recorded_function(RECORD, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return made(*bound.args, **bound.kwargs)

    return call


def _init(group_name: str) -> int:
    assert not _shmem, "initialised twice"
    _shmem.append(torch._C._distributed_c10d._resolve_process_group(group_name))  # type: ignore[arg-type]
    return 0


def _finalize() -> int:
    assert not _alive, f"{len(_alive)} ops outlive the symmetric heap"
    _shmem.clear()
    return 0


def _export(buffer: torch.Tensor, filename: str, slot_map: Any, *rest: Any) -> None:
    Path(filename).write_text(f"{slot_map}, {int((buffer != 0).sum())} events")


def alive() -> int:
    return len(_alive)


@contextlib.contextmanager
def installed() -> Iterator[type[EpDispatchCombineOp]]:
    """`import mori` gives the fake, and a process group can't end before the heap that lives on it."""
    names = ("mori", "mori.cpp", "mori.ops", "mori.shmem", "mori.kernel_profiler")
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    for name in names[1:]:
        setattr(modules["mori"], name.partition(".")[2], modules[name])
    modules["mori"].__version__ = "1.2.4"
    ops, shmem = modules["mori.ops"], modules["mori.shmem"]
    ops.EpDispatchCombineOp, ops.EpDispatchCombineConfig = EpDispatchCombineOp, CONFIG
    ops.EpDispatchCombineKernelType = EpDispatchCombineKernelType
    shmem.shmem_torch_process_group_init = _behind("shmem_torch_process_group_init", _init)
    shmem.shmem_finalize = _behind("shmem_finalize", _finalize)
    modules["mori.kernel_profiler"].export_to_perfetto = _behind("export_to_perfetto", _export)
    EpDispatchCombineOp.calls.clear()
    EpDispatchCombineOp.fault = ""
    before = {name: sys.modules.get(name) for name in names}
    sys.modules |= modules
    try:
        with guarded_end(lambda: "the symmetric heap outlives its process group" if _shmem else ""):
            yield EpDispatchCombineOp
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
