"""The encoded payload, and whether a dispatch brought exactly the right copies of it.

Each row says whose it is, so that a copy that is missing, doubled, stale, torn or at the wrong place can be named.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lib import formats
from lib.contract import Received
from lib.problem import Problem, stream_seed
from lib.routing import Routing

RANK_DIGITS, TOKEN_DIGITS = 4, 6  # base 8: 4096 ranks, 262144 tokens
PAYLOAD_COLUMNS = RANK_DIGITS + TOKEN_DIGITS  # hidden must be at least 16
PAYLOAD_MAX = 7
PAYLOAD_BLOCK = 16  # the last column of each is +-7, see encoded_rows

_CHUNK_ELEMENTS = 1 << 22  # of int64 at once: 32 MiB
_PRIME = (1 << 31) - 1
_MIXERS = (48271, 69621, 1277803291)  # below the prime: products stay under 2**62


def encoded_payload(
    problem: Problem, rank: int, count: int, salt: int, device: torch.device, first_token: int = 0
) -> torch.Tensor:
    """The encoded rows of one rank's tokens first_token..first_token+count-1, bf16 [count, H]."""
    tokens = torch.arange(first_token, first_token + count, dtype=torch.int64, device=device)
    return encoded_rows(torch.full_like(tokens, rank), tokens, problem.hidden, salt)


def encoded_rows(ranks: torch.Tensor, tokens: torch.Tensor, hidden: int, salt: int) -> torch.Tensor:
    """Rows that say whose they are, bf16 [n, H], for int64 [n] ranks and tokens on any device, the same bytes anywhere.

    Columns 0..3 are the rank's base-8 digits, 4..9 the token's, lowest first; the rest integers in -7..7 from (rank,
    token, column, salt), by int64 products below 2**62. The last of each 16 columns is +-7: every scale block then
    has amax 7, 7 / 448 is a power of two, and e4m3 carries the row without loss under any scale rule.
    """
    columns = torch.arange(hidden, dtype=torch.int64, device=ranks.device)
    column_keys = _mixed(columns + stream_seed("payload columns") % _PRIME)
    row_keys = _mixed(ranks * 8**TOKEN_DIGITS + tokens + stream_seed("payload", salt) % _PRIME)
    edge = columns % PAYLOAD_BLOCK == PAYLOAD_BLOCK - 1
    rows = torch.empty(len(ranks), hidden, dtype=torch.bfloat16, device=ranks.device)
    for part in _chunks(len(ranks), hidden):
        pattern = ((row_keys[part, None] * column_keys >> 24) & 15).clamp_(max=2 * PAYLOAD_MAX) - PAYLOAD_MAX
        pattern = torch.where(edge, torch.where(pattern < 0, -PAYLOAD_MAX, PAYLOAD_MAX), pattern)
        for digit in range(PAYLOAD_COLUMNS):
            value, place = (ranks, digit) if digit < RANK_DIGITS else (tokens, digit - RANK_DIGITS)
            pattern[:, digit] = value[part] // 8**place % 8
        rows[part] = pattern.to(torch.bfloat16)
    return rows


