"""An `mscclpp.ep` for machines without a GPU: MoECommunicator on CPU tensors, its exchange over gloo.

Signatures are recorded from upstream's source at 3d02152b (tests/signatures); asserts are the
library's own there. What atomics order on the GPU is random here; receive buffers are the library's and are
overwritten as there; what it leaves unwritten is NaN or stale.
"""

from __future__ import annotations

import contextlib
import enum
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from lib.formats import quantize
from tests.fake_gather import gather, guarded_end
from tests.recorded import _told, enforced, recorded_dataclass

RECORD = "mscclpp_3d02152b.json"
FAULTS = ("corrupt_row", "swap_rows", "skip_weights", "other_bits")  # what `MoECommunicator.fault` may be, beside ""
LL_DISPATCH_HIDDEN = (2048, 4096, 4352, 6656, 7168, 8192, 8704, 9216)  # dispatch/common.cuh
MAX_BLOCKS, CONTROL_BLOCKS = 130, 2  # include/kernels.hpp
COMBINE_MAX_TOPK = 9  # combine/common.cuh
POOL_ROWS, POOL_ROW_BYTES = 65536, 16384  # include/recv_pool.hpp


class MoEMode(enum.Enum):
    LATENCY = 0
    THROUGHPUT = 1


class DispatchLayout(enum.Enum):
    EXPERT_MAJOR = 0
    TOKEN_MAJOR = 1
    RANK_MAJOR = 2


class CombineMode(enum.Enum):
    RANK_LOCAL_REDUCE = 0
    DIRECT_SEND = 1


class DispatchDataType(enum.Enum):
    BF16 = 0
    FP8_E4M3 = 1


_config = recorded_dataclass(RECORD, "MoECommunicatorConfig")
_output = recorded_dataclass(RECORD, "DispatchOutput")
_handle = recorded_dataclass(RECORD, "DispatchHandle")
_layout = recorded_dataclass(RECORD, "DispatchLayoutInfo")
_expert_major_context = recorded_dataclass(RECORD, "_ExpertMajorCombineContext")
QuantConfig = recorded_dataclass(RECORD, "QuantConfig")

_alive: weakref.WeakSet[Any] = weakref.WeakSet()


@enforced(RECORD, {"calls"}, "CommGroup")
class CommGroup:
    calls: ClassVar[list[Any]] = []

    def __init__(self, mpi_comm: Any, torch_group: Any, interfaceIpPortTrio: str, rank: Any, size: Any):  # noqa: N803
        assert torch_group is not None, "Either the interface or mpi_group need to be specified"
        assert dist.get_backend(torch_group) == "gloo", "the id is broadcast on the CPU"
        self._group, self._rank, self._size = torch_group, torch_group.rank(), torch_group.size()


