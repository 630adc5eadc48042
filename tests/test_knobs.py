"""The knobs: the table, what one text may be, the canonical text, the command. No test looks at this machine's GPUs."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from knob_helpers import BLACKWELL, CPU, HOPPER, SECRET, error, parsed, write_routing

from lib import knobs as knobs_module
from lib.knob_help import EXIT_CODES, help_text, markdown_table
from lib.knobs import KNOBS, Knobs, MachineFacts, parse_knobs

REPOSITORY = Path(__file__).resolve().parent.parent
CPU_BUDGET_S = 0.3
Command = Callable[..., tuple[int, str, str]]


# Defaults


def test_a_cpu_only_machine_has_small_defaults() -> None:
    knobs = parsed()
    assert (knobs.gpus, knobs.num_experts, knobs.topk, knobs.hidden, knobs.inter) == (2, 32, 4, 512, 256)
    assert (knobs.tokens, knobs.warmup, knobs.iters, knobs.world) == (8, 20, 50, 2)


def test_a_gpu_machine_has_the_large_shape_and_four_ranks() -> None:
    knobs = parsed(BLACKWELL)
    assert (knobs.gpus, knobs.num_experts, knobs.topk, knobs.hidden, knobs.inter) == (4, 256, 8, 7168, 2048)


def test_fewer_than_four_gpus_are_all_used() -> None:
    assert parsed(MachineFacts(2, (9, 0))).gpus == 2


def test_only_hopper_lists_the_sm90_mega_backends_by_default() -> None:
    common = ("deep_gemm_mega", "mxfp8_cutedsl", "nvfp4_cutedsl")
    assert parsed(BLACKWELL).mega_list == parsed(CPU).mega_list == common
    assert parsed(HOPPER).mega_list == (*common, "sm90_push_fp8", "sm90_pull_fp8")


def test_an_outer_launcher_sets_the_number_of_ranks() -> None:
    assert parsed(MachineFacts(8, (9, 0), local_world_size=8)).gpus == 8
    assert parsed(MachineFacts(0, None, local_world_size=4)).gpus == 4


def test_a_launcher_that_shows_each_task_one_gpu_is_accepted() -> None:
    assert parsed(MachineFacts(1, (9, 0), local_world_size=4)).gpus == 4


@pytest.mark.parametrize("empty", ["", "  "])
def test_every_knob_set_to_nothing_has_its_default(empty: str) -> None:
    env = {knob.name: empty for knob in KNOBS if knob.name != "CUDA_VISIBLE_DEVICES"}
    knobs = parse_knobs(env, CPU)
    assert knobs == parsed()
    assert knobs.given == frozenset()
    assert knobs.notices == ()


def test_given_holds_what_the_user_set_even_to_the_default() -> None:
    assert parsed(TOKENS="8", HIDDEN="", OTHER="1").given == {"TOKENS"}


# The table


def test_every_knob_has_a_field_and_every_field_a_knob() -> None:
    extra = {"all_sections", "given", "notices"}
    fields = {field.name for field in dataclasses.fields(Knobs)} - extra
    assert sorted(knob.field_name for knob in KNOBS) == sorted(fields)


def test_the_help_lists_every_knob_and_exit_code_once() -> None:
    entries = re.findall(r"^    ([A-Z][A-Z0-9_]*) \[", help_text(), re.MULTILINE)
    assert entries == [knob.name for knob in KNOBS]
    assert len(set(entries)) == len(entries)
    codes = re.findall(r"^ +(\d+)  ", help_text(), re.MULTILINE)
    assert [int(code) for code in codes] == [code for code, _ in EXIT_CODES] == [0, 1, 2, 3, 4, 75, 130]


def test_the_markdown_table_lists_every_knob_once_in_three_columns() -> None:
    lines = markdown_table().splitlines()
    assert [line.count("|") for line in lines] == [4] * len(lines)
    assert re.findall(r"^\| `([A-Z][A-Z0-9_]*)` \|", "\n".join(lines), re.MULTILINE) == [knob.name for knob in KNOBS]


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_no_help_holds_a_tag_or_a_star_outside_code(knob: knobs_module.Knob) -> None:
    outside = re.sub(r"`[^`]*`", "", f"{knob.default} {knob.help}")
    assert not set(outside) & set("<>*`|\n")


def test_the_table_holds_every_knob_of_the_plan() -> None:
    plan = """SECTION GPUS CUDA_VISIBLE_DEVICES ALGO TOKENS NUM_EXPERTS TOPK HIDDEN INTER WARMUP ITERS EXPERTS_LIST
        REF_LIST COMM_LIST MEGA_LIST MEGA_KNOBS MEGA_TIMING MEGA_IKR MEGA_COMBINE_DTYPE MEGA_ACC VLLM_MEGA
        EXCLUDE_QUANT TIMING ITERS_PER_GRAPH L2 ROUTING SEED DISPATCH_DTYPE NUM_SMS CHECK_REPEATS PEAKS PYTHON
        COMM_PYTHON FI_PYTHON OUT_DIR SEQ_LENS SEQ_LEN_MIN SEQ_LEN_MAX SETUP_TIMEOUT_S TIMEOUT_S RESUME NNODES NODE_RANK
        RANKS_PER_GPU MASTER_ADDR MASTER_PORT NIC TRACE BASELINE STARTS KEEP DRY_RUN DEBUG"""
    assert sorted(knob.name for knob in KNOBS) == sorted(plan.split())


# Canonical text


def test_canonical_text_parses_to_the_same_knobs(tmp_path: Path) -> None:
    peaks = tmp_path / "peaks 1.json"
    peaks.write_text("{}")
    env = {
        "SECTION": "comm,split fi_mega",
        "GPUS": "4",
        "CUDA_VISIBLE_DEVICES": "3,1,0,2",
        "SEQ_LENS": "8,16 8",
        "ROUTING": "zipf:1.20,mask=0.10,empty=3",
        "MEGA_KNOBS": '{"flag_batch": 4, "token_back_mode": "epi_warps"}',
        "MEGA_IKR": "1",
        "TIMING": "kernel,e2e",
        "L2": "cold",
        "NUM_SMS": "24 0",
        "PEAKS": str(peaks),
        "OUT_DIR": "my results",
        "TIMEOUT_S": "0.5",
        "PYTHON": sys.executable,
        "RESUME": "20261130T190000Z-2",
        "NIC": "^lo,docker0",
        "MASTER_PORT": "29500",
        "DEBUG": "yes",
    }
    knobs = parse_knobs(env, HOPPER)
    assert parse_knobs(knobs.as_text(), HOPPER) == knobs
    assert knobs.as_text()["SECTION"] == "comm vllm_split fi_mega"
    assert knobs.as_text()["SEQ_LENS"] == "8 16"
    assert knobs.comm_python == knobs.fi_python == knobs.python


@pytest.mark.parametrize("facts", [CPU, HOPPER, BLACKWELL])
def test_defaults_round_trip_and_say_nothing(facts: MachineFacts) -> None:
    knobs = parse_knobs({}, facts)
    again = parse_knobs(knobs.as_text(), facts)
    assert again == knobs
    assert again.notices == ()


def test_hiding_every_gpu_round_trips() -> None:
    knobs = parsed(HOPPER, CUDA_VISIBLE_DEVICES="")
    assert knobs.as_text()["CUDA_VISIBLE_DEVICES"] == ""
    assert parse_knobs(knobs.as_text(), HOPPER) == knobs


def test_canonical_text_holds_every_knob_but_unset_devices() -> None:
    assert {knob.name for knob in KNOBS} - parsed().as_text().keys() == {"CUDA_VISIBLE_DEVICES"}


def test_whether_all_was_asked_survives() -> None:
    text = parsed(SECTION="all").as_text()
    assert text["SECTION"] == "all"
    assert not parsed(SECTION="ref vllm_split vllm_mega fi_mega comm").all_sections


# Lists and sections


def test_all_means_the_five_sections_in_order() -> None:
    knobs = parsed(SECTION="comm all")
    assert knobs.sections == ("ref", "vllm_split", "vllm_mega", "fi_mega", "comm")
    assert knobs.all_sections


def test_vllm_mega_0_leaves_the_verdict_to_the_plan() -> None:
    assert "vllm_mega" in parsed(VLLM_MEGA="0").sections
    assert any("VLLM_MEGA=0" in notice for notice in parsed(SECTION="vllm_mega", VLLM_MEGA="0").notices)


def test_lists_take_spaces_and_commas_and_drop_duplicates() -> None:
    assert parsed(COMM_LIST="mori, torch mori").comm_list == ("mori", "torch")
    assert parsed(SECTION="split,vllm_split ref").sections == ("vllm_split", "ref")
    assert parsed(ALGO="ll,ht").algos == ("ll", "ht")
    assert parsed(NUM_SMS="0,24").num_sms == (0, 24)


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("SECTION", "fi_mga", "fi_mega"),
        ("EXPERTS_LIST", "deepgem", "deepgemm"),
        ("COMM_LIST", "torch deepp", "deepep"),
        ("REF_LIST", "torch_fp", "torch_fp8"),
        ("MEGA_LIST", "sm90_push", "sm90_push_fp8"),
        ("TIMING", "kernels", "kernel"),
        ("ROUTING", "unifrm", "uniform"),
    ],
)
def test_an_unknown_word_gets_the_one_that_was_meant(name: str, value: str, meant: str) -> None:
    sentence = error(**{name: value})
    assert sentence.startswith(f"{name}={value}: ")
    assert f"did you mean {meant}?" in sentence


@pytest.mark.parametrize(
    ("name", "value"),
    [("MEGA_LIST", "foo"), ("L2", "hot"), ("ROUTING", "gauss"), ("MEGA_TIMING", "graph"), ("DISPATCH_DTYPE", "fp4")],
)
def test_an_unknown_word_is_answered_with_the_choices(name: str, value: str) -> None:
    sentence = error(**{name: value})
    assert sentence.startswith(f"{name}={value}: ")
    assert value in sentence.split(": ", 1)[1]


@pytest.mark.parametrize("name", ["SECTION", "COMM_LIST", "SEQ_LENS", "NUM_SMS"])
def test_a_list_of_nothing_but_commas_is_refused(name: str) -> None:
    assert error(**{name: ", ,"}).startswith(f"{name}=, ,: names nothing")


# Numbers


@pytest.mark.parametrize(
    ("name", "value", "must"),
    [
        ("HIDDEN", "abc", "must be a whole number >= 16, not 'abc'"),
        ("HIDDEN", "100", "must be a multiple of 16; 96 or 112 work"),
        ("HIDDEN", "0", "must be a whole number >= 16"),
        ("INTER", "-16", "must be a whole number >= 16"),
        ("TOKENS", "-1", "must be a whole number >= 0"),
        ("TOKENS", "8.0", "must be a whole number >= 0, not '8.0'"),
        ("TOKENS", "1_0", "must be a whole number >= 0, not '1_0'"),
        ("TOKENS", "3000000000", "must be at most 2147483647"),
        ("ITERS", "0", "must be a whole number >= 1"),
        ("WARMUP", "-1", "must be a whole number >= 0"),
        ("NUM_SMS", "24 -1", "must be a whole number >= 0"),
        ("MASTER_PORT", "70000", "must be a whole number 1..65535"),
        ("SEQ_LENS", "8 x", "must be a whole number >= 0, not 'x'; list tokens per rank, or auto"),
        ("SEQ_LENS", "8 -1", "must be a whole number >= 0; list tokens per rank, or auto"),
        ("TIMEOUT_S", "0", "must be a number of seconds greater than 0, at most 10000000"),
        ("TIMEOUT_S", "nan", "must be a number of seconds greater than 0, at most 10000000"),
        ("TIMEOUT_S", "1e300", "must be a number of seconds greater than 0, at most 10000000"),
        ("SETUP_TIMEOUT_S", "1h", "must be a number of seconds greater than 0, at most 10000000"),
        ("MEGA_ACC", "yes", "must be 0 or 1"),
        ("DRY_RUN", "2", "must be 0 or 1"),
        ("GPUS", "0", "must be a whole number >= 1"),
    ],
)
def test_a_wrong_number_gets_one_sentence(name: str, value: str, must: str) -> None:
    assert error(**{name: value}) == f"{name}={value}: {must}"


def test_no_tokens_is_legal() -> None:
    assert parsed(TOKENS="0").tokens == 0
    assert parsed(SEQ_LENS="0 8").seq_lens == (0, 8)
    assert parsed(WARMUP="0").warmup == 0


def test_time_outs_may_be_fractions() -> None:
    assert parsed(TIMEOUT_S="0.5").timeout_s == 0.5
    assert parsed(TIMEOUT_S="600").as_text()["TIMEOUT_S"] == "600"


# The command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `check` with these variables only, on a pretended machine without a GPU; (exit code, stdout, stderr)."""
    machine = types.ModuleType("lib.machine")
    machine.detect_facts = lambda env: CPU  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lib.machine", machine)

    def run(*arguments: str, **env: str) -> tuple[int, str, str]:
        monkeypatch.setattr(os, "environ", env)
        code = knobs_module.main(["check", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_check_prints_exactly_what_the_scripts_read(command: Command, tmp_path: Path) -> None:
    code, out, err = command(
        SECTION="ref comm", OUT_DIR="a b", MOE_EP_CALLER_DIR=str(tmp_path), COMM_PYTHON=sys.executable, DRY_RUN="1"
    )
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "sections=ref comm",
        "python=",
        f"comm_python={sys.executable}",
        "fi_python=",
        f"out_dir={tmp_path}/a b",
        "dry_run=1",
        "resume=",
        "debug=0",
        "starts=4",
        "keep=30",
        "baseline=",
        "nnodes=1",
        "follower=0",
    ]


def test_check_tells_the_scripts_who_keeps_no_files(command: Command) -> None:
    by_hand = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1", "SECTION": "ref"}
    for env, follows in [
        (by_hand, "1"),
        (by_hand | {"NODE_RANK": "0"}, "0"),
        ({"RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "1"),
    ]:
        assert command(**env)[1].splitlines()[-1] == f"follower={follows}"


def test_check_prints_every_error_and_exits_2(command: Command) -> None:
    code, out, err = command(TOPK="9", NUM_EXPERTS="8", ITERS="0")
    assert (code, out) == (2, "")
    assert err.splitlines() == ["ITERS=0: must be a whole number >= 1", "TOPK=9: must be 1..8 (NUM_EXPERTS=8)"]


def test_check_takes_the_points_of_a_sweep(command: Command, tmp_path: Path) -> None:
    write_routing(tmp_path / "r.npy", world=2, tokens=8, topk=4)
    env = {"ROUTING": str(tmp_path / "r.npy"), "SEQ_LENS": "16"}
    assert command(**env)[0] == 0
    assert command("--sweep", **env)[0] == 2


def test_a_secret_is_never_shown(command: Command) -> None:
    secrets = {"HIDDEN_KEY": SECRET, "TOKEN": SECRET, "HF_TOKEN": SECRET, "MEGA_NO_DIST": SECRET, "DEBUG": SECRET}
    code, out, err = command(**secrets)
    assert (code, "TOKEN: is set but is not a knob" in err, "debug=1" in out) == (0, True, True)
    assert SECRET not in out + err
    knobs = parse_knobs(secrets, CPU)
    assert SECRET not in repr(knobs) + str(knobs.as_text())
    code, out, err = command(MEGA_TOKEN=SECRET, **secrets)
    assert (code, "MEGA_TOKEN: there is no such knob" in err) == (2, True)
    assert SECRET not in out + err


@pytest.mark.parametrize("arguments", [[], ["halp"], ["check", "--sweeep"], ["help", "me"]])
def test_an_unknown_verb_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert knobs_module.main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: ")


def python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def help_cpu_seconds() -> float:
    """CPU seconds of `help` in a fresh interpreter: unlike wall time, they do not depend on the neighbours."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert python("-m", "lib.knobs", "help") == help_text() + "\n"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_the_command_takes_less_than_its_budget() -> None:
    assert min(help_cpu_seconds() for _ in range(3)) < CPU_BUDGET_S


def test_the_command_imports_the_standard_library_only() -> None:
    print_modules = "; import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    ours = set(python("-c", f"import lib.knobs, lib.knob_help{print_modules}").split())
    put_there_by_site = set(python("-c", f"pass{print_modules}").split())
    assert ours - put_there_by_site - set(sys.stdlib_module_names) == {"lib"}