def decode_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rank, token) int64 [n] that float rows [n, H] carry; digits are rounded, so dequantised rows will do."""
    digits = rows[:, :PAYLOAD_COLUMNS].float().nan_to_num(0.0).round().clamp(0, 7).long()
    places = 8 ** torch.arange(TOKEN_DIGITS, device=rows.device)
    return (digits[:, :RANK_DIGITS] * places[:RANK_DIGITS]).sum(1), (digits[:, RANK_DIGITS:] * places).sum(1)


def check_dispatch(received: Received, routing: Routing, problem: Problem, rank: int, salt: int) -> str:
    """Did exactly the right copies reach `rank`, bit for bit?

    Once a (source rank, token) that touches a local expert where `experts` has K columns, once a selection where it
    has one. Ids, weights, rows and scales must equal what the routing and the encoded payload say.
    """
    arrivals = _Arrivals(received, routing, problem, rank)
    return (
        arrivals.shape_trouble()
        or arrivals.range_trouble()
        or arrivals.set_trouble()
        or arrivals.choice_trouble()
        or arrivals.payload_trouble(salt)
    )


class _Arrivals:
    """The copies that one rank got, beside those that it should have got. A code is source rank * T + token."""

    def __init__(self, received: Received, routing: Routing, problem: Problem, rank: int) -> None:
        device = received.rows.device
        self.got, self.problem = received, problem
        self.first_expert, self.end_expert = rank * problem.local_experts, (rank + 1) * problem.local_experts
        ids = torch.from_numpy(routing.topk_idx).to(device).flatten(0, 1)
        self.ids = torch.where((ids >= self.first_expert) & (ids < self.end_expert), ids, -1)
        self.weights = torch.from_numpy(routing.topk_weights).to(device).flatten(0, 1)
        self.per_selection = received.experts.dim() == 2 and received.experts.shape[1] == 1 < problem.topk
        self.source = self.token = torch.empty(0, dtype=torch.int64, device=device)  # range_trouble tells them

    def shape_trouble(self) -> str:
        got, count = self.got, len(self.got.rows)
        width = 1 if self.per_selection else self.problem.topk
        shapes = {
            "rows": (got.rows, (count, self.problem.hidden)),
            "source ranks": (got.source_rank, (count,)),
            "source tokens": (got.source_token, (count,)),
            "experts": (got.experts, (count, width)),
            "weights": (got.weights, (count, width)),
        }
        for name, (tensor, shape) in shapes.items():
            if tensor is not None and tensor.shape != shape:
                return f"the received {name} have the shape {list(tensor.shape)}, not {list(shape)}"
        if got.format not in formats.FORMATS:
            return f"the received rows have an unknown format {got.format!r}"
        if formats.FORMATS[got.format].scale and got.scales is None:
            return f"the received {got.format} rows came without scales"
        return ""

    def range_trouble(self) -> str:
        got, tokens = self.got, self.problem.tokens
        if got.source_rank is None or got.source_token is None:
            rows = formats.dequantize(formats.Quantized(got.format, got.rows, got.scales))
            self.source, self.token = decode_rows(rows)
        if got.source_rank is not None:
            self.source = got.source_rank.long()
        if got.source_token is not None:
            self.token = got.source_token.long()
        bad = (self.source < 0) | (self.source >= self.problem.world) | (self.token < 0) | (self.token >= tokens)
        if bad.any():
            row = _first(bad)
            return f"received row {row} claims to be {self._copy(row)}, which does not exist"
        foreign = (got.experts < self.first_expert) | (got.experts >= self.end_expert)
        if not self.per_selection:
            foreign &= got.experts != -1
        if foreign.any():
            row = _first(foreign)
            return f"{self._copy(row)} came for expert {_at(got.experts, foreign)}, which is not here"
        return ""

    def set_trouble(self) -> str:
        """Missing copies, uninvited ones, and those that came twice."""
        code = self.source * self.problem.tokens + self.token
        if self.per_selection:
            wanted_at = (self.ids >= 0).nonzero()
            wanted = wanted_at[:, 0] * self.problem.num_experts + self.ids[self.ids >= 0]
            code = code * self.problem.num_experts + self.got.experts[:, 0]
        else:
            wanted = (self.ids >= 0).any(1).nonzero()[:, 0]
        ordered = code.sort().values
        findings = {
            "did not come": wanted[~torch.isin(wanted, code)],
            "came uninvited": code[~torch.isin(code, wanted)],
            "came twice": ordered[1:][ordered[1:] == ordered[:-1]],
        }
        for what, codes in findings.items():
            if codes.numel():
                return f"{self._named(int(codes.min()))} {what} ({codes.numel()} such, {len(wanted)} copies expected)"
        return ""

    def choice_trouble(self) -> str:
        """Expert ids as a set, and the weight of each."""
        code = self.source * self.problem.tokens + self.token
        ids, weights, experts = self.ids[code], self.weights[code], self.got.experts.long()
        if self.per_selection:
            weights = torch.where(ids == experts, weights, 0).sum(1, keepdim=True)
            ids = experts
        ids, wanted_order = ids.sort(1)
        experts, order = experts.sort(1)
        if (wrong := ids != experts).any():
            row = _first(wrong)
            return f"{self._copy(row)} came for the experts {experts[row].tolist()}, not {ids[row].tolist()}"
        if self.got.weights is None:
            return ""
        wanted, came = weights.gather(1, wanted_order), self.got.weights.gather(1, order)
        if (wrong := (_bits(wanted) != _bits(came)) & (ids >= 0)).any():
            values = f"weight {_at(came, wrong):.9g}, not {_at(wanted, wrong):.9g}"
            return f"{self._copy(_first(wrong))} came for expert {_at(ids, wrong)} with the {values}"
        return ""

    def payload_trouble(self, salt: int) -> str:
        """Every row and scale against the regenerated payload, bit for bit."""
        hidden, got = self.problem.hidden, self.got
        for part in _chunks(len(got.rows), hidden):
            wanted = formats.quantize(got.format, encoded_rows(self.source[part], self.token[part], hidden, salt))
            pairs = {"value": (got.rows[part], wanted.values)}
            if wanted.scales is not None and got.scales is not None:
                pairs["scale"] = (got.scales[part], wanted.scales)
            for name, (came, expected) in pairs.items():
                if came.dtype != expected.dtype or came.shape != expected.shape:
                    shapes = f"{came.dtype} {list(came.shape)}, not {expected.dtype} {list(expected.shape)}"
                    return f"the received {name}s are {shapes}"
                if (wrong := _bits(came) != _bits(expected)).any():
                    row, column = wrong.nonzero()[0].tolist()
                    values = f"{float(came[row, column]):g}, not {float(expected[row, column]):g}"
                    return f"{self._copy(part.start + row)} has at {name} {column} {values}"
        return ""

    def _copy(self, row: int) -> str:
        return f"token {int(self.token[row])} of rank {int(self.source[row])}"

    def _named(self, code: int) -> str:
        code, expert = divmod(code, self.problem.num_experts) if self.per_selection else (code, None)
        source, token = divmod(code, self.problem.tokens)
        return f"token {token} of rank {source}" + (f" for expert {expert}" if expert is not None else "")


def _mixed(value: torch.Tensor) -> torch.Tensor:
    """A scrambled 31-bit key of each int64, by products below 2**62: no overflow, so the same on every device."""
    value = value % _PRIME
    for mixer in _MIXERS:
        value = value * mixer % _PRIME
        value = value ^ (value >> 15)
    return value


def _chunks(count: int, hidden: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // hidden)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def _first(wrong: torch.Tensor) -> int:
    """The first row with a True."""
    return int(wrong.nonzero()[0, 0])


def _at(values: torch.Tensor, wrong: torch.Tensor) -> float:
    return values[wrong][0].item()
