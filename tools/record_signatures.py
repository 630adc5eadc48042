#!/usr/bin/env python3
"""Write down the signatures of a library's classes and functions, read from its Python source without importing it.

    record_signatures.py WHEEL_OR_FOLDER MODULE NAME [MODULE NAME ...] [--out FILE] [--checkout REPOSITORY@COMMIT]
    record_signatures.py WHEEL_OR_FOLDER MODULE:NAME [MODULE:CLASS.METHOD ...] [--out FILE] [...]

MODULE NAME is a whole class or a function: one pair gives one record, several give one with the `parts` of them all.
With colons the words are chosen calls, for a library of which an adapter uses a few out of many modules, and one record
holds the `signatures` of them all; MODULE:CLASS is the constructor, also an inherited one. A dataclass gets the
constructor that its fields make.

An EP library's extension needs a GPU to load, so a contract test can't ask the library itself; it asks this record,
which was made from the very wheel that the adapter was verified with, or from a checkout where there is no wheel.
Standard library only.
"""

from __future__ import annotations

import argparse
import ast
import email
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

USAGE_EXIT = 2
KINDS = ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD", "VAR_POSITIONAL", "KEYWORD_ONLY", "VAR_KEYWORD")
CONSTRUCTORS = ("__init__", "__new__")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Parameter = dict[str, str]
Method = dict[str, "bool | list[Parameter]"]
Record = dict[str, Any]
Definition = ast.ClassDef | Function


class UsageError(Exception):
    """One sentence for whoever typed the command."""


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(
            f"{message}; usage: {self.prog} WHEEL_OR_FOLDER MODULE NAME ... | MODULE:CALL ... [--out FILE]"
        )


