"""The same run's proof that the numbers belong to a right result: before timing, and again after it.

A round writes another payload into the inputs that the harness owns, poisons what the session can reach, calls it
once, and compares. With the same bytes every time, a skipped transfer would find yesterday's right ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lib import oracle
from lib.contract import Group, Session
from lib.formats import roundtrip
from lib.problem import SECOND_PAYLOAD, TIMED_PAYLOAD, Inputs, Problem, expert_weights, tensor_digest, token_payload
from lib.timing import leading_phases, main_phases, run_phases

if TYPE_CHECKING:
    import torch

    from lib.routing import Routing


CHECKSUM_FACTOR = 0x2545F4914F6CDD1D  # odd and large: 64-bit products that wrap, one multiplier a column
CHECKSUM_ROWS = 1024  # rows at a time: a row's words are widened to 64 bits


def checksums(rows: torch.Tensor) -> torch.Tensor:
    """A number a row, int64 [n], of rows [n, m] whose bytes are a multiple of 4; it depends on each place."""
    import torch

    words = rows.contiguous().view(torch.int32)
    columns = torch.arange(1, words.shape[1] + 1, device=words.device)
    return torch.cat([(chunk.long() * (columns * CHECKSUM_FACTOR + 1)).sum(1) for chunk in words.split(CHECKSUM_ROWS)])


def mark_of(experts: torch.Tensor) -> torch.Tensor:
    """1/2, 1 or 2 by expert, float32; another order than that of routing.uneven."""
    import torch

    return torch.exp2((experts // 3 + experts) % 3 - 1.0)


class Checker:
    """One rank's checks of one session. Every method returns "" or what is wrong, the same on all ranks."""

    def __init__(self, session: Session, inputs: Inputs, problem: Problem, routing: Routing, group: Group) -> None:
        self.session, self.inputs, self.problem, self.routing, self.group = session, inputs, problem, routing, group
        self.count = inputs.x.shape[0]
        # An output belongs to an earlier payload if call() combines what untimed phases have staged before it.
        self.staged = not session.staging_included and any(not phase.timed for phase in main_phases(session))
        self.references: dict[tuple[int, str], torch.Tensor] = {}
        self.timed_output: torch.Tensor | None = None
        self.timed_digest = ""
        self.timed_rows: torch.Tensor | None = None
        self.calls_problem = ""
        self.acc_terms: tuple[float, float] | None = None
        self.salt = 0

    # -- what measure.py calls

    def before(self, rounds: int) -> str:
        """`rounds` rounds, then the timed payload: its output is kept for the comparison after timing."""
        problem = self._agree(self._weights_digest_differs() or self._rounds(rounds))
        problem = problem or self._agree(self._marked_round())
        problem = problem or self._agree(self._keep_timed_output())
        problem = problem or self._agree(self.session.broken_promise())
        self._poison_and_stage()  # a call that does nothing while it is timed would else leave the right output
        return problem

    def between_series(self, replay: Callable[[], None] | None) -> None:
        """After the timed calls, before the timed phases: each series has to give the output by itself.

        A graph is replayed once more on another payload: what was captured must move the bytes, not find them.
        """
        self.calls_problem = self._timed_output_moved("calls")
        if replay is not None:
            problem = self._replay_problem(replay)
            self.calls_problem = self.calls_problem or problem
        self._poison_and_stage()

    def after(self, rounds: int) -> str:
        """Inputs untouched, the timed payload's output still what it was, and `rounds` rounds more."""
        problem = self._agree(self.calls_problem or self._timed_output_moved("phases"))
        return problem or self._agree(self._rounds(rounds))

    def acc_loss_pct(self) -> float | None:
        """100 * ||out - ref|| / ||ref|| over all ranks, the reference on unquantised data; None for a combine."""
        if self.acc_terms is None:
            return None
        terms = self._gather(self.acc_terms)
        return oracle.acc_loss_pct(sum(num for num, _ in terms), sum(den for _, den in terms))

    # -- rounds

    def _rounds(self, rounds: int) -> str:
        for number in range(rounds):
            # Every rank makes every call of a round, and all agree after it: a rank that stopped alone would leave
            # the others in a collective.
            problem = self._moe_round(number) if self.session.kind == "moe" else self._combine_round()
            if number == 0:
                differs = self._chain_problem()
                problem = problem or differs
            if agreed := self._first(self._gather(problem)):
                return agreed
        return ""

    def _combine_round(self) -> str:
        self._write_encoded()
        self._poisoned_call()
        problem = self._dispatch_problem()
        if self.staged:
            # call() combined what an earlier payload left staged: stage this one's, then call again. The output is
            # looked at after both: one that is a call late would be right from the second on.
            run_phases(self.session)
            problem = problem or self._dispatch_problem() or self._output_problem(self.inputs.x)
            self._poisoned_call()
        return problem or self._output_problem(self.inputs.x)

    def _marked_round(self) -> str:
        """Each expert's rows times a power of two of its own.

        Where the experts are the identity, a token's rows are alike, and any expert's weight on any of them would do.
        """
        import torch

        if self.session.kind != "combine" or self.session.weighed_rows() is None:
            return ""
        self._write_encoded()
        self.session.poison()
        *before, combine = self.session.phases
        for phase in before:
            phase.fn()
        rows = self.session.weighed_rows()
        assert rows is not None
        experts = torch.arange(len(rows), device=rows.device) + self.group.rank * len(rows)
        rows.mul_(mark_of(experts).to(rows.dtype).view(-1, 1, 1))
        combine.fn()
        ids, weights = self.inputs.topk_idx, self.inputs.topk_weights
        marked = torch.where(ids >= 0, weights * mark_of(ids), weights)
        found = oracle.check_combine(self.session.output(), self.inputs.x, marked, self.session.combine_format)
        return f"with each expert's rows marked, {found}" if found else ""

    def _moe_round(self, number: int) -> str:
        self._write_encoded()
        self._poisoned_call()
        problem = self._dispatch_problem()
        payload = TIMED_PAYLOAD if number % 2 else SECOND_PAYLOAD
        self._write_payload(payload)
        self._poisoned_call()
        return problem or self._moe_problem(payload)

    def _chain_problem(self) -> str:
        """The staged decomposition gives the same result as the call that it explains."""
        output = self.session.output().clone()
        self.session.poison()
        run_phases(self.session)
        return self._differs(self.session.output(), output, "the phases' output differs from the call's")

    def _keep_timed_output(self) -> str:
        self._write_payload(TIMED_PAYLOAD)
        run_phases(self.session)
        self._poisoned_call()
        self.timed_output = self.session.output().clone()
        self.timed_digest = tensor_digest(self.inputs.tensors())
        self.timed_rows = self._received_rows()
        if self.session.kind != "moe":
            return self._output_problem(self.inputs.x)
        self.acc_terms = oracle.acc_loss_pct_terms(self.timed_output, self._reference(TIMED_PAYLOAD, "bf16"))
        return self._moe_problem(TIMED_PAYLOAD)

    def _timed_output_moved(self, series: str) -> str:
        import torch

        if tensor_digest(self.inputs.tensors()) != self.timed_digest:
            return "the inputs were changed during timing"
        assert self.timed_output is not None
        assert self.timed_rows is not None
        if not torch.equal(self._received_rows(), self.timed_rows):
            return f"the rows that the timed {series} dispatched differ from before"
        what = f"the output of the timed {series} differs from before"
        return self._differs(self.session.output(), self.timed_output, what)

    def _received_rows(self) -> torch.Tensor:
        """A checksum of each row that the last dispatch brought, with its scales, sorted: rows come in any order."""
        import torch

        received = self.session.received()
        if received is None or not len(received.rows):
            return torch.empty(0, dtype=torch.int64)
        sums = checksums(received.rows)
        if received.scales is not None:
            sums = sums * CHECKSUM_FACTOR + checksums(received.scales)
        return sums.sort().values.cpu()

    def _replay_problem(self, replay: Callable[[], None]) -> str:
        """No eager call may come between capture and here: the session still shows the captured buffers.

        With staged phases in the chain the output belongs to an earlier payload, and only the dispatch is looked at.
        """
        self._write_encoded()
        self._poison_and_stage()
        replay()
        problem = self._dispatch_problem()
        if self.session.kind == "moe":
            self._write_payload(SECOND_PAYLOAD)
            self._poison_and_stage()
            replay()
            problem = problem or self._moe_problem(SECOND_PAYLOAD)
        elif not self.staged:
            problem = problem or self._output_problem(self.inputs.x)
        self._write_payload(TIMED_PAYLOAD)
        return f"graph replayed on another payload: {problem}" if problem else ""

    # -- parts of a round

    def _write_encoded(self) -> None:
        self.salt += 1
        rows = oracle.encoded_payload(self.problem, self.group.rank, self.count, self.salt, self.inputs.x.device)
        self.inputs.x.copy_(rows)

    def _write_payload(self, payload: int) -> None:
        x = token_payload(self.problem, self.group.rank, self.count, payload, self.inputs.x.device)
        self.inputs.x.copy_(x)

    def _poisoned_call(self) -> None:
        self._poison_and_stage()
        self.session.call()

    def _poison_and_stage(self) -> None:
        """What comes before a call on a new payload: untimed phases before the first timed one stage the inputs."""
        self.session.poison()
        for phase in leading_phases(self.session):
            phase.fn()

    def _dispatch_problem(self) -> str:
        received = self.session.received()
        if received is None:
            return ""
        return oracle.check_dispatch(received, self.routing, self.problem, self.group.rank, self.salt)

    def _output_problem(self, x: torch.Tensor) -> str:
        """A quantised wire is no error of the combine: what it brings is the round trip of x in its format."""
        if self.session.dispatch_format != "bf16":
            x = roundtrip(self.session.dispatch_format, x).to(x.dtype)
        return oracle.check_combine(self.session.output(), x, self.inputs.topk_weights, self.session.combine_format)

    def _moe_problem(self, payload: int) -> str:
        reference = self._reference(payload, self.session.number_format)
        session = self.session
        return oracle.check_moe(session.output(), reference, session.number_format, session.combine_format)

    def _reference(self, payload: int, operand_format: str) -> torch.Tensor:
        """The reference of one payload in one operand format, computed once."""
        key = (payload, operand_format)
        if key not in self.references:
            inputs, device = self.inputs, self.inputs.x.device
            x = token_payload(self.problem, self.group.rank, self.count, payload, device)
            self.references[key] = oracle.moe_reference(
                self.problem, x, inputs.topk_idx, inputs.topk_weights, device, operand_format=operand_format
            )
        return self.references[key]

    def _differs(self, output: torch.Tensor, expected: torch.Tensor, what: str) -> str:
        """Bitwise where the session is deterministic, else within the tolerance of its number format."""
        import torch

        if self.session.deterministic:
            return "" if torch.equal(output.view(torch.int16), expected.view(torch.int16)) else what
        problem = oracle.check_moe(output, expected.float(), self.session.number_format)
        return f"{what}: {problem}" if problem else ""

    def _weights_digest_differs(self) -> str:
        """Every rank must make the same expert from the same seed."""
        if self.session.kind != "moe":
            return ""
        digest = tensor_digest(list(expert_weights(self.problem, 0, self.inputs.x.device)))
        return "" if len(set(self._gather(digest))) == 1 else "expert 0's weights differ between ranks"

    # -- agreement

    def _gather(self, value: object) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.group.world
        dist.all_gather_object(values, value, group=self.group.host_pg)
        return values

    def _agree(self, problem: str) -> str:
        return self._first(self._gather(problem))

    @staticmethod
    def _first(problems: list[str]) -> str:
        for rank, problem in enumerate(problems):
            if problem:
                return problem if problem.startswith("rank ") else f"rank {rank}: {problem}"
        return ""
