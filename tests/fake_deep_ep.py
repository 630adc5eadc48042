"""A `deep_ep` for machines without a GPU: DeepEP's legacy Buffer on CPU tensors, its exchange over gloo.

Signatures are those recorded from a real wheel (tests/signatures), so a call that the library would refuse is refused
here; asserts are the library's own, at the commit whose buffer.py that wheel holds (92fe2de). What is random on the
GPU is random here: ll's slot order. What is uninitialised there is NaN here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from lib.formats import quantize
from tests.recorded import enforced

SIGNATURES = "deep_ep_1.2.1.json"
FAULTS = ("corrupt_row", "swap_slots", "skip_weights", "weigh_another")  # what `Buffer.fault` may be, beside ""
ALIGNMENT = 128  # csrc/kernels/configs.cuh, NUM_BUFFER_ALIGNMENT_BYTES
NVL_PEERS = 8  # csrc/kernels/configs.cuh, NUM_MAX_NVL_PEERS
MAX_LOCAL_EXPERTS = 1024  # csrc/kernels/configs.cuh, NUM_MAX_LOCAL_EXPERTS
HT_RANKS = (2, 4, 8)  # csrc/kernels/launch.cuh, SWITCH_RANKS
HT_MAX_TOPK = 32  # csrc/kernels/intranode.cu
HT_TMA_BYTES = 8192  # csrc/kernels/intranode.cu: half a row and a barrier of 8 bytes
NVL_CHUNK = 256  # deep_ep/buffer.py, num_max_nvl_chunked_recv_tokens of every one-node config
LL_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)  # csrc/kernels/launch.cuh, SWITCH_HIDDEN
LL_MAX_TOPK = 11  # csrc/kernels/internode_ll.cu, kNumMaxTopK
RESULTS_ALIVE = 2  # deep_ep/buffer.py, low_latency_dispatch's warning
GARBAGE = -(1 << 30)  # where the kernel writes no source token

_alive: list[Buffer] = []


@dataclass(frozen=True)
class Config:
    num_sms: int
    num_max_nvl_chunked_send_tokens: int
    num_max_nvl_chunked_recv_tokens: int
    num_max_rdma_chunked_send_tokens: int
    num_max_rdma_chunked_recv_tokens: int


class EventOverlap:
    def current_stream_wait(self) -> None:
        """Nothing runs beside the caller here."""


def low_latency_bytes(tokens: int, hidden: int, experts: int) -> int:
    """csrc/config.hpp, LowLatencyLayout: two send, receive and signal buffers; the hint is the next multiple of 128."""
    scales = hidden // 128 * 4
    dispatch_message, combine_message = 16 + max(2 * hidden, hidden + scales), scales + 2 * hidden
    send = max(tokens * dispatch_message, experts * tokens * combine_message)
    receive = experts * tokens * max(dispatch_message, combine_message)
    signals = -(-experts * 4 // ALIGNMENT) * ALIGNMENT
    return (2 * (send + receive + signals) + ALIGNMENT) // ALIGNMENT * ALIGNMENT


def _is(tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    """The library's checks of one argument: type, shape (-1 = any), contiguous."""
    assert tensor.dtype == dtype, f"{tensor.dtype}, not {dtype}"
    assert tensor.dim() == len(shape), f"{tensor.dim()} dimensions, not {len(shape)}"
    fits = all(want in (-1, size) for size, want in zip(tensor.shape, shape, strict=True))
    assert fits, f"{list(tensor.shape)}, not {list(shape)}"
    assert tensor.is_contiguous(), "not contiguous"


def _no_extras(options: dict[str, Any]) -> None:
    used = {name for name, value in options.items() if value not in (None, False, 0)}
    assert not used, f"the fake has no {used}"


