"""What one knob's text alone can't tell: knobs that contradict each other or the machine, and names that are not knobs.

Standard library only. An error is a sentence `NAME=value: what is wrong and what works`, a remark is for a notice.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lib import mega_knobs, nic
from lib.knob_types import ALL, UNTIMED, or_list, shown
from lib.routing_spec import check_routing, check_routing_file, parse_routing

if TYPE_CHECKING:
    from lib.knobs import Knobs, MachineFacts

TOPK_MAX = 32  # a warp's lanes: the libraries' kernels hold a token's choices in one warp
CPU_RANKS_MAX = 64
SHARING_MAX = 16  # ranks on a GPU, which take turns of some milliseconds
NODE_GPUS = 8  # counts up to a full node are proposed
TIMING_FIELDS = {"TIMING": "timing", "MEGA_TIMING": "mega_timing"}
COLD_TIMINGS = ("e2e", "kernel", UNTIMED)

STRICT_PREFIXES = ("MEGA_", "SEQ_LEN")
# Read by FlashInfer's moe_ep itself, so not a typing error; all that we say is that they are set.
LIBRARY_NAMES = ("MEGA_NO_DIST", "MEGA_SINGLE_GPU_GLOO")
NEAR_MISS_CUTOFF = 0.85
# In every GPU container, and as near to CUDA_VISIBLE_DEVICES as a typing error is.
FAMILIAR_NAMES = ("NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
HIDDEN_DEVICES = ("", "NoDevFiles")  # Slurm writes the latter for a job without GPUs


@dataclass(frozen=True)
class Draft:
    """Knobs before the cross checks. A field in `bad` holds a default, since its own text was wrong."""

    knobs: Knobs
    facts: MachineFacts
    visible: MachineFacts  # the facts that CUDA_VISIBLE_DEVICES leaves
    devices: str | None  # its text
    bad: frozenset[str]
    changed: set[str]
    sweep: bool

    def given(self, name: str) -> bool:
        return name in self.knobs.given

    def asked(self, *sections: str) -> bool:
        return bool(set(sections) & set(self.knobs.sections))


Check = Callable[[Draft], Iterator[str]]


# CUDA_VISIBLE_DEVICES and GPUS


def device_entries(devices: str) -> list[str]:
    """Entries before the first one that hides the rest: CUDA stops at a negative index."""
    entries: list[str] = []
    for entry in (part.strip() for part in devices.split(",")):
        if entry.startswith("-") or (entry in HIDDEN_DEVICES and not entries):
            break
        entries.append(entry)
    return entries


def visible_facts(facts: MachineFacts, devices: str | None) -> MachineFacts:
    """The facts with the GPUs that CUDA_VISIBLE_DEVICES leaves; set but empty leaves none."""
    if devices is None or facts.gpu_count == 0:
        return facts
    count = min(len(device_entries(devices)), facts.gpu_count)
    return replace(facts, gpu_count=count, sm=facts.sm if count else None)


def devices_exist(draft: Draft) -> Iterator[str]:
    if draft.devices is None or draft.facts.gpu_count == 0:
        return
    name, last = f"CUDA_VISIBLE_DEVICES={shown(draft.devices)}", draft.facts.gpu_count - 1
    entries = device_entries(draft.devices)
    for entry in dict.fromkeys(entries):
        if entry.isdecimal() and int(entry) > last:
            yield f"{name}: there is no GPU {entry}, this machine has 0..{last}"
        elif not entry.isdecimal() and not entry.startswith("GPU-"):
            yield f"{name}: '{shown(entry)}' is no index (0..{last}) and no GPU-... uuid; separate them by commas"
    if len(set(entries)) < len(entries):
        yield f"{name}: names a GPU twice; name each once"


def gpus_are_there(draft: Draft) -> Iterator[str]:
    knobs, there = draft.knobs, draft.visible.gpu_count
    if knobs.gpus == draft.facts.local_world_size:
        return  # one task a GPU: a launcher may show each task its own GPU only
    named = len(device_entries(draft.devices)) if draft.devices is not None else 0
    if 0 < named * knobs.ranks_per_gpu < knobs.gpus and draft.given("GPUS"):
        yield (
            f"CUDA_VISIBLE_DEVICES={shown(draft.devices or '')}: names {named} of the GPUS={knobs.gpus} asked for; "
            f"name {-(-knobs.gpus // knobs.ranks_per_gpu)} or set GPUS={named * knobs.ranks_per_gpu}"
        )
    elif there and knobs.gpus > there * knobs.ranks_per_gpu:
        few, shared = there * knobs.ranks_per_gpu, f", {knobs.ranks_per_gpu} ranks each" * (knobs.ranks_per_gpu > 1)
        yield f"GPUS={knobs.gpus}: there are only {there} GPUs{shared}; GPUS={few} or fewer work"
    elif not there and knobs.gpus > CPU_RANKS_MAX:
        yield f"GPUS={knobs.gpus}: at most {CPU_RANKS_MAX} ranks run on a CPU; GPUS={CPU_RANKS_MAX} or fewer work"


def share_gpus(values: dict[str, Any], given: set[str], visible: MachineFacts) -> None:
    """RANKS_PER_GPU above 1: as many ranks by default as fit, and no timing that was not asked for."""
    if not visible.gpu_count:
        values["ranks_per_gpu"] = 1
    if values["ranks_per_gpu"] == 1:
        return
    if "GPUS" not in given and visible.local_world_size is None:
        values["gpus"] *= values["ranks_per_gpu"]
    for knob, name in TIMING_FIELDS.items():
        values[name] = values[name] if knob in given else (UNTIMED,)


def shared_gpus_are_not_timed(draft: Draft) -> Iterator[str]:
    """What a rank waits for would be the other's time slice."""
    count = draft.knobs.ranks_per_gpu
    for knob, name in TIMING_FIELDS.items() if count > 1 else ():
        if timed := [timing for timing in getattr(draft.knobs, name) if timing != UNTIMED]:
            what = f"{knob}={' '.join(timed)}: ranks that share a GPU (RANKS_PER_GPU={count}) are checked, not timed"
            yield f"{what}; set {knob}={UNTIMED} or RANKS_PER_GPU=1"


