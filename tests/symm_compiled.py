"""Runs the kernels of `symm` as compiled for sm_90: two ranks' arenas in one memory, a program after the other.

Triton's interpreter (tests/symm_ranks.py) knows no threads, so it can't see wrong lanes; here each thread of the very
PTX is followed. Every flag of the peers is set beforehand, and all is done twice, so that nobody waits.
Prints {case: what is wrong, or ""} as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.backends import symm_combine, symm_kernels
from bench.backends.symm_launch import (
    MAX_COMBINE_TILE,
    MAX_TILE,
    PLAN_TOKENS,
    PLAN_WARPS,
    Tiling,
    scan_tokens,
    tiling,
)
from bench.backends.symm_memory import fields, most_flags
from lib.formats import quantize
from lib.problem import TIMED_PAYLOAD, Problem, token_payload
from lib.routing import make_routing
from tests.ptx_machine import Kernel, Machine, PtxError
from tests.symm_compile import SMS, compiled, problem

# 2 column blocks, the second of one group; the tiles are those of 4096 tokens, and a last one that is not full
SHAPE = Problem(2, 1, 70, 64, 8, 1152, 64, 0, "zipf:1.2,mask=0.3")
PROGRAMS = 3
LATER = 1 << 30  # than any call
FLAGS = ("ready", "done", "started", "arrived")
CASES = {f"{algo} {wire}": (algo, wire) for algo, wire in MAX_TILE} | {"cached bf16": ("cached", "bf16")}
REPEATS = 3  # returned rows lie on two sides in turn, and are read when their peer has had its turn on that side
Array = Any


@dataclass
class Rank:
    """Where one rank's own tensors lie, in bytes from the start of memory."""

    at: dict[str, int]
    arena: int
    x: torch.Tensor
    ids: Array
    weights: Array


