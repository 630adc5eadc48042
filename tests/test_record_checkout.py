"""Records of a checkout, where there is no wheel, and of functions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = """
def start(group, *, wait: bool = True): ...

class Op:
    def send(self, x): ...
"""
RECORDED = {
    "mscclpp_3d02152b.json": ("microsoft/mscclpp", "3d02152bce741e0fc06ca79b15b6ec1e726b7912"),
    "mori_624002c8.json": ("ROCm/mori", "624002c897a30928ec04c14fc167bf2b8a93f6ce"),
}


def tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", str(ROOT / "tools" / "record_signatures.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "lib_of").mkdir()
    (tmp_path / "lib_of" / "__init__.py").write_text(SOURCE)
    return tmp_path


def test_a_checkout_is_recorded_under_its_repository_and_commit(checkout: Path) -> None:
    record = json.loads(tool(checkout, "lib_of", "Op", "--checkout", "some/library@0a1b2c").stdout)
    assert (record["distribution"], record["version"]) == ("some/library", "0a1b2c")
    assert list(record["methods"]) == ["send"]


def test_several_of_one_checkout_share_it(checkout: Path) -> None:
    record = json.loads(tool(checkout, "lib_of", "Op", "lib_of", "start", "--checkout", "some/library@0a1b2c").stdout)
    assert (record["distribution"], record["version"]) == ("some/library", "0a1b2c")
    assert [part.get("class") or part["function"] for part in record["parts"]] == ["Op", "start"]


@pytest.mark.parametrize("given", ["some/library", "@0a1b2c", "some/library@"])
def test_half_a_checkout_gets_one_sentence_and_exit_2(checkout: Path, given: str) -> None:
    run = tool(checkout, "lib_of", "Op", "--checkout", given)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        f"record_signatures.py: --checkout {given}: give REPOSITORY@COMMIT, such as microsoft/mscclpp@3d02152b\n"
    )


@pytest.mark.parametrize("file", RECORDED)
def test_the_committed_records_are_of_the_commits_that_the_adapters_name(file: str) -> None:
    record = json.loads((ROOT / "tests" / "signatures" / file).read_text())
    assert (record["distribution"], record["version"]) == RECORDED[file]
    commit = RECORDED[file][1][:8]
    library = file.partition("_")[0]
    assert commit in (ROOT / "bench" / "backends" / f"{library}.py").read_text()
    assert commit in (ROOT / "bench" / "backends" / f"{library}_limits.py").read_text()
