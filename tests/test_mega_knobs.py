"""MEGA_*: an object's names and values, and which backends an option leaves alone, before anything starts."""

from __future__ import annotations

import pytest
from knob_helpers import BLACKWELL, HOPPER, error, parsed

FI = {"SECTION": "fi_mega"}
NVFP4 = FI | {"MEGA_LIST": "nvfp4_cutedsl"}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (FI | {"MEGA_KNOBS": '{"flag_bach": 4}'}, "MEGA_KNOBS: there is no 'flag_bach'; did you mean flag_batch?"),
        (FI | {"MEGA_KNOBS": "{}"}, "MEGA_KNOBS={}: names nothing"),
        (NVFP4 | {"MEGA_KNOBS": '{"flag_batch": 3}'}, "flag_batch must be 1, 2, 4, 8 or 16, not 3 (nvfp4_cutedsl)"),
        (NVFP4 | {"MEGA_KNOBS": '{"flag_batch": true}'}, "flag_batch must be 1, 2, 4, 8 or 16, not true"),
        (NVFP4 | {"MEGA_KNOBS": '{"epi_flag_batch": [2, 33]}'}, "epi_flag_batch must be a pair of whole numbers 1..32"),
        (NVFP4 | {"MEGA_KNOBS": '{"group_hint": 0}'}, "group_hint must be null or a whole number > 0, not 0"),
        (NVFP4 | {"MEGA_KNOBS": '{"token_back_mode": "epi"}'}, 'token_back_mode must be "epi_warps", '),
        (NVFP4 | {"MEGA_KNOBS": '{"mma_tiler_mnk": [256, 128, 256]}'}, "M = 256 needs an even cluster_shape_mnk"),
        (
            NVFP4 | {"MEGA_KNOBS": '{"token_back_mode": "epi_warps"}', "MEGA_COMBINE_DTYPE": "nvfp4"},
            'MEGA_COMBINE_DTYPE=nvfp4 needs token_back_mode "reuse_dispatch_warps"',
        ),
        (NVFP4 | {"MEGA_KNOBS": '{"in_kernel_fc2_reduce": true}'}, "is not given here; set MEGA_IKR=1"),
        (NVFP4 | {"MEGA_KNOBS": '{"swap_ab": true}'}, "swap_ab belongs to sm90_pull_fp8, which MEGA_LIST"),
        (
            FI | {"MEGA_KNOBS": '{"swap_ab": true, "flag_batch": 4}', "MEGA_LIST": "sm90_pull_fp8 nvfp4_cutedsl"},
            "no one backend in MEGA_LIST=sm90_pull_fp8 nvfp4_cutedsl has all of swap_ab, flag_batch",
        ),
        (
            FI | {"MEGA_KNOBS": '{"mma_tiler_mnk": [256, 32, 128]}', "MEGA_LIST": "sm90_pull_fp8"},
            "with swap_ab false mma_tiler_mnk must be [64, 128, 128] or [64, 256, 128]",
        ),
        (
            FI | {"MEGA_KNOBS": '{"combine_dtype": "bf16"}', "MEGA_LIST": "sm90_push_fp8"},
            'combine_dtype "bf16" needs grouped_combine false (sm90_push_fp8)',
        ),
        (
            FI | {"MEGA_KNOBS": '{"capacity_factor": 2}', "MEGA_LIST": "sm90_push_fp8"},
            "capacity_factor must be a number above 0 and at most 1, not 2",
        ),
        (
            {"MEGA_KNOBS": '{"token_back_mode": "standalone_warps"}', "MEGA_IKR": "1"}
            | FI
            | {"MEGA_LIST": "mxfp8_cutedsl"},
            'MEGA_IKR=1 needs token_back_mode "epi_warps" (mxfp8_cutedsl)',
        ),
    ],
)
def test_a_mega_object_is_checked_before_a_library_drops_it_silently(env: dict[str, str], words: str) -> None:
    sentence = error(BLACKWELL, **env)
    assert sentence.startswith("MEGA_KNOBS")
    assert words in sentence


def test_a_mega_object_is_not_looked_at_by_other_sections() -> None:
    assert parsed(SECTION="ref", MEGA_KNOBS='{"flag_bach": 4}').mega_knobs == {"flag_bach": 4}


@pytest.mark.parametrize("section", ["fi_mega", "ref"])
def test_a_name_that_an_object_has_twice_is_refused(section: str) -> None:
    text = '{"flag_batch": 4, "group_hint": 2, "flag_batch": 8}'
    sentence = f"MEGA_KNOBS={text}: names 'flag_batch' twice; name it once"
    assert error(BLACKWELL, SECTION=section, MEGA_KNOBS=text) == sentence


def test_it_is_said_what_an_object_really_does_and_whom_it_leaves_alone() -> None:
    knobs = parsed(BLACKWELL, **FI, MEGA_KNOBS='{"flag_batch": 4, "mma_tiler_mnk": [128, 128, 256]}')
    *unchanged, replaces = knobs.notices
    assert unchanged == [
        "MEGA_KNOBS: deep_gemm_mega has no flag_batch, mma_tiler_mnk and runs unchanged",
        "MEGA_KNOBS: mxfp8_cutedsl has no mma_tiler_mnk and runs unchanged",
    ]
    assert replaces.startswith(
        "MEGA_KNOBS: the object replaces the heuristic of nvfp4_cutedsl; a name that it leaves out"
    )
    fields = parsed(HOPPER, **FI, MEGA_LIST="sm90_pull_fp8", MEGA_KNOBS='{"swap_ab": true}')
    assert fields.notices == (), "fields of a config, which add to its defaults"


def test_autotune_needs_a_backend_that_has_a_tuner() -> None:
    sm90 = "sm90_push_fp8 sm90_pull_fp8"
    sentence = error(HOPPER, **FI, MEGA_KNOBS="auto", MEGA_LIST=sm90)
    assert sentence.startswith(f"MEGA_KNOBS=auto: no backend in MEGA_LIST={sm90} has it; add mxfp8_cutedsl or nvfp4_")
    (notice,) = parsed(BLACKWELL, **FI, MEGA_KNOBS="auto").notices
    assert notice == "MEGA_KNOBS=auto: deep_gemm_mega does not have it and runs unchanged"