def shared_gpus_are_full(draft: Draft) -> Iterator[str]:
    count, ranks = draft.knobs.ranks_per_gpu, draft.knobs.gpus
    if ranks % count:
        fit = [str(each) for each in range(1, SHARING_MAX + 1) if ranks % each == 0]
        yield f"RANKS_PER_GPU={count}: does not divide GPUS={ranks}, which counts ranks; set it to {or_list(fit)}"


def none_is_checked(draft: Draft) -> Iterator[str]:
    if UNTIMED in draft.knobs.mega_timing and not draft.knobs.mega_acc:
        yield f"MEGA_ACC=0: with MEGA_TIMING={UNTIMED} nothing would be timed or checked; leave one of them unset"


def fit_gpus(values: dict[str, Any], changed: set[str]) -> None:
    """The default GPUS: 3 GPUs run without a knob, on 2. One rank exchanges nothing, so it has to be asked for."""
    for count in range(values["gpus"], 1, -1):
        if values["num_experts"] % (count * values["nnodes"]) == 0 and count % values["ranks_per_gpu"] == 0:
            changed |= {"GPUS"} if count < values["gpus"] else set()
            values["gpus"] = count
            return


# Shape


def _work(name: str, values: Sequence[int]) -> str:
    return f"{name}={or_list(values)} {'works' if len(values) == 1 else 'work'}"


def experts_divide(draft: Draft) -> Iterator[str]:
    knobs, world, experts = draft.knobs, draft.knobs.world, draft.knobs.num_experts
    if experts % world == 0:
        return
    below, above = experts // world * world, -(-max(experts, knobs.topk) // world) * world
    counts = [count for count in (below, above) if count >= knobs.topk]
    most = min(max(NODE_GPUS, knobs.gpus), draft.visible.gpu_count or CPU_RANKS_MAX)
    gpus = [count for count in range(1, most + 1) if experts % (count * knobs.nnodes) == 0]
    what = f"not divisible by {world} ranks"
    if not gpus:  # three nodes, and 32 experts
        yield f"NUM_EXPERTS={experts}: is {what} (NNODES={knobs.nnodes}); {_work('NUM_EXPERTS', counts)}"
    elif draft.given("GPUS") or not draft.given("NUM_EXPERTS"):
        remedy = f"{_work('GPUS', gpus)}, or NUM_EXPERTS={or_list(counts)}"
        yield f"GPUS={knobs.gpus}: NUM_EXPERTS={experts} is {what}; {remedy}"
    else:
        remedy = f"{_work('NUM_EXPERTS', counts)}, or GPUS={or_list(gpus)}"
        yield f"NUM_EXPERTS={experts}: is {what} (GPUS={knobs.gpus} by default); {remedy}"


def topk_within_experts(draft: Draft) -> Iterator[str]:
    knobs, experts_known = draft.knobs, "num_experts" not in draft.bad
    most = min(TOPK_MAX, knobs.num_experts) if experts_known else TOPK_MAX
    if 1 <= knobs.topk <= most:
        return
    if draft.given("TOPK"):
        yield f"TOPK={knobs.topk}: must be 1..{most}" + (f" (NUM_EXPERTS={knobs.num_experts})" if experts_known else "")
    else:
        yield f"NUM_EXPERTS={knobs.num_experts}: is less than TOPK={knobs.topk}, its default; set TOPK=1..{most} too"


