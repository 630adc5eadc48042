"""Where the packages are that a tool lacks: in the suite's own .venv, if that has been made."""

from __future__ import annotations

import sys
from pathlib import Path

VENV_PYTHON = Path(__file__).resolve().parent.parent / ".venv" / "bin" / "python"


def how_to_get(*packages: str) -> str:
    """What to type: another interpreter that has them, or pip."""
    if VENV_PYTHON.exists() and VENV_PYTHON.resolve() != Path(sys.executable).resolve():
        return f"start this by {VENV_PYTHON}"
    return f"get it by: {sys.executable} -m pip install {' '.join(packages)}"
