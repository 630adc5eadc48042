"""The experts of the fake `vllm`, plain and batched, and what one installation of it knows."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from lib import formats

BLOCK = [128, 128]
E8M0 = "VLLM_USE_DEEP_GEMM_E8M0"
FAULTS = ("wrong_expert", "skip_experts", "stale_experts")  # of rank 1's experts, once a session is bound


class MoEActivation(Enum):
    SILU = "silu"

    @property
    def is_gated(self) -> bool:
        return True


class RoutingMethodType(Enum):
    Renormalize = 1


class Fp8MoeBackend(Enum):
    FLASHINFER_TRTLLM = "FLASHINFER_TRTLLM"


@dataclasses.dataclass
class State:
    """What one installation knows: its signatures, and what was done with it."""

    version: str
    signatures: dict[str, Any]
    calls: list[str] = dataclasses.field(default_factory=list)
    workspace: bool = False
    context: Any = None
    expected_m: list[int | None] = dataclasses.field(default_factory=list)
    fault: str = ""
    refuses_scales: bool = False  # DeepGEMM does not take power-of-two scales here, whatever the environment says
    stale: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    def bound(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, whose arguments bind to the record of `name` first (TypeError), by keyword thereafter."""
        signature = self.signatures[name]

        def checked(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name.partition(":")[2])
            found = signature.bind(*args, **kwargs)
            return call(**found.arguments)

        return checked

    def method(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        signature = self.signatures[name]

        def checked(own: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(name.partition(":")[2])
            return call(own, **signature.bind(*args, **kwargs).arguments)

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        checked.__signature__ = inspect.Signature([own, *signature.parameters.values()])  # type: ignore[attr-defined]
        return checked


def dequantized(values: torch.Tensor, scales: torch.Tensor, rows: int) -> torch.Tensor:
    """values [M, N] e4m3 times scales a block of `rows` x 128, float32."""
    wide = scales.repeat_interleave(rows, 0).repeat_interleave(128, 1)
    return values.float() * wide[: values.shape[0], : values.shape[1]]


def of_activations() -> str:
    return "fp8_e8m0" if os.environ[E8M0] == "1" else "fp8"


class Experts:
    """Block-fp8 experts. `batched`: [L, slots, H] and counts; else [n, H] and global ids with an expert map."""

    batched = False
    up_first = False  # the layout of w13 that the kernel reads
    state: State

    def __init__(self, moe_config: Any, quant_config: Any, **more: Any) -> None:
        assert self.state.workspace, "WorkspaceManager not initialized"
        assert quant_config.block_shape == BLOCK
        assert (set(more) == {"max_num_tokens", "num_dispatchers"}) == self.batched
        self.moe_config, self.quant_config, self.more = moe_config, quant_config, more

    def one(self, expert: int, rows: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        quant = self.quant_config
        w13 = dequantized(w1[expert], quant.w1_scale[expert], 128)
        first, second = (rows @ w13.T).bfloat16().float().chunk(2, dim=1)
        gate, up = (second, first) if self.up_first else (first, second)
        middle = formats.roundtrip(of_activations(), (torch.nn.functional.silu(gate) * up).bfloat16())
        return (middle @ dequantized(w2[expert], quant.w2_scale[expert], 128).T).bfloat16()

    def apply(self, rows: torch.Tensor, scales: torch.Tensor, **given: Any) -> torch.Tensor:
        run = self.apply_batched if self.batched else self.apply_standard
        fault = self.state.fault if self.moe_config.moe_parallel_config.ep_rank == 1 else ""
        if fault == "stale_experts" and id(self) in self.state.stale:
            return self.state.stale[id(self)]
        made = run(rows, scales, **given)
        if fault == "skip_experts":
            made = torch.zeros_like(made)
        self.state.stale[id(self)] = made
        return made

    def apply_standard(self, rows: torch.Tensor, scales: torch.Tensor, **given: Any) -> torch.Tensor:
        x = dequantized(rows, scales, 1)
        total = torch.zeros(rows.shape[0], rows.shape[1])
        local_ids = given["expert_map"][given["topk_ids"]].long()
        for expert in local_ids[local_ids >= 0].unique().tolist():
            row, slot = (local_ids == expert).nonzero(as_tuple=True)
            used = (expert + 1) % given["w1"].shape[0] if self._wrong() else expert
            partial = self.one(used, x[row], given["w1"], given["w2"]).float()
            total.index_add_(0, row, partial * given["topk_weights"][row, slot, None])
        return total.bfloat16()

    def apply_batched(self, rows: torch.Tensor, scales: torch.Tensor, **given: Any) -> torch.Tensor:
        assert given["expert_map"] is None
        made = torch.full(rows.shape, float("nan"), dtype=torch.bfloat16)
        meta = self.state.context.dp_metadata if self.state.context else None
        self.state.expected_m.append(None if meta is None else int(meta.sum()))
        for expert, count in enumerate(given["expert_tokens_meta"].tolist()):
            x = dequantized(rows[expert, :count], scales[expert, :count], 1)
            used = (expert + 1) % rows.shape[0] if self._wrong() else expert
            made[expert, :count] = self.one(used, x, given["w1"], given["w2"])
        return made

    def _wrong(self) -> bool:
        return self.state.fault == "wrong_expert" and self.moe_config.moe_parallel_config.ep_rank == 1