@enforced(RECORD, {"calls", "fault"}, "MoECommunicator")
class MoECommunicator:
    calls: ClassVar[list[tuple[str, dict[str, Any]]]] = []
    fault: ClassVar[str] = ""  # of rank 1

    def __init__(self, config: Any, **more: Any) -> None:
        kwargs = more["kwargs"]
        assert config is None or not kwargs, "Pass either MoECommunicatorConfig or keyword arguments, not both"
        made = _config(**kwargs) if config is None else config
        MoECommunicator.calls.append(("config", {name: _told(value) for name, value in kwargs.items()}))
        assert isinstance(made.mode, MoEMode), "MoECommunicatorConfig.mode must be a MoEMode"
        assert min(made.num_experts, made.hidden_size, made.topk, made.max_tokens_per_rank) > 0, "must be positive"
        assert made.output_layout is None or isinstance(made.output_layout, DispatchLayout)
        self._config, self._group = made, made.comm._group
        self._rank, self._world = made.comm._rank, made.comm._size
        assert made.num_experts % self._world == 0
        self._local = made.num_experts // self._world
        self._latency = made.mode is MoEMode.LATENCY
        self._layout = made.output_layout
        self._shuffle = torch.Generator().manual_seed(self._rank)
        self._initialized, self._results = False, 0
        (self._check_latency if self._latency else self._check_throughput)()
        _alive.add(self)

    def _check_latency(self) -> None:
        made = self._config
        blocks = MAX_BLOCKS if made.num_blocks is None else made.num_blocks
        assert self._layout in (None, DispatchLayout.EXPERT_MAJOR, DispatchLayout.RANK_MAJOR), "unsupported layout"
        assert self._world + CONTROL_BLOCKS <= blocks <= MAX_BLOCKS, "num_blocks"
        assert isinstance(made.combine_mode, CombineMode), "combine_mode must be a CombineMode"
        assert made.quant is None or made.quant.format is DispatchDataType.FP8_E4M3
        assert made.quant is None or self._layout is not DispatchLayout.RANK_MAJOR, "BF16 dispatch only"
        assert made.topk <= 32

    def _check_throughput(self) -> None:
        made = self._config
        assert self._layout in (None, DispatchLayout.TOKEN_MAJOR, DispatchLayout.RANK_MAJOR), "unsupported layout"
        assert made.num_blocks is None or made.num_blocks > 0
        assert made.quant is None, "throughput quantized dispatch (scales) is not implemented yet"
        assert made.invalid_token_expert_id is None

    def is_available(self) -> bool:
        return self._latency or self._world in (2, 4, 8, 16)

    def initialize(self) -> None:
        if self._initialized:
            return
        assert self._latency or self._world in (2, 4, 8, 16)
        self._initialized = True
        gather(self._group, None)
        rows, hidden = self._world * self._config.max_tokens_per_rank, self._config.hidden_size
        if self._latency and self._layout is not DispatchLayout.RANK_MAJOR:
            dtype = torch.float8_e4m3fn if self._config.quant else torch.bfloat16
            self._buffer = _garbage(self._local, rows, hidden, dtype=dtype)
            self._source = torch.full((self._local, rows), -(1 << 30), dtype=torch.int32)
            scales = _garbage(self._local, hidden // 128, rows, dtype=torch.float32)
            self._scales = scales.transpose(1, 2) if self._config.quant else None
            return
        self._buffer = _garbage(rows, hidden, dtype=torch.bfloat16)
        self._routes = self._buffer
        if self._config.combine_mode is CombineMode.DIRECT_SEND:
            self._routes = _garbage(rows, self._config.topk, hidden, dtype=torch.bfloat16)

    def is_initialized(self) -> bool:
        return self._initialized

    def dispatch(self, input: Any, topk_ids: Any, weights: Any, quant: Any, **more: Any) -> tuple[Any, Any]:  # noqa: A002
        assert quant is None, "per-call input quant metadata is not supported"
        assert more["stream"] is more["output_buffer"] is more["runtime_max_tokens_per_rank"] is None
        if not self._initialized:
            self.initialize()
        self._check_inputs(input, topk_ids, weights)
        if not self._latency:
            return self._throughput_dispatch(input, topk_ids, weights, more["previous_handle"])
        assert input.shape[1] in LL_DISPATCH_HIDDEN, "unsupported latency dispatch hidden size"
        self._results += 1
        expert_major = self._layout is not DispatchLayout.RANK_MAJOR
        return (self._expert_major if expert_major else self._rank_major)(input, topk_ids, weights)

    def combine(self, expert_output: torch.Tensor, handle: Any, out: Any, stream: Any) -> torch.Tensor:
        assert stream is None
        assert expert_output.is_contiguous()
        if not self._latency:
            return self._throughput_combine(expert_output, handle, out)
        assert expert_output.dtype == torch.bfloat16, "expert_output must be BF16"
        assert self._config.topk <= COMBINE_MAX_TOPK
        assert self._config.hidden_size in LL_DISPATCH_HIDDEN[1:], "unsupported latency combine hidden size"
        assert handle._context.result == self._results, "the handle is of an earlier dispatch"
        tokens = handle._context.num_tokens
        out = torch.empty(tokens, self._config.hidden_size, dtype=torch.bfloat16) if out is None else out
        assert out.shape == (tokens, self._config.hidden_size)
        expert_major = self._layout is not DispatchLayout.RANK_MAJOR
        total = (self._combine_slots if expert_major else self._combine_rows)(expert_output, handle._context)
        return out.copy_(total.to(torch.bfloat16))

    def _check_inputs(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        made = self._config
        assert x.is_contiguous()
        assert (x.dtype, x.shape[1]) == (torch.bfloat16, made.hidden_size)
        assert len(x) <= made.max_tokens_per_rank, "input token count exceeds max_tokens_per_rank"
        assert ids.is_contiguous()
        assert (ids.dtype, ids.shape) == (torch.int64, (len(x), made.topk))
        assert weights.is_contiguous()
        assert (weights.dtype, weights.shape) == (torch.float32, ids.shape)

    def _owner(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.where(ids >= 0, ids // self._local, -1)

    def _break(self, rows: torch.Tensor, valid: torch.Tensor) -> None:
        """The fault, on the valid ones of rows [n, H]."""
        if self._rank == 1 and len(valid) > 1:
            data, (first, second) = rows.view(torch.uint8), valid[:2].tolist()
            if MoECommunicator.fault == "corrupt_row":
                data[first, -1] ^= 1
            elif MoECommunicator.fault == "swap_rows":
                data[[first, second]] = data[[second, first]]

    # -- latency: a token once a rank; in expert-major order copied to a slot of each of its experts there

    def _sent(self, rank: int, values: Any, scales: Any, ids: torch.Tensor, weights: torch.Tensor) -> dict[str, Any]:
        """What goes to one rank, in the order in which warps got there."""
        token = (self._owner(ids) == rank).any(1).nonzero()[:, 0]
        token = token[torch.randperm(len(token), generator=self._shuffle)]
        part = {"token": token, "rows": values[token].view(torch.uint8), "ids": ids[token], "weights": weights[token]}
        return part if scales is None else part | {"scales": scales[token]}

    def _exchanged(self, values: Any, scales: Any, ids: Any, weights: Any) -> tuple[list[Any], list[Any]]:
        """(what came, a source rank each; what was sent, a destination each)"""
        mine = [self._sent(rank, values, scales, ids, weights) for rank in range(self._world)]
        return [sent[self._rank] for sent in gather(self._group, mine)], mine

    def _expert_major(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[Any, Any]:
        quantized = quantize("fp8", x) if self._config.quant else None
        values, scales = (quantized.values, quantized.scales) if quantized else (x, None)
        came, mine = self._exchanged(values, scales, ids, weights)
        ranges = torch.zeros(self._local, self._world, dtype=torch.int64)
        counts = torch.zeros(self._local, dtype=torch.int32)
        slots = [torch.full(part["ids"].shape, -1) for part in came]
        for local in range(self._local):
            for source in torch.randperm(self._world, generator=self._shuffle).tolist():
                part, expert = came[source], local + self._rank * self._local
                picked, lane = (part["ids"] == expert).nonzero(as_tuple=True)
                begin, end = int(counts[local]), int(counts[local]) + len(picked)
                self._buffer[local, begin:end] = part["rows"][picked].view(self._buffer.dtype)
                if self._scales is not None:
                    self._scales[local, begin:end] = part["scales"][picked]
                self._source[local, begin:end] = part["token"][picked].int()
                slots[source][picked, lane] = local * self._buffer.shape[1] + torch.arange(begin, end)
                ranges[local, source], counts[local] = begin << 32 | len(picked), end
        busiest = int(counts.argmax())
        self._break(self._buffer[busiest], torch.arange(int(counts[busiest])))
        context = _expert_major_context(
            ids, weights, self._config.num_experts, len(x), x.shape[1], self._source, ranges
        )
        context.result, context.slots, context.came, context.mine = self._results, slots, came, mine
        quant = QuantConfig(format=DispatchDataType.FP8_E4M3, block_scales=self._scales) if quantized else None
        layout = _layout(DispatchLayout.EXPERT_MAJOR, num_tokens_per_expert=counts)
        return _output(self._buffer, quant, layout), _handle(None, context)

    def _combine_slots(self, expert_output: torch.Tensor, context: Any) -> torch.Tensor:
        """Weighted here: a rank's partial sum is rounded to bf16, unless each selection is sent by itself."""
        assert expert_output.shape == self._buffer.shape, "expert_output must keep dispatch output's layout"
        flat, direct = expert_output.flatten(0, 1), self._config.combine_mode is CombineMode.DIRECT_SEND
        back = []
        for part, slot in zip(context.came, context.slots, strict=True):
            there = (slot >= 0).unsqueeze(2)
            rows = torch.where(there, flat[slot.clamp(min=0)].float(), 0.0)  # [n, K, H]
            broken = MoECommunicator.fault == "skip_weights" and self._rank == 1
            if not direct:
                partial = (rows * (1.0 if broken else part["weights"].unsqueeze(2))).sum(1)
                rows = partial.to(torch.bfloat16).float()
            back.append((part["token"], rows))
        total = torch.zeros(context.num_tokens, flat.shape[1])
        for answers in gather(self._group, back):
            token, rows = answers[self._rank]
            broken = MoECommunicator.fault == "skip_weights" and self._rank == 1
            factor = 1.0 if broken or not direct else context.weights[token].unsqueeze(2)
            total[token] += (rows * factor).sum(1) if direct else rows
        return total

    def _rank_major(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[Any, Any]:
        capacity, invalid = self._config.max_tokens_per_rank, self._config.num_experts
        came, mine = self._exchanged(x, None, ids, weights)
        recv_ids = torch.full((self._world * capacity, ids.shape[1]), invalid, dtype=torch.int32)
        recv_weights = torch.zeros(recv_ids.shape)
        counts = torch.tensor([len(part["token"]) for part in came], dtype=torch.int32)
        for source, part in enumerate(came):
            span = slice(source * capacity, source * capacity + len(part["token"]))
            local = self._owner(part["ids"]) == self._rank
            self._buffer[span] = part["rows"].view(torch.bfloat16)
            recv_ids[span] = torch.where(local, part["ids"], invalid).int()
            recv_weights[span] = torch.where(local, part["weights"], 0.0)
        self._break(self._buffer, (recv_ids < invalid).any(1).nonzero()[:, 0])
        context = types.SimpleNamespace(topk_ids=ids, num_tokens=len(x), result=self._results, mine=mine)
        layout = _layout(DispatchLayout.RANK_MAJOR, num_tokens_per_rank=counts)
        out = _output(self._buffer, None, layout, recv_ids, recv_weights, combine_input_buffer=self._routes)
        return out, _handle(None, context)

    def _combine_rows(self, expert_output: torch.Tensor, context: Any) -> torch.Tensor:
        """The source reads its rows, or its routes, in the peers' buffers, and adds them up."""
        assert expert_output.shape == self._routes.shape
        assert expert_output.data_ptr() == self._routes.data_ptr(), "RANK_MAJOR combine requires the runtime's buffer"
        shares = gather(self._group, expert_output.view(torch.uint8))
        direct = self._config.combine_mode is CombineMode.DIRECT_SEND
        total = torch.zeros(context.num_tokens, self._config.hidden_size)
        for rank, sent in enumerate(context.mine):
            token, begin = sent["token"], self._rank * self._config.max_tokens_per_rank
            rows = shares[rank].view(torch.bfloat16)[begin : begin + len(token)].float()
            if direct:
                there = (self._owner(context.topk_ids[token]) == rank).unsqueeze(2)
                rows = torch.where(there, rows, 0.0).sum(1)
            total[token] += rows
        return total

    # -- throughput: a token once a rank, in source order, straight into the receive pool

    def _throughput_dispatch(self, x: Any, ids: Any, weights: Any, previous: Any) -> tuple[Any, Any]:
        cache = None if previous is None else previous._dispatch_cache
        key = (ids.data_ptr(), ids._version, weights.data_ptr(), weights._version, len(x), id(self))
        if cache is not None and cache["key"] != key:
            cache = None  # without a word
        capacity, rank_major = self._config.max_tokens_per_rank, self._layout is DispatchLayout.RANK_MAJOR
        owner = self._owner(ids)
        in_rank = (owner.unsqueeze(2) == torch.arange(self._world)).any(1)
        token = [in_rank[:, rank].nonzero()[:, 0] for rank in range(self._world)]
        mine = [(x[t].view(torch.uint8), ids[t], weights[t]) for t in token]
        came = [sent[self._rank] for sent in gather(self._group, mine)]
        matrix = torch.tensor(gather(self._group, [len(t) for t in token]), dtype=torch.int32).cumsum(0).int()
        rows = self._world * capacity if rank_major else int(matrix[-1, self._rank])
        assert rows <= POOL_ROWS, "throughput dispatch capacity exceeded"
        assert rows * x.shape[1] * 2 <= POOL_ROWS * POOL_ROW_BYTES, "throughput dispatch capacity exceeded"
        assert rows > 0, "recvX == the receive pool"  # an empty tensor's address is 0
        recv_ids, recv_weights = torch.full((rows, ids.shape[1]), 1 << 20), _garbage(rows, ids.shape[1])
        starts = [0, *matrix[:-1, self._rank].tolist()]
        for source, (data, their_ids, their_weights) in enumerate(came):
            begin = source * capacity if rank_major else starts[source]
            span = slice(begin, begin + len(their_ids))
            local = self._owner(their_ids) == self._rank
            self._buffer[span] = data.view(torch.bfloat16)
            recv_ids[span] = torch.where(local, their_ids - self._rank * self._local, -1)
            recv_weights[span] = torch.where(local, their_weights, 0.0)
        self._break(self._buffer[:rows], (recv_ids < self._local).all(1).nonzero()[:, 0])
        if cache is None:
            cache = {"key": key, "rank_prefix_matrix": matrix, "ids": recv_ids, "weights": recv_weights}
        layout = _layout(self._layout)
        if rank_major:
            ends = matrix[:, self._rank]
            layout.num_tokens_per_rank = torch.diff(ends, prepend=ends.new_zeros(1))
        context = types.SimpleNamespace(token=token, num_tokens=len(x), starts=matrix)
        out = _output(self._buffer[:rows], None, layout, cache["ids"], cache["weights"])
        return out, _handle(None, context, cache)

    def _throughput_combine(self, rows: torch.Tensor, handle: Any, out: Any) -> torch.Tensor:
        context, capacity = handle._context, self._config.max_tokens_per_rank
        assert context.num_tokens > 0, "sendHead != nullptr"  # an empty tensor's address is 0
        assert (rows.dtype, rows.shape[1]) == (torch.bfloat16, self._config.hidden_size)
        if rows.data_ptr() != self._buffer.data_ptr():
            self._buffer[: len(rows)] = rows
        shares = gather(self._group, self._buffer.view(torch.uint8))
        total = torch.zeros(context.num_tokens, rows.shape[1])
        rank_major = self._layout is DispatchLayout.RANK_MAJOR
        for rank, token in enumerate(context.token):
            before = int(context.starts[self._rank - 1, rank]) if self._rank else 0
            begin = self._rank * capacity if rank_major else before
            total[token] += shares[rank].view(torch.bfloat16)[begin : begin + len(token)].float()
        made = total.to(torch.bfloat16)
        if MoECommunicator.fault == "other_bits" and self._rank == 1 and rank_major:
            made.view(torch.int16)[0, -1] ^= 1
        return made if out is None else out.copy_(made)


def _garbage(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(torch.uint8).fill_(0xFF)  # NaN
    return tensor


def alive() -> int:
    """Communicators that something still refers to: ht's destructor is a barrier, so a late one hangs its peers."""
    return len(_alive)


@contextlib.contextmanager
def installed() -> Iterator[type[MoECommunicator]]:
    """`import mscclpp.ep` gives the fake, and a process group can't end before the communicators that live on it."""
    package: Any = types.ModuleType("mscclpp")
    package.ep = ep = types.ModuleType("mscclpp.ep")
    package.CommGroup, package.version = CommGroup, {"version": "0.9.0", "git_commit": "3d02152b"}
    for thing in (MoECommunicator, MoEMode, DispatchLayout, CombineMode, DispatchDataType):
        setattr(ep, thing.__name__, thing)
    ep.QuantConfig = QuantConfig  # type: ignore[attr-defined]
    MoECommunicator.calls.clear()
    MoECommunicator.fault = ""
    names = {"mscclpp": package, "mscclpp.ep": ep}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules |= names
    try:
        with guarded_end(lambda: f"{alive()} communicators outlive their process group" if alive() else ""):
            yield MoECommunicator
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
