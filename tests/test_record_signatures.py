"""tools/record_signatures.py on a small package, as a wheel and as a folder: contract tests stand on its records."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "record_signatures.py"
FILES = {
    "lib_of/configs.py": """
@dataclass(frozen=True)
class Config:
    KINDS: ClassVar[tuple] = ("a", "b")
    size: int
    stream: int = 0
    device: int | None = field(default=None, kw_only=True)
    names: list = field(default_factory=list)

    @property
    def double(self): ...

class Pack:
    def __new__(cls, w13, w2=None): ...

def layer(config, *, backend="auto"): ...
""",
    "lib_of/__init__.py": "import a_gpu_extension\nfrom .inner.core import Real as Shown\nfrom .lost import Gone\n",
    "lib_of/inner/__init__.py": "",
    "lib_of/inner/core.py": """
raise RuntimeError("this file must be read, not run")

class Real:
    size: int = 3

    def __init__(self, group, /, count: int = 2 ** 4, *, flag: bool = False, must) -> None: ...

    def send(self, x, *rest, dtype=None, **more): ...

    @staticmethod
    def hint(tokens: int, name: str = "a b") -> int: ...

    @classmethod
    def made(cls, path): ...

    @property
    def rank(self): ...

    async def wait(self): ...

    def _private(self): ...
""",
    "lib_of/parts.py": """
from enum import IntEnum

class Kind(IntEnum):
    \"\"\"Which.\"\"\"

    SLOW = 0
    FAST = 2

@binding_dataclass(_bindings.Config)
class Config:
    kind: Kind = Kind.SLOW
    must: int
    mine: list = field(default_factory=list)

@dataclass
class Plain:
    first: int
    second: int = 1
""",
    "lib_of/broken.py": "class Real:\n    def (\n",
    "lib_of/circle.py": "from .circle import Real\n",
    "other-9.dist-info/METADATA": "Name: other\nVersion: 9\n",
    "other-9.dist-info/RECORD": "other/__init__.py,sha256=x,1\n",
    "lib_of-1.5.post2.dist-info/METADATA": "Metadata-Version: 2.1\nName: lib-of\nVersion: 1.5.post2\n\nVersion: talk\n",
    "lib_of-1.5.post2.dist-info/RECORD": "lib_of/__init__.py,,\nlib_of/inner/core.py,sha256=x,1\nlib_of/circle.py,,\n"
    "lib_of/configs.py,,\nlib_of/parts.py,,\n",
}
POSITIONAL, BOTH = "POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD"
STAR, KEYWORD, STARS = "VAR_POSITIONAL", "KEYWORD_ONLY", "VAR_KEYWORD"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "site packages"
    for name, text in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "lib_of-1.5.post2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    return path


def tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Isolated and without site-packages: the standard library has to do."""
    command = [sys.executable, "-I", "-S", str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_wheel_and_its_folder_give_the_same_record(wheel: Path, folder: Path) -> None:
    told = [tool(path, "lib_of", "Shown") for path in (wheel, folder)]
    assert [(run.returncode, run.stderr) for run in told] == [(0, ""), (0, "")]
    assert told[0].stdout == told[1].stdout


def test_the_record_holds_version_place_and_every_public_method(wheel: Path, tmp_path: Path) -> None:
    assert tool(wheel, "lib_of", "Shown", "--out", tmp_path / "record.json").stdout == ""
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["distribution"], record["version"]) == ("lib-of", "1.5.post2")
    assert (record["module"], record["class"], record["source"]) == ("lib_of", "Shown", "lib_of/inner/core.py")
    assert list(record["methods"]) == ["__init__", "send", "hint", "made", "wait"]
    assert [name for name, method in record["methods"].items() if method["static"]] == ["hint", "made"]
    assert record["properties"] == ["rank"]


def test_parameters_keep_order_kind_and_the_text_of_their_default(wheel: Path) -> None:
    methods = json.loads(tool(wheel, "lib_of.inner.core", "Real").stdout)["methods"]
    parameters = {name: method["parameters"] for name, method in methods.items()}
    assert parameters["__init__"] == [
        {"name": "group", "kind": POSITIONAL},
        {"name": "count", "kind": BOTH, "default": "2 ** 4"},
        {"name": "flag", "kind": KEYWORD, "default": "False"},
        {"name": "must", "kind": KEYWORD},
    ]
    assert [(p["name"], p["kind"]) for p in parameters["send"]] == [
        ("x", BOTH), ("rest", STAR), ("dtype", KEYWORD), ("more", STARS)
    ]  # fmt: skip
    assert parameters["hint"] == [{"name": "tokens", "kind": BOTH}, {"name": "name", "kind": BOTH, "default": "'a b'"}]
    assert [p["name"] for p in parameters["made"]] == ["path"]


