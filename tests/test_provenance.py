"""What must stay the same from a run's plan to its last row, and what is recorded beside the knobs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib import provenance, version


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository of two sources, hashed."""
    for name in ("bench/comm.py", "lib/measure.py"):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text("x = 1\n")
    monkeypatch.setattr(version, "REPO_ROOT", tmp_path)
    version._first.cache_clear()
    version.source_hash()
    yield tmp_path
    version._first.cache_clear()


def test_sources_that_stay_are_not_changed_nor_is_a_touched_one(tree: Path) -> None:
    assert not version.changed_sources()
    os.utime(tree / "lib/measure.py", (1, 1))
    assert not version.changed_sources()


@pytest.mark.parametrize("change", ["edit", "edit of the same size and time", "add", "remove"])
def test_an_edited_added_or_removed_source_is_a_change(tree: Path, change: str) -> None:
    path = tree / "bench/comm.py"
    if change == "add":
        (tree / "lib/new.py").write_text("")
    elif change == "remove":
        path.unlink()
    else:
        path.write_text("x = 2\n" if "same" in change else "x = 22\n")
    assert version.changed_sources()
    assert provenance.moved("").startswith("the sources in bench/ or lib/ were changed")
    assert version.source_hash() == version.source_hash()


def test_a_routing_file_is_the_plans_until_its_bytes_change(tmp_path: Path) -> None:
    path = tmp_path / "routing.npy"
    path.write_bytes(b"one")
    digest = provenance.file_digest(str(path))
    assert provenance.moved(str(path)) == ""
    path.write_bytes(b"two")
    assert provenance.file_digest(str(path)) == digest
    assert provenance.moved(str(path)).startswith("ROUTING: the file was changed")
    path.unlink()
    assert provenance.moved(str(path)).startswith("ROUTING: the file was changed")


def test_what_tunes_a_library_is_recorded_and_what_names_a_place_or_a_secret_is_not() -> None:
    kept = {"NCCL_PROTO": "LL", "OMP_NUM_THREADS": "4", "VLLM_USE_DEEP_GEMM_E8M0": "1", "EP_DISABLE_GIN": "1"}
    left = dict.fromkeys(
        "CUDA_VISIBLE_DEVICES CUDA_HOME NCCL_SOCKET_IFNAME NCCL_COMM_ID VLLM_API_KEY HF_TOKEN PATH TORCH_HOME".split(),
        "x",
    )
    assert provenance.library_environment(kept | left) == kept


def test_the_software_is_read_from_metadata_with_python_and_torch() -> None:
    found = provenance.software()
    assert found["torch"].startswith("2.")
    assert found["python"].startswith("3.")
    assert all(found.values())