def _garbage(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(torch.uint8).fill_(0xFF)  # NaN in bf16, e4m3 and fp32
    return tensor


@enforced(SIGNATURES, attributes={"num_sms", "calls", "fault"})
class Buffer:
    num_sms: int = 20
    calls: ClassVar[list[tuple[str, dict[str, Any]]]] = []
    fault: ClassVar[str] = ""  # of rank 1

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int, low_latency_mode: bool, **more: Any):
        self._group, self._rank, self._world = group, dist.get_rank(group), dist.get_world_size(group)
        assert num_nvl_bytes % ALIGNMENT == num_rdma_bytes % ALIGNMENT == 0
        assert self._world < NVL_PEERS or self._world % NVL_PEERS == 0
        assert num_rdma_bytes == 0 or self._world > NVL_PEERS or low_latency_mode
        self._nvl_bytes, self._rdma_bytes, self._low_latency = num_nvl_bytes, num_rdma_bytes, low_latency_mode
        self._queues, self._explicit = more["num_qps_per_rank"], more["explicitly_destroy"]
        self._queue_depth = int(os.environ.get("NVSHMEM_QP_DEPTH", "1024"))
        self._results: list[StorageWeakRef] = []
        self._shuffle = torch.Generator().manual_seed(self._rank)
        self._gather(None)  # the real one exchanges memory handles
        _alive.append(self)

    def destroy(self) -> None:
        assert self._explicit, "`explicitly_destroy` flag must be set"
        assert self in _alive, "destroyed twice"
        assert dist.is_initialized(), "destroyed after its process group"
        _alive.remove(self)

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms, {2: 24, 4: 6, 8: 6}[num_ranks], NVL_CHUNK, 6, 128)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms, {2: 10, 4: 9, 8: 4}[num_ranks], NVL_CHUNK, 6, 128)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    def _gather(self, value: Any) -> list[Any]:
        """Every rank's value: a collective, as all of the library's calls are but the layout's."""
        assert dist.is_initialized(), "called after its process group"
        values: list[Any] = [None] * self._world
        # as arrays, which pickle several times faster than tensors
        dist.all_gather_object(values, tree_map_only(torch.Tensor, lambda t: t.numpy(), value), group=self._group)
        return tree_map_only(np.ndarray, torch.from_numpy, values)

    def _break(self, rows: torch.Tensor) -> None:
        """The fault, on rows [n, H] that came."""
        if self._rank == 1 and len(rows) > 1:
            data = rows.view(torch.uint8)
            if Buffer.fault == "corrupt_row":
                data[0, -1] ^= 1
            elif Buffer.fault == "swap_slots":
                data[[0, 1]] = data[[1, 0]]

    # -- ht: a token once a rank, in the order of source ranks and of their tokens

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, **more: Any) -> tuple[Any, ...]:
        _no_extras(more)
        _is(topk_idx, torch.int64, -1, -1)
        owner = torch.where(topk_idx >= 0, topk_idx // (num_experts // self._world), -1)
        in_rank = (owner.unsqueeze(2) == torch.arange(self._world)).any(1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, EventOverlap()

    def dispatch(self, x: Any, handle: Any, config: Config, **more: Any) -> tuple[Any, ...]:
        names = ("is_token_in_rank", "num_tokens_per_rank", "num_tokens_per_expert", "topk_idx", "topk_weights")
        in_rank, per_rank, per_expert, ids, weights = (more.pop(name) for name in names)
        assert more.pop("expert_alignment") == 1, "the fake has no expert_alignment"
        _no_extras(more)
        rows, scales = x if isinstance(x, tuple) else (x, None)
        tokens, local = len(rows), 0
        self._check_rows(rows, config, topk=0 if ids is None else ids.shape[1], scales=scales)
        if handle is None:
            _is(per_rank, torch.int32, self._world)
            _is(per_expert, torch.int32, -1)
            _is(ids, torch.int64, tokens, -1)
            _is(weights, torch.float32, *ids.shape)
            local = len(per_expert) // self._world
            assert local <= MAX_LOCAL_EXPERTS
        else:
            assert ids is weights is None
            in_rank = handle[4]
        _is(in_rank, torch.bool, tokens, self._world)
        ranks = range(self._world)
        sent = self._gather([self._part(rank, rows, scales, in_rank, ids, weights, local) for rank in ranks])
        came = {name: [source[self._rank][name] for source in sent] for name in sent[0][0]}
        got = torch.cat(came["rows"]).view(rows.dtype)
        self._break(got)
        result = got if scales is None else (got, torch.cat(came["scales"]))
        if handle is not None:
            assert len(handle[3]) == len(got), "the handle is of another layout"
            return result, None, None, None, None, EventOverlap()
        counts = torch.tensor([[len(part["rows"]) for part in source] for source in sent], dtype=torch.int32)
        channels = torch.zeros(self._world, config.num_sms // 2, dtype=torch.int32)
        handle = (counts.cumsum(0).int(), channels, channels, torch.cat(came["token"]), in_rank, in_rank.int())
        recv_ids = torch.cat(came["ids"])
        per_local_expert = [int((recv_ids == expert).sum()) for expert in range(local)]
        return result, recv_ids, torch.cat(came["weights"]), per_local_expert, handle, EventOverlap()

    def _part(
        self, rank: int, rows: torch.Tensor, scales: Any, in_rank: torch.Tensor, ids: Any, weights: Any, local: int
    ) -> dict[str, torch.Tensor]:
        """What goes to one rank: ids are local there, -1 and weight 0 for experts of others."""
        token = in_rank[:, rank].nonzero()[:, 0]
        part = {"token": token.int(), "rows": rows[token].view(torch.uint8)}
        if scales is not None:
            part["scales"] = scales[token]
        if ids is not None:
            mine = (ids[token] >= 0) & (ids[token] // local == rank)
            part["ids"] = torch.where(mine, ids[token] - rank * local, -1)
            part["weights"] = torch.where(mine, weights[token], 0.0)
        return part

    def combine(self, x: torch.Tensor, handle: tuple[Any, ...], config: Config, **more: Any) -> tuple[Any, ...]:
        _no_extras(more)
        self._check_rows(x, config)
        assert x.dtype == torch.bfloat16
        prefix, _, _, token, in_rank, _ = handle
        _is(prefix, torch.int32, self._world, self._world)
        _is(token, torch.int32, len(x))
        ends = [0, *prefix[:, self._rank].tolist()]
        assert ends[-1] == len(x), "the handle is of another layout"
        spans = [slice(*ends[source : source + 2]) for source in range(self._world)]
        back = self._gather([(token[span].long(), x[span].view(torch.uint8)) for span in spans])
        total = torch.zeros(len(in_rank), x.shape[1])
        for to_ranks in back:
            tokens, rows = to_ranks[self._rank]
            total[tokens] += rows.view(x.dtype).float()
        return total.to(torch.bfloat16), None, EventOverlap()

    def _check_rows(self, rows: torch.Tensor, config: Any, topk: int = 0, scales: torch.Tensor | None = None) -> None:
        assert self in _alive, "the Buffer is destroyed"
        assert self._world in HT_RANKS, "Unsupported ranks"
        assert isinstance(config, Config)
        assert config.num_sms % 2 == 0
        _is(rows, torch.bfloat16 if scales is None else torch.float8_e4m3fn, -1, -1)
        row_bytes = rows.shape[1] * rows.element_size()
        assert row_bytes % 32 == 0
        assert row_bytes // 2 + 8 <= HT_TMA_BYTES, "half a row does not fit into a warp's shared memory"
        assert topk <= HT_MAX_TOPK
        if scales is not None:
            assert scales.dtype == torch.float32
            assert scales.shape == (len(rows), rows.shape[1] // 128)
            row_bytes += 4 * scales.shape[1]
        queues = config.num_sms // 2 * self._world
        need = self._world**2 * 4 + queues * (16 + config.num_max_nvl_chunked_recv_tokens * (row_bytes + 4 + 12 * topk))
        assert need <= self._nvl_bytes, f"the buffer has {self._nvl_bytes} bytes, {need} are needed"

    # -- ll: a token once an expert, into that expert's slots

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        self._check_low_latency(num_max_dispatch_tokens_per_rank, hidden, num_experts)
        self._gather(None)

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, num_experts: int, use_fp8: bool, **more: Any
    ) -> tuple[Any, ...]:
        limit = more.pop("num_max_dispatch_tokens_per_rank")
        _no_extras(more)
        (tokens, hidden), local = x.shape, num_experts // self._world
        self._check_low_latency(limit, hidden, num_experts, topk_idx)
        _is(x, torch.bfloat16, len(topk_idx), hidden)
        assert tokens <= limit
        assert not use_fp8 or hidden % 512 == 0
        self._results = [result for result in self._results if not result.expired()]
        assert len(self._results) < RESULTS_ALIVE, f"{len(self._results)} dispatch results are still held"
        quantized = quantize("fp8", x) if use_fp8 else None
        values, scales = (quantized.values, quantized.scales) if quantized else (x, torch.zeros(tokens, 0))
        sent = self._gather([self._messages(rank, values, scales, topk_idx, local) for rank in range(self._world)])
        return self._into_slots([source[self._rank] for source in sent], limit, hidden, num_experts, use_fp8)

    def _messages(self, rank: int, values: Any, scales: Any, topk_idx: torch.Tensor, local: int) -> tuple[Any, ...]:
        """(local expert, token, row, scales) of each selection on one rank, in the order in which warps got there."""
        token, slot = ((topk_idx >= 0) & (topk_idx // local == rank)).nonzero(as_tuple=True)
        order = torch.randperm(len(token), generator=self._shuffle)
        token, slot = token[order], slot[order]
        return topk_idx[token, slot] - rank * local, token.int(), values[token].view(torch.uint8), scales[token]

    def _into_slots(self, came: list[Any], limit: int, hidden: int, num_experts: int, fp8: bool) -> tuple[Any, ...]:
        local, slots = num_experts // self._world, self._world * limit
        rows = _garbage(local, slots, hidden, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
        scales = _garbage(local, came[0][3].shape[1], slots, dtype=torch.float32).transpose(1, 2)
        source_token = torch.full((local, slots), GARBAGE, dtype=torch.int32)
        ranges = torch.zeros(local, self._world, dtype=torch.int64)
        counts = torch.zeros(local, dtype=torch.int32)
        for expert in range(local):
            for source in torch.randperm(self._world, generator=self._shuffle).tolist():
                experts, token, values, its_scales = came[source]
                picked = (experts == expert).nonzero()[:, 0]
                begin, end = int(counts[expert]), int(counts[expert]) + len(picked)
                rows[expert, begin:end], scales[expert, begin:end] = values[picked].view(rows.dtype), its_scales[picked]
                source_token[expert, begin:end] = token[picked]
                ranges[expert, source] = begin << 32 | len(picked)
                counts[expert] = end
        busiest = int(counts.argmax())
        self._break(rows[busiest, : int(counts[busiest])])
        self._results.append(StorageWeakRef(rows.untyped_storage()))
        handle = (source_token, ranges, limit, hidden, num_experts)
        return (rows, scales) if fp8 else rows, counts, handle, EventOverlap(), None

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple[Any, ...],
        out: torch.Tensor | None,
        **more: Any,
    ) -> tuple[Any, ...]:
        _no_extras(more)
        source_token, ranges, limit, hidden, num_experts = handle
        self._check_low_latency(limit, hidden, num_experts, topk_idx)
        local = num_experts // self._world
        _is(x, torch.bfloat16, local, self._world * limit, hidden)
        _is(topk_weights, torch.float32, *topk_idx.shape)
        out = x.new_empty(len(topk_idx), hidden) if out is None else out
        _is(out, torch.bfloat16, len(topk_idx), hidden)
        back: list[list[Any]] = [[] for _ in range(self._world)]
        for expert in range(local):
            for source in range(self._world):
                begin, count = divmod(int(ranges[expert, source]), 1 << 32)
                span = slice(begin, begin + count)
                back[source].append(
                    (expert + self._rank * local, source_token[expert, span].long(), x[expert, span].view(torch.uint8))
                )
        received = _garbage(num_experts, limit, hidden, dtype=torch.bfloat16)
        for to_ranks in self._gather(back):
            for expert, token, rows in to_ranks[self._rank]:
                received[expert, token] = rows.view(x.dtype)
        out.copy_(self._weighted(received, topk_idx, topk_weights))
        return out, EventOverlap(), None

    def _weighted(self, received: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """The sum over a token's choices in their order, float32 [T, H]."""
        total = torch.zeros(len(topk_idx), received.shape[2])
        if Buffer.fault == "weigh_another" and self._rank == 1:
            topk_weights = topk_weights.roll(1, 1)  # the sum of weights stays: identity rows would not tell
        for expert, weight in zip(topk_idx.T, topk_weights.T, strict=True):
            token = (expert >= 0).nonzero()[:, 0]
            broken = Buffer.fault == "skip_weights" and self._rank == 1
            factor = torch.ones_like(weight) if broken else weight
            total[token] += received[expert[token], token].float() * factor[token].unsqueeze(1)
        return total

    def _check_low_latency(self, limit: int, hidden: int, num_experts: int, topk_idx: Any = None) -> None:
        assert self in _alive, "the Buffer is destroyed"
        assert self._low_latency
        assert self._queue_depth >= (limit + 1) * 2, f"QP depth {self._queue_depth} is too small for {limit} tokens"
        assert hidden in LL_HIDDEN, "Unsupported hidden"
        assert num_experts % self._world == 0
        assert self._queues >= num_experts // self._world
        assert self._world * limit % 4 == 0, "TMA requires the number of tokens to be multiple of 4"
        assert low_latency_bytes(limit, hidden, num_experts) - ALIGNMENT <= self._rdma_bytes
        if topk_idx is not None:
            _is(topk_idx, torch.int64, -1, -1)
            assert topk_idx.shape[1] <= LL_MAX_TOPK
            assert len(topk_idx) <= limit


@contextlib.contextmanager
def installed() -> Iterator[type[Buffer]]:
    """`import deep_ep` gives the fake, and a process group can't end before the Buffers that live on it."""
    module: Any = types.ModuleType("deep_ep")
    module.Buffer, module.Config = Buffer, Config
    ends_group, before = dist.destroy_process_group, sys.modules.get("deep_ep")

    def guarded(group: Any = None) -> None:
        assert not _alive, f"{len(_alive)} Buffers outlive their process group"
        ends_group(group)

    Buffer.calls.clear()
    Buffer.fault, Buffer.num_sms = "", 20
    sys.modules["deep_ep"], dist.destroy_process_group = module, guarded
    try:
        yield Buffer
    finally:
        dist.destroy_process_group = ends_group
        sys.modules.pop("deep_ep")
        if before is not None:
            sys.modules["deep_ep"] = before