class Package:
    """The text files of a wheel, or of the folder that it was unpacked or installed to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wheel: zipfile.ZipFile | None = None
        if path.is_dir():
            self.names = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
            return
        if not path.exists():
            raise UsageError(f"{path} does not exist")
        try:
            self.wheel = zipfile.ZipFile(path)
        except zipfile.BadZipFile as error:
            raise UsageError(f"{path} is neither a wheel nor a folder") from error
        self.names = set(self.wheel.namelist())

    def read(self, name: str) -> str:
        data = self.wheel.read(name) if self.wheel else (self.path / name).read_bytes()
        return data.decode()

    def source_of(self, module: str) -> str:
        """The name of the file that holds a dotted module."""
        stem = module.replace(".", "/")
        for name in (f"{stem}/__init__.py", f"{stem}.py"):
            if name in self.names:
                return name
        raise UsageError(f"{self.path} has no Python source of the module {module}")

    def distribution(self, file: str) -> tuple[str, str]:
        """(name, version) of the distribution that brought a file: a folder may hold several."""
        for name in sorted(self.names):
            folder, _, last = name.rpartition("/")
            if last != "METADATA" or not folder.endswith(".dist-info"):
                continue
            recorded = self.read(f"{folder}/RECORD") if f"{folder}/RECORD" in self.names else ""
            if file in {line.partition(",")[0] for line in recorded.splitlines()}:
                fields = email.message_from_string(self.read(name))
                return fields["Name"], fields["Version"]
        raise UsageError(f"{self.path} has no *.dist-info that lists {file}, so its version is unknown")


def find(package: Package, module: str, name: str) -> tuple[str, Definition]:
    """The file and the definition of a class or function. Raises UsageError where there is none to be read."""
    try:
        return _followed(package, module, name)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UsageError(f"{package.path} holds a source that does not parse: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{module} imports {name} in a circle") from error


def _followed(package: Package, module: str, name: str) -> tuple[str, Definition]:
    """Through `from .x import Name` to where it stands."""
    file = package.source_of(module)
    tree = ast.parse(package.read(file), file)
    for node in tree.body:
        if isinstance(node, Definition) and node.name == name:
            return file, node
    parent = module if file.endswith("/__init__.py") else module.rpartition(".")[0]
    for imported in ast.walk(tree):  # those at the top come first; a package may import behind an `if`
        if not isinstance(imported, ast.ImportFrom):
            continue
        for alias in imported.names:
            if (alias.asname or alias.name) == name:
                return _followed(package, absolute(imported, parent), alias.name)
    raise UsageError(f"{file} has no class or function {name}")


def absolute(node: ast.ImportFrom, parent: str) -> str:
    """The dotted module that an import in the package `parent` names."""
    if not node.level:
        return node.module or ""
    parts = parent.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def parameters(function: Function, bound: bool) -> Iterator[Parameter]:
    """Name, kind and default of each parameter in order, without `self` or `cls` where the method is bound."""
    args = function.args
    positional = [(arg, KINDS[0]) for arg in args.posonlyargs] + [(arg, KINDS[1]) for arg in args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    ordered = [(arg, kind, default) for (arg, kind), default in zip(positional, defaults, strict=True)][bound:]
    ordered += [(args.vararg, KINDS[2], None)] if args.vararg else []
    ordered += [(arg, KINDS[3], default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    ordered += [(args.kwarg, KINDS[4], None)] if args.kwarg else []
    for arg, kind, default in ordered:
        yield {"name": arg.arg, "kind": kind} | ({"default": ast.unparse(default)} if default else {})


def methods(definition: ast.ClassDef) -> dict[str, Method]:
    """The constructor and the public methods that the class itself defines; properties are no methods.

    `__new__` stands for the constructor where that is all there is.
    """
    found: dict[str, Method] = {}
    for node in definition.body:
        if not isinstance(node, Function) or (node.name.startswith("_") and node.name not in CONSTRUCTORS):
            continue
        decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
        if "property" in decorators or any(name.endswith(".setter") for name in decorators):
            continue
        static = "staticmethod" in decorators
        of_class = "classmethod" in decorators  # called without an instance as well; its first parameter is the class
        told = list(parameters(node, bound=not static))
        found[node.name] = {"static": static or of_class, "parameters": told}
    if "__init__" not in found and is_dataclass(definition):
        constructor: Method = {"static": False, "parameters": list(fields(definition))}
        found = {"__init__": constructor, **found}
    return found


def properties(definition: ast.ClassDef) -> list[str]:
    nodes = [node for node in definition.body if isinstance(node, Function) and not node.name.startswith("_")]
    return [node.name for node in nodes if "property" in {ast.unparse(found) for found in node.decorator_list}]


def members(definition: ast.ClassDef) -> dict[str, int]:
    """Names and values of an IntEnum."""
    if not any("Enum" in ast.unparse(base) for base in definition.bases):
        return {}
    pairs = [node for node in definition.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)]
    return {ast.unparse(node.targets[0]): int(str(ast.literal_eval(node.value))) for node in pairs}


def is_dataclass(definition: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(made) for made in definition.decorator_list)


def fields(definition: ast.ClassDef) -> Iterator[Parameter]:
    """A dataclass's own fields as its constructor's parameters, those given by keyword only last.

    A decorator of the library's own, which is no `dataclass` by name, takes all by keyword only.
    """
    names = {ast.unparse(made).split("(")[0] for made in definition.decorator_list}
    usual = KINDS[1] if names & {"dataclass", "dataclasses.dataclass"} else KINDS[3]
    keyword_only = []
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign) or "ClassVar" in ast.unparse(node.annotation):
            continue
        told, kind = {"name": ast.unparse(node.target)}, usual
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func).endswith("field"):
            given = {word.arg: ast.unparse(word.value) for word in node.value.keywords}
            if given.get("init") == "False":
                continue
            kind = KINDS[3] if given.get("kw_only") == "True" else kind
            default = given.get("default", "None" if "default_factory" in given else "")
        else:
            default = ast.unparse(node.value) if node.value is not None else ""
        made = told | {"kind": kind} | ({"default": default} if default else {})
        if kind == KINDS[3]:
            keyword_only.append(made)
        else:
            yield made
    yield from keyword_only


def record(package: Package, module: str, name: str) -> tuple[str, Record]:
    """The file that holds a class or function, and what is told of it."""
    file, definition = find(package, module, name)
    made: Record = {"module": module}
    if isinstance(definition, ast.ClassDef):
        extras = {"members": members(definition), "properties": properties(definition)}
        told = {what: value for what, value in extras.items() if value}
        return file, made | {"class": name, "source": file, **told, "methods": methods(definition)}
    return file, made | {"function": name, "source": file, "parameters": list(parameters(definition, bound=False))}


def call(package: Package, asked: str) -> tuple[str, list[Parameter]]:
    """The file that holds MODULE:NAME or MODULE:CLASS.METHOD, and its parameters in order."""
    module, colon, path = asked.partition(":")
    if not colon or not path:
        raise UsageError(f"{asked} must be MODULE:NAME or MODULE:CLASS.METHOD, as the others")
    name, _, method = path.partition(".")
    file, definition = find(package, module, name)
    if isinstance(definition, ast.ClassDef):
        return file, of_class(package, file, definition, method or CONSTRUCTORS[0])
    return file, list(parameters(definition, bound=False))


def of_class(package: Package, file: str, definition: ast.ClassDef, method: str) -> list[Parameter]:
    """Parameters without `self` of a method of the class or of one that it inherits from by name."""
    for node in definition.body:
        if isinstance(node, Function) and node.name == method:
            static = "staticmethod" in {ast.unparse(decorator) for decorator in node.decorator_list}
            return list(parameters(node, bound=not static))
    if method == CONSTRUCTORS[0] and is_dataclass(definition):
        return list(fields(definition))
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for base in definition.bases:
        if isinstance(base, ast.Name):
            parent_file, parent = find(package, module, base.id)
            assert isinstance(parent, ast.ClassDef)
            return of_class(package, parent_file, parent, method)
    raise UsageError(f"{module}:{definition.name} has no {method} of its own")


def record_all(package: Package, words: list[str], checkout: str = "") -> Record:
    """What `words` ask for, under one distribution and its version.

    `checkout` names the repository and commit of a folder that no distribution brought.
    """
    if any(":" in word for word in words):
        calls = [(word, *call(package, word)) for word in words]
        file = calls[0][1]
        told: Record = {"signatures": {word: signature for word, _, signature in calls}}
    elif len(words) % 2:
        raise UsageError(f"{words[-1]} has no NAME behind it")
    else:
        made = [record(package, module, name) for module, name in zip(words[::2], words[1::2], strict=True)]
        file = made[0][0]
        told = made[0][1] if len(made) == 1 else {"parts": [part for _, part in made]}
    repository, _, commit = checkout.partition("@")
    distribution, version = (repository, commit) if checkout else package.distribution(file)
    return {"distribution": distribution, "version": version} | told


def as_json(value: object, depth: int = 0) -> str:
    """JSON with one parameter a line, so that a changed signature is a readable diff."""
    inner, close = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict) and value and "kind" not in value:
        items = [f"{inner}{json.dumps(key)}: {as_json(entry, depth + 1)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{close}}}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"{inner}{as_json(entry, depth + 1)}" for entry in value) + f"\n{close}]"
    return json.dumps(value)


def run(arguments: list[str]) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(prog="record_signatures.py", description=__doc__, formatter_class=raw)
    parser.add_argument("path", metavar="WHEEL_OR_FOLDER", type=Path)
    words = (
        "pairs of a dotted module, such as deep_ep, and a name in it, such as Buffer; or calls, such as deep_ep:Buffer"
    )
    parser.add_argument("words", metavar="MODULE NAME | MODULE:CALL", nargs="+", help=words)
    parser.add_argument("--out", metavar="FILE", type=Path, help="instead of stdout")
    parser.add_argument("--checkout", metavar="REPOSITORY@COMMIT", default="", help="of a folder without *.dist-info")
    args = parser.parse_args(arguments)
    if args.checkout and not all(args.checkout.partition("@")):
        raise UsageError(f"--checkout {args.checkout}: give REPOSITORY@COMMIT, such as microsoft/mscclpp@3d02152b")
    text = as_json(record_all(Package(args.path), args.words, args.checkout)) + "\n"
    if args.out is None:
        sys.stdout.write(text)
        return
    try:
        args.out.write_text(text)
    except OSError as error:
        raise UsageError(f"{args.out} can't be written: {error.strerror}") from error


def main(arguments: list[str]) -> int:
    try:
        run(arguments)
    except UsageError as error:
        print(f"record_signatures.py: {error}", file=sys.stderr)
        return USAGE_EXIT
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
