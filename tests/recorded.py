"""Fakes of libraries that take exactly the calls which the real one takes: recorded signatures, enforced.

A record is made by tools/record_signatures.py from the wheel that an adapter was verified with.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

SIGNATURES = Path(__file__).resolve().parent / "signatures"
Class = TypeVar("Class", bound=type)


@cache
def record_of(file: str, name: str) -> dict[str, Any]:
    """A record, or the part of it that is the class or function `name`."""
    record: dict[str, Any] = json.loads((SIGNATURES / file).read_text())
    if not name:
        return record
    return next(part for part in record["parts"] if name in (part.get("class"), part.get("function")))


def recorded(file: str, part: str = "") -> dict[str, tuple[inspect.Signature, bool]]:
    """Each method of a record: the signature to bind a call with (without self), and whether it is static."""
    methods = record_of(file, part)["methods"]
    return {name: (_signature(told["parameters"]), told["static"]) for name, told in methods.items()}


def recorded_function(file: str, name: str) -> inspect.Signature:
    return _signature(record_of(file, name)["parameters"])


def recorded_module(file: str, name: str) -> str:
    return str(record_of(file, name)["module"])


def recorded_dataclass(file: str, name: str) -> type:
    """A dataclass of the recorded fields and defaults."""
    made: list[Any] = []
    for parameter in recorded(file, name)["__init__"][0].parameters.values():
        only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if parameter.default is inspect.Parameter.empty:
            made.append((parameter.name, Any, dataclasses.field(kw_only=only)))
        else:
            made.append((parameter.name, Any, dataclasses.field(default=parameter.default, kw_only=only)))
    return dataclasses.make_dataclass(name, made)


def recorded_enum(file: str, name: str) -> Any:
    """An IntEnum with the recorded members."""
    return enum.IntEnum(name, record_of(file, name)["members"])


def recorded_api(file: str) -> dict[str, inspect.Signature]:
    """Each call of a record of chosen calls, `module:name` or `module:Class.method`, without self."""
    told = json.loads((SIGNATURES / file).read_text())["signatures"]
    return {name: _signature(parameters) for name, parameters in told.items()}


def enforced(file: str, attributes: set[str], part: str = "") -> Callable[[Class], Class]:
    """Class decorator: each method binds its call to the record first (TypeError), and notes it in `cls.calls`.

    A recorded method that the fake lacks raises NotImplementedError; a public name that the record lacks, other than
    `attributes`, is refused at once.
    """

    def decorate(cls: Class) -> Class:
        methods = recorded(file, part)
        known = set(methods) | set(record_of(file, part).get("properties", ())) | attributes
        surplus = {name for name in vars(cls) if not name.startswith("_")} - known
        assert not surplus, f"the recorded class has no {surplus}"
        for name, (signature, static) in methods.items():
            made = vars(cls).get(name)
            assert made is None or isinstance(made, staticmethod) == static, f"{name} is static in one of the two only"
            plain = made.__func__ if isinstance(made, staticmethod) else made
            call = _bound(cls, name, plain, signature, static)
            setattr(cls, name, staticmethod(call) if static else call)
        return cls

    return decorate


class NoLiteral(str):
    """A default that only the library itself can evaluate, as its source spells it."""


def _default(told: dict[str, str]) -> Any:
    if "default" not in told:
        return inspect.Parameter.empty
    try:
        return ast.literal_eval(told["default"])
    except ValueError:
        return NoLiteral(told["default"])


def _signature(parameters: list[dict[str, str]]) -> inspect.Signature:
    made = []
    for told in parameters:
        default = _default(told)
        made.append(inspect.Parameter(told["name"], getattr(inspect.Parameter, told["kind"]), default=default))
    return inspect.Signature(made)


def _bound(cls: Any, name: str, made: Any, signature: inspect.Signature, static: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        own, rest = ((), args) if static else (args[:1], args[1:])
        bound = signature.bind(*rest, **kwargs)
        cls.calls.append((name, {key: _told(value) for key, value in bound.arguments.items()}))
        if made is None:
            raise NotImplementedError(f"the fake has no {name}")
        bound.apply_defaults()
        return made(*own, **bound.arguments)

    return call


def _told(value: Any) -> Any:
    """An argument as a list of calls keeps it: a tensor there would keep a dispatch's result alive."""
    if isinstance(value, tuple):
        return tuple(map(_told, value))
    if hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return value if isinstance(value, int | str | None) else repr(value)
