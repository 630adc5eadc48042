"""What a figure depends on beside the knobs, and what must stay the same from a run's plan to its last row.

Interpreter, packages and the environment variables that libraries read go into a case's key, so that RESUME does not
take a row of another torch or of another OMP_NUM_THREADS for this one. Standard library only.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from lib.version import changed_sources

# Import names of what is measured, and distributions that no import name leads to.
MEASURED = "torch numpy triton deep_ep deep_gemm vllm flashinfer nccl mscclpp mori cutlass nvshmem".split()
DISTRIBUTIONS = "nvidia-nccl-cu12 nvidia-nccl-cu13 nvidia-nvshmem-cu12 nvidia-nvshmem-cu13".split()
LIBRARY_VARIABLE = re.compile(
    "(OMP|MKL|OPENBLAS|NCCL|CUDA|HIP|HSA|TORCH|PYTORCH|TRITON|NVSHMEM|EP|DEEPEP|DG|VLLM|FLASHINFER|MORI|MSCCLPP|UCX)_"
)
# Places and names, which differ from machine to machine and change no figure; CUDA_VISIBLE_DEVICES is a knob.
NEUTRAL = re.compile(
    "VISIBLE_DEVICES|PATH|DIR|HOME|CACHE|ROOT|FILE|ADDR|HOST|PORT|URL|IFNAME|LOG|DEBUG|TOKEN$|KEY$|SECRET|_ID$|VERSION"
)


def library_environment(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables by which a user tunes the libraries below us, such as NCCL_PROTO or OMP_NUM_THREADS."""
    names = sorted(name for name in env if LIBRARY_VARIABLE.match(name) and not NEUTRAL.search(name))
    return {name: env[name] for name in names}


@cache
def software() -> dict[str, str]:
    """Versions of this interpreter and of what is installed for it, by metadata: nothing is imported."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    owners = importlib.metadata.packages_distributions()
    names = [*dict.fromkeys(owner for module in MEASURED for owner in owners.get(module, [])), *DISTRIBUTIONS]
    return found | {name: version for name in names if (version := package_version(name))}


def package_version(package: str) -> str:
    """The installed version by metadata, "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def read_digest(path: str) -> str:
    """Hash of a file's bytes as they are now, "" for no file. Raises OSError."""
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest() if path else ""


@cache
def file_digest(path: str) -> str:
    """The hash at the first call, which is the plan's: another routing under the same name is another case."""
    return read_digest(path)


def moved(routing_path: str) -> str:
    """What has changed under a run since it was planned, in one sentence; "" if nothing has.

    A row measured since then is not what its key and its commit say.
    """
    if changed_sources():
        return "the sources in bench/ or lib/ were changed while the run was going on (a git pull?): run it again"
    try:
        same = read_digest(routing_path) == file_digest(routing_path)
    except OSError:
        same = False
    return "" if same else "ROUTING: the file was changed while the run was going on: run it again"
