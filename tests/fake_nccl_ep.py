"""`nccl.core` and `nccl.ep` for machines without a GPU: groups and handles on CPU tensors.

Signatures are those of the wheels (tests/signatures), dataclasses and enums included; asserts are the library's own,
whose real ones abort the process. Slots of ll are handed out anew in each dispatch, ht's by expert in each update.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from lib.formats import quantize
from tests import fake_exchange as exchange
from tests.fake_exchange import as_bytes, from_bytes, gather, is_shaped, shuffled
from tests.recorded import enforced, recorded_enum

EP, CORE, IDENT = "nccl_ep_0.1.0.json", "nccl4py_communicator_0.6.0.json", "nccl4py_unique_id_0.6.0.json"
Algorithm, Layout, ExpertIdKind, Recipe = (
    recorded_enum(EP, name) for name in ("Algorithm", "Layout", "ExpertIdKind", "DispatchQuantizationRecipe")
)
alive: list[Any] = []  # what has to be destroyed, in the order of its making


def end(thing: Any) -> None:
    assert alive, "destroyed twice"
    assert alive[-1] is thing, "destroyed before what lives on it"
    alive.pop()


@enforced(IDENT, attributes={"calls"})
class UniqueId:
    calls: ClassVar[list[Any]] = []

    def __init__(self, _internal: Any) -> None:
        self._data = _internal

    @property
    def as_bytes(self) -> bytes:
        return bytes(self._data)

    @staticmethod
    def from_bytes(b: bytes) -> UniqueId:
        return UniqueId(b)


@enforced(CORE, attributes={"calls"})
class Communicator:
    calls: ClassVar[list[Any]] = []

    def __init__(self, ptr: Any) -> None:
        alive.append(self)

    @staticmethod
    def init(nranks: int, rank: int, unique_id: UniqueId, config: Any) -> Communicator:
        assert unique_id.as_bytes == b"of rank 0"
        assert (rank, nranks) == (dist.get_rank(), dist.get_world_size())
        return Communicator()

    @property
    def n_lsa_teams(self) -> int:
        raise RuntimeError("InvalidUsage (5)")  # the real one under libnccl 2.30.7

    @property
    def team_lsa(self) -> Any:
        return SimpleNamespace(n_ranks=dist.get_world_size(), rank=dist.get_rank(), stride=1)

    def destroy(self) -> None:
        end(self)


def bundle(name: str) -> Any:
    """A dataclass of the library: by keyword only, under the recorded names."""

    class Bundle:
        calls: ClassVar[list[Any]] = []

        def __init__(self, **fields: Any) -> None:
            for field, value in fields.items():
                setattr(self, field, value)

    Bundle.__name__ = name
    return enforced(EP, attributes={"calls"}, part=name)(Bundle)


GroupConfig, DispatchConfig, LayoutInfo = map(bundle, ("GroupConfig", "DispatchConfig", "LayoutInfo"))
DispatchInputs, DispatchOutputs = map(bundle, ("DispatchInputs", "DispatchOutputs"))
CombineInputs, CombineOutputs = map(bundle, ("CombineInputs", "CombineOutputs"))


@enforced(EP, attributes={"calls"}, part="Tensor")
class Tensor:
    calls: ClassVar[list[Any]] = []

    def __init__(self, buffer: torch.Tensor, **more: Any) -> None:
        assert isinstance(buffer, torch.Tensor)
        assert not any(more.values())
        self._held = buffer

    @property
    def buffer(self) -> torch.Tensor:
        return self._held


def buffer_of(bundle: Any, name: str) -> Any:
    held = getattr(bundle, name) if bundle is not None else None
    return None if held is None else held.buffer


@enforced(EP, attributes={"calls"}, part="Group")
class Group:
    calls: ClassVar[list[Any]] = []

    def __init__(self, ptr: Any) -> None:
        self._config = ptr
        alive.append(self)

    @staticmethod
    def create(comm: Communicator, config: Any) -> Group:
        assert alive[-1] is comm
        assert config.max_dispatch_tokens_per_rank > 0
        assert len(set(gather(config.max_dispatch_tokens_per_rank))) == 1
        if config.algorithm == Algorithm.HIGH_THROUGHPUT:
            assert config.max_recv_tokens_per_rank >= config.max_dispatch_tokens_per_rank
            assert config.max_dispatch_tokens_per_rank * dist.get_world_size() % 4 == 0, "even num_tokens_per_rank"
            assert config.max_token_bytes % 16 == 0
            assert config.num_experts % 4 == 0
        return Group(config)

    def create_handle(self, layout: Any, topk_idx: Tensor, layout_info: Any, config: Any, stream: int) -> Handle:
        assert config is None
        high = self._config.algorithm == Algorithm.HIGH_THROUGHPUT
        assert layout in ((Layout.FLAT, Layout.EXPERT_MAJOR) if high else (Layout.RANK_MAJOR, Layout.EXPERT_MAJOR))
        handle = Handle(SimpleNamespace(config=self._config, layout=layout, high=high))
        handle.update(topk_idx, layout_info=layout_info, stream=stream)
        return handle

    def destroy(self) -> None:
        end(self)


@enforced(EP, attributes={"calls"}, part="Handle")
class Handle:
    """`_copies`: (source, token, choices) of what this rank gets, in the order of its slots, and `_slots` those."""

    calls: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def __init__(self, ptr: Any) -> None:
        self._made, self._rank, self._world = ptr, dist.get_rank(), dist.get_world_size()
        self._local = ptr.config.num_experts // self._world
        self._by_expert = ptr.layout == Layout.EXPERT_MAJOR
        alive.append(self)

    def destroy(self) -> None:
        end(self)

    def update(self, topk_idx: Tensor, layout_info: Any, stream: int) -> None:
        assert isinstance(stream, int)
        self._ids = topk_idx.buffer
        is_shaped(self._ids, torch.int64, -1, -1)
        assert len(self._ids) <= self._made.config.max_dispatch_tokens_per_rank
        if not self._made.high:
            assert layout_info is None, "LL mode does not accept local tensors"
            return
        self._place(gather(self._ids))
        buffer_of(layout_info, "recv_total_counter").fill_(len(self._copies))
        if self._by_expert:
            buffer_of(layout_info, "expert_counters").copy_(self._counts)

    def _place(self, everyone: list[torch.Tensor]) -> None:
        """Where each copy lies on this rank. ll: random; ht by expert: random in an expert's zone; flat: in order."""
        first, end_expert = self._rank * self._local, (self._rank + 1) * self._local
        here = [(ids >= first) & (ids < end_expert) for ids in everyone]
        if not self._by_expert:
            copies = [(source, int(token)) for source, mine in enumerate(here) for token in mine.any(1).nonzero()[:, 0]]
            if not self._made.high:
                copies = [copies[i] for i in shuffled(len(copies)).tolist()]
                copies.sort(key=lambda copy: copy[0])
            self._counts = torch.bincount(torch.tensor([s for s, _ in copies]).int(), minlength=self._world).int()
            self._copies = [(source, token, None) for source, token in copies]
        else:
            found = [
                (source, int(token), int(choice))
                for source, mine in enumerate(here)
                for token, choice in mine.nonzero().tolist()
            ]
            found = [found[i] for i in shuffled(len(found)).tolist()]
            experts = [int(everyone[s][t, k]) - first for s, t, k in found]
            order = sorted(range(len(found)), key=experts.__getitem__)
            self._copies = [found[i] for i in order]
            self._counts = torch.bincount(torch.tensor(experts).int(), minlength=self._local).int()
        self._slots = self._slots_of(self._counts)

    def _slots_of(self, counts: torch.Tensor) -> list[int]:
        """ht packs; ll has R * capacity slots an expert, or capacity slots a source rank."""
        if self._made.high:
            return list(range(int(counts.sum())))
        room = self._made.config.max_dispatch_tokens_per_rank * (self._world if self._by_expert else 1)
        return [group * room + slot for group, count in enumerate(counts.tolist()) for slot in range(count)]

    def dispatch(self, inputs: Any, outputs: Any, layout_info: Any, config: Any, stream: int) -> None:
        assert isinstance(stream, int)
        x, scales, recipe = buffer_of(inputs, "tokens"), buffer_of(inputs, "scales"), config.quantization_recipe
        rows, out_scales = buffer_of(outputs, "tokens"), buffer_of(outputs, "scales")
        assert (scales is not None) == (recipe == Recipe.FWD)
        assert (out_scales is not None) == (recipe != Recipe.NONE)
        assert recipe != Recipe.DS_FP8E3M4 or not self._made.high, "DS_FP8E3M4 is LL-only"
        self._check_shapes(x, rows, out_scales, inputs, outputs, layout_info)
        if recipe == Recipe.DS_FP8E3M4:
            assert x.shape[1] % 512 == 0
            made = quantize("fp8", x)
            x, scales = made.values, made.scales
        scales = torch.zeros(len(x), 0) if scales is None else scales
        weights = buffer_of(inputs, "topk_weights")
        weights = torch.zeros(self._ids.shape) if weights is None else weights
        everyone = gather((as_bytes(x), scales, self._ids, weights))
        if not self._made.high:
            self._place([ids for _, _, ids, _ in everyone])
        flat = rows.flatten(0, -2)
        assert flat.dtype == x.dtype
        assert len(self._slots) <= len(flat)
        for (source, token, choice), slot in zip(self._copies, self._slots, strict=True):
            values, their_scales, ids, their_weights = everyone[source]
            flat.view(torch.uint8)[slot] = values[token]
            if out_scales is not None:
                out_scales.flatten(0, -2)[slot] = their_scales[token]
            self._tell(outputs, slot, ids[token], their_weights[token], choice)
        exchange.broken(flat, self._slots)
        if not self._made.high:
            name = "expert_counters" if self._by_expert else "src_rank_counters"
            buffer_of(layout_info, name).copy_(self._counts)

    def _check_shapes(self, x: Any, rows: Any, scales: Any, inputs: Any, outputs: Any, layout_info: Any) -> None:
        config, hidden, capacity = self._made.config, x.shape[1], self._made.config.max_dispatch_tokens_per_rank
        assert len(x) == len(self._ids)
        assert hidden * x.element_size() <= config.max_token_bytes
        weights = buffer_of(inputs, "topk_weights")
        if self._made.high:
            assert layout_info is None
            assert len(rows) >= config.max_recv_tokens_per_rank
            shape: tuple[int, ...] = (-1,)
        elif self._by_expert:
            assert weights is None
            assert buffer_of(layout_info, "src_rank_counters") is None
            is_shaped(buffer_of(layout_info, "expert_counters"), torch.int32, self._local)
            shape = (self._local, self._world * capacity)
        else:
            assert buffer_of(layout_info, "expert_counters") is None
            assert layout_info.recv_topk_idx_kind == ExpertIdKind.LOCAL
            shape = (self._world, capacity)
        is_shaped(rows, rows.dtype, *shape, hidden)
        if scales is not None:
            is_shaped(scales, torch.float32, *shape, hidden // 128)
        if self._made.high or not self._by_expert:
            is_shaped(weights, torch.float32, len(x), self._ids.shape[1])
            self._check_told(outputs, shape)

    def _check_told(self, outputs: Any, shape: tuple[int, ...]) -> None:
        ids, weights = buffer_of(outputs, "topk_idx"), buffer_of(outputs, "topk_weights")
        if self._by_expert:
            assert ids is None
            is_shaped(weights, torch.float32, -1)
            return
        is_shaped(ids, torch.int64 if self._made.high else torch.int32, *shape, self._ids.shape[1])
        is_shaped(weights, torch.float32, *shape, self._ids.shape[1])

    def _tell(self, outputs: Any, slot: int, ids: torch.Tensor, weights: torch.Tensor, choice: int | None) -> None:
        told_ids, told = buffer_of(outputs, "topk_idx"), buffer_of(outputs, "topk_weights")
        if choice is not None:
            if told is not None:
                told[slot] = weights[choice]
            return
        first = self._rank * self._local
        here = (ids >= first) & (ids < first + self._local)
        if self._made.high:  # the local choices first, the others -1 and 0
            order = here.int().argsort(descending=True, stable=True)
            ids, weights, here = ids[order], torch.where(here, weights, 0.0)[order], here[order]
        told_ids.flatten(0, -2)[slot] = torch.where(here, ids - first, -1).to(told_ids.dtype)
        told.flatten(0, -2)[slot] = weights

    def combine(self, inputs: Any, outputs: Any, config: Any, stream: int) -> None:
        assert isinstance(stream, int)
        assert config is None
        x, out, weights = buffer_of(inputs, "tokens"), buffer_of(outputs, "tokens"), buffer_of(outputs, "topk_weights")
        weighs = self._by_expert and not self._made.high
        assert buffer_of(inputs, "topk_weights") is None
        assert (weights is not None) == weighs
        is_shaped(out, torch.bfloat16, len(self._ids), x.shape[-1])
        assert x.dtype == torch.bfloat16
        flat = x.flatten(0, -2)[self._slots]
        back: list[Any] = [([], [], []) for _ in range(self._world)]
        for index, (source, token, choice) in enumerate(self._copies):
            for part, value in zip(back[source], (index, token, choice), strict=True):
                part.append(value)
        parts = [(token, choice, as_bytes(flat[index])) for index, token, choice in back]
        total = torch.zeros(out.shape)
        for part in gather(parts):
            token, choice, rows = part[self._rank]
            if token:
                factor = weights[token, choice].unsqueeze(1) if weighs else 1.0
                total.index_add_(0, torch.tensor(token), from_bytes(rows, x).float() * factor)
        out.copy_(exchange.summed(total))


def installed() -> Any:
    Handle.calls.clear()  # type: ignore[attr-defined]
    names = "Algorithm Layout ExpertIdKind Group GroupConfig DispatchConfig LayoutInfo DispatchInputs".split()
    names += "DispatchOutputs CombineInputs CombineOutputs Tensor".split()
    made = {name: globals()[name] for name in names} | {"DispatchQuantizationRecipe": Recipe}
    module = exchange.module
    return exchange.modules(
        nccl=module("nccl"),
        nccl__core=module(
            "nccl.core",
            Communicator=Communicator,
            UniqueId=UniqueId,
            get_unique_id=lambda empty=False: UniqueId(b"of rank 0"),
            __version__="0.6.0",
        ),
        nccl__ep=module("nccl.ep", get_lib_version=lambda: "0.2.0", **made),
    )
