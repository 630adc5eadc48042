"""What the harness knows of a library: nothing but the names in this file.

An adapter is a Backend, which opens an Engine once a worker group, which binds a Session once a point:

    Backend.variants -> Backend.supports -> [worker group] Backend.open -> Engine.bind -> Session.call / .phases

Importing this module needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from lib.knobs import Knobs
    from lib.machine import Machine
    from lib.problem import Inputs, Problem


@dataclass(frozen=True)
class Support:
    """A verdict reached without running anything. `status` is ok, unsupported, missing or skipped."""

    status: str = "ok"
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"


OK = Support()


def unsupported(reason: str) -> Support:
    return Support("unsupported", reason)


def missing(reason: str) -> Support:
    return Support("missing", reason)


class Unsupported(Exception):  # noqa: N818 - a verdict, not an error
    """Raised by open or bind: this machine or shape can't, as only the library itself could tell."""


class Missing(Exception):  # noqa: N818 - a verdict, not an error
    """Raised by open or bind: the library or a version of something it needs is not there."""


class NotCaptured(Exception):  # noqa: N818 - a verdict, not an error
    """The CUDA graph could not be captured on some rank: the case is measured eagerly, in a fresh group."""


@dataclass(frozen=True)
class Variant:
    """One way to run a backend; everything here but the shape and the timing is fixed for a worker group.

    `name` is `backend[_algo][+layout][+experts][+cached][+suffixes]`; empty strings mean "does not apply". `options` is
    the adapter's own; an upper-case name in it is a knob that this variant exists by, and goes into its repro line.
    """

    name: str
    comm: str = ""
    compute_kernel: str = ""
    algo: str = ""
    dispatch_dtype: str = ""
    combine_dtype: str = ""
    num_sms: int | None = None
    layout: str = ""
    handle: str = ""
    options: tuple[tuple[str, str], ...] = ()

    def option(self, name: str, default: str = "") -> str:
        return dict(self.options).get(name, default)


@dataclass
class Group:
    """One rank's view of its worker group. `pg` moves the backend's data, `host_pg` (gloo) the harness's words."""

    rank: int
    world: int
    local_rank: int
    nodes: int
    device: torch.device
    pg: Any
    host_pg: Any


@dataclass(frozen=True)
class Phase:
    """One step of the staged decomposition. An untimed phase carries what must not be charged to the library.

    Untimed phases before the first timed one stage the inputs: the harness runs them whenever it changed the payload,
    also before a plain `call`. A repeatable one may run again without those before it: its column is then measured in a
    series of its own, in which nothing else runs.
    """

    name: str
    fn: Callable[[], None]
    timed: bool = True
    blocks_host: bool = False
    repeatable: bool = False


@dataclass
class Received:
    """What this rank got from the last dispatch, for the exactness check.

    rows [n, H] in the wire's dtype · scales [n, S] float32 or None · source_rank, source_token [n] int64, each None
    where the library does not tell (the payload then identifies it) · experts [n, k] int64 global ids, -1 = not on
    this rank (k = K where a token comes once a rank, 1 where it comes once an expert) · weights [n, k] float32, or
    None where the library keeps them at the source.
    """

    rows: torch.Tensor
    source_rank: torch.Tensor | None
    source_token: torch.Tensor | None
    experts: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None = None
    format: str = "bf16"


@dataclass(frozen=True)
class LibraryProfiler:
    """A library's own kernel profiler on this rank, for TRACE=library.

    `start` forgets what was recorded before; `write` saves the calls since as Chrome / Perfetto JSON at the path.
    """

    start: Callable[[], None]
    write: Callable[[Path], None]


def _nothing() -> None:
    """The arrival mark outside the phase series."""


