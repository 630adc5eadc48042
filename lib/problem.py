"""One MoE layer's shape and data: the point of a sweep that every rank can rebuild by itself.

Importing this module needs the standard library only (the coordinator plans with it); torch is imported by the
functions that make tensors.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TIMED_PAYLOAD = 0  # the payload that is timed
SECOND_PAYLOAD = 1  # another one over the same routing, so that yesterday's right bytes are today's wrong ones


@dataclass(frozen=True)
class Problem:
    """The shape of one point. `tokens` is per rank; experts are owned contiguously: rank r has [r*L, (r+1)*L)."""

    world: int
    nodes: int
    tokens: int
    num_experts: int
    topk: int
    hidden: int
    inter: int
    seed: int
    routing: str

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.world

    def at(self, tokens: int) -> Problem:
        return replace(self, tokens=tokens)

    def with_seed(self, seed: int) -> Problem:
        return replace(self, seed=seed)

    def weight_bytes(self, bytes_per_element: float) -> int:
        """Bytes of one rank's expert weights: w13 [L, 2I, H] and w2 [L, H, I]."""
        return int(self.local_experts * 3 * self.inter * self.hidden * bytes_per_element)


@dataclass
class Inputs:
    """One rank's static inputs. The harness owns and rewrites them in place; a session only reads them.

    x [T, H] bf16 · topk_idx [T, K] int64, -1 = masked · topk_weights [T, K] float32, 0 where masked, else positive, and
    1 in a row's sum (0 if all of it is masked), except where experts are the identity (routing.uneven). T is this
    rank's own token count, which is 0 on a rank named by `empty=`.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        return [self.x, self.topk_idx, self.topk_weights]


def stream_seed(*parts: int | str) -> int:
    """A 63-bit seed for one named stream, so that no two streams of a run share one."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def token_payload(problem: Problem, rank: int, count: int, payload: int, device: torch.device) -> torch.Tensor:
    """x ~ N(0, 1) of one rank, [count, H] bf16."""
    import torch

    generator = torch.Generator(device=device)
    generator.manual_seed(stream_seed("x", problem.seed, payload, rank))
    return torch.randn(count, problem.hidden, generator=generator, device=device).to(torch.bfloat16)


def expert_weights(problem: Problem, expert: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert's weights, the same on whichever rank asks.

    Returns w13 [2I, H] bf16 ~ N(0, 1/H), gate rows first, then up rows; and w2 [H, I] bf16 ~ N(0, 1/I).
    """
    import torch

    generator = torch.Generator(device=device)
    generator.manual_seed(stream_seed("expert", problem.seed, expert))
    hidden, inter = problem.hidden, problem.inter
    w13 = torch.randn(2 * inter, hidden, generator=generator, device=device).mul_(hidden**-0.5)
    w2 = torch.randn(hidden, inter, generator=generator, device=device).mul_(inter**-0.5)
    return w13.to(torch.bfloat16), w2.to(torch.bfloat16)


def local_weights(problem: Problem, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's weights in bf16: w13 [L, 2I, H] and w2 [L, H, I]."""
    import torch

    count, hidden, inter = problem.local_experts, problem.hidden, problem.inter
    w13 = torch.empty(count, 2 * inter, hidden, dtype=torch.bfloat16, device=device)
    w2 = torch.empty(count, hidden, inter, dtype=torch.bfloat16, device=device)
    for index in range(count):
        w13[index], w2[index] = expert_weights(problem, rank * count + index, device)
    return w13, w2


def tensor_digest(tensors: list[torch.Tensor]) -> str:
    """Hash of the exact bytes, for 'the inputs are still what they were'."""
    import torch

    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        flat = tensor.contiguous().flatten()  # first flat: the view of an empty matrix needs a stride that it lacks
        digest.update(flat.view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
