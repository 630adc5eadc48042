"""FlashInfer's MoeAlltoAll for machines without a GPU: the workspace on the CPU.

Its traps are here: the state machine, slots handed out anew in each dispatch, ids of -1 that go to rank 0, loads that
want their payload aligned, slots that keep what lay in them, and a combine that takes the workspace's own tensor.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tests import fake_exchange as exchange
from tests.fake_exchange import as_bytes, gather, is_shaped, no_extras, shuffled
from tests.recorded import enforced

ALLTOALL = "flashinfer_alltoall_0.6.18.json"
MNNVL = "flashinfer_mnnvl_0.6.18.json"
MAPPING = "flashinfer_mapping_0.6.18.json"
TOPK = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)
MAX_PAYLOADS = 6
AUX_BYTES = 256


@enforced(MAPPING, attributes={"calls"})
class Mapping:
    calls: ClassVar[list[Any]] = []

    def __init__(
        self, world_size: int, rank: int, tp_size: int, moe_tp_size: int, moe_ep_size: int, **more: Any
    ) -> None:
        assert tp_size * more["pp_size"] * more["cp_size"] == world_size
        assert moe_tp_size * moe_ep_size == tp_size
        self._ep_size, self._ep_rank = moe_ep_size, rank


@enforced(MNNVL, attributes={"calls"}, part="TorchDistBackend")
class TorchDistBackend:
    calls: ClassVar[list[Any]] = []

    def __init__(self, group: Any) -> None:
        self._group = group


@enforced(MNNVL, attributes={"calls"}, part="MnnvlConfig")
class MnnvlConfig:
    calls: ClassVar[list[Any]] = []

    def __init__(self, comm_backend: Any, **more: Any) -> None:
        assert isinstance(comm_backend, TorchDistBackend)


class MnnvlMemory:
    _fabric_supported = False


@enforced(ALLTOALL, attributes={"calls"})
class MoeAlltoAll:
    calls: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def __init__(
        self, mapping: Mapping, max_num_tokens: int, top_k: int, num_experts: int, hidden_size: int, **more: Any
    ) -> None:
        assert isinstance(more.pop("mnnvl_config"), MnnvlConfig), "without one it asks for MPI"
        no_extras(more)
        assert top_k in TOPK, "Unsupported top_k"
        self._rank, self._world = mapping._ep_rank, mapping._ep_size
        self._max, self._topk, self._experts = max_num_tokens, top_k, num_experts
        slots = self._world * max_num_tokens
        size = AUX_BYTES + (slots * (hidden_size * 2 + top_k * 8) + 127) // 128 * 128 + slots * hidden_size * 2 + 128
        self._workspace = torch.full((size,), 0xA5, dtype=torch.uint8)
        self._dispatched = False

    def dispatch(
        self,
        token_selected_experts: torch.Tensor,
        input_payloads: list[torch.Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int,
        expert_id_payload_index: int,
        **more: Any,
    ) -> list[torch.Tensor]:
        no_extras(more)
        assert not self._dispatched, "dispatch called twice without combine"
        assert 0 < runtime_max_tokens_per_rank <= self._max
        ids, limit = token_selected_experts, runtime_max_tokens_per_rank
        is_shaped(ids, torch.int32, -1, self._topk)
        assert 0 < len(input_payloads) <= MAX_PAYLOADS
        for payload in input_payloads:
            is_shaped(payload, payload.dtype, len(ids), -1)
        local = self._experts // self._world
        target = torch.div(ids, local, rounding_mode="trunc")  # as C divides: -1 goes to rank 0
        self._sent = []
        for rank in range(self._world):
            token = (target == rank).any(1).nonzero()[:, 0]
            self._sent.append(token[shuffled(len(token))])
        assert all(len(token) <= limit for token in self._sent)
        parts = [[as_bytes(payload[token]) for payload in input_payloads] for token in self._sent]
        came = [part[self._rank] for part in gather(parts)]
        self._counts, made, offset = [], [], AUX_BYTES
        for source in gather([len(token) for token in self._sent]):
            self._counts.append(source[self._rank])
        for index, payload in enumerate(input_payloads):
            row = payload.shape[1] * payload.element_size()
            assert offset % min(16, row & -row) == 0, "misaligned address"
            place = self._workspace[offset : offset + self._world * limit * row].view(self._world, limit, row)
            for source, count in enumerate(self._counts):
                if count:
                    place[source, :count] = came[source][index]
            made.append(place.flatten().view(payload.dtype).view(self._world, limit, -1))
            offset += place.numel()
        for source, count in enumerate(self._counts):
            made[expert_id_payload_index][source, count:] = invalid_token_expert_id
        rows = max(made, key=lambda payload: payload.shape[2] * payload.element_size())
        used = [source * limit + slot for source, count in enumerate(self._counts) for slot in range(count)]
        exchange.broken(rows.flatten(0, 1), used)
        self._offset, self._limit, self._dispatched = (offset + 127) // 128 * 128, limit, True
        return made

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        if not self._dispatched:
            raise RuntimeError("get_combine_payload_tensor_in_workspace called before successful dispatch")
        size = self._world * runtime_max_tokens_per_rank * hidden_size * dtype.itemsize
        part = self._workspace[self._offset : self._offset + size]
        return part.view(dtype).view(self._world, runtime_max_tokens_per_rank, -1)

    def combine(
        self,
        payload: torch.Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool,
        output: torch.Tensor,
        **more: Any,
    ) -> torch.Tensor:
        no_extras({name: value for name, value in more.items() if name != "output_scalar_scale"})
        assert self._dispatched, "combine called before successful dispatch"
        assert runtime_max_tokens_per_rank == self._limit
        assert payload_in_workspace
        assert payload.data_ptr() == self._workspace.data_ptr() + self._offset, "tensor pointer mismatch"
        parts = [as_bytes(payload[source, :count]) for source, count in enumerate(self._counts)]
        total = torch.zeros(output.shape)
        for rank, source in enumerate(gather(parts)):
            token = self._sent[rank]
            if len(token):
                total[token] += source[self._rank].view(payload.dtype).float()
        output.copy_(exchange.summed(total))
        self._dispatched = False
        return output


def installed() -> Any:
    assert dist.is_initialized()
    MoeAlltoAll.calls.clear()  # type: ignore[attr-defined]
    module = exchange.module
    return exchange.modules(
        flashinfer=module("flashinfer"),
        flashinfer__comm=module("flashinfer.comm"),
        flashinfer__comm__mapping=module("mapping", Mapping=Mapping),
        flashinfer__comm__mnnvl=module(
            "mnnvl", MnnvlConfig=MnnvlConfig, MnnvlMemory=MnnvlMemory, TorchDistBackend=TorchDistBackend
        ),
        flashinfer__comm__trtllm_moe_alltoall=module("trtllm_moe_alltoall", MoeAlltoAll=MoeAlltoAll),
    )