def sweep_range(draft: Draft) -> Iterator[str]:
    low, high = draft.knobs.seq_len_min, draft.knobs.seq_len_max
    if low > high:
        name, value = ("SEQ_LEN_MIN", low) if draft.given("SEQ_LEN_MIN") else ("SEQ_LEN_MAX", high)
        yield f"{name}={value}: leaves no points: SEQ_LEN_MIN={low} is above SEQ_LEN_MAX={high}; swap them"
    elif not draft.knobs.seq_lens:
        yield f"SEQ_LEN_MIN={low}: there is no power of two up to SEQ_LEN_MAX={high}; widen the range or list SEQ_LENS"


def routing_fits(draft: Draft) -> Iterator[str]:
    knobs, spec = draft.knobs, parse_routing(draft.knobs.routing)
    points = knobs.seq_lens if draft.sweep else (knobs.tokens,)
    wrong = check_routing(spec, knobs.world, knobs.nnodes, knobs.num_experts, knobs.topk)
    if not wrong and spec.path:
        wrong = check_routing_file(spec.path, knobs.world, max(points, default=0), knobs.num_experts, knobs.topk)
    if wrong:
        yield f"ROUTING={shown(knobs.routing)}: {wrong}"


# Exclusive pairs, and knobs that no listed backend has


def cold_l2(draft: Draft) -> Iterator[str]:
    knobs = draft.knobs
    if knobs.l2 != "cold":
        return
    asked = [("TIMING", knobs.timing, draft.asked("ref", "vllm_split", "comm"))]
    asked.append(("MEGA_TIMING", knobs.mega_timing, draft.asked("vllm_mega", "fi_mega")))
    for name, timings, read in asked:
        wrong = [timing for timing in timings if timing not in COLD_TIMINGS]
        if read and wrong:
            what = " ".join(wrong)
            yield f"L2=cold: goes with {or_list(COLD_TIMINGS)} only, not with {name}={what}; set L2=warm or drop {what}"


def ikr_and_combine_dtype(draft: Draft) -> Iterator[str]:
    knobs = draft.knobs
    if knobs.mega_ikr and knobs.mega_combine_dtype != "bf16":
        dtype = knobs.mega_combine_dtype
        yield f"MEGA_IKR=1: excludes MEGA_COMBINE_DTYPE={dtype}; set MEGA_IKR=0 or MEGA_COMBINE_DTYPE=bf16"


def mega_options(draft: Draft) -> Iterator[str]:
    if draft.asked("fi_mega"):
        yield from mega_knobs.errors(draft.knobs)


# Nodes


def nodes_meet(draft: Draft) -> Iterator[str]:
    knobs, told = draft.knobs, draft.facts.nodes
    one_a_gpu = draft.facts.local_world_size is not None
    if draft.given("NNODES") and knobs.nnodes != told and (one_a_gpu or told > 1 < knobs.nnodes):
        yield f"NNODES={knobs.nnodes}: the launcher started {told}; leave NNODES and NODE_RANK unset"
    elif knobs.node_rank >= knobs.nnodes:
        last = knobs.nnodes - 1
        yield f"NODE_RANK={knobs.node_rank}: must be 0..{last} (NNODES={knobs.nnodes})"
    for name in ("MASTER_ADDR", "MASTER_PORT") if knobs.nnodes > 1 else ():
        if not getattr(knobs, name.lower()):
            what = "the address at which the others reach node 0" if name == "MASTER_ADDR" else "a free port of node 0"
            yield f"{name}: is not set; {knobs.nnodes} nodes meet there: give {what}, the same on every node"


def nic_remarks(draft: Draft) -> Iterator[str]:
    """A name that this node does not have; a list that leaves nothing is refused by lib/meeting.py or here."""
    knobs, devices = draft.knobs, draft.facts.nics
    if not knobs.nic:
        return
    if not devices:
        yield f"NIC: has no effect, this node has no RDMA device ({nic.RDMA_ROOT})"
        return
    for name in nic.unknown(knobs.nic, devices):
        yield f"NIC={knobs.nic}: there is no device {name} here, this node has {', '.join(devices)}"


def some_nic_is_left(draft: Draft) -> Iterator[str]:
    knobs, devices = draft.knobs, draft.facts.nics
    if knobs.nnodes == 1 and knobs.nic and devices and not nic.chosen(knobs.nic, devices):
        yield f"NIC={knobs.nic}: leaves no RDMA device; this node has {', '.join(devices)}"


