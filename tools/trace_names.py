"""What the names in a trace mean: kernel family, lane, phase, and where an iteration starts and ends.

The kernel names are MORI's (its profiler slots, commit 624002c8), the phases are ours (lib/contract.py), the categories
are torch.profiler's. Any other name is kept, in a lane of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lib.trace import PHASE_CATEGORY

SERIAL = "serial"  # drawn at full height: nothing is meant to run beside it
INTERNODE, INTRANODE = "internode", "intranode"
TRANSFER, COPY = "transfer", "copy"

# name -> (short label, lane)
V1 = {
    "ep_dispatch_copy_to_staging": ("copy_to_stg", SERIAL),
    "dispatch_inter_node_send": ("disp_send", INTERNODE),
    "dispatch_inter_node_recv": ("disp_recv", INTERNODE),
    "dispatch_inter_node_ll_send": ("disp_ll_send", INTERNODE),
    "dispatch_inter_node_ll_recv": ("disp_ll_recv", INTERNODE),
    "dispatch_intra": ("disp_intra", INTRANODE),
    "dispatch_sync": ("disp_sync", SERIAL),
    "combine_sync": ("comb_sync", SERIAL),
    "ep_combine_sync_barrier": ("comb_sync_bar", SERIAL),
    "combine_inter_node": ("comb_inter", INTERNODE),
    "combine_inter_node_ll": ("comb_ll_inter", INTERNODE),
    "combine_intra_node": ("comb_intra", INTRANODE),
    "combine_intra_node_ll": ("comb_ll_intra", INTRANODE),
    "ep_combine_all": ("comb_all", SERIAL),
}
ASYNC_LL = {
    "dispatch_async_send_copy": ("disp_send_copy", COPY),
    "dispatch_async_slot_assign": ("disp_slot_assign", COPY),
    "dispatch_async_send_copy_multi_block": ("disp_send_copy_mb", COPY),
    "dispatch_async_send_transfer": ("disp_send_transfer", TRANSFER),
    "dispatch_async_recv_transfer": ("disp_recv_transfer", TRANSFER),
    "dispatch_async_recv_copy": ("disp_recv_copy", COPY),
    "combine_async_send_copy": ("comb_send_copy", COPY),
    "combine_async_send_transfer": ("comb_send_transfer", TRANSFER),
    "combine_async_recv_transfer": ("comb_recv_transfer", TRANSFER),
    "combine_async_recv_copy": ("comb_recv_copy", COPY),
}
# In pipeline order; each step is a lane, because warps run through them at their own pace.
INTRANODE_STEPS = (
    "dispatch_send_tokens dispatch_notify_peer dispatch_wait_peer_token combine_stage_input combine_copy_weights "
    "combine_barrier combine_accum_setup combine_prepare_ptrs combine_dequant_accum combine_accum_weights"
).split()
INTRANODE_NAMES = {
    step: (step.replace("dispatch_", "disp_").replace("combine_", "comb_"),) * 2 for step in INTRANODE_STEPS
}
KERNELS = {**V1, **ASYNC_LL, **INTRANODE_NAMES}
MODULES = ("internode_v1", "low_latency_async", "intranode")  # slot files, which upstream puts before a name


@dataclass(frozen=True)
class Anchors:
    """Which kernels open and close an iteration; of `ends`, the first that the trace holds."""

    starts: tuple[str, ...]
    ends: tuple[str, ...]


ANCHORS = (
    Anchors(("ep_dispatch_copy_to_staging",), ("ep_combine_all", "dispatch_sync")),
    Anchors(
        ("dispatch_async_slot_assign", "dispatch_async_send_copy"),
        ("combine_async_recv_copy", "dispatch_async_recv_copy"),
    ),
    Anchors(
        ("dispatch_send_tokens", "combine_stage_input"),
        (*reversed(INTRANODE_STEPS[5:]), "dispatch_wait_peer_token"),
    ),
)
ANCHOR_NAMES = frozenset(name for anchors in ANCHORS for name in (*anchors.starts, *anchors.ends))
# The end of a collective is one moment on all ranks: what traces of several ranks are aligned on.
COLLECTIVES = ("dispatch_sync", "combine_sync")

MARK = re.compile(r"(?:iteration|ProfilerStep)(?:[ #:_]*(\d+))?$")
OWN_PHASE = re.compile(r"(?:quant|dispatch|experts|combine|stage|forward)(?:\.\w+)?$")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
GPU_ANNOTATION = "gpu_user_annotation"
HOST_CATEGORIES = ("cpu_op", "user_annotation")
# Host-side noise beside GPU work, and frames that enclose everything.
DROPPED_CATEGORIES = ("python_function", "cuda_runtime", "cuda_driver", "overhead", "Trace", "ac2g", "fwdbwd")


def bare_name(name: str) -> str:
    """The name without the "module." that MORI's merged slot table puts before it."""
    module, dot, rest = name.rpartition(".")
    return rest if dot and (module in MODULES or rest in KERNELS) else name


def is_anchor(name: str) -> bool:
    """Whether the name helps to find iterations, whatever wrote the trace."""
    return bare_name(name) in ANCHOR_NAMES or MARK.match(name) is not None


def short_name(name: str) -> str:
    """A label that fits a bar: the table's, else a C++ name without return type, template and parameter lists."""
    if name in KERNELS:
        return KERNELS[name][0]
    plain = re.split(r"[<(]", name.removeprefix("void "), maxsplit=1)[0].strip() or name
    plain = "::".join(plain.split("::")[-2:])
    return plain if len(plain) <= 28 else f"{plain[:25]}..."


def phase_of(name: str) -> str:
    """`dispatch`, `combine`, or "" where the name does not say."""
    match = re.match(r"(?:ep_)?(dispatch|combine)_", name)
    return match.group(1) if match else ""


def named_lane(name: str, category: str) -> str:
    """The lane that name and category decide without the thread, "" if they do not."""
    if name in KERNELS:
        return KERNELS[name][1]
    if category in GPU_CATEGORIES:
        return ""  # a C++ namespace is no lane: DeepEP's internode_ll kernels run within a node too
    if category == PHASE_CATEGORY or OWN_PHASE.match(name):
        return SERIAL
    return next((lane for lane in (INTERNODE, INTRANODE) if lane in name), "")


def variant_of(names: set[str], categories: set[str], marked: bool) -> str:
    """`v1`, `v1_ll`, `async_ll`, `intranode`, `phases` (ours), `torch` (torch.profiler's) or `unknown`."""
    if names.intersection(V1):
        return "v1_ll" if any("_ll" in name for name in names.intersection(V1)) else "v1"
    if names.intersection(ASYNC_LL):
        return "async_ll"
    if names.intersection(INTRANODE_NAMES):
        return "intranode"
    if marked and (PHASE_CATEGORY in categories or any(OWN_PHASE.match(name) for name in names)):
        return "phases"
    return "torch" if categories.intersection((*GPU_CATEGORIES, *HOST_CATEGORIES)) else "unknown"
