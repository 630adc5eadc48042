"""Knobs against each other, the machine and its files; names that are not knobs. None looks at real GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from knob_helpers import CPU, HOPPER, SECRET, error, errors, parsed, swept, write_routing

from lib.knobs import MachineFacts

REPOSITORY = Path(__file__).resolve().parent.parent


# Sweep points


def test_auto_points_are_the_powers_of_two_in_the_range() -> None:
    assert parsed().seq_lens == tuple(2**bit for bit in range(14))
    assert parsed(SEQ_LEN_MIN="3", SEQ_LEN_MAX="20").seq_lens == (4, 8, 16)
    assert parsed(SEQ_LENS="auto", SEQ_LEN_MIN="64", SEQ_LEN_MAX="64").seq_lens == (64,)


def test_an_empty_range_of_points_is_refused() -> None:
    assert error(SEQ_LEN_MIN="64", SEQ_LEN_MAX="8").startswith("SEQ_LEN_MIN=64: leaves no points")
    assert "no power of two" in error(SEQ_LEN_MIN="5", SEQ_LEN_MAX="7")


def test_points_that_a_script_does_not_run_are_noticed() -> None:
    assert any(notice.startswith("SEQ_LENS:") for notice in parsed(SEQ_LENS="8").notices)
    assert swept(SEQ_LENS="8").notices == ()
    assert any(notice.startswith("TOKENS:") for notice in swept(TOKENS="64").notices)


# Shape against world


def test_ranks_that_do_not_divide_the_experts_are_told_which_do() -> None:
    expected = "GPUS=3: NUM_EXPERTS=256 is not divisible by 3 ranks; GPUS=1, 2, 4 or 8 work, or NUM_EXPERTS=255 or 258"
    assert error(GPUS="3", NUM_EXPERTS="256") == expected
    assert error(HOPPER, GPUS="3") == expected


def test_only_gpus_that_are_there_are_proposed() -> None:
    assert "GPUS=1, 2 or 4 work" in error(MachineFacts(4, (9, 0)), GPUS="3")


def test_the_experts_are_blamed_if_only_they_were_given() -> None:
    sentence = error(HOPPER, NUM_EXPERTS="257")
    assert sentence == (
        "NUM_EXPERTS=257: is not divisible by 4 ranks (GPUS=4 by default); NUM_EXPERTS=256 or 260 work, or GPUS=1"
    )


@pytest.mark.parametrize(
    ("gpu_count", "env", "gpus", "above"),
    [
        (3, {}, 2, 3),
        (3, {"CUDA_VISIBLE_DEVICES": "2,0,1"}, 2, 3),
        (8, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, 2, 3),
        (8, {"NUM_EXPERTS": "258"}, 3, 4),
        (4, {"NUM_EXPERTS": "45", "NNODES": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, 3, 12),
    ],
)
def test_without_gpus_given_as_many_run_as_divide_the_experts(
    gpu_count: int, env: dict[str, str], gpus: int, above: int
) -> None:
    knobs = parsed(MachineFacts(gpu_count, (9, 0)), **env)
    assert knobs.gpus == gpus
    (notice,) = knobs.notices
    assert notice == f"GPUS: {gpus} by default, since NUM_EXPERTS={knobs.num_experts} is not divisible by {above} ranks"


def test_the_largest_default_that_divides_is_no_notice() -> None:
    assert [parsed(MachineFacts(count, (9, 0))).gpus for count in (1, 2, 4, 8)] == [1, 2, 4, 4]
    assert [parsed(MachineFacts(count, (9, 0))).notices for count in (1, 2, 4, 8)] == [()] * 4


def test_three_tasks_of_a_launcher_are_not_made_two() -> None:
    assert "not divisible by 3 ranks" in error(MachineFacts(3, (9, 0), local_world_size=3))


def test_no_proposal_leaves_fewer_experts_than_topk() -> None:
    assert error(GPUS="3", NUM_EXPERTS="4", TOPK="4").endswith("GPUS=1, 2 or 4 work, or NUM_EXPERTS=6")
    assert "NUM_EXPERTS=9" in " ".join(errors(GPUS="3", NUM_EXPERTS="1", TOPK="8"))


def test_topk_stays_within_the_experts_and_thirty_two() -> None:
    assert error(TOPK="9", NUM_EXPERTS="8") == "TOPK=9: must be 1..8 (NUM_EXPERTS=8)"
    assert error(TOPK="0") == "TOPK=0: must be 1..32 (NUM_EXPERTS=32)"
    assert error(TOPK="33", NUM_EXPERTS="64") == "TOPK=33: must be 1..32 (NUM_EXPERTS=64)"
    assert parsed(TOPK="8", NUM_EXPERTS="8").topk == 8


def test_few_experts_are_blamed_for_a_topk_nobody_set() -> None:
    assert error(NUM_EXPERTS="2").startswith("NUM_EXPERTS=2: is less than TOPK=4")


# GPUS and CUDA_VISIBLE_DEVICES


def test_more_gpus_than_there_are_is_refused_with_the_number() -> None:
    assert error(MachineFacts(2, (9, 0)), GPUS="4") == "GPUS=4: there are only 2 GPUs; GPUS=2 or fewer work"


def test_a_cpu_runs_up_to_sixty_four_ranks() -> None:
    assert parsed(GPUS="64", NUM_EXPERTS="64").world == 64
    assert "at most 64 ranks" in error(GPUS="128", NUM_EXPERTS="128")


@pytest.mark.parametrize("facts", [CPU, HOPPER])
def test_a_list_of_devices_shorter_than_gpus_is_refused_everywhere(facts: MachineFacts) -> None:
    sentence = error(facts, CUDA_VISIBLE_DEVICES="0", GPUS="2")
    assert sentence == "CUDA_VISIBLE_DEVICES=0: names 1 of the GPUS=2 asked for; name 2 or set GPUS=1"


def test_the_default_number_of_ranks_counts_the_visible_devices() -> None:
    knobs = parsed(HOPPER, CUDA_VISIBLE_DEVICES="5, 2")
    assert (knobs.gpus, knobs.cuda_visible_devices) == (2, "5, 2")
    assert parsed(HOPPER, CUDA_VISIBLE_DEVICES="GPU-8a1,GPU-77").gpus == 2
    assert parsed(HOPPER, CUDA_VISIBLE_DEVICES="0,1,-1,2").gpus == 2


@pytest.mark.parametrize("hiding", ["", "-1", "NoDevFiles"])
def test_devices_that_hide_every_gpu_make_it_a_run_on_the_cpu(hiding: str) -> None:
    knobs = parsed(HOPPER, CUDA_VISIBLE_DEVICES=hiding)
    assert (knobs.gpus, knobs.num_experts, knobs.cuda_visible_devices) == (2, 32, hiding)
    assert "sm90_push_fp8" not in knobs.mega_list
    assert any("hides every GPU" in notice for notice in knobs.notices)
    assert parsed(HOPPER, CUDA_VISIBLE_DEVICES=hiding, GPUS="4").gpus == 4


def test_devices_on_a_machine_without_a_gpu_are_ignored_with_a_notice() -> None:
    knobs = parsed(CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert (knobs.gpus, knobs.cuda_visible_devices) == (2, None)
    assert "CUDA_VISIBLE_DEVICES: ignored, there is no GPU on this machine" in knobs.notices
    assert parsed(CUDA_VISIBLE_DEVICES="").notices == ()


def test_devices_that_are_not_there_are_refused() -> None:
    assert "there is no GPU 9, this machine has 0..7" in error(HOPPER, CUDA_VISIBLE_DEVICES="0,9")
    assert "twice" in error(HOPPER, CUDA_VISIBLE_DEVICES="0,0")
    assert "'0 1' is no index" in error(HOPPER, CUDA_VISIBLE_DEVICES="0 1")


# MEGA_*


def test_mega_knobs_is_unset_auto_or_an_object() -> None:
    assert parsed().mega_knobs is None
    assert parsed(MEGA_KNOBS="auto").mega_knobs == "auto"
    assert parsed(MEGA_KNOBS='{"flag_batch": 4}').mega_knobs == {"flag_batch": 4}
    assert error(MEGA_KNOBS="{bad").startswith("MEGA_KNOBS={bad: is not JSON")
    assert error(MEGA_KNOBS="[1]").startswith("MEGA_KNOBS=[1]: must be an object")
    assert "NaN is not JSON" in error(MEGA_KNOBS='{"a": NaN}')


def test_ikr_excludes_a_quantised_combine() -> None:
    sentence = error(MEGA_IKR="1", MEGA_COMBINE_DTYPE="nvfp4")
    assert sentence.startswith("MEGA_IKR=1: excludes MEGA_COMBINE_DTYPE=nvfp4")


@pytest.mark.parametrize(("name", "value"), [("MEGA_IKR", "1"), ("MEGA_COMBINE_DTYPE", "mxfp8")])
def test_an_option_that_no_listed_backend_has_is_refused_where_it_was_asked_for(name: str, value: str) -> None:
    env = {name: value, "MEGA_LIST": "deep_gemm_mega"}
    assert error(SECTION="fi_mega", **env).startswith(f"{name}={value}: no backend in MEGA_LIST=deep_gemm_mega has it")
    assert any("runs unchanged" in notice for notice in parsed(SECTION="all", **env).notices)
    assert parsed(SECTION="ref", **env).mega_list == ("deep_gemm_mega",)


def test_an_option_that_some_listed_backend_has_leaves_the_others_unchanged() -> None:
    knobs = parsed(SECTION="fi_mega", MEGA_IKR="1", MEGA_LIST="deep_gemm_mega mxfp8_cutedsl")
    assert knobs.notices == ("MEGA_IKR=1: deep_gemm_mega does not have it and runs unchanged",)


# Timing, L2, routing


@pytest.mark.parametrize("timing", ["graph", "e2e_pipelined", "e2e graph"])
def test_cold_l2_goes_with_e2e_and_kernel_only(timing: str) -> None:
    sentence = error(L2="cold", TIMING=timing)
    assert sentence.startswith("L2=cold: ")
    assert f"TIMING={timing.split()[-1]}" in sentence
    assert parsed(L2="cold", TIMING="e2e kernel").l2 == "cold"


def test_cold_l2_looks_at_the_timing_of_the_sections_that_run() -> None:
    assert "MEGA_TIMING=e2e_pipelined" in error(SECTION="fi_mega", L2="cold", MEGA_TIMING="e2e_pipelined")
    assert parsed(SECTION="ref", L2="cold", MEGA_TIMING="e2e_pipelined").l2 == "cold"


def test_a_knob_that_no_section_asked_for_reads_is_noticed() -> None:
    assert parsed(SECTION="fi_mega", TIMING="kernel").notices == (
        "TIMING: has no effect, SECTION=fi_mega does not read it",
    )
    assert parsed(SECTION="fi_mega comm", TIMING="kernel").notices == ()


def test_an_empty_rank_is_one_of_the_world() -> None:
    assert parsed(ROUTING="empty=1").routing == "uniform,empty=1"
    assert error(ROUTING="uniform,empty=2").startswith("ROUTING=uniform,empty=2: empty=2 must be a rank, 0..1")


def test_a_routing_file_is_checked_for_the_largest_point(tmp_path: Path) -> None:
    write_routing(tmp_path / "r.npy", world=2, tokens=8, topk=4)
    env = {"ROUTING": "./r.npy,mask=0.5", "MOE_EP_CALLER_DIR": str(tmp_path)}
    assert parsed(**env).routing == f"{tmp_path}/r.npy,mask=0.5"
    assert swept(SEQ_LENS="8 2", TOKENS="9", **env).seq_lens == (8, 2)
    assert "must have the shape" in error(TOKENS="9", **env)
    assert "must have the shape" in error(sweep="1", SEQ_LENS="2 16", **env)
    assert "can't be read" in error(ROUTING=str(tmp_path / "absent.npy"))


# Paths and words


def test_a_given_out_dir_is_relative_to_the_caller(tmp_path: Path) -> None:
    assert parsed().out_dir == str(REPOSITORY / "results")
    assert parsed(OUT_DIR="my results", MOE_EP_CALLER_DIR=str(tmp_path)).out_dir == str(tmp_path / "my results")
    (tmp_path / "file").touch()
    assert "is not a folder" in error(OUT_DIR=str(tmp_path / "file"))
    assert "line breaks" in error(OUT_DIR="a\nb")


def test_an_interpreter_exists_and_can_be_executed(tmp_path: Path) -> None:
    assert error(PYTHON="/nonexistent").startswith("PYTHON=/nonexistent: no such interpreter; ")
    (tmp_path / "python").touch(mode=0o644)
    assert "is not executable" in error(FI_PYTHON="./python", MOE_EP_CALLER_DIR=str(tmp_path))
    (tmp_path / "python").chmod(0o755)
    knobs = parsed(PYTHON="./python", MOE_EP_CALLER_DIR=str(tmp_path))
    assert knobs.python == knobs.comm_python == knobs.fi_python == str(tmp_path / "python")
    assert parsed(PYTHON="sh").python.endswith("/sh")
    assert parsed(COMM_PYTHON="sh").python == ""


def test_an_interpreter_that_is_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)  # following it would leave the virtual environment
    assert parsed(PYTHON=str(tmp_path / "python")).python == str(tmp_path / "python")


def test_a_baseline_is_any_path_since_the_gate_has_its_own_exit_code(tmp_path: Path) -> None:
    assert parsed(BASELINE="b.csv", MOE_EP_CALLER_DIR=str(tmp_path)).baseline == str(tmp_path / "b.csv")


def test_peaks_are_an_existing_file(tmp_path: Path) -> None:
    assert parsed(PEAKS="off").peaks == "off"
    assert "must be measure or off, or an existing file" in error(PEAKS="peaks.json", MOE_EP_CALLER_DIR=str(tmp_path))
    (tmp_path / "peaks.json").touch()
    assert parsed(PEAKS="peaks.json", MOE_EP_CALLER_DIR=str(tmp_path)).peaks == str(tmp_path / "peaks.json")


@pytest.mark.parametrize("stamp", ["last", "20261130T190000Z", "20261130T190000Z-2"])
def test_resume_takes_last_or_a_stamp(stamp: str) -> None:
    assert parsed(RESUME=stamp).resume == stamp


@pytest.mark.parametrize("stamp", ["yesterday", "20261130", "20261130T190000Z-", "../20261130T190000Z"])
def test_resume_takes_nothing_else(stamp: str) -> None:
    assert error(RESUME=stamp).startswith(f"RESUME={stamp}: must be last or a stamp")


# Nodes

MEETING = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
OF_TORCHRUN = MachineFacts(gpu_count=0, nodes=2, node_rank=1)
OF_SRUN_A_GPU = MachineFacts(gpu_count=8, sm=(9, 0), local_world_size=8, nodes=2, node_rank=1)
WITH_NICS = MachineFacts(gpu_count=8, sm=(9, 0), nics=("mlx5_0", "mlx5_1", "mlx5_10"))


def test_several_nodes_need_a_rank_each_and_a_meeting_point() -> None:
    assert error(NODE_RANK="1") == "NODE_RANK=1: must be 0..0 (NNODES=1)"
    assert error(NNODES="2", NODE_RANK="2", **MEETING) == "NODE_RANK=2: must be 0..1 (NNODES=2)"
    without = errors(NNODES="2")
    assert [sentence.partition(":")[0] for sentence in without] == ["MASTER_ADDR", "MASTER_PORT"]
    assert without[0].endswith("give the address at which the others reach node 0, the same on every node")
    assert parsed(NNODES="2", NODE_RANK="1", **MEETING).world == 4


def test_the_launchers_nodes_are_the_default_and_a_number_that_contradicts_them_is_refused() -> None:
    knobs = parsed(OF_TORCHRUN, **MEETING)
    assert (knobs.nnodes, knobs.node_rank) == (2, 1)
    assert parsed(OF_TORCHRUN, NNODES="1", NODE_RANK="0").world == 2  # each node measures alone
    told = "the launcher started 2; leave NNODES and NODE_RANK unset"
    assert error(OF_TORCHRUN, NNODES="4", **MEETING) == f"NNODES=4: {told}"
    assert error(OF_SRUN_A_GPU, NNODES="1", **MEETING) == f"NNODES=1: {told}"


def test_experts_have_to_divide_over_the_ranks_of_all_nodes_and_the_proposals_do() -> None:
    sentence = error(NNODES="3", GPUS="2", **MEETING)
    assert sentence == "NUM_EXPERTS=32: is not divisible by 6 ranks (NNODES=3); NUM_EXPERTS=30 or 36 work"
    assert error(NNODES="2", GPUS="3", **MEETING).count("GPUS=1, 2, 4 or 8 work") == 1


def test_a_meeting_point_on_one_node_is_noticed_as_without_effect() -> None:
    assert parsed(**MEETING).notices == tuple(f"{name}: has no effect on one node" for name in MEETING)


def test_nic_names_that_this_node_does_not_have_are_reported() -> None:
    assert parsed(WITH_NICS, NIC="mlx5_0,mlx5_10").notices == ()
    (notice,) = parsed(WITH_NICS, NIC="mlx5_0,mlx5_7").notices
    assert notice == ("NIC=mlx5_0,mlx5_7: there is no device mlx5_7 here, this node has mlx5_0, mlx5_1, mlx5_10")
    assert parsed(NIC="mlx5_0").notices == ("NIC: has no effect, this node has no RDMA device (/sys/class/infiniband)",)


@pytest.mark.parametrize("nic", ["mlx5_7", "^mlx5_0,mlx5_1,mlx5_10"])
def test_a_nic_list_that_leaves_no_device_is_refused(nic: str) -> None:
    assert error(WITH_NICS, NIC=nic).startswith(f"NIC={nic}: leaves no RDMA device; this node has mlx5_0, ")


# Names


@pytest.mark.parametrize(
    ("name", "meant"), [("MEGA_TIMNG", "MEGA_TIMING"), ("SEQ_LEN", "SEQ_LENS"), ("SEQ_LEN_MAXX", "SEQ_LEN_MAX")]
)
def test_an_unknown_mega_or_seq_len_name_is_an_error(name: str, meant: str) -> None:
    sentence = error(**{name: "e2e"})
    assert sentence.startswith(f"{name}: there is no such knob; did you mean {meant}?")
    assert parsed(**{name: ""}).notices == ()


def test_names_that_libraries_read_are_only_noticed() -> None:
    (notice,) = parsed(MEGA_NO_DIST=SECRET).notices
    assert notice.startswith("MEGA_NO_DIST: is set")
    assert SECRET not in notice


@pytest.mark.parametrize(
    ("name", "meant"),
    [("TOKEN", "TOKENS"), ("TOPKS", "TOPK"), ("ITER", "ITERS"), ("hidden", "HIDDEN"), ("OUTDIR", "OUT_DIR")],
)
def test_a_near_miss_is_a_warning(name: str, meant: str) -> None:
    assert parsed(**{name: "1"}).notices == (f"{name}: is set but is not a knob; did you mean {meant}?",)


@pytest.mark.parametrize("name", "NVIDIA_VISIBLE_DEVICES PATH HIDDEN_KEY LOCAL_RANK PYTHONPATH SLURM_NNODES".split())
def test_familiar_names_are_no_near_misses(name: str) -> None:
    assert parsed(**{name: "1"}).notices == ()


def test_all_errors_come_together() -> None:
    env = {"TOPK": "0", "HIDDEN": "abc", "SECTION": "fi_mga", "GPUS": "3", "PYTHON": "/nonexistent"}
    wrong = {sentence.split(":")[0] for sentence in errors(MEGA_TIMNG="e2e", **env)}
    assert wrong == {"TOPK=0", "HIDDEN=abc", "SECTION=fi_mga", "GPUS=3", "PYTHON=/nonexistent", "MEGA_TIMNG"}
    assert "L2=cold" in {sentence.split(":")[0] for sentence in errors(L2="cold", TIMING="graph", HIDDEN="abc")}


def test_no_error_builds_on_a_value_that_is_wrong_itself() -> None:
    assert errors(NUM_EXPERTS="x", GPUS="3", TOPK="99") == [
        "NUM_EXPERTS=x: must be a whole number >= 1, not 'x'",
        "TOPK=99: must be 1..32",
    ]


def test_an_error_shows_one_printable_line_of_bounded_length() -> None:
    sentence = error(COMM_LIST="bad\x1b[31m\nnews" + "x" * 500)
    assert sentence.isprintable()
    assert len(sentence) < 400
