"""How the kernels of backend `symm` are cut and launched. Triton is imported by the first launch, with the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.backends.symm_memory import COLUMN_BLOCK, SCALE_BLOCK, most_flags, rank_lanes
from lib.problem import Problem

if TYPE_CHECKING:
    from bench.backends.symm import SymmSession

PLAN_TOKENS, PLAN_WARPS = 32, 8  # of a program of symm_plan
SCAN_TOKENS = 1024  # whose ids a program counts at once; fewer where there are fewer
# Of a dispatch's tile, by mode and wire: most rows, and most warps, without a spill (tests/symm_compile.py). ll counts
# beside its rows, so it needs 128 registers a thread.
MAX_TILE: dict[tuple[str | None, str], tuple[int, int]] = {
    ("ht", "bf16"): (32, 32),
    ("ht", "fp8"): (16, 32),
    ("ll", "bf16"): (16, 16),
    ("ll", "fp8"): (8, 16),
}
MAX_COMBINE_TILE = (16, 32)
LANES = 32
ACCESS_ELEMENTS = 8  # 16 bytes of bf16
LAG = 1  # rounds between pushing a chunk and reducing the one that came for it


@dataclass(frozen=True)
class Tiling:
    """How one launch cuts the work: an item is `rows` x `tiles` rows by `groups` x 128 columns."""

    rows: int
    groups: int
    warps: int
    tiles: int = 1
    lag: int = LAG


def power_of_two(number: int) -> int:
    """The number rounded up to a power of two, at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def tiling(problem: Problem, programs: int, most: tuple[int, int]) -> Tiling:
    """About one item a program while tokens are few, then tiles as tall as registers allow. The same on all ranks.

    `most`: rows and warps.
    """
    blocks = problem.hidden // SCALE_BLOCK
    groups = min(COLUMN_BLOCK, power_of_two(blocks))
    items = problem.tokens * -(-blocks // groups)
    rows = min(power_of_two(-(-items // programs)), most[0])
    warps = rows * groups * SCALE_BLOCK // (ACCESS_ELEMENTS * LANES)
    return Tiling(rows, groups, min(max(warps, 1), most[1]))


def scan_tokens(problem: Problem) -> int:
    return min(SCAN_TOKENS, max(power_of_two(problem.tokens), 2))


class Launcher:
    """The three launches of one session, on the current stream."""

    def __init__(self, session: SymmSession) -> None:
        from bench.backends import symm_combine, symm_kernels

        self.code, self.combine_code, self.session = symm_kernels, symm_combine, session
        self.programs, self.capacity = session.engine.programs, session.engine.capacity
        problem, self.rank = session.problem, session.group.rank
        self.world, self.tokens = problem.world, len(session.inputs.x)
        self.lanes = power_of_two(problem.topk)
        wire = session.engine.variant.algo, session.dispatch_format
        self.push = tiling(problem, self.programs, MAX_TILE[wire])
        self.back = tiling(problem, self.programs, MAX_COMBINE_TILE)
        self.shape = {"world": self.world, "topk": problem.topk}
        self.routing = {
            "local_experts": problem.local_experts,
            "lanes": self.lanes,
            "rank_lanes": rank_lanes(self.world),
            "scan": scan_tokens(problem),
        }

    def plan(self) -> None:
        own, arena = self.session, self.session.arena
        blocks = max(1, -(-self.tokens // PLAN_TOKENS))
        self.code.symm_plan[(blocks,)](
            own.inputs.topk_idx, self.tokens, own.slots, arena.table, own.engine.state, self.rank, self.capacity,
            **self.shape, **self.routing, count=PLAN_TOKENS, num_warps=PLAN_WARPS,
        )  # fmt: skip

    def dispatch(self, plan: Any) -> None:
        """`plan` is one of symm_kernels.FRESH, CACHED and UNPLANNED."""
        own, arena, cut = self.session, self.session.arena, self.push
        self.code.symm_dispatch[(self.programs,)](
            own.inputs.x, own.inputs.topk_idx, own.inputs.topk_weights, self.tokens,
            own.slots, own.starts, own.arrivals, arena.table, own.engine.state, self.rank, self.capacity,
            **self.shape, **self.routing, hidden=own.problem.hidden, count=cut.rows, groups=cut.groups,
            fp8=own.dispatch_format == "fp8", plan=plan, num_warps=cut.warps,
        )  # fmt: skip

    def combine(self) -> None:
        own, arena, cut = self.session, self.session.arena, self.back
        self.combine_code.symm_combine[(self.programs,)](
            own.staged, own.index, arena.views["weights"], own.out, self.tokens,
            own.slots, own.arrivals, arena.table, own.engine.state, self.rank, self.capacity,
            most_flags(self.capacity, own.problem.hidden),
            **self.shape, hidden=own.problem.hidden, count=cut.rows, tiles=cut.tiles, groups=cut.groups, lag=cut.lag,
            weighted=own.weighted, num_warps=cut.warps,
        )  # fmt: skip
