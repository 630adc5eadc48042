"""The text of the ROUTING knob: `<law>[,mask=<0..1>][,empty=<rank>]`, parsed and checked.

The coordinator answers a wrong knob with this file, so it needs the standard library only; lib/routing.py makes the
routing itself.
"""

from __future__ import annotations

import array
import ast
import difflib
import re
import struct
import sys
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

LAWS = ("uniform", "balanced", "zipf", "onehot", "deepep")
FILE_LAW = "file"
MAX_GROUPS = 4  # DeepEP's tests let a token reach at most four nodes

_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?|\.[0-9]{1,9}")  # nine digits: mask resolves 2**-32, no finer
_RANK = re.compile(r"[0-9]{1,9}")
_NPY_MAGIC = b"\x93NUMPY"
SHOWN_CHARACTERS = 80  # of what a person gave, in a message
_NPY_ITEM = {"<i4": ("i", 4), "<i8": ("q", 8)}  # dtype -> array type code, bytes
_NPY_HEADER_MAX = 65536


@dataclass(frozen=True)
class RoutingSpec:
    """A parsed routing. `exponent` is zipf's s as written, `path` the file law's file; "" where they do not apply."""

    law: str = "uniform"
    exponent: str = ""
    path: str = ""
    mask: Fraction = Fraction(0)
    empty: int | None = None


def parse_routing(text: str) -> RoutingSpec:
    """Parse `<law>[,mask=<0..1>][,empty=<rank>]`; a law that is left out is uniform.

    Laws: uniform, balanced, zipf:<s> (plain zipf = zipf:1), onehot, deepep, or a path (it contains `/`).
    Raises ValueError with one sentence, without the knob's name.
    """
    parts = [part.strip() for part in text.split(",")]
    options: dict[str, str] = {}
    while parts and _is_option(parts[-1]):  # from the end, since a path may contain commas
        key, value = (half.strip() for half in parts.pop().split("=", 1))
        if key in options:
            raise ValueError(f"{key} is given twice")
        options[key] = value
    law, exponent, path = _parse_law(",".join(parts))
    mask = _parse_mask(options["mask"]) if "mask" in options else Fraction(0)
    empty = _parse_empty(options["empty"]) if "empty" in options else None
    return RoutingSpec(law, exponent, path, mask, empty)


def canonical(spec: RoutingSpec) -> str:
    """The one spelling of a routing: `parse_routing(canonical(spec))` means the same as `spec`."""
    law = {"zipf": f"zipf:{_plain(Decimal(spec.exponent or 1))}", FILE_LAW: spec.path}.get(spec.law, spec.law)
    if spec.mask:
        exact = Context(prec=40).divide(Decimal(spec.mask.numerator), Decimal(spec.mask.denominator))
        law += f",mask={_plain(exact)}"
    return law + (f",empty={spec.empty}" if spec.empty is not None else "")


