"""Records of chosen calls of a small package: functions, methods, inherited constructors and dataclass fields."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "record_signatures.py"
FILES = {
    "lib_of/__init__.py": "if True:\n    from .core import Child, send as sent\nclass InInit(Child): ...\n",
    "lib_of/base.py": "class Base:\n    def __init__(self, a, *, b: int = MAX): ...\n",
    "lib_of/core.py": """
from dataclasses import dataclass, field
from .base import Base
raise RuntimeError("this file must be read, not run")

def send(x, /, *rest, dtype=None): ...

class Child(Base):
    def _step(self, y, z=(1, 2)): ...
    @staticmethod
    def hint(tokens): ...

@dataclass(frozen=True)
class Config:
    size: int
    made: ClassVar[int] = 3
    hidden: int = field(default=4, init=False)
    name: str = "a"
""",
    "lib_of/broken.py": "def (",
    "lib_of-2.0.dist-info/METADATA": "Name: lib-of\nVersion: 2.0\n",
    "lib_of-2.0.dist-info/RECORD": "lib_of/core.py,,\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    return tmp_path / "site"


def run(folder: Path, *asked: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", str(TOOL), str(folder), *asked, "--out", str(folder / "out.json")]
    return subprocess.run(command, capture_output=True, text=True)


def test_functions_methods_and_fields_are_written_down_without_running_the_library(folder: Path) -> None:
    asked = ["lib_of:sent", "lib_of:Child", "lib_of.core:Child._step", "lib_of.core:Child.hint"]
    asked += ["lib_of.core:Config", "lib_of:InInit"]
    assert run(folder, *asked).returncode == 0
    made = json.loads((folder / "out.json").read_text())
    assert (made["distribution"], made["version"], list(made["signatures"])) == ("lib-of", "2.0", asked)
    told = {name: [(each["name"], each.get("default")) for each in made["signatures"][name]] for name in asked}
    assert told == {
        "lib_of:sent": [("x", None), ("rest", None), ("dtype", "None")],
        "lib_of:Child": [("a", None), ("b", "MAX")],
        "lib_of.core:Child._step": [("y", None), ("z", "(1, 2)")],
        "lib_of.core:Child.hint": [("tokens", None)],
        "lib_of:InInit": [("a", None), ("b", "MAX")],
        "lib_of.core:Config": [("size", None), ("name", "'a'")],
    }
    kinds = [each["kind"] for each in made["signatures"]["lib_of:sent"]]
    assert kinds == ["POSITIONAL_ONLY", "VAR_POSITIONAL", "KEYWORD_ONLY"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("lib_of:sent", "lib_of.core"), "lib_of.core must be MODULE:NAME or MODULE:CLASS.METHOD"),
        (("lib_of.core:",), "lib_of.core: must be MODULE:NAME"),
        (("lib_of.core:Gone",), "has no class or function Gone"),
        (("lib_of.core:Config.call",), "has no call"),
        (("lib_of.none:x",), "no Python source"),
        (("lib_of.broken:x",), "holds a source that does not parse"),
    ],
)
def test_what_is_not_there_is_one_sentence(folder: Path, asked: tuple[str, ...], words: str) -> None:
    answer = run(folder, *asked)
    assert answer.returncode == 2
    assert words in answer.stderr
    assert len(answer.stderr.splitlines()) == 1
