"""What the comm adapters share: a session of dispatch, identity experts and combine, and the staging between them.

The identity experts multiply each received row by the sum of its local weights where the library leaves the weights
to its caller, so that every combine has to give sum(w * x). They are untimed; they are inside a call only where the
library places rows anew in each dispatch (`staging_included`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lib.contract import Group, Phase, Session
from lib.problem import Inputs, Problem

if TYPE_CHECKING:
    import torch

    from lib.machine import Machine

SCALE_BLOCK = 128  # columns that share an fp32 scale
FP8_BYTES = 1


def weighted(rows: torch.Tensor, weights: torch.Tensor | None, scales: torch.Tensor | None, out: torch.Tensor) -> None:
    """out = rows * weights, rounded once; rows in fp8 are dequantised on the way.

    rows [..., H] bf16, or e4m3 with scales [..., H/128] float32 · weights [..., 1] float32, None = 1, with scales
    only · out [..., H] bf16.
    """
    import torch

    if scales is None:
        assert weights is not None
        torch.mul(rows, weights, out=out)
        return
    factor = scales if weights is None else scales * weights
    # e4m3 is exact in bf16; the product is made in float32 and rounded once, straight into its place
    blocks = rows.to(torch.bfloat16).unflatten(-1, (-1, SCALE_BLOCK))
    torch.mul(blocks, factor.unsqueeze(-1), out=out.unflatten(-1, (-1, SCALE_BLOCK)))


def local_weight(here: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of a row's weights of experts that are here, [..., 1] float32; here and weights are [..., K]."""
    import torch

    return torch.where(here, weights, 0.0).sum(-1, keepdim=True)


def spoil(tensor: torch.Tensor | None) -> None:
    """Overwrite a buffer with NaN, or with -1 where it holds numbers of something."""
    import torch

    if tensor is None or not tensor.numel():
        return
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(0xFF)
    else:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def stream_pointer(device: torch.device) -> int:
    """The current stream as an integer handle, as libraries without PyTorch take it; 0 on a CPU."""
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def device_sms(group: Group) -> int:
    """SMs of this rank's GPU, 0 on a CPU."""
    import torch

    if group.device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(group.device).multi_processor_count)


def nvidia_reason(machine: Machine, needed: tuple[int, int] = (9, 0), what: str = "") -> str:
    """Why this machine will not do for kernels of an NVIDIA GPU of this compute capability, "" if it will."""
    if machine.vendor != "cuda":
        return f"needs an NVIDIA GPU, this machine has {machine.has_what}"
    if machine.sm is not None and machine.sm < needed:
        newer = "" if what else " or newer"
        here = f"this is sm_{machine.sm[0]}{machine.sm[1]}"
        return f"{what}{' ' if what else ''}needs sm_{needed[0]}{needed[1]}{newer}, {here}"
    return ""


def stand_still(group: Group) -> None:
    """All that was enqueued on any rank is done when this returns."""
    import torch
    import torch.distributed as dist

    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    dist.barrier(group=group.host_pg)


class CommSession(Session):
    """Phases, staging and payload of one point. A subclass gives _dispatch, _combine, and _identity where it stages."""

    number_format = "bf16"
    combine_format = "bf16"

    def __init__(self, group: Group, problem: Problem, inputs: Inputs, dispatch_format: str) -> None:
        self.group, self.problem, self.inputs, self.dispatch_format = group, problem, inputs, dispatch_format
        self.first_expert = group.rank * problem.local_experts
        self.end_expert = self.first_expert + problem.local_experts
        self.payload: Any = inputs.x  # or (values, scales), where the caller quantises
        self.rows: torch.Tensor | None = None
        self.scales: torch.Tensor | None = None
        self.staged: torch.Tensor | None = None
        self.out: torch.Tensor | None = None

    def declare(
        self, staging: str = "", included: bool = False, blocks_host: bool = False, quantize: bool = False
    ) -> None:
        """Set the phases. `staging` names the untimed one, "" = none; `quantize`: dispatch takes a quantised pair."""
        dispatch = Phase("dispatch", self._dispatch, blocks_host=blocks_host)
        self.phases = [dispatch, Phase("combine", self._combine)]
        if staging:
            self.phases.insert(1, Phase(staging, self._identity, timed=False))
            self.staging_included = included
        if quantize:
            self.phases.insert(0, Phase("quantize", self._quantize, timed=False))
            self.quant_included = False
            self._quantize()

    def _quantize(self) -> None:
        from lib.formats import quantize

        quantized = quantize("fp8", self.inputs.x)
        if isinstance(self.payload, tuple):
            # in place: a captured graph and a library's descriptors keep the tensors that they were made with
            self.payload[0].copy_(quantized.values)
            self.payload[1].copy_(quantized.scales)
        else:
            self.payload = (quantized.values, quantized.scales)

    def _dispatch(self) -> None:
        raise NotImplementedError

    def _identity(self) -> None:
        """No staging."""

    def _combine(self) -> None:
        raise NotImplementedError

    def call(self) -> None:
        self._dispatch()
        if self.staging_included:
            self._identity()
        self._combine()

    def output(self) -> torch.Tensor:
        assert self.out is not None
        return self.out

    def keep(self, received: Any) -> None:
        """Rows, or a pair of rows and scales."""
        self.rows, self.scales = received if isinstance(received, tuple) else (received, None)

    def place(self, shape: torch.Size) -> torch.Tensor:
        """The staged rows, bf16, made once: a captured graph reads the tensor that it was captured with."""
        import torch

        if self.staged is None or self.staged.shape != shape:
            self.staged = torch.zeros(shape, dtype=torch.bfloat16, device=self.inputs.x.device)
        return self.staged

    def poison(self) -> None:
        for tensor in (self.rows, self.scales, self.out):
            spoil(tensor)

    def close(self) -> None:
        # `phases` refers back to self, so without this the tensors would stay until a garbage collection
        self.rows = self.scales = self.staged = None
