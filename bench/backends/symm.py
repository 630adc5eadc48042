"""Backend `symm`: the suite's own dispatch and combine over PyTorch's symmetric memory, for one NVLink domain.

Copy rule: a token once a destination rank, with the local expert ids and weights beside it. `ht`: rows lie without
gaps, by source rank, then by token (a plan kernel and an exchange of counts come first; `+cached` reuses a plan). `ll`:
one kernel a direction, each source has a region of its own. Combine sums a token's copies in float32 in the order of
the ranks, without an epilogue; `+weighted` takes one row a chosen expert and applies the gate weights itself. Nothing
waits for the host and the receive buffers stay where they are, so every call can be captured.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.backends.session import CommSession, device_sms, local_weight, nvidia_reason, spoil, stand_still, weighted
from bench.backends.symm_launch import Launcher
from bench.backends.symm_memory import SCALE_BLOCK, fields, make_arena
from lib.contract import Backend, Engine, Group, Missing, Received, Support, Unsupported, Variant, unsupported
from lib.plan import needs_packages
from lib.problem import Inputs, Problem

if TYPE_CHECKING:
    import torch

    from lib.knobs import Knobs
    from lib.machine import Machine

PACKAGES = {"torch": "torch (pip install torch)", "triton": "triton (pip install triton)"}
MAX_RANKS = 8  # peers of one NVLink domain; a rank is a bit of a mask and a lane of a register
MAX_TOPK = 32
BF16_BYTES = 2
MOST_SMS = 256  # more than any GPU has, for the size of the flags
CPU_PROGRAMS = 4  # under Triton's interpreter
SM = {"bf16": (8, 0), "fp8": (8, 9)}  # Triton converts to e4m3 from sm_89 on


class Move(NamedTuple):
    """Received rows `rows` [n] int64, staged at `places` [n] int64."""

    rows: torch.Tensor
    places: torch.Tensor


class SymmSession(CommSession):
    """One point. All tensors keep their addresses, so a captured graph may be replayed after any other call."""

    deterministic = True
    capturable = ""
    kernels = {"dispatch": [r"symm_plan", r"symm_dispatch"], "combine": [r"symm_combine"]}  # noqa: RUF012

    def __init__(self, engine: SymmEngine, problem: Problem, inputs: Inputs) -> None:
        import torch

        variant = engine.variant
        super().__init__(engine.group, problem, inputs, variant.dispatch_dtype)
        self.engine, self.arena = engine, engine.arena
        self.cached, self.weighted = variant.handle == "cached", variant.layout == "expert_major"
        self.declare("identity")
        fp8 = self.dispatch_format == "fp8"
        if fp8:
            self.quant_included = True
        device, received = engine.group.device, problem.world * engine.capacity
        self.slots = torch.full((problem.world, engine.capacity), -1, dtype=torch.int32, device=device)
        self.starts = torch.zeros(problem.world, dtype=torch.int32, device=device)
        self.arrivals = torch.zeros(2, problem.world, dtype=torch.int32, device=device)
        self.index = torch.full((received, problem.topk), -1, dtype=torch.int32, device=device)
        self.out = torch.zeros_like(inputs.x)
        self.keep((engine.arena.views["rows"], engine.arena.views["scales"] if fp8 else None))
        self.moves: list[Move] = []
        self.launcher = Launcher(self)
        self._dispatch_fresh()

    def _dispatch(self) -> None:
        self.mark_arrival()
        if self.cached:
            self.launcher.dispatch(self.launcher.code.CACHED)
        else:
            self._dispatch_fresh()

    def _dispatch_fresh(self) -> None:
        if self.engine.variant.algo == "ll":
            self.launcher.dispatch(self.launcher.code.UNPLANNED)
        else:
            self.launcher.plan()
            self.launcher.dispatch(self.launcher.code.FRESH)

    def _combine(self) -> None:
        if self.staged is None:
            self._identity()
        self.launcher.combine()

    def arrived(self) -> torch.Tensor:
        """Numbers of the rows that came, int64 [n], by source rank and then by token."""
        import torch

        starts, counts = self.arrivals.tolist()
        spans = [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        return torch.cat(spans).to(self.inputs.x.device)

    def _identity(self) -> None:
        """Stage what identity experts leave: a row a copy, weighted, or unweighted one a chosen expert, by expert.

        Where each row goes is settled by the first call: rows lie by source and token in every dispatch of a routing.
        Later calls ask the device nothing, so that a graph may hold the staged steps.
        """
        ids, weights = self.arena.views["ids"], self.arena.views["weights"]
        if not self.moves:
            self.moves = self._expert_moves() if self.weighted else self._row_moves()
        for rows, places in self.moves:
            factor = weights.new_ones(len(rows), 1) if self.weighted else local_weight(ids[rows] >= 0, weights[rows])
            assert self.staged is not None
            made = self.staged.new_empty(len(rows), self.problem.hidden)
            weighted(self._taken(rows), factor, None if self.scales is None else self.scales[rows], made)
            self.staged[places] = made

    def _row_moves(self) -> list[Move]:
        """Every row that came stays at its number."""
        import torch

        rows = self.arrived()
        self.place(torch.Size((len(self.arena.views["rows"]), self.problem.hidden)))
        return [Move(rows, rows)]

    def _expert_moves(self) -> list[Move]:
        """A row a chosen expert, grouped by expert; a move a choice: all at once would double the memory."""
        import torch

        rows = self.arrived()
        ids = self.arena.views["ids"][rows]
        copy, choice = (ids >= 0).nonzero(as_tuple=True)
        places = torch.empty_like(copy)
        places[ids[copy, choice].argsort(stable=True)] = torch.arange(len(copy), device=copy.device)
        self.index[rows[copy], choice] = places.int()
        self.place(torch.Size((len(copy), self.problem.hidden)))
        return [
            Move(rows[copy[some]], places[some]) for some in (choice == number for number in range(self.problem.topk))
        ]

    def _taken(self, rows: torch.Tensor) -> torch.Tensor:
        """Some received rows; as integers, since PyTorch indexes no float8 on a CPU."""
        import torch

        assert self.rows is not None
        return self.rows.view(torch.uint8)[rows].view(self.rows.dtype)

    def received(self) -> Received:
        import torch

        rows, views = self.arrived(), self.arena.views
        ids, source = views["ids"][rows], views["source"][rows].long()
        return Received(
            rows=self._taken(rows),
            source_rank=source // self.engine.capacity,
            source_token=source % self.engine.capacity,
            experts=torch.where(ids >= 0, ids.long() + self.first_expert, -1),
            weights=views["weights"][rows],
            scales=None if self.scales is None else self.scales[rows],
            format=self.dispatch_format,
        )

    def poison(self) -> None:
        """Peers write into the arena at their own time: all ranks stand still meanwhile."""
        stand_still(self.group)
        for name in ("ids", "weights", "source", "returned"):
            spoil(self.arena.views[name])
        super().poison()
        stand_still(self.group)

    def facts(self) -> dict[str, Any]:
        launcher = self.launcher
        return {"programs": launcher.programs, "push": asdict(launcher.push), "back": asdict(launcher.back)}

    def transport(self) -> str:
        return "nvlink" if self.problem.world > 1 else "local"

    def versions(self) -> dict[str, str]:
        return self.engine.versions


class SymmEngine(Engine):
    """The arena, sized for the largest point, and the counts of calls that all points go on with."""

    def __init__(self, group: Group, variant: Variant, capacity: Problem) -> None:
        import torch

        try:
            import triton
        except ImportError as error:
            raise Missing(f"triton does not import: {error}") from error
        there = device_sms(group)
        if variant.num_sms and there and variant.num_sms > there:
            raise Unsupported(f"NUM_SMS={variant.num_sms}: this GPU has {there} SMs")
        self.group, self.variant = group, variant
        self.versions = {"triton": str(triton.__version__)}
        self.programs = variant.num_sms or there or CPU_PROGRAMS
        self.capacity = max(capacity.tokens, 1)
        self.arena = make_arena(group, fields(capacity, self.capacity, variant.dispatch_dtype == "fp8", self.programs))
        self.state = torch.zeros(4, dtype=torch.int32, device=group.device)

    def bind(self, problem: Problem, inputs: Inputs) -> SymmSession:
        return SymmSession(self, problem, inputs)


class SymmBackend(Backend):
    name = "symm"
    family = "symm"

    def variants(self, knobs: Knobs) -> list[Variant]:
        found = []
        for algo in knobs.algos:
            for dtype in knobs.dispatch_dtype:
                for sms in knobs.num_sms:
                    base = Variant(f"symm_{algo}", "symm", algo=algo, dispatch_dtype=dtype, combine_dtype="bf16")
                    plain = replace(base, num_sms=sms, layout="token_major" if algo == "ht" else "rank_major")
                    found.append(plain)
                    if algo == "ht":
                        found.append(replace(plain, name=f"{plain.name}+cached", handle="cached"))
                        found.append(replace(plain, name=f"{plain.name}+weighted", layout="expert_major"))
        return found

    def supports(self, variant: Variant, machine: Machine, problem: Problem, knobs: Knobs) -> Support:
        reason = self._reason(variant, machine, problem)
        return needs_packages(machine, PACKAGES, unsupported(reason) if reason else Support())

    def _reason(self, variant: Variant, machine: Machine, problem: Problem) -> str:
        dtype = variant.dispatch_dtype
        if reason := nvidia_reason(machine, SM[dtype], dtype):
            return reason
        if problem.nodes > 1:
            return f"symm reaches the GPUs of one node, this is {problem.nodes} nodes"
        if problem.world > MAX_RANKS:
            return f"GPUS={problem.world}: symm takes at most {MAX_RANKS}, one NVLink domain"
        if problem.topk > MAX_TOPK:
            return f"TOPK={problem.topk}: symm takes at most {MAX_TOPK}"
        if problem.hidden % SCALE_BLOCK:
            return f"HIDDEN={problem.hidden}: symm takes a multiple of {SCALE_BLOCK}"
        return ""

    def memory_bytes(self, variant: Variant, problem: Problem) -> int:
        """The arena (received rows, and returned ones twice), what is staged and its temporaries, the output."""
        capacity, row = max(problem.tokens, 1), problem.hidden * BF16_BYTES
        programs = variant.num_sms or MOST_SMS
        arena = fields(problem, capacity, variant.dispatch_dtype == "fp8", programs)[-1].end
        copies = min(problem.topk, problem.local_experts) if variant.layout == "expert_major" else 1
        received = problem.world * capacity
        return arena + received * row * (copies + 2) + received * problem.topk * 4 + capacity * row

    def open(self, group: Group, variant: Variant, capacity: Problem, knobs: Knobs) -> SymmEngine:
        return SymmEngine(group, variant, capacity)
