"""Fakes of libraries that take exactly the calls which the real one takes: recorded signatures, enforced.

A record is made by tools/record_signatures.py from the wheel that an adapter was verified with, or from a checkout.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

SIGNATURES = Path(__file__).resolve().parent / "signatures"
Class = TypeVar("Class", bound=type)


def recorded(file: str) -> dict[str, tuple[inspect.Signature, bool]]:
    """Each method of a record: the signature to bind a call with (without self), and whether it is static."""
    methods = json.loads((SIGNATURES / file).read_text())["methods"]
    return {name: (_signature(told["parameters"]), told["static"]) for name, told in methods.items()}


def enforced(file: str, attributes: set[str]) -> Callable[[Class], Class]:
    """Class decorator: each method binds its call to the record first (TypeError), and notes it in `cls.calls`.

    A recorded method that the fake lacks raises NotImplementedError; a public name that the record lacks, other than
    `attributes`, is refused at once.
    """

    def decorate(cls: Class) -> Class:
        methods = recorded(file)
        surplus = {name for name in vars(cls) if not name.startswith("_")} - set(methods) - attributes
        assert not surplus, f"the recorded class has no {surplus}"
        for name, (signature, static) in methods.items():
            made = vars(cls).get(name)
            assert made is None or isinstance(made, staticmethod) == static, f"{name} is static in one of the two only"
            plain = made.__func__ if isinstance(made, staticmethod) else made
            call = _bound(cls, name, plain, signature, static)
            setattr(cls, name, staticmethod(call) if static else call)
        return cls

    return decorate


def structure(file: str) -> Callable[..., SimpleNamespace]:
    """Makes what a recorded dataclass would hold: its fields and no others."""
    signature, _ = recorded(file)["__init__"]

    def make(*args: Any, **kwargs: Any) -> SimpleNamespace:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return SimpleNamespace(**bound.arguments)

    return make


def function(file: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """`made` behind the signature of a recorded function."""
    ((signature, _),) = recorded(file).values()

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return made(*bound.args, **bound.kwargs)

    return call


def _signature(parameters: list[dict[str, str]]) -> inspect.Signature:
    made = []
    for told in parameters:
        default = _literal(told["default"]) if "default" in told else inspect.Parameter.empty
        made.append(inspect.Parameter(told["name"], getattr(inspect.Parameter, told["kind"]), default=default))
    return inspect.Signature(made)


def _literal(text: str) -> Any:
    """A default as a value, or its text where it names something of the library's own, such as `MoEMode.LATENCY`."""
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


def _bound(cls: Any, name: str, made: Any, signature: inspect.Signature, static: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        own, rest = ((), args) if static else (args[:1], args[1:])
        bound = signature.bind(*rest, **kwargs)
        cls.calls.append((name, {key: told(value) for key, value in bound.arguments.items()}))
        if made is None:
            raise NotImplementedError(f"the fake has no {name}")
        bound.apply_defaults()
        return made(*own, **bound.arguments)

    return call


def told(value: Any) -> Any:
    """An argument as a list of calls keeps it: a tensor there would keep a dispatch's result alive."""
    if isinstance(value, tuple):
        return tuple(map(told, value))
    if hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return value if isinstance(value, int | str | None) else repr(value)
