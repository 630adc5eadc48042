"""All backends of all sections: each name of a knob has one, and each says why it can't run on this machine."""

from __future__ import annotations

import pytest
from knob_helpers import CPU, HOPPER, parsed
from machine_helpers import cpu

from bench import comm, fi_mega, ref, split, vllm_mega
from lib.plan import Section, base_problem
from lib.rows import cell

SECTIONS = [ref.SECTION, split.SECTION, vllm_mega.SECTION, fi_mega.SECTION, comm.SECTION]


def test_every_name_of_a_backend_knob_has_one_backend() -> None:
    """A name without a backend would vanish from the plan without a word."""
    everything = parsed(HOPPER, EXPERTS_LIST="deepgemm trtllm triton")
    lists = {
        "ref": everything.ref_list,
        "comm": everything.comm_list,
        "vllm_split": everything.experts_list,
        "fi_mega": everything.mega_list,
    }
    for section in SECTIONS:
        found = [backend.name for backend in section.backends(everything)]
        assert found == list(lists.get(section.name, ("vllm_deep_gemm_mega",)))


def test_the_knobs_lists_choose_and_order_the_backends() -> None:
    assert [backend.name for backend in comm.SECTION.backends(parsed(COMM_LIST="mori torch"))] == ["mori", "torch"]
    split_backends = split.SECTION.backends(parsed(EXPERTS_LIST="triton deepgemm"))
    assert [backend.name for backend in split_backends] == ["triton", "deepgemm"]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_without_a_gpu_every_variant_has_a_verdict_with_a_reason_that_fits_a_cell(section: Section) -> None:
    knobs = parsed(CPU, ALGO="ht ll", DISPATCH_DTYPE="bf16 fp8", EXPERTS_LIST="deepgemm trtllm triton")
    problem = base_problem(knobs)
    for backend in section.backends(knobs):
        for variant in backend.variants(knobs):
            support = backend.supports(variant, cpu(), problem, knobs)
            assert support.ok == (backend.name == "torch"), variant.name
            assert bool(support.reason) != support.ok
            assert cell(support.reason) == support.reason
            assert backend.memory_bytes(variant, problem) > 0