def check_routing(spec: RoutingSpec, world: int, nodes: int, num_experts: int, topk: int) -> str:
    """What keeps this routing from this shape: "" or one sentence. Files are checked by `check_routing_file`."""
    if spec.empty is not None and spec.empty >= world:
        return f"empty={spec.empty} must be a rank, 0..{world - 1}"
    if spec.law != "deepep":
        return ""
    if num_experts % nodes:
        return f"deepep puts {num_experts} experts into {nodes} equal groups, one a node: it must divide"
    groups = min(nodes, MAX_GROUPS)
    reach = groups * (num_experts // nodes)
    if topk > reach:
        return f"deepep lets a token choose among the {reach} experts of {groups} nodes, top-{topk} needs more"
    return ""


def check_routing_file(path: str, world: int, tokens: int, num_experts: int, topk: int) -> str:
    """What keeps this .npy file from being a routing: "" or one sentence.

    It must hold int32 or int64, C order, [world, at least `tokens`, topk]; of each rank the first `tokens` rows are
    checked, which are those used: ids in -1..num_experts-1, distinct within a row but for -1.
    """
    if Path(path).exists() and not Path(path).is_file():
        return f"{path} is not a regular file"
    try:
        with Path(path).open("rb") as file:
            dtype, fortran, shape = _read_npy_header(file)
            if dtype not in _NPY_ITEM or fortran:
                return f"{path} must hold little-endian int32 or int64 in C order, it holds {dtype}"
            if len(shape) != 3 or shape[0] != world or shape[1] < tokens or shape[2] != topk:
                need = f"[{world}, {tokens} or more, {topk}] (ranks, tokens, top-k)"
                return f"{path} must have the shape {need}, it has {list(shape)}"
            return _check_ids(file, path, dtype, shape, tokens, num_experts)
    except OSError as error:
        return f"{path} can't be read: {error.strerror}"
    except (ValueError, OverflowError, struct.error) as error:
        return f"{path} is not a .npy file: {error}"


def _is_option(part: str) -> bool:
    return part.split("=")[0].strip() in ("mask", "empty") and "=" in part


def _parse_law(text: str) -> tuple[str, str, str]:
    """(law, exponent, path) of the text before the options."""
    if "/" in text:
        return FILE_LAW, "", text
    if not text:
        return "uniform", "", ""
    if "," in text or "=" in text:
        stray = text.split(",")[-1]
        raise ValueError(f"{stray[:SHOWN_CHARACTERS]!r} is not understood: give <law>[,mask=<0..1>][,empty=<rank>]")
    name, colon, exponent = (piece.strip() for piece in text.partition(":"))
    if name not in LAWS:
        near = difflib.get_close_matches(name, LAWS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use {', '.join(LAWS)} or a path (with a /)"
        raise ValueError(f"there is no routing law {name[:SHOWN_CHARACTERS]!r}: {hint}")
    if name != "zipf":
        if colon:
            raise ValueError(f"{name} takes no :{exponent}")
        return name, "", ""
    exponent = exponent if colon else "1"
    if not _NUMBER.fullmatch(exponent) or Decimal(exponent) <= 0:
        raise ValueError(f"zipf:{exponent} needs a decimal exponent above 0, such as zipf:1.2")
    return name, exponent, ""


def _parse_mask(value: str) -> Fraction:
    if not _NUMBER.fullmatch(value) or Decimal(value) > 1:
        raise ValueError(f"mask={value} must be a decimal share, 0..1")
    return Fraction(Decimal(value))


def _parse_empty(value: str) -> int:
    if not _RANK.fullmatch(value):
        raise ValueError(f"empty={value} must be a rank, 0 or more")
    return int(value)


def _plain(number: Decimal) -> str:
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _read_npy_header(file: BinaryIO) -> tuple[str, bool, tuple[int, ...]]:
    """(dtype, fortran order, shape); the file then stands at the data. Raises ValueError or struct.error."""
    if file.read(6) != _NPY_MAGIC:
        raise ValueError("it does not start with the .npy mark")
    major, _minor = struct.unpack("<BB", file.read(2))
    (length,) = struct.unpack("<H", file.read(2)) if major == 1 else struct.unpack("<I", file.read(4))
    if length > _NPY_HEADER_MAX:
        raise ValueError(f"its header claims {length} bytes")
    try:
        header = ast.literal_eval(file.read(length).decode("latin1").strip())
        shape = tuple(int(size) for size in header["shape"])
        return str(header["descr"]), bool(header["fortran_order"]), shape
    except (SyntaxError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("its header is broken") from error


def _check_ids(file: BinaryIO, path: str, dtype: str, shape: tuple[int, ...], tokens: int, num_experts: int) -> str:
    code, size = _NPY_ITEM[dtype]
    world, file_tokens, topk = shape
    start = file.tell()
    for rank in range(world):
        file.seek(start + rank * file_tokens * topk * size)
        data = file.read(tokens * topk * size)
        if len(data) < tokens * topk * size:
            return f"{path} is cut short in the rows of rank {rank}"
        ids = array.array(code)
        ids.frombytes(data)
        if sys.byteorder == "big":
            ids.byteswap()
        if ids and (min(ids) < -1 or max(ids) >= num_experts):
            return f"{path} has an expert id outside -1..{num_experts - 1} in the rows of rank {rank}"
        for token in range(tokens):
            chosen = [expert for expert in ids[token * topk : (token + 1) * topk] if expert >= 0]
            if len(set(chosen)) < len(chosen):
                return f"{path} names one expert twice for token {token} of rank {rank}"
    return ""
