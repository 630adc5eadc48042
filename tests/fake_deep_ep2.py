"""A `deep_ep` 2 for machines without a GPU: ElasticBuffer on CPU tensors, two ranks.

Signatures are those of the wheel (tests/signatures); asserts are the library's own. What is random on the GPU is
random here: the slot that a token gets on each rank, and in an expert's rows, unless a handle is given.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tests import fake_exchange as exchange
from tests.fake_exchange import as_bytes, from_bytes, gather, is_shaped, no_extras, shuffled
from tests.recorded import enforced, record_of

SIGNATURES = "deep_ep_2.1.0.json"
HANDLE_FIELDS = [p["name"] for p in record_of(SIGNATURES, "EPHandle")["methods"]["__init__"]["parameters"]]


@dataclass
class Handle:
    """EPHandle's own attributes, and the fake's: which tokens went to each rank, in which order."""

    do_expand: bool
    num_experts: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    recv_src_metadata: torch.Tensor
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    sent: list[torch.Tensor]


assert set(Handle.__dataclass_fields__) - {"sent"} <= set(HANDLE_FIELDS), "EPHandle has no such attribute"


@enforced(SIGNATURES, attributes={"calls", "alive"}, part="ElasticBuffer")
class ElasticBuffer:
    calls: ClassVar[list[tuple[str, dict[str, Any]]]] = []
    alive: ClassVar[int] = 0

    def __init__(self, group: Any, num_max_tokens_per_rank: int, hidden: int, num_topk: int, **more: Any) -> None:
        assert not more.pop("allow_hybrid_mode"), "NCCL GIN is unavailable"
        assert os.environ.get("EP_DISABLE_GIN") == "1", "NCCL GIN is unavailable"
        assert more.pop("explicitly_destroy")
        assert more.pop("allow_multiple_reduction")
        assert num_max_tokens_per_rank > 0
        self._group, self._rank, self._world = group, dist.get_rank(group), dist.get_world_size(group)
        self._max, self._hidden, self._topk = num_max_tokens_per_rank, hidden, num_topk
        self._fp8 = more.pop("use_fp8_dispatch")
        gather(None, group)
        ElasticBuffer.alive += 1

    def destroy(self) -> None:
        assert dist.is_initialized(), "destroyed after its process group"
        gather(None, self._group)  # the real one ends with a barrier
        ElasticBuffer.alive -= 1

    def get_physical_domain_size(self) -> tuple[int, int]:
        return 1, self._world

    def dispatch(
        self, x: Any, topk_idx: Any, topk_weights: Any, handle: Any, num_experts: Any, do_expand: bool, **more: Any
    ) -> tuple[Any, ...]:
        limit, sms = more.pop("num_max_tokens_per_rank"), more.pop("num_sms")
        assert sms > 0, "the library's own choice of SMs is a trap: pass num_sms"
        assert more.pop("do_handle_copy")
        no_extras(more)
        rows, scales = x if isinstance(x, tuple) else (x, torch.zeros(len(x), 0))
        is_shaped(rows, torch.float8_e4m3fn if self._fp8 else torch.bfloat16, -1, self._hidden)
        assert rows.shape[1] * rows.element_size() % 16 == 0
        if handle is None:
            assert limit is not None
            is_shaped(topk_idx, torch.int64, len(rows), self._topk)
            is_shaped(topk_weights, torch.float32, len(rows), self._topk)
        else:
            assert topk_idx is topk_weights is None
            assert handle.do_expand == do_expand
            topk_idx, num_experts, limit = handle.topk_idx, handle.num_experts, handle.num_max_tokens_per_rank
        assert len(rows) <= limit <= self._max
        local = num_experts // self._world
        sent = handle.sent if handle else [self._order(topk_idx, rank, local) for rank in range(self._world)]
        weights = torch.zeros(topk_idx.shape) if topk_weights is None else topk_weights
        parts = [
            {
                "rows": as_bytes(rows[token]),
                "scales": scales[token],
                "ids": topk_idx[token],
                "weights": weights[token],
                "source": (token + self._rank * limit).int(),
            }
            for token in sent
        ]
        came = [part[self._rank] for part in gather(parts, self._group)]
        whole = {
            name: torch.cat([part[name] for part in came if len(part["source"])] or [came[0][name]]) for name in came[0]
        }
        got, ids = from_bytes(whole["rows"], rows), whole["ids"].long()
        mine = (ids >= self._rank * local) & (ids < (self._rank + 1) * local)
        ids = torch.where(mine, ids - self._rank * local, -1)
        ends = torch.tensor([len(part["source"]) for part in came]).cumsum(0).int()
        counts = torch.bincount(ids[ids >= 0], minlength=local)
        metadata = handle.recv_src_metadata if handle else self._metadata(whole["source"], ids, counts, do_expand)
        made = handle or Handle(
            do_expand, num_experts, limit, sms, topk_idx.clone(), metadata, ends, counts.cumsum(0).int(), sent
        )
        given = None if topk_weights is None else whole["weights"]
        if not do_expand:
            exchange.broken(got, list(range(len(got))))
            return (got, whole["scales"]) if self._fp8 else got, ids, given, made, None
        slots = metadata[:, 2:].long()
        copy, choice = (slots >= 0).nonzero(as_tuple=True)
        place = slots[copy, choice]
        wide = exchange.garbage(int(counts.sum()), rows.shape[1], dtype=rows.dtype)
        wide_scales, wide_weights = torch.zeros(len(wide), scales.shape[1]), torch.zeros(len(wide))
        wide.view(torch.uint8)[place] = got.view(torch.uint8)[copy]
        wide_scales[place], wide_weights[place] = whole["scales"][copy], whole["weights"][copy, choice]
        exchange.broken(wide, place.tolist())
        return (
            (wide, wide_scales) if self._fp8 else wide,
            None,
            None if given is None else wide_weights,
            made,
            None,
        )

    def _order(self, topk_idx: torch.Tensor, rank: int, local: int) -> torch.Tensor:
        token = ((topk_idx >= rank * local) & (topk_idx < (rank + 1) * local)).any(1).nonzero()[:, 0]
        return token[shuffled(len(token))]

    def _metadata(self, source: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, expand: bool) -> torch.Tensor:
        slots = torch.full_like(ids, -1 if expand else 1 << 30)  # what the kernel leaves alone is no slot
        if expand:
            starts = counts.cumsum(0) - counts
            for expert, start in enumerate(starts.tolist()):
                row, choice = (ids == expert).nonzero(as_tuple=True)
                slots[row, choice] = start + shuffled(len(row))
        return torch.cat([source.unsqueeze(1), torch.zeros_like(source).unsqueeze(1), slots.int()], 1)

    def combine(self, x: torch.Tensor, handle: Handle, num_sms: int, **more: Any) -> tuple[Any, ...]:
        no_extras(more)
        assert num_sms > 0
        metadata, limit = handle.recv_src_metadata, handle.num_max_tokens_per_rank
        if handle.do_expand:
            slots = metadata[:, 2:].long()
            picked = torch.where((slots >= 0).unsqueeze(2), x[slots.clamp(min=0)].float(), 0.0) if len(x) else None
            x = picked.sum(1).to(x.dtype) if picked is not None else x.new_zeros(len(metadata), x.shape[1])
        is_shaped(x, torch.bfloat16, len(metadata), self._hidden)
        source = metadata[:, 0].long()
        parts = [
            (source[source // limit == rank] % limit, as_bytes(x[source // limit == rank]))
            for rank in range(self._world)
        ]
        total = torch.zeros(len(handle.topk_idx), self._hidden)
        for part in gather(parts, self._group):
            token, rows = part[self._rank]
            total[token.long()] += from_bytes(rows, x).float()
        return exchange.summed(total), None, None


def installed() -> Any:
    ElasticBuffer.calls.clear()  # type: ignore[attr-defined]
    return exchange.modules(
        deep_ep=exchange.module("deep_ep", ElasticBuffer=ElasticBuffer, __version__="2.1.0.post20260801")
    )