class Pair:
    """Memory of two ranks, and launches on it."""

    def __init__(self, fp8: bool) -> None:
        self.fields = {field.name: field for field in fields(SHAPE, SHAPE.tokens, fp8, PROGRAMS)}
        self.end = 256
        whole = list(self.fields.values())[-1].end
        arenas = [self.reserve(whole) for _ in range(SHAPE.world)]
        table = np.array([[arena + field.offset for arena in arenas] for field in self.fields.values()], np.int64)
        self.table, self.fp8 = self.reserve(table.nbytes), fp8
        routing = make_routing(SHAPE)
        self.ranks = [self.rank(number, arenas[number], routing) for number in range(SHAPE.world)]
        self.machine = Machine(-(-self.end // 256) * 256)
        self.put(self.table, table)
        for rank in self.ranks:
            self.put(rank.at["x"], rank.x.view(torch.int16).numpy())
            self.put(rank.at["ids"], rank.ids)
            self.put(rank.at["weights"], rank.weights)

    def reserve(self, size: int) -> int:
        start = self.end
        self.end = -(-(start + size) // 256) * 256
        return start

    def rank(self, number: int, arena: int, routing: Any) -> Rank:
        world, tokens, received = SHAPE.world, SHAPE.tokens, SHAPE.world * SHAPE.tokens
        sizes = {"x": tokens * SHAPE.hidden * 2, "ids": tokens * SHAPE.topk * 8, "weights": tokens * SHAPE.topk * 4}
        sizes |= {"slots": world * tokens * 4, "starts": world * 4, "arrivals": 2 * world * 4, "state": 16}
        sizes |= {"staged": received * SHAPE.topk * SHAPE.hidden * 2, "index": received * SHAPE.topk * 4}
        sizes["out"] = sizes["x"]
        at = {name: self.reserve(size) for name, size in sizes.items()}
        payload = token_payload(SHAPE, number, tokens, TIMED_PAYLOAD, torch.device("cpu"))
        return Rank(at, arena, payload, routing.topk_idx[number].astype(np.int64), routing.topk_weights[number])

    def put(self, place: int, values: Array) -> None:
        raw = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
        self.machine.memory[place : place + len(raw)] = raw

    def get(self, place: int, kind: Any, *shape: int) -> Array:
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        return self.machine.memory[place : place + size].view(kind).reshape(shape).copy()

    def field(self, rank: Rank, name: str, kind: Any) -> Array:
        field = self.fields[name]
        return self.get(rank.arena + field.offset, kind, *field.shape)

    def set_flags(self) -> None:
        for rank in self.ranks:
            for name in FLAGS:
                self.put(rank.arena + self.fields[name].offset, np.full(self.fields[name].shape, LATER, np.int32))

    def launch(self, kernel: Kernel, grid: int, warps: int, rank: Rank, names: str, *more: int) -> None:
        """`names`: tensors of the rank, `table`, `tokens`, `rank` and `capacity`, in the order of the kernel."""
        number = self.ranks.index(rank)
        known = {**rank.at, "table": self.table, "tokens": SHAPE.tokens, "rank": number, "capacity": SHAPE.tokens}
        known["arena_weights"] = rank.arena + self.fields["weights"].offset
        self.machine.launch(kernel, grid, warps * 32, [*(known[name] for name in names.split()), *more])


def shapes(cut: Tiling) -> dict[str, Any]:
    return {"world": 2, "topk": SHAPE.topk, "hidden": SHAPE.hidden, "count": cut.rows, "groups": cut.groups}


def dispatched(algo: str, wire: str) -> Pair:
    """Both ranks after REPEATS dispatches."""
    most = MAX_TILE["ll" if algo == "ll" else "ht", wire]
    cut = tiling(problem(4096), SMS, most)
    routing = {"local_experts": SHAPE.local_experts, "lanes": 8, "rank_lanes": 2, "scan": scan_tokens(problem(4096))}
    plan_of = {"ht": symm_kernels.FRESH, "cached": symm_kernels.FRESH, "ll": symm_kernels.UNPLANNED}
    plans = [plan_of[algo]] + [symm_kernels.CACHED if algo == "cached" else plan_of[algo]] * (REPEATS - 1)
    pair = Pair(wire == "fp8")
    text = compiled(symm_kernels.symm_plan, {**shapes(cut), **routing, "count": PLAN_TOKENS}, PLAN_WARPS)["ptx"]
    planning = Kernel(text)
    for plan in plans:
        constants = {**shapes(cut), **routing, "fp8": pair.fp8, "plan": plan}
        sending = Kernel(compiled(symm_kernels.symm_dispatch, constants, cut.warps)["ptx"])
        if plan == symm_kernels.FRESH:
            for rank in pair.ranks:
                blocks = -(-SHAPE.tokens // PLAN_TOKENS)
                pair.launch(planning, blocks, PLAN_WARPS, rank, "ids tokens slots table state rank capacity")
        pair.set_flags()
        names = "x ids weights tokens slots starts arrivals table state rank capacity"
        for rank in pair.ranks:
            pair.launch(sending, PROGRAMS, cut.warps, rank, names)
    return pair


def expected_copies(pair: Pair, algo: str, here: int) -> list[tuple[int, int, int]]:
    """(row, source rank, token) of what rank `here` should have received."""
    found = []
    for source, rank in enumerate(pair.ranks):
        mine = ((rank.ids >= 0) & (rank.ids // SHAPE.local_experts == here)).any(1).nonzero()[0]
        start = source * SHAPE.tokens if algo == "ll" else len(found)
        found += [(start + place, source, int(token)) for place, token in enumerate(mine)]
    return found


def wrong_rows(pair: Pair, algo: str) -> str:
    """What of the received rows, ids, weights, sources and arrivals is not as it should be."""
    for here, rank in enumerate(pair.ranks):
        copies = expected_copies(pair, algo, here)
        arrived = pair.get(rank.at["arrivals"], np.int32, 2, SHAPE.world)
        counts = [sum(source == each for _, source, _ in copies) for each in range(SHAPE.world)]
        starts = [0, SHAPE.tokens if algo == "ll" else counts[0]]
        if arrived.tolist() != [starts, counts]:
            return f"rank {here}: arrivals {arrived.tolist()}, not {[starts, counts]}"
        rows = pair.field(rank, "rows", np.uint8 if pair.fp8 else np.uint16)
        ids, weights = pair.field(rank, "ids", np.int32), pair.field(rank, "weights", np.float32)
        source_of = pair.field(rank, "source", np.int32)
        for row, source, token in copies:
            sent = pair.ranks[source]
            if source_of[row] != source * SHAPE.tokens + token:
                return f"rank {here}: row {row} says it is copy {source_of[row]}"
            local = sent.ids[token] - here * SHAPE.local_experts
            local = np.where((sent.ids[token] >= 0) & (local >= 0) & (local < SHAPE.local_experts), local, -1)
            if (ids[row] != local).any() or (weights[row] != np.where(local >= 0, sent.weights[token], 0)).any():
                return f"rank {here}: ids or weights of row {row}"
            values = quantize("fp8" if pair.fp8 else "bf16", sent.x[token : token + 1])
            raw = values.values.view(torch.uint8 if pair.fp8 else torch.int16).numpy().view(rows.dtype)[0]
            if (rows[row] != raw).any():
                return f"rank {here}: row {row} at columns {(rows[row] != raw).nonzero()[0][:3].tolist()}"
            if pair.fp8 and (pair.field(rank, "scales", np.float32)[row] != values.scales.numpy()[0]).any():
                return f"rank {here}: scales of row {row}"
    return ""


def stage(pair: Pair, algo: str, weighted: bool) -> list[torch.Tensor]:
    """Put what identity experts leave; returns each rank's share of every one of its rows, float32."""
    shares = []
    for here, rank in enumerate(pair.ranks):
        rows = torch.from_numpy(pair.field(rank, "rows", np.int16)).view(torch.bfloat16)
        ids = torch.from_numpy(pair.field(rank, "ids", np.int32))
        weights = torch.from_numpy(pair.field(rank, "weights", np.float32))
        came = [row for row, _, _ in expected_copies(pair, algo, here)]
        share = torch.zeros(rows.shape)
        if weighted:
            index = torch.full(ids.shape, -1, dtype=torch.int32)
            places = [(row, choice) for row in came for choice in range(SHAPE.topk) if ids[row, choice] >= 0]
            staged = torch.stack([rows[row] for row, _ in places])
            for place, (row, choice) in enumerate(places):
                index[row, choice] = place
                share[row] += weights[row, choice] * rows[row].float()
            pair.put(rank.at["index"], index.numpy())
        else:
            staged = (rows.float() * torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True)).to(torch.bfloat16)
            share[came] = staged[came].float()
        pair.put(rank.at["staged"], staged.view(torch.int16).numpy())
        shares.append(share)
    return shares


def wrong_sums(pair: Pair, algo: str, weighted: bool) -> str:
    """Combine what arrived; which token's sum is not exactly that of its copies."""
    shares = stage(pair, algo, weighted)
    cut = tiling(problem(4096), SMS, MAX_COMBINE_TILE)
    constants = {**shapes(cut), "tiles": cut.tiles, "lag": cut.lag, "weighted": weighted}
    kernel = Kernel(compiled(symm_combine.symm_combine, constants, cut.warps)["ptx"])
    names = "staged index arena_weights out tokens slots arrivals table state rank capacity"
    for _ in range(REPEATS):
        pair.set_flags()
        for rank in pair.ranks:
            pair.launch(kernel, PROGRAMS, cut.warps, rank, names, most_flags(SHAPE.tokens, SHAPE.hidden))
    rows = [{(source, token): row for row, source, token in expected_copies(pair, algo, here)} for here in range(2)]
    for number, rank in enumerate(pair.ranks):
        out = torch.from_numpy(pair.get(rank.at["out"], np.int16, SHAPE.tokens, SHAPE.hidden)).view(torch.bfloat16)
        for token in range(SHAPE.tokens):
            total = torch.zeros(SHAPE.hidden)
            for here in range(SHAPE.world):
                if (row := rows[here].get((number, token))) is not None:
                    share = shares[here][row]
                    total += share if here == number else share.to(torch.bfloat16).float()
            if not torch.equal(out[token], total.to(torch.bfloat16)):
                return f"rank {number}: token {token}"
    return ""


def found_in(name: str) -> dict[str, str]:
    algo, wire = CASES[name]
    found = {}
    try:
        pair = dispatched(algo, wire)
        found[f"dispatch {name}"] = wrong_rows(pair, algo)
        if wire == "bf16" and algo != "cached" and not any(found.values()):
            found[f"combine {name}"] = wrong_sums(pair, algo, weighted=False)
            if algo == "ht":
                found[f"combine {name} weighted"] = wrong_sums(pair, algo, weighted=True)
    except PtxError as error:
        found[name] = str(error)
    return found


def main() -> None:
    json.dump({case: wrong for name in CASES for case, wrong in found_in(name).items()}, sys.stdout)


if __name__ == "__main__":
    main()
