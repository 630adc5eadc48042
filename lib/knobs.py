"""Every knob of the suite in one table, and the parser that checks them all at once.

Standard library only, and quick: a wrong knob is answered before anything is installed or started.

    python -m lib.knobs help | markdown | check [--sweep]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lib import knob_checks as checks
from lib import knob_types as parse
from lib.gate import MAX_NIGHTS, MAX_STARTS, MIN_NIGHTS, MIN_STARTS
from lib.knob_types import UNTIMED
from lib.knob_types import MachineFacts as MachineFacts
from lib.launcher import detect_launcher
from lib.talk import say, show

REPOSITORY = Path(__file__).resolve().parent.parent
CALLER_DIR = "MOE_EP_CALLER_DIR"  # where the user stood when a script was called: relative paths start there
USAGE_ERROR = 2

DEFAULT_GPUS = 4
DEFAULT_CPU_RANKS = 2
REF_BACKENDS = "torch torch_fp8 symm"
COMM_BACKENDS = "torch symm deepep deepep_v2 nccl_ep flashinfer mscclpp mori"
MEGA_BACKENDS = "deep_gemm_mega mxfp8_cutedsl nvfp4_cutedsl"
SM90_MEGA_BACKENDS = "sm90_push_fp8 sm90_pull_fp8"
FOR_SCRIPTS = "python comm_python fi_python out_dir dry_run resume debug starts keep baseline nnodes".split()
TIMINGS = ("e2e", "e2e_pipelined", "kernel", "graph", UNTIMED)
MEGA_TIMINGS = ("e2e", "e2e_pipelined", "kernel", UNTIMED)


@dataclass(frozen=True)
class Knob:
    """One row of the table. `default` is what the documentation shows; `initial`, where given, is parsed instead."""

    name: str
    default: str
    group: str
    help: str
    parse: parse.Parser
    initial: str | Callable[[MachineFacts], str] | None = None
    unset: Any = ""  # the value where neither the user nor `initial` has a text
    read_by: tuple[str, ...] = ()  # the only sections that read it; empty: all of them
    attribute: str = ""  # of Knobs, where it is not the name in lower case

    @property
    def field_name(self) -> str:
        return self.attribute or self.name.lower()

    def default_value(self, facts: MachineFacts) -> Any:
        text = self.default if self.initial is None else self.initial
        text = text(facts) if callable(text) else text
        return self.parse(text, REPOSITORY) if text else self.unset


def _gpus(facts: MachineFacts) -> str:
    if facts.local_world_size:
        return str(facts.local_world_size)
    return str(min(DEFAULT_GPUS, facts.gpu_count) or DEFAULT_CPU_RANKS)


def _mega_list(facts: MachineFacts) -> str:
    return f"{MEGA_BACKENDS} {SM90_MEGA_BACKENDS}" if facts.sm == (9, 0) else MEGA_BACKENDS


def _gpu_or_cpu(gpu: int, cpu: int) -> Callable[[MachineFacts], str]:
    return lambda facts: str(gpu if facts.gpu_count else cpu)


def _text(text: str, base: Path) -> str:
    return text


WHAT, SHAPE, BACKENDS, MEGA = "What runs", "Shape and data", "Backends", "Fused mega MoE"
HOW, OUTPUT, LIMITS = "How it is measured", "Interpreters and output", "Limits"
NODES, NIGHT = "Several nodes", "Nightly"
TIMED, MEGA_TIMED = ("ref", "vllm_split", "comm"), ("vllm_mega", "fi_mega")
SPLIT, FI_MEGA, COMM = ("vllm_split",), ("fi_mega",), ("comm",)

# fmt: off
KNOBS: tuple[Knob, ...] = (
    Knob("SECTION", "all", WHAT,
         "`ref`, `vllm_split` (or `split`), `vllm_mega`, `fi_mega`, `comm`, a list of them, or `all`",
         parse.section_list, attribute="sections"),
    Knob("VLLM_MEGA", "1", WHAT, "`0` leaves `vllm_mega` out when SECTION is `all`", parse.flag),
    Knob("GPUS", "4, or the visible number if fewer, or the largest below that divides NUM_EXPERTS; CPU: 2", WHAT,
         "ranks on this node, one a GPU (= DP = EP); has to divide NUM_EXPERTS", parse.integer(1), _gpus),
    Knob("RANKS_PER_GPU", "1", WHAT,
         "ranks on each GPU (GPUS counts ranks): above 1, rows are checked and not timed (`TIMING=none`)",
         parse.integer(1, checks.SHARING_MAX)),
    Knob("CUDA_VISIBLE_DEVICES", "all", WHAT,
         "which GPUs, order included: the first GPUS of them are used; ignored where there is no GPU",
         _text, "", unset=None),
    Knob("ALGO", "ht", WHAT,
         "`ht` (prefill), `ll` (decode) or both; a backend without the two modes runs once whatever it says",
         parse.some_of("ht", "ll"), read_by=("vllm_split", "comm"), attribute="algos"),
    Knob("DRY_RUN", "0", WHAT, "`1`, or `--plan`: show every case with verdict and memory, run nothing", parse.flag),

    Knob("TOKENS", "8", SHAPE, "tokens per rank (`run.sh`); 0 is legal", parse.integer(0)),
    Knob("SEQ_LENS", "auto", SHAPE,
         "tokens per rank of each point (`run_sweep.sh`); `auto` = powers of two from SEQ_LEN_MIN to SEQ_LEN_MAX",
         parse.sweep_points),
    Knob("SEQ_LEN_MIN", "1", SHAPE, "smallest point of an `auto` sweep", parse.integer(1)),
    Knob("SEQ_LEN_MAX", "8192", SHAPE, "largest point of an `auto` sweep", parse.integer(1)),
    Knob("NUM_EXPERTS", "256; CPU only: 32", SHAPE, "experts over all ranks", parse.integer(1), _gpu_or_cpu(256, 32)),
    Knob("TOPK", "8; CPU only: 4", SHAPE, f"experts a token goes to, 1..NUM_EXPERTS and at most {checks.TOPK_MAX}",
         parse.integer(), _gpu_or_cpu(8, 4)),
    Knob("HIDDEN", "7168; CPU only: 512", SHAPE, "elements of a token, a multiple of 16",
         parse.width, _gpu_or_cpu(7168, 512)),
    Knob("INTER", "2048; CPU only: 256", SHAPE, "intermediate size of an expert, a multiple of 16",
         parse.width, _gpu_or_cpu(2048, 256)),
    Knob("ROUTING", "uniform", SHAPE,
         "`<law>[,mask=<0..1>][,empty=<rank>]`: law `uniform`, `balanced`, `zipf:<s>`, `onehot`, `deepep` (grouped "
         "top-k) or a file (its path contains `/`); mask = share of -1 entries, empty = a rank without tokens",
         parse.routing),
    Knob("SEED", "0", SHAPE, "of tokens, weights and routing", parse.integer(0)),

    Knob("REF_LIST", REF_BACKENDS, BACKENDS, "backends of `ref`",
         parse.some_of(*REF_BACKENDS.split()), read_by=("ref",)),
    Knob("COMM_LIST", COMM_BACKENDS, BACKENDS, "backends of `comm`",
         parse.some_of(*COMM_BACKENDS.split()), read_by=COMM),
    Knob("EXPERTS_LIST", "deepgemm trtllm", BACKENDS, "expert backends of `vllm_split`; also `triton`",
         parse.some_of("deepgemm", "trtllm", "triton"), read_by=SPLIT),
    Knob("DISPATCH_DTYPE", "bf16", BACKENDS, "`bf16`, `fp8` or both: what `comm` dispatches",
         parse.some_of("bf16", "fp8"), read_by=COMM),
    Knob("EXCLUDE_QUANT", "1", BACKENDS, "leave the input quantisation out of `vllm_split` timing (HT only)",
         parse.flag, read_by=SPLIT),
    Knob("NUM_SMS", "0", BACKENDS,
         "SM budget of the communication kernels, one or a list, each value a case; 0 = the library's choice",
         parse.integers(0)),

    Knob("MEGA_LIST", f"{MEGA_BACKENDS}; sm_90 also: {SM90_MEGA_BACKENDS}", MEGA, "backends of `fi_mega`",
         parse.some_of(*MEGA_BACKENDS.split(), *SM90_MEGA_BACKENDS.split()), _mega_list, read_by=FI_MEGA),
    Knob("MEGA_KNOBS", "unset", MEGA,
         "`auto` = online autotune at the first forward; a JSON object replaces the heuristic; unset = heuristic",
         parse.auto_or_json_object, "", unset=None, read_by=FI_MEGA),
    Knob("MEGA_TIMING", "e2e", MEGA, "as TIMING without `graph`; of `fi_mega` and `vllm_mega`",
         parse.some_of(*MEGA_TIMINGS), read_by=MEGA_TIMED),
    Knob("MEGA_IKR", "0", MEGA, "`1` = reduce FC2 in the kernel (the cutedsl backends, sm90_pull_fp8); suffix `+ikr`",
         parse.flag, read_by=FI_MEGA),
    Knob("MEGA_COMBINE_DTYPE", "bf16", MEGA,
         "`mxfp8` or `nvfp4` = combine wire of `nvfp4_cutedsl`; suffix `+combine_<fmt>`; excludes MEGA_IKR=1",
         parse.choice("bf16", "mxfp8", "nvfp4"), read_by=FI_MEGA),
    Knob("MEGA_ACC", "1", MEGA, "`0` skips the accuracy pass: `check` = skipped, and the row never becomes a baseline",
         parse.flag, read_by=MEGA_TIMED),

    Knob("TIMING", "e2e", HOW,
         "`e2e`, `e2e_pipelined`, `kernel`, `graph`, one or a list; of `ref`, `vllm_split`, `comm`; `none` checks only",
         parse.some_of(*TIMINGS), read_by=TIMED),
    Knob("WARMUP", "20", HOW, "untimed iterations", parse.integer(0)),
    Knob("ITERS", "50", HOW, "timed iterations", parse.integer(1)),
    Knob("ITERS_PER_GRAPH", "50", HOW, "iterations captured in one graph", parse.integer(1), read_by=TIMED),
    Knob("L2", "warm", HOW, "`warm` or `cold`; `cold` goes with the timings `e2e` and `kernel` only",
         parse.choice("warm", "cold")),
    Knob("CHECK_REPEATS", "20", HOW, "correctness rounds", parse.integer(1)),
    Knob("PEAKS", "measure", HOW, "`measure` the machine's peaks once a run, `off`, or a file of an earlier run",
         parse.word_or_file("measure", "off")),
    Knob("TRACE", "0", HOW, "`1` = write a trace a rank, `library` = the library's own profiler; the row is `tainted`",
         parse.choice("0", "1", "library")),

    Knob("PYTHON", "`python` on PATH if it has all that is needed, else `.venv`", OUTPUT, "interpreter, used as it is",
         parse.interpreter, ""),
    Knob("COMM_PYTHON", "PYTHON", OUTPUT, "interpreter of `comm`", parse.interpreter, ""),
    Knob("FI_PYTHON", "PYTHON", OUTPUT, "interpreter of `fi_mega`", parse.interpreter, ""),
    Knob("OUT_DIR", "results", OUTPUT, "where log, CSV and JSONL go; a given one is relative to the caller's folder",
         parse.folder),
    Knob("RESUME", "unset", OUTPUT, "a stamp or `last`: append to that run's files, skipping the cases already there",
         parse.pattern(rf"last|{parse.STAMP}", "must be last or a stamp like 20261130T190000Z"), ""),
    Knob("DEBUG", "unset", OUTPUT, "any value: tracebacks instead of one-line errors", parse.anything, "", unset=False),

    Knob("SETUP_TIMEOUT_S", "3600", LIMITS, "seconds a case may take to open, compile and tune", parse.seconds),
    Knob("TIMEOUT_S", "600", LIMITS, "seconds a case may take to check and time", parse.seconds),

    Knob("NNODES", "1, or torchrun's or srun's number", NODES, "nodes; more than one needs MASTER_ADDR and MASTER_PORT",
         parse.integer(1), lambda facts: str(facts.nodes)),
    Knob("NODE_RANK", "0, or torchrun's or srun's number", NODES, "this node, 0..NNODES-1; node 0 writes the rows",
         parse.integer(0), lambda facts: str(facts.node_rank)),
    Knob("MASTER_ADDR", "unset", NODES, "where the other nodes reach node 0", parse.host, ""),
    Knob("MASTER_PORT", "unset", NODES, "a free port of node 0", parse.integer(1, 65535), "", unset=None),
    Knob("NIC", "unset", NODES, "RDMA devices to use, such as `mlx5_0,mlx5_1`; `^` in front = not to use",
         parse.nics, ""),

    Knob("BASELINE", "the machine's accepted one", NIGHT, "a CSV of nights to compare with", parse.any_path, ""),
    Knob("STARTS", "4", NIGHT, "process starts a night", parse.integer(MIN_STARTS, MAX_STARTS)),
    Knob("KEEP", "30", NIGHT, "nights kept", parse.integer(MIN_NIGHTS, MAX_NIGHTS)),
)
# fmt: on


@dataclass(frozen=True)
class Knobs:
    """All knobs of a run, parsed. Paths are absolute text; "" or None = unset."""

    sections: tuple[str, ...]
    all_sections: bool  # SECTION was `all`: `sections` holds every one, none asked for by name
    vllm_mega: bool
    gpus: int
    ranks_per_gpu: int
    cuda_visible_devices: str | None  # None: unset, or ignored because there is no GPU
    algos: tuple[str, ...]
    dry_run: bool
    tokens: int  # per rank
    seq_lens: tuple[int, ...]  # tokens per rank of each point; `auto` resolved
    seq_len_min: int
    seq_len_max: int
    num_experts: int
    topk: int
    hidden: int
    inter: int
    routing: str  # canonical text, see lib/routing_spec.py
    seed: int
    ref_list: tuple[str, ...]
    comm_list: tuple[str, ...]
    experts_list: tuple[str, ...]
    dispatch_dtype: tuple[str, ...]
    exclude_quant: bool
    num_sms: tuple[int, ...]
    mega_list: tuple[str, ...]
    mega_knobs: str | dict[str, Any] | None  # "auto", an override, or the library's heuristic
    mega_timing: tuple[str, ...]
    mega_ikr: bool
    mega_combine_dtype: str
    mega_acc: bool
    timing: tuple[str, ...]
    warmup: int
    iters: int
    iters_per_graph: int
    l2: str
    check_repeats: int
    peaks: str
    trace: str
    python: str
    comm_python: str
    fi_python: str
    out_dir: str
    resume: str
    debug: bool
    setup_timeout_s: float
    timeout_s: float
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int | None
    nic: str
    baseline: str
    starts: int
    keep: int
    given: frozenset[str] = field(default=frozenset(), compare=False)  # names that the user set
    notices: tuple[str, ...] = field(default=(), compare=False)

    @property
    def world(self) -> int:
        return self.gpus * self.nnodes

    def as_text(self) -> dict[str, str]:
        """Canonical text by knob name; parsed on the same machine it gives equal Knobs again. "" = unset.

        CUDA_VISIBLE_DEVICES is left out when None, since set-but-empty hides every GPU.
        """
        text = {knob.name: parse.render(getattr(self, knob.field_name)) for knob in KNOBS}
        if self.all_sections:
            text["SECTION"] = parse.ALL
        if self.seq_lens == parse.powers_of_two(self.seq_len_min, self.seq_len_max):
            text["SEQ_LENS"] = "auto"
        text["DEBUG"] = "1" if self.debug else ""
        if self.cuda_visible_devices is None:
            del text["CUDA_VISIBLE_DEVICES"]
        return text


class KnobErrors(Exception):  # noqa: N818 - all of them, each a sentence
    """Every wrong knob, each as `NAME=value: sentence with remedy`."""

    def __init__(self, errors: Sequence[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = list(errors)


@dataclass
class _Reading:
    """What the texts say, each by itself. Values and errors by field name; a wrong text leaves its default behind."""

    values: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)  # names of knobs that are not what they are by default


def _read(env: Mapping[str, str], facts: MachineFacts) -> _Reading:
    base = Path(env.get(CALLER_DIR) or Path.cwd())
    reading = _Reading()
    for knob in KNOBS:
        text, default = env.get(knob.name, "").strip(), knob.default_value(facts)
        try:
            value = knob.parse(text, base) if text else default
        except (ValueError, OSError, RecursionError) as error:  # a path too long, JSON too deep
            value = default
            why = error if isinstance(error, ValueError) else f"cannot be used ({parse.plain(error)})"
            reading.errors[knob.field_name] = f"{knob.name}={parse.shown(text)}: {why}"
        reading.values[knob.field_name] = value
        if value != default:
            reading.changed.add(knob.name)
    return reading


def _settle(values: dict[str, Any]) -> None:
    """Fill in what depends on other knobs."""
    values["all_sections"] = values["sections"] == (parse.ALL,)
    if values["all_sections"]:
        values["sections"] = parse.SECTIONS
    values["seq_lens"] = values["seq_lens"] or parse.powers_of_two(values["seq_len_min"], values["seq_len_max"])
    for name in ("comm_python", "fi_python"):
        values[name] = values[name] or values["python"]


def _unread(knobs: Knobs, changed: set[str]) -> list[str]:
    return [
        f"{knob.name}: has no effect, SECTION={' '.join(knobs.sections)} does not read it"
        for knob in KNOBS
        if knob.name in changed and knob.read_by and not set(knob.read_by) & set(knobs.sections)
    ]


def parse_knobs(env: Mapping[str, str], facts: MachineFacts, sweep: bool = False) -> Knobs:
    """All knobs from the environment. `sweep`: the points are SEQ_LENS, not TOKENS.

    Raises KnobErrors with every error at once. No value of a variable that is not a knob is kept or shown.
    """
    names = [knob.name for knob in KNOBS]
    devices = env.get("CUDA_VISIBLE_DEVICES")  # the one knob whose empty text has a meaning
    visible = checks.visible_facts(facts, devices)
    reading = _read(env, visible)
    given = {name for name in names if env.get(name, "").strip()} | ({"CUDA_VISIBLE_DEVICES"} & env.keys())
    _settle(reading.values)
    checks.share_gpus(reading.values, given, visible)
    if not env.get("GPUS", "").strip() and facts.local_world_size is None:
        checks.fit_gpus(reading.values, reading.changed)
    reading.values["cuda_visible_devices"] = devices.strip() if devices is not None and facts.gpu_count else None
    knobs = Knobs(**reading.values, given=frozenset(given))
    draft = checks.Draft(knobs, facts, visible, devices, frozenset(reading.errors), reading.changed, sweep)
    errors = [*reading.errors.values(), *checks.contradictions(draft), *checks.unknown_names(env, names)]
    if errors:
        raise KnobErrors(errors)
    notices = [*checks.near_misses(env, names), *_unread(knobs, reading.changed), *checks.remarks(draft)]
    return replace(knobs, notices=tuple(notices))


def shell_lines(knobs: Knobs) -> list[str]:
    """What the scripts need to know, one `name=value` a line; no value holds a line break."""
    return [
        f"sections={' '.join(knobs.sections)}",
        *(f"{name}={parse.render(getattr(knobs, name))}" for name in FOR_SCRIPTS),
    ]


def check(env: Mapping[str, str], sweep: bool) -> int:
    """Command `check`: notices and errors to stderr, shell_lines to stdout. Returns the exit code."""
    from lib.machine import detect_facts

    try:
        knobs = parse_knobs(env, detect_facts(env), sweep)
    except KnobErrors as wrong:
        say("\n".join(wrong.errors))
        return USAGE_ERROR
    for notice in knobs.notices:
        say(f"notice: {notice}")
    follower = f"follower={int(detect_launcher(env).placed(knobs).follower)}"  # of node 0, which alone keeps files
    # for the scripts: unlike show, it may not get lost
    sys.stdout.write("\n".join([*shell_lines(knobs), follower]) + "\n")
    return 0


def main(arguments: Sequence[str]) -> int:
    from lib.knob_help import help_text, markdown_table

    match list(arguments):
        case ["help"]:
            show([help_text()])
        case ["markdown"]:
            show([markdown_table()])
        case ["check", *rest] if rest in ([], ["--sweep"]):
            return check(os.environ, sweep=bool(rest))
        case _:
            say("usage: python -m lib.knobs help | markdown | check [--sweep]")
            return USAGE_ERROR
    return 0


if __name__ == "__main__":
    from lib import knobs as this_module  # lib.machine imports it by this name: one set of classes, not two

    sys.exit(this_module.main(sys.argv[1:]))
