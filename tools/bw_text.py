"""The bandwidth calculator's records as text for a person."""

from __future__ import annotations

from collections.abc import Iterator

from lib.routing_spec import MAX_GROUPS
from tools.bw_counts import (
    ALGO,
    BYTES,
    DEVIATION,
    EXPECTED,
    FORMATS,
    PHYSICAL,
    RECEIVED,
    REFERENCE,
    SENT,
    Case,
    Record,
    ungrouped_expectation,
)

LABEL, COUNT, SIZE, GB = 33, 14, 20, 12  # column widths
BYTES_A_GB = 1e9
WORDS = {
    "rdma_send_algo": "RDMA send, algo", "rdma_send_physical": "RDMA send, physical", "nvl_recv": "NVL receive",
    "rdma_recv_algo": "RDMA receive, algo", "rdma_recv_physical": "RDMA receive, physical", "nvl_send": "NVL send",
}  # fmt: skip
NO_RDMA = "one node: nothing crosses RDMA"


def header(case: Case) -> Iterator[str]:
    """What is counted, and by which rules."""
    problem = case.problem
    gpus = problem.world // problem.nodes
    yield (
        f"{_several(problem.world, 'rank')} = {_several(problem.nodes, 'node')} x {_several(gpus, 'GPU')}; "
        f"{problem.tokens} tokens a rank, hidden {problem.hidden}, {problem.num_experts} experts, top-{problem.topk}"
    )
    law = "the reference script's (RNG seed = rank)" if problem.routing == REFERENCE else problem.routing
    yield f"routing: {law}; {_cap(case)}"
    if case.rules == "mori":
        counted = "every token to every node" if case.undeduplicated else "one copy a (token, node)"
        yield f"rules: mori, kernel {case.kernel_type}: RDMA algo counts {counted}; an FP8 row is H bytes, no scales"
        algo, received = ungrouped_expectation(problem)
        algo = problem.tokens * problem.nodes if case.undeduplicated else algo
        yield (
            "MORI's own routing (a GPU generator, no group cap) can't be repeated here: it has "
            f"{algo:.1f} algo and {received:.1f} received tokens a rank on average"
        )
    else:
        yield "rules: deepep: RDMA algo counts one copy a (token, node); an FP8 row brings a 4-byte scale per 128"


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _cap(case: Case) -> str:
    if case.groups is None:
        return "no group cap"
    nodes = case.problem.nodes
    if nodes == 1:
        return "one group"
    over = f" (the group cap is {MAX_GROUPS})" if nodes > MAX_GROUPS else ""
    return f"a token reaches at most {case.groups} of {nodes} nodes{over}"


def rank_block(case: Case, record: Record) -> Iterator[str]:
    """One rank's values."""
    yield f"[rank {record['rank']}, node {record['node']}, GPU {record['gpu']}]"
    yield from _values(case, record)


def total_block(case: Case, record: Record) -> Iterator[str]:
    """The sums, and how good the (N-1)/N formula is on single ranks."""
    yield f"[all {_several(case.problem.world, 'rank')}]"
    yield from _values(case, record)
    if case.problem.nodes > 1:
        yield (
            f"  algo x (N-1)/N is the physical count on {record['num_ranks_where_formula_exact']} of "
            f"{case.problem.world} ranks; the largest deviation is {record['max_abs_deviation_tokens']:.1f} tokens, "
            f"{record['max_rel_deviation']:.2%} at most"
        )


def _values(case: Case, record: Record) -> Iterator[str]:
    yield _count("tokens sent", record[SENT])
    yield _count("tokens received", record[RECEIVED], "own rank included")
    if record["num_masked"]:
        yield _count("top-k entries masked", record["num_masked"], "counted nowhere")
    if case.problem.nodes == 1:
        yield _count("RDMA tokens, algo", None, NO_RDMA)
        yield _count("RDMA tokens, physical", None, NO_RDMA)
    else:
        nodes = case.problem.nodes
        yield _count("RDMA tokens, algo", record[ALGO], "own node included, as the libraries report it")
        how = "by definition of the kernel" if case.undeduplicated else "counted"
        gap = f"expected algo x {nodes - 1}/{nodes} = {record[EXPECTED]:,.1f}, deviation {record[DEVIATION]:+.1f}"
        yield _count("RDMA tokens, physical", record[PHYSICAL], f"{how}; {gap}")
    yield " " * LABEL + "".join(f"{fmt.upper() + ' bytes':>{SIZE}}{'GB':>{GB}}" for fmt in FORMATS)
    for leg, what, _ in BYTES:
        sizes = [record[f"{leg}_{fmt}_{what}_bytes"] for fmt in FORMATS]
        if case.problem.nodes == 1 and what.startswith("rdma"):
            sizes = [None] * len(FORMATS)
        yield f"  {leg + ' ' + WORDS[what]:{LABEL - 2}}" + "".join(map(_size, sizes))
    if case.total_gbps is not None:
        yield _bandwidth(case.total_gbps, record)


def _count(label: str, count: int | None, remark: str = "") -> str:
    number = "n/a" if count is None else f"{count:,}"
    return f"  {label:{LABEL - 2}}{number:>{COUNT}}  {remark}".rstrip()


def _size(size: int | None) -> str:
    return f"{'n/a':>{SIZE}}{'n/a':>{GB}}" if size is None else f"{size:>{SIZE},}{size / BYTES_A_GB:>{GB}.4f}"


def _bandwidth(total_gbps: float, record: Record) -> str:
    if record["rdma_algo_gbps"] is None:
        parts = ["RDMA n/a"]
    else:
        parts = [f"RDMA {name} {record[f'rdma_{name}_gbps']:.1f} GB/s" for name in ("algo", "physical")]
        parts[0] += f" (share {record[ALGO] / record[RECEIVED]:.4f})"
    if "ll_gbps" in record:
        parts.append(f"LL {record['ll_gbps']:.1f} GB/s")
    return f"  of {total_gbps:g} GB/s a rank in all: " + ", ".join(parts)
