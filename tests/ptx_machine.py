"""Runs PTX on a CPU, a program at a time: all its threads in step, each register an array with an element a thread.

For integer code with uniform branches, as Triton makes it: an address outside memory, a branch on which the threads
disagree, shared memory read by another warp than wrote it without a barrier between, or an unknown instruction is an
error. What GPUs do at the same moment it does not show: one program runs after the other.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

WARP = 32
MOST_STEPS = 100_000  # of a program: one that waits for a flag would go on for ever
SHARED_BYTES = 228 * 1024  # of an SM
INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*);$")
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
ADDRESS = re.compile(r"\[\s*([%\w$]+)?\s*(?:\+?\s*(-?\d+))?\s*\]")
WIDTHS = {"b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "s32": np.int32, "u32": np.uint32}
WIDTHS |= {"s64": np.int64, "u64": np.uint64, "u16": np.uint16, "s16": np.int16, "f32": np.float32}
WIDER = {"s32": np.int64, "u32": np.uint64}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "mul": operator.mul, "min": np.minimum, "max": np.maximum,
}  # fmt: skip
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
REGISTERS = {"%p": np.bool_, "%rs": np.uint16, "%r": np.uint32, "%rd": np.uint64, "%f": np.uint32}

Values = Any  # an array with an element a thread


class PtxError(Exception):
    """The program did what no GPU would, or what this machine does not know."""


class Kernel:
    """PTX of one kernel, read once."""

    def __init__(self, text: str) -> None:
        self.code: list[tuple[str, str, str, list[str]]] = []
        self.labels: dict[str, int] = {}
        self.parameters = re.findall(r"\.param \.\w+[^,)\n]*?(\w+_param_\d+)", text)
        for line in text.partition(".entry")[2].splitlines():
            words = line.split("//")[0].strip()
            if label := re.fullmatch(r"(\$\w+):", words):
                self.labels[label[1]] = len(self.code)
            elif (found := INSTRUCTION.match(words)) and not words.startswith("."):
                negated, guard, name, rest = found.groups()
                self.code.append((f"{negated or ''}{guard or ''}", name, rest, OPERAND.findall(rest)))
            elif words.startswith("@") or (words.endswith(";") and not words.startswith(".")):
                raise PtxError(f"cannot be read: {words}")


class Machine:
    """Global memory [bytes], and the programs that run on it one after the other."""

    def __init__(self, size: int) -> None:
        self.memory = np.zeros(size, np.uint8)

    def launch(self, kernel: Kernel, grid: int, threads: int, arguments: Sequence[int]) -> None:
        for program in range(grid):
            Program(self.memory, kernel, program, grid, threads, arguments).run()


class Program:
    def __init__(
        self, memory: Values, kernel: Kernel, number: int, grid: int, threads: int, arguments: Sequence[int]
    ) -> None:
        self.kernel, self.threads, self.memory = kernel, threads, memory
        self.shared = np.zeros(SHARED_BYTES, np.uint8)
        self.writer = np.full(SHARED_BYTES, -1, np.int32)  # the warp that wrote a byte since the last barrier
        self.lanes = np.arange(threads, dtype=np.uint32)
        self.registers: dict[str, Values] = {
            "%tid.x": self.lanes,
            "%ctaid.x": self.all(number, np.uint32),
            "%nctaid.x": self.all(grid, np.uint32),
            "global_smem": self.all(0, np.uint32),
        }
        self.arguments = dict(zip(kernel.parameters, arguments, strict=False))

    def all(self, value: int, kind: Any) -> Values:
        return np.full(self.threads, value & (2 ** (8 * np.dtype(kind).itemsize) - 1), kind)

    def run(self) -> None:
        place, code, steps = 0, self.kernel.code, 0
        with np.errstate(over="ignore"):
            while place < len(code):
                steps += 1
                if steps > MOST_STEPS:
                    raise PtxError(f"does not end within {MOST_STEPS} instructions")
                guard, name, rest, operands = code[place]
                place += 1
                if name == "ret":
                    return
                active = self.active(guard)
                if name in ("bra", "bra.uni"):
                    if active.any() != active.all():
                        raise PtxError(f"threads part at a branch: {guard} {rest}")
                    place = self.kernel.labels[operands[0]] if active.all() else place
                    continue
                try:
                    self.execute(name.split("."), operands, active)
                except (IndexError, KeyError, ValueError) as error:
                    raise PtxError(f"{name} {rest}: {type(error).__name__} {error}") from error

    def active(self, guard: str) -> Values:
        if not guard:
            return np.ones(self.threads, np.bool_)
        return ~self.registers[guard[1:]] if guard[0] == "!" else self.registers[guard]

    # -- operands

    def read(self, operand: str, kind: Any) -> Values:
        """A register or a constant as `kind`, its bits taken as they are."""
        if operand.startswith("{"):
            half = np.uint16 if np.dtype(kind).itemsize == 4 else np.uint32
            parts = [self.read(part, half) for part in inside(operand)]
            return np.stack(parts, 1).view(kind)[:, 0]
        if operand in self.registers:
            value = self.registers[operand]
            return value if value.dtype == kind else narrowed(value, kind)
        if operand.startswith("0f"):
            return np.full(self.threads, int(operand[2:], 16), np.uint32).view(kind)
        operand = operand.rstrip("U")
        if kind is np.bool_:
            return np.full(self.threads, int(operand, 0) != 0)
        return self.all(int(operand, 0), np.dtype(f"u{np.dtype(kind).itemsize}")).view(kind)

    def write(self, operand: str, value: Values, active: Values) -> None:
        if operand.startswith("{"):
            names = inside(operand)
            for name, part in zip(names, value.reshape(self.threads, 1).view(register_type(names[0])).T, strict=True):
                self.write(name, part.copy(), active)
            return
        kind = register_type(operand)
        value = value if value.dtype == kind else narrowed(value, kind)
        old = self.registers.get(operand)
        self.registers[operand] = value if active.all() or old is None else np.where(active, value, old)

    # -- instructions

    def execute(self, name: list[str], to: list[str], active: Values) -> None:
        verb, kind = name[0], WIDTHS.get(name[-1], np.bool_)
        if verb in ("ld", "st", "atom"):
            self.access(name, to, active)
        elif verb == "bar":
            self.writer[:] = -1
        elif verb == "shfl":
            self.write(to[0], self.shuffled(name[2], self.read(to[1], np.uint32), self.read(to[2], np.int32)), active)
        elif verb == "redux":
            sums = self.read(to[1], np.uint32).reshape(-1, WARP).sum(1, dtype=np.uint32)
            self.write(to[0], np.repeat(sums, WARP), active)
        elif verb == "setp":
            self.write(to[0], COMPARE[name[1]](self.read(to[1], kind), self.read(to[2], kind)), active)
        elif verb == "selp":
            self.write(to[0], np.where(self.registers[to[3]], self.read(to[1], kind), self.read(to[2], kind)), active)
        elif verb == "cvt":
            self.write(to[0], self.converted(name, to), active)
        elif verb == "mov":
            self.write(to[0], self.read(to[1], kind if to[0].startswith("{") else register_type(to[0])), active)
        else:
            self.write(to[0], self.computed(verb, name, kind, to[1:]), active)

    def computed(self, verb: str, name: list[str], kind: Any, sources: list[str]) -> Values:
        first, *rest = (self.read(source, kind) for source in sources)
        if verb in ("mul", "mad") and "wide" in name:
            wide = WIDER[name[-1]]
            product = first.astype(wide) * rest[0].astype(wide)
            return product + self.read(sources[2], wide) if verb == "mad" else product
        if verb == "mul" and "hi" in name:
            return (first.astype(np.int64) * rest[0].astype(np.int64) >> 32).astype(np.int32)
        if verb == "mad":
            return first * rest[0] + rest[1]
        if verb in ("shl", "shr"):
            by = np.minimum(self.read(sources[1], np.uint32), 8 * np.dtype(kind).itemsize - 1).astype(kind)
            return first << by if verb == "shl" else first >> by
        if verb == "bfe":
            field = first.astype(np.int64) >> rest[0].astype(np.int64)
            bits = rest[1].astype(np.int64)
            field &= (1 << bits) - 1
            return np.where(field >> (bits - 1) & 1, field - (1 << bits), field) if kind is np.int32 else field
        if verb == "div":
            return first / rest[0] if kind is np.float32 else np.trunc(first / rest[0]).astype(kind)
        if verb == "not":
            return ~first
        if verb == "abs":
            return np.abs(first)
        if verb == "prmt":
            whole = first.astype(np.uint64) | rest[0].astype(np.uint64) << np.uint64(32)
            starts = [8 * (rest[1] >> np.uint32(4 * place) & np.uint32(7)).astype(np.uint64) for place in range(4)]
            return sum((whole >> start & 0xFF) << np.uint64(8 * place) for place, start in enumerate(starts))
        return BINARY[verb](first, rest[0])

    def converted(self, name: list[str], to: list[str]) -> Values:
        target, source = name[-2:]
        if source == "bf16":
            return self.read(to[1], np.uint16).astype(np.uint32) << np.uint32(16)
        if target in ("bf16x2", "e4m3x2"):
            kind = torch.bfloat16 if target == "bf16x2" else torch.float8_e4m3fn
            bits = np.uint16 if target == "bf16x2" else np.uint8
            high, low = (torch.from_numpy(self.read(operand, np.float32).copy()).to(kind) for operand in to[1:])
            raw = torch.uint8 if target == "e4m3x2" else torch.int16
            halves = np.stack([low.view(raw).numpy().view(bits), high.view(raw).numpy().view(bits)], 1)
            return halves.view(np.uint32 if target == "bf16x2" else np.uint16)[:, 0]
        return self.read(to[1], WIDTHS[source]).astype(WIDTHS[target])

    def shuffled(self, how: str, value: Values, by: Values) -> Values:
        lane = (self.lanes % WARP).astype(np.int64)
        there = {"bfly": lane ^ by, "up": lane - by, "idx": by}[how]
        there = np.where((there >= 0) & (there < WARP), there, lane)
        return value[self.lanes - lane + there]

    def access(self, name: list[str], to: list[str], active: Values) -> None:
        """ld, st or atom; of parameters, shared or global memory."""
        space = name[1].partition(":")[0]
        kind = WIDTHS[name[-1]]
        place = next(operand for operand in to if operand.startswith("["))
        if space == "param":
            self.write(to[0], self.all(self.arguments.get(place.strip("[] "), 0), kind), active)
            return
        base, offset = ADDRESS.fullmatch(place).groups()  # type: ignore[union-attr]
        address = (self.read(base, np.int64) if base else self.all(0, np.int64)) + int(offset or 0)
        data = next(operand for operand in to if operand != place)
        names = inside(data) if data.startswith("{") else [data]
        for number, register in enumerate(names):
            there = self.checked(address + number * np.dtype(kind).itemsize, kind, space, active)
            memory = (self.shared if space == "shared" else self.memory).view(kind)
            if name[0] == "st":
                memory[there] = self.read(register, kind)[active]
                self.mark(there, kind, space, active)
                continue
            self.heard(there, kind, space, active)
            value = np.zeros(self.threads, kind)
            value[active] = memory[there]
            if name[0] == "atom":
                new = self.read(to[2], kind)[active]
                for index, change in zip(there, new, strict=True):
                    memory[index] = change if "exch" in name else memory[index] + change
            self.write(register, value, active)

    def checked(self, address: Values, kind: Any, space: str, active: Values) -> Values:
        size, whole = np.dtype(kind).itemsize, len(self.shared if space == "shared" else self.memory)
        asked = address[active]
        if len(asked) and (asked.min() < 0 or asked.max() + size > whole or (asked % size).any()):
            raise PtxError(f"{space} memory at {asked.min()}..{asked.max()}: outside or not aligned")
        return asked // size

    def mark(self, there: Values, kind: Any, space: str, active: Values) -> None:
        if space == "shared":
            self.writer.reshape(-1, np.dtype(kind).itemsize)[there] = (self.lanes[active] // WARP)[:, None]

    def heard(self, there: Values, kind: Any, space: str, active: Values) -> None:
        if space == "shared":
            writer = self.writer.reshape(-1, np.dtype(kind).itemsize)[there]
            if ((writer >= 0) & (writer != (self.lanes[active] // WARP)[:, None])).any():
                raise PtxError("shared memory that another warp wrote is read without a barrier")


def inside(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{} ").split(",")]


def register_type(name: str) -> Any:
    found = re.match(r"%[a-z]+", name)
    return REGISTERS[found[0]] if found else np.uint32


def narrowed(value: Values, kind: Any) -> Values:
    """The bits of a value as another type; wider ones are filled by the value's own sign, if it has one."""
    if value.dtype.itemsize == np.dtype(kind).itemsize:
        return value.view(kind)
    return value.astype(kind)
