"""Section `fake`: section comm, its backends the fakes that MOE_EP_FAKES lists. `python -m tests.fake_section`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lib.contract import Backend
from lib.plan import Section
from lib.section import run_section
from tests.fakes import FAKES, LIST, FakeBackend

if TYPE_CHECKING:
    from lib.knobs import Knobs


def backends(knobs: Knobs) -> list[Backend]:
    return [FakeBackend(FAKES[name], with_experts=False) for name in os.environ[LIST].split()]


SECTION = Section("fake", "tests.fake_section", backends, identity_experts=True)

if __name__ == "__main__":
    raise SystemExit(run_section(SECTION))
