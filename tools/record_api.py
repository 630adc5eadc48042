#!/usr/bin/env python3
"""Write down the signatures of chosen functions, methods and dataclass fields of a library, without importing it.

    record_api.py WHEEL_OR_FOLDER MODULE:NAME [MODULE:CLASS.METHOD ...] --out FILE

Where an adapter uses a few calls out of many modules of one library, as of vLLM, one record holds them all.
tools/record_signatures.py records one whole class. `MODULE:CLASS` gives the constructor, or the fields of a dataclass.
Standard library only.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.record_signatures import USAGE_EXIT, Function, Package, Parameter, UsageError, absolute, parameters

Record = dict[str, "list[Parameter]"]
CONSTRUCTOR = "__init__"
DATACLASS = "dataclass"


def find(package: Package, module: str, name: str) -> tuple[str, Function | ast.ClassDef]:
    """The file and the definition of a function or class, followed through `from .x import name`.

    Raises UsageError where there is none.
    """
    file = package.source_of(module)
    tree = ast.parse(package.read(file), file)
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and node.name == name:
            return file, node
    parent = module if file.endswith("/__init__.py") else module.rpartition(".")[0]
    for imported in ast.walk(tree):  # a package may import behind an `if`
        if not isinstance(imported, ast.ImportFrom):
            continue
        for alias in imported.names:
            if (alias.asname or alias.name) == name:
                return find(package, absolute(imported, parent), alias.name)
    raise UsageError(f"{file} has no {name}")


def fields(definition: ast.ClassDef) -> list[Parameter]:
    """The constructor's parameters of a dataclass, from its annotated names in order."""
    found = []
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if "ClassVar" in ast.unparse(node.annotation) or (node.value and "init=False" in ast.unparse(node.value)):
            continue
        told = {"name": node.target.id, "kind": "POSITIONAL_OR_KEYWORD"}
        found.append(told | ({"default": ast.unparse(node.value)} if node.value else {}))
    return found


def of_class(package: Package, module: str, definition: ast.ClassDef, method: str) -> list[Parameter]:
    """Parameters without `self` of a method, looked for in base classes of the same file or its imports too."""
    for node in definition.body:
        if isinstance(node, Function) and node.name == method:
            return list(parameters(node, bound=True))
    if method == CONSTRUCTOR and any(DATACLASS in ast.unparse(mark) for mark in definition.decorator_list):
        return fields(definition)
    for base in definition.bases:
        if isinstance(base, ast.Name):
            _, parent = find(package, module, base.id)
            assert isinstance(parent, ast.ClassDef)
            return of_class(package, module, parent, method)
    raise UsageError(f"{module}:{definition.name} has no {method} of its own")


def record_one(package: Package, asked: str) -> tuple[str, list[Parameter]]:
    """The file that holds it, and its parameters in order."""
    module, colon, path = asked.partition(":")
    if not colon or not path:
        raise UsageError(f"{asked}: must be MODULE:NAME or MODULE:CLASS.METHOD")
    name, _, method = path.partition(".")
    file, node = find(package, module, name)
    if isinstance(node, ast.ClassDef):
        return file, of_class(package, file.removesuffix(".py").replace("/", "."), node, method or CONSTRUCTOR)
    return file, list(parameters(node, bound=False))


def record(path: Path, asked: list[str]) -> dict[str, str | Record]:
    package = Package(path)
    found = {one: record_one(package, one) for one in asked}
    distribution, version = package.distribution(next(iter(found.values()))[0])
    told = {one: signature for one, (_, signature) in found.items()}
    return {"distribution": distribution, "version": version, "signatures": told}


def as_json(made: dict[str, str | Record]) -> str:
    """JSON with one signature a line, so that a changed one is a readable diff."""
    signatures = made["signatures"]
    assert isinstance(signatures, dict)
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(told)}" for name, told in signatures.items())
    head = "".join(f'  "{name}": {json.dumps(made[name])},\n' for name in ("distribution", "version"))
    return f'{{\n{head}  "signatures": {{\n{lines}\n  }}\n}}\n'


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="record_api.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", metavar="WHEEL_OR_FOLDER", type=Path)
    parser.add_argument("asked", metavar="MODULE:NAME", nargs="+")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True)
    args = parser.parse_args(arguments)
    try:
        args.out.write_text(as_json(record(args.path, args.asked)))
    except (UsageError, OSError) as error:
        print(f"record_api.py: {error}", file=sys.stderr)
        return USAGE_EXIT
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
