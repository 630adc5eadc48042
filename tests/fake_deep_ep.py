"""A `deep_ep` for machines without a GPU: DeepEP's legacy Buffer on CPU tensors, its exchange over gloo.

Signatures are those recorded from a real wheel (tests/signatures), so a call that the library would refuse is refused
here; asserts are the library's own, of the commit that wheel was built from (92fe2de, between v1.2.1 and v2). What is
random on the GPU is random here: ll's slot order. What is uninitialised there is NaN here.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import json
import os
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from lib.formats import quantize

SIGNATURES = Path(__file__).resolve().parent / "signatures" / "deep_ep_1.2.1.json"
BUFFER_ALIGNMENT = 128  # csrc/kernels/configs.cuh, NUM_BUFFER_ALIGNMENT_BYTES
NVL_PEERS = 8  # csrc/kernels/configs.cuh, NUM_MAX_NVL_PEERS
HT_RANKS = (2, 4, 8)  # csrc/kernels/launch.cuh, SWITCH_RANKS
HT_TMA_BYTES = 8192  # csrc/kernels/intranode.cu: half a row and a barrier of 8 bytes have to fit
LL_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)  # csrc/kernels/launch.cuh, SWITCH_HIDDEN
NVL_CHUNK = 256  # deep_ep/buffer.py, num_max_nvl_chunked_recv_tokens of every config of one node
RESULTS_ALIVE = 2  # deep_ep/buffer.py, low_latency_dispatch: "cannot hold more than 2"
GARBAGE = -(1 << 30)  # what stands in a source index that the kernel does not write


def recorded_signatures(path: Path = SIGNATURES) -> dict[str, inspect.Signature]:
    """Every recorded method as a signature to bind calls to, without self."""
    found = {}
    for name, method in json.loads(path.read_text())["methods"].items():
        parameters = [
            inspect.Parameter(
                parameter["name"],
                getattr(inspect.Parameter, parameter["kind"]),
                default=ast.literal_eval(parameter["default"]) if "default" in parameter else inspect.Parameter.empty,
            )
            for parameter in method["parameters"]
        ]
        found[name] = inspect.Signature(parameters)
    return found


def enforce_signatures(cls: type[Buffer]) -> type[Buffer]:
    """Bind every call to the recorded signature, and note it in `cls.calls`; what the fake lacks says so."""
    recorded = json.loads(SIGNATURES.read_text())["methods"]
    for name, signature in recorded_signatures().items():
        static = recorded[name]["static"]
        made = cls.__dict__.get(name)
        assert made is None or isinstance(made, staticmethod) == static, f"{name} is static in one of them only"
        setattr(cls, name, _bound(name, made.__func__ if isinstance(made, staticmethod) else made, signature, static))
    surplus = {name for name in cls.__dict__ if not name.startswith("_")} - set(recorded) - {"num_sms", "calls", "fault"}
    assert not surplus, f"the recorded class has no {surplus}"
    return cls


def _bound(name: str, made: Callable[..., Any] | None, signature: inspect.Signature, static: bool) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        own, rest = ((), args) if static else (args[:1], args[1:])
        bound = signature.bind(*rest, **kwargs)
        Buffer.calls.append((name, {key: _told(value) for key, value in bound.arguments.items()}))
        if made is None:
            raise NotImplementedError(f"the fake has no {name}")
        bound.apply_defaults()
        return made(*own, **bound.arguments)

    return staticmethod(call) if static else functools.wraps(made or call)(call)


def _told(value: Any) -> Any:
    """An argument as a record keeps it: no tensor, or the record would keep a dispatch's result alive."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return tuple(_told(item) for item in value) if isinstance(value, tuple) else value


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
    """csrc/config.hpp, LowLatencyLayout: two send, receive and signal buffers, then up to the next 128."""
    scales = hidden // 128 * 4
    dispatch_message = 16 + max(2 * hidden, hidden + scales)
    combine_message = scales + 2 * hidden
    send = max(tokens * dispatch_message, experts * tokens * combine_message)
    receive = experts * tokens * max(dispatch_message, combine_message)
    signals = -(-experts * 4 // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
    total = 2 * (send + receive + signals)
    return (total + BUFFER_ALIGNMENT) // BUFFER_ALIGNMENT * BUFFER_ALIGNMENT


@dataclass
class Faults:
    """Ways in which tests break the fake, on rank 1 only: "", corrupt_row, swap_slots or skip_weights."""

    name: str = ""


class Buffer:
    num_sms: int = 20
    calls: ClassVar[list[tuple[str, dict[str, Any]]]] = []
    fault: ClassVar[Faults] = Faults()

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int, low_latency_mode: bool, **more: Any) -> None:
        assert group is not None, "the fake wants a torch.distributed group"
        self._group, self._rank, self._world = group, dist.get_rank(group), dist.get_world_size(group)
        assert num_nvl_bytes % BUFFER_ALIGNMENT == 0
        assert num_rdma_bytes % BUFFER_ALIGNMENT == 0
        assert self._world < NVL_PEERS or self._world % NVL_PEERS == 0
        assert num_rdma_bytes == 0 or self._world > NVL_PEERS or low_latency_mode
        assert more["num_qps_per_rank"] > 0
        self._nvl_bytes, self._rdma_bytes, self._low_latency = num_nvl_bytes, num_rdma_bytes, low_latency_mode
        self._qps, self._explicit = more["num_qps_per_rank"], more["explicitly_destroy"]
        self._qp_depth = int(os.environ.get("NVSHMEM_QP_DEPTH", "1024")) if low_latency_mode else 0
        self._alive = True
        self._results: list[StorageWeakRef] = []
        self._order = random.Random(self._rank)
        self._gather(None)  # the real one exchanges its memory handles
        _alive.append(self)

    def destroy(self) -> None:
        assert self._explicit, "`explicitly_destroy` flag must be set"
        assert self._alive, "destroyed twice"
        assert dist.is_initialized(), "destroyed after its process group"
        self._alive = False
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

    # -- ht

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, **later: Any) -> tuple[Any, ...]:
        _synchronous(later)
        assert self._alive
        assert topk_idx.dim() == 2
        assert topk_idx.is_contiguous()
        assert topk_idx.dtype == torch.int64
        assert num_experts > 0
        owner = torch.where(topk_idx >= 0, topk_idx // (num_experts // self._world), -1)
        in_rank = (owner.unsqueeze(2) == torch.arange(self._world)).any(1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, EventOverlap()

    def dispatch(self, x: Any, handle: Any, config: Config | None, num_worst_tokens: int, **more: Any) -> tuple[Any, ...]:
        _synchronous({key: more.pop(key) for key in ("previous_event", "async_finish", "allocate_on_comm_stream")})
        assert num_worst_tokens == 0, "the fake has no num_worst_tokens"
        assert more["expert_alignment"] == 1, "the fake has no expert_alignment"
        rows, scales = x if isinstance(x, tuple) else (x, None)
        in_rank = more["is_token_in_rank"] if handle is None else handle[4]
        ids, weights = more["topk_idx"], more["topk_weights"]
        self._check_high_throughput(rows, scales, in_rank, ids, config)
        if handle is None:
            per_rank, per_expert = more["num_tokens_per_rank"], more["num_tokens_per_expert"]
            assert per_rank.dtype == per_expert.dtype == torch.int32
            assert ids.shape == weights.shape == (len(rows), ids.shape[1])
            assert weights.dtype == torch.float32
        else:
            assert ids is None
            assert weights is None
            assert [len(matrix) for matrix in handle[:2]] == [self._world, self._world]
        parts = []
        for rank in range(self._world):
            token = in_rank[:, rank].nonzero()[:, 0]
            part = {"token": token.int(), "rows": rows[token], "scales": None if scales is None else scales[token]}
            if handle is None:
                local = len(per_expert) // self._world
                mine = (ids[token] >= 0) & (ids[token] // local == rank)
                part["ids"] = torch.where(mine, ids[token] - rank * local, -1)
                part["weights"] = torch.where(mine, weights[token], 0.0)
            parts.append(part)
        return self._received(parts, handle, in_rank, config)

    def _received(self, parts: list[dict[str, Any]], handle: Any, in_rank: torch.Tensor, config: Any) -> tuple[Any, ...]:
        sent = self._gather(parts)  # [source][destination]
        counts = torch.tensor([[len(part["token"]) for part in source] for source in sent], dtype=torch.int32)
        came = {key: [source[self._rank][key] for source in sent] for key in parts[0]}
        rows = self._broken(torch.cat(came["rows"]))
        got = rows if came["scales"][0] is None else (rows, torch.cat(came["scales"]))
        if handle is not None:
            assert len(rows) == len(handle[3]), "the handle is of another layout"
            return got, None, None, None, None, EventOverlap()
        ids, channels = torch.cat(came["ids"]), config.num_sms // 2
        per_expert = [int((ids == expert).sum()) for expert in range(int(ids.max(initial=-1)) + 1 if False else 0)]
        channel = torch.zeros(self._world, channels, dtype=torch.int32)
        handle = (counts.cumsum(0).int(), channel, channel, torch.cat(came["token"]), in_rank, in_rank.int())
        return got, ids, torch.cat(came["weights"]), per_expert, handle, EventOverlap()