# Each check with the fields it stands on: it is left out while one of them is wrong by itself.
OF_NIGHTLY = ("BASELINE", "STARTS", "KEEP")
GPU_ONLY = ("RANKS_PER_GPU", "L2", "PEAKS", "ITERS_PER_GRAPH")
CHECKS: tuple[tuple[Check, tuple[str, ...]], ...] = (
    (devices_exist, ()),
    (gpus_are_there, ("gpus", "ranks_per_gpu")),
    (none_is_checked, ("mega_timing", "mega_acc")),
    (shared_gpus_are_full, ("gpus", "ranks_per_gpu")),
    (shared_gpus_are_not_timed, ("ranks_per_gpu", "timing", "mega_timing")),
    (experts_divide, ("gpus", "nnodes", "num_experts")),
    (topk_within_experts, ("topk",)),
    (sweep_range, ("seq_lens", "seq_len_min", "seq_len_max")),
    (routing_fits, ("routing", "gpus", "nnodes", "num_experts", "topk", "tokens", "seq_lens")),
    (cold_l2, ("l2", "timing", "mega_timing", "sections")),
    (ikr_and_combine_dtype, ("mega_ikr", "mega_combine_dtype")),
    (mega_options, ("mega_list", "mega_ikr", "mega_combine_dtype", "mega_knobs", "sections")),
    (nodes_meet, ("nnodes", "node_rank", "master_addr", "master_port")),
    (some_nic_is_left, ("nic", "nnodes")),
)


def contradictions(draft: Draft) -> list[str]:
    """Every error that takes more than one knob, or the machine, to see."""
    return [error for check, needs in CHECKS if draft.bad.isdisjoint(needs) for error in check(draft)]


def remarks(draft: Draft) -> Iterator[str]:
    """What is legal, but may not do what it seems to."""
    knobs = draft.knobs
    entries = device_entries(draft.devices) if draft.devices is not None else []
    if entries and not draft.facts.gpu_count:
        yield "CUDA_VISIBLE_DEVICES: ignored, there is no GPU on this machine"
    if draft.facts.gpu_count and not draft.visible.gpu_count:
        yield "CUDA_VISIBLE_DEVICES: hides every GPU, so this is a run on the CPU"
    if "GPUS" in draft.changed and not draft.given("GPUS"):
        ranks = (knobs.gpus + 1) * knobs.nnodes
        yield f"GPUS: {knobs.gpus} by default, since NUM_EXPERTS={knobs.num_experts} is not divisible by {ranks} ranks"
    if not knobs.vllm_mega and not knobs.all_sections and draft.asked("vllm_mega"):
        yield f"VLLM_MEGA=0: has no effect, SECTION names vllm_mega; it counts for SECTION={ALL} only"
    if knobs.exclude_quant and draft.given("EXCLUDE_QUANT") and draft.asked("vllm_split") and "ll" in knobs.algos:
        yield "EXCLUDE_QUANT: ll quantises inside DeepEP's dispatch kernel, so its rows include it (quant_included = 1)"
    for name in OF_NIGHTLY:
        if name in draft.changed:
            yield f"{name}: has no effect here, ./nightly.sh reads it"
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name in draft.changed and knobs.nnodes == 1 and draft.facts.local_world_size is None:
            yield f"{name}: has no effect on one node"
    yield from nic_remarks(draft)
    for name in GPU_ONLY:
        if name in draft.changed and not draft.visible.gpu_count:
            yield f"{name}: has no effect on a CPU"
    if draft.sweep and "TOKENS" in draft.changed:
        yield "TOKENS: has no effect in a sweep, whose points are SEQ_LENS"
    for name in ("SEQ_LENS", "SEQ_LEN_MIN", "SEQ_LEN_MAX"):
        if name in draft.changed and not draft.sweep:
            yield f"{name}: has no effect in run.sh, which runs TOKENS={knobs.tokens}; ./run_sweep.sh sweeps"
    if draft.asked("fi_mega"):
        yield from mega_knobs.remarks(knobs)


# Names that are not knobs: their values are never looked at beyond "is it empty"


def _strict(name: str) -> bool:
    return name.startswith(STRICT_PREFIXES) and name not in LIBRARY_NAMES


def unknown_names(env: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Names that only we could be meant by, and that we do not have."""
    errors = []
    for name in sorted(env):
        if _strict(name) and name not in names and env[name].strip():
            near = difflib.get_close_matches(name, names, n=1)
            what = f"did you mean {near[0]}?" if near else "see ./run.sh --help"
            errors.append(f"{shown(name)}: there is no such knob; {what} (unset it if it is not for this suite)")
    return errors


def near_misses(env: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Names that a typing error would make of a knob's, and libraries' own names that are set."""
    notes = []
    for name in sorted(env):
        if name in names or name in FAMILIAR_NAMES or not env[name].strip():
            continue
        if name in LIBRARY_NAMES:
            notes.append(f"{name}: is set; a library reads it, the harness does not")
        elif near := difflib.get_close_matches(name.upper(), names, n=1, cutoff=NEAR_MISS_CUTOFF):
            notes.append(f"{shown(name)}: is set but is not a knob; did you mean {near[0]}?")
    return notes