class Session:
    """One bound point. Subclasses fill in `phases`, `call` and `output`; the rest has defaults.

    `mark_arrival` is set by the harness; `call` and the phases invoke it immediately before the call's first
    collective, so that a rank that arrives late can be told from a slow path.
    """

    phases: list[Phase]
    kind: str = "combine"  # what the output is checked against: "combine" = sum(w*x), "moe" = the dense MoE
    number_format: str = "bf16"  # of the operands: chooses the tolerance (lib/oracle.py)
    dispatch_format: str = "bf16"  # of the dispatch wire (lib/traffic.py)
    combine_format: str = "bf16"
    staging_included: bool = False
    quant_included: bool | None = None  # None: this session has no input quantisation
    deterministic: bool = False
    capturable: str = "not declared capturable"  # "" = may be captured in a CUDA graph; else the reason why not
    every_node: bool = False  # dispatch sends a token to every node, whatever its experts are
    barrier: Callable[[], None] | None = None
    kernels: ClassVar[dict[str, list[str]]] = {}  # phase -> kernel-name patterns
    replayed_kernel: bool = False  # TIMING=kernel: no bare launch, so a graph of one call is replayed in its place
    kernel_note: str = ""  # what TIMING=kernel launches, where that is not the library's bare kernel
    cold_kernel: bool = (
        False  # the library's own tester writes the L2 over between bare launches, so TIMING=kernel does
    )
    mark_arrival: Callable[[], None] = staticmethod(_nothing)

    def call(self) -> None:
        """What a user would call, once. It gives the total."""
        raise NotImplementedError

    def output(self) -> torch.Tensor:
        """The last result, [T, H] bf16."""
        raise NotImplementedError

    def poison(self) -> None:
        """Overwrite every receive buffer and output that the session can reach with NaN or -1."""

    def received(self) -> Received | None:
        """What the last dispatch brought, or None where the library does not show it."""
        return None

    def weighed_rows(self) -> torch.Tensor | None:
        """What combine will take, [L, slots, H] bf16 by local expert, where the library applies the gate weights.

        Asked after a dispatch and its staging; the check may change it. None where the caller has weighed the rows.
        """
        return None

    def broken_promise(self) -> str:
        """What the library promises beyond the sum, "" if it is kept: part of the check. All ranks call it together."""
        return ""

    def bare_kernel(self) -> Callable[[], None] | None:
        """The launch alone, on inputs that this call stages; afterwards `output` shows what the launch wrote."""
        return None

    def library_profiler(self) -> LibraryProfiler | str:
        """The library's own profiler, or one sentence why there is none in this library or build."""
        return "this backend has no profiler of its own; TRACE=1 traces it"

    def facts(self) -> dict[str, Any]:
        """What the library chose at this point and what setting it up cost, as JSON: for the log and the record."""
        return {}

    def transport(self) -> str:
        return ""

    def versions(self) -> dict[str, str]:
        """Versions of what is loaded in this process, beside torch."""
        return {}

    def close(self) -> None:
        """Free what bind took. Called after the row is saved."""


class Engine:
    """What lives over all points of a variant: weights, communicators, buffers sized for the largest point."""

    isolation: str = "variant"  # "point": the library needs a fresh process a point

    def bind(self, problem: Problem, inputs: Inputs) -> Session:
        """Workspaces and JIT of one point. May raise Unsupported or Missing."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what open took."""


class Backend:
    """One library. Adapters import it inside `open`, never at the top of a file."""

    name: str
    family: str  # backends of one family may share a process

    def variants(self, knobs: Knobs) -> list[Variant]:
        raise NotImplementedError

    def supports(self, variant: Variant, machine: Machine, problem: Problem, knobs: Knobs) -> Support:
        """The verdict before anything runs: hardware first, then shape, then packages."""
        raise NotImplementedError

    def memory_bytes(self, variant: Variant, problem: Problem) -> int:
        """Device memory (host memory on a CPU) that one rank needs at this point."""
        raise NotImplementedError

    def env(self, variant: Variant, problem: Problem, knobs: Knobs) -> dict[str, str]:
        """Variables that must exist before the worker's interpreter starts."""
        return {}

    def open(self, group: Group, variant: Variant, capacity: Problem, knobs: Knobs) -> Engine:
        """Once a worker group; `capacity` is the problem at its largest point. May raise Unsupported or Missing."""
        raise NotImplementedError