def test_several_names_make_one_record_with_parts(wheel: Path) -> None:
    pairs = ("lib_of.configs", "Config", "lib_of.configs", "Pack", "lib_of.configs", "layer", "lib_of", "Shown")
    record = json.loads(tool(wheel, *pairs).stdout)
    assert set(record) == {"distribution", "version", "parts"}
    config, pack, layer, shown = record["parts"]
    assert config["methods"]["__init__"]["parameters"] == [
        {"name": "size", "kind": BOTH},
        {"name": "stream", "kind": BOTH, "default": "0"},
        {"name": "names", "kind": BOTH, "default": "None"},
        {"name": "device", "kind": KEYWORD, "default": "None"},
    ]
    assert [p["name"] for p in pack["methods"]["__new__"]["parameters"]] == ["w13", "w2"]
    assert layer["function"] == "layer"
    assert layer["parameters"][1] == {"name": "backend", "kind": KEYWORD, "default": "'auto'"}
    assert shown == {key: value for key, value in json.loads(tool(wheel, *pairs[-2:]).stdout).items() if key in shown}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "the following arguments are required: WHEEL_OR_FOLDER, MODULE NAME | MODULE:CALL"),
        (("/nonexistent", "lib_of", "Real"), "/nonexistent does not exist"),
        ((TOOL, "lib_of", "Real"), "is neither a wheel nor a folder"),
        (("WHEEL", "lib_of", "Shown", "lib_of.configs"), "lib_of.configs has no NAME behind it"),
        (("WHEEL", "lib_on", "Real"), "has no Python source of the module lib_on"),
        (("WHEEL", "lib_of", "Unreal"), "lib_of/__init__.py has no class or function Unreal"),
        (("WHEEL", "lib_of", "Gone"), "has no Python source of the module lib_of.lost"),
        (("WHEEL", "lib_of.broken", "Real"), "holds a source that does not parse"),
        (("WHEEL", "lib_of.circle", "Real"), "lib_of.circle imports Real in a circle"),
        (
            ("WHEEL", "lib_of", "Shown", "--out", "/nonexistent/record.json"),
            "can't be written: No such file or directory",
        ),
        (("WHEEL", "lib_of", "Shown", "--format", "x"), "unrecognized arguments: --format x"),
    ],
)
def test_a_wrong_command_gets_one_sentence_and_exit_2(
    wheel: Path, arguments: tuple[str | Path, ...], words: str
) -> None:
    run = tool(*(wheel if argument == "WHEEL" else argument for argument in arguments))
    assert (run.returncode, run.stdout) == (2, "")
    assert words in run.stderr
    assert run.stderr.count("\n") == 1


def test_several_classes_come_under_their_names_with_enum_members_and_dataclass_fields(wheel: Path) -> None:
    words = [word for name in ("Kind", "Config", "Plain") for word in ("lib_of.parts", name)]
    record = json.loads(tool(wheel, *words).stdout)
    classes = {part["class"]: part for part in record["parts"]}
    assert (list(classes), record["version"]) == (["Kind", "Config", "Plain"], "1.5.post2")
    assert classes["Kind"]["members"] == {"SLOW": 0, "FAST": 2}
    made = {name: classes[name]["methods"]["__init__"]["parameters"] for name in ("Config", "Plain")}
    assert made["Config"] == [
        {"name": "kind", "kind": KEYWORD, "default": "Kind.SLOW"},
        {"name": "must", "kind": KEYWORD},
        {"name": "mine", "kind": KEYWORD, "default": "None"},
    ]
    assert made["Plain"] == [{"name": "first", "kind": BOTH}, {"name": "second", "kind": BOTH, "default": "1"}]


def test_a_source_that_no_distribution_lists_has_no_version(folder: Path) -> None:
    (folder / "lib_of-1.5.post2.dist-info" / "RECORD").unlink()
    run = tool(folder, "lib_of", "Shown")
    assert (run.returncode, run.stdout) == (2, "")
    assert "no *.dist-info that lists lib_of/inner/core.py, so its version is unknown" in run.stderr


@pytest.mark.parametrize("version", ["0.6.18.post1", "0.7.4"])
def test_the_records_of_the_mega_layers_are_of_the_versions_they_name(version: str) -> None:
    name = f"flashinfer_{version.removesuffix('.post1')}.json"
    record = json.loads((ROOT / "tests" / "signatures" / name).read_text())
    assert (record["distribution"], record["version"]) == ("flashinfer-python", version)


RECORDED = {
    "deep_ep_2.1.0.json": ("tokenspeed-deepep", "2.1.0.post20260801"),
    "nccl_ep_0.1.0.json": ("nccl-extensions", "0.1.0"),
    "nccl4py_communicator_0.6.0.json": ("nccl4py", "0.6.0"),
    "nccl4py_unique_id_0.6.0.json": ("nccl4py", "0.6.0"),
    "flashinfer_alltoall_0.6.18.json": ("flashinfer-python", "0.6.18.post1"),
    "flashinfer_mnnvl_0.6.18.json": ("flashinfer-python", "0.6.18.post1"),
    "flashinfer_mapping_0.6.18.json": ("flashinfer-python", "0.6.18.post1"),
}


@pytest.mark.parametrize("file", RECORDED)
def test_the_other_committed_records_are_of_the_wheels_that_the_adapters_name(file: str) -> None:
    record = json.loads((ROOT / "tests" / "signatures" / file).read_text())
    assert (record["distribution"], record["version"]) == RECORDED[file]


def test_the_committed_record_is_of_the_wheel_that_was_measured() -> None:
    record = json.loads((ROOT / "tests" / "signatures" / "deep_ep_1.2.1.json").read_text())
    assert (record["distribution"], record["version"]) == ("tokenspeed-deepep", "1.2.1.post20251110")
    assert {"dispatch", "combine", "low_latency_dispatch", "low_latency_combine"} <= set(record["methods"])
