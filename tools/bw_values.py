#!/usr/bin/env python3
"""Tokens and bytes that an expert-parallel dispatch and combine move, for any number of logical ranks.

Needs numpy only: no GPU, no torch, no processes. The default routing is exactly the one of the MORI-EP benchmark
document's reference script, so the counts are the same integers; docs/bw_values.md defines every value.

    tools/bw_values.py --num-nodes 2 --rank 3
    tools/bw_values.py --num-nodes 2 --routing ./topk_idx.npy --json
    tools/bw_values.py --num-nodes 4 --rules mori --kernel-type v1_ll --total-gbps 85
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a file, from any folder

from lib.problem import Problem
from lib.routing_spec import FILE_LAW, RoutingSpec, check_routing, check_routing_file
from tools.arguments import OneLineParser, UsageError
from tools.bw_counts import KERNEL_TYPES, REFERENCE, Case, Record, count_tokens, rank_record, total_record
from tools.bw_routing import GROUP, too_small
from tools.bw_text import header, rank_block, total_block

USAGE_EXIT, INTERRUPTED_EXIT = 2, 130
COUNT_MAX = 2**31 - 1
EXPERTS_MAX = 1 << 16  # the routing laws keep an expert's number in 16 bits
PROGRAM = "bw_values"


def main(argv: list[str] | None = None) -> int:
    try:
        options = _parser().parse_args(argv)
        case = _case(options)
        _check(case, options)
        return _run(case, options)
    except UsageError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return USAGE_EXIT
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's own flush raises again
        return 0


def _parser() -> argparse.ArgumentParser:
    title, about, examples = (__doc__ or "").split("\n\n")
    parser = OneLineParser(
        prog=PROGRAM,
        description=f"{title}\n{about}",
        epilog=examples,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    many = _whole(1, COUNT_MAX)
    parser.add_argument("--num-nodes", type=many, default=1, metavar="N", help="nodes")
    parser.add_argument("--gpu-per-node", type=many, default=8, metavar="G", help="GPUs a node; N x G ranks")
    parser.add_argument("--num-tokens", type=many, default=4096, metavar="T", help="tokens a rank")
    parser.add_argument("--hidden", type=many, default=7168, metavar="H", help="elements of a token's row")
    parser.add_argument("--num-experts", type=many, default=256, metavar="E", help="experts over all ranks")
    parser.add_argument("--num-topk", type=many, default=8, metavar="K", help="experts that a token chooses")
    law = "reference = the document's script; else what ROUTING takes: a law, or the path of a .npy file (with a /)"
    parser.add_argument("--routing", default=REFERENCE, metavar="LAW|PATH", help=law)
    parser.add_argument("--rules", choices=("deepep", "mori"), default="deepep", help="whose counting")
    parser.add_argument("--kernel-type", choices=KERNEL_TYPES, help="with --rules mori: its kernel (v1 unless given)")
    share = "a measured total, GB/s a rank: adds the RDMA bandwidth in it, algo and physical"
    parser.add_argument("--total-gbps", type=_bandwidth, metavar="X", help=share)
    parser.add_argument("--rank", type=_whole(0, COUNT_MAX), metavar="R", help="show this rank and the total only")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="config, ranks and total as one JSON object")
    form.add_argument("--csv", action="store_true", help="one line a rank, no total")
    return parser


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text} must be a whole number, {least} to {most}")
        return number

    return parse


def _bandwidth(text: str) -> float:
    try:
        gbps = float(text)
    except ValueError:
        gbps = math.nan
    if not math.isfinite(gbps) or gbps <= 0:
        raise argparse.ArgumentTypeError(f"{text} must be a number of GB/s above 0")
    return gbps


def _case(options: argparse.Namespace) -> Case:
    if options.kernel_type and options.rules != "mori":
        raise UsageError(f"--kernel-type {options.kernel_type} is a kernel of MORI: add --rules mori")
    problem = Problem(
        world=options.num_nodes * options.gpu_per_node,
        nodes=options.num_nodes,
        tokens=options.num_tokens,
        num_experts=options.num_experts,
        topk=options.num_topk,
        hidden=options.hidden,
        inter=0,  # of the experts, which move nothing
        seed=0,
        routing=options.routing,
    )
    return Case(problem, options.rules, options.kernel_type or KERNEL_TYPES[1], options.total_gbps)


def _check(case: Case, options: argparse.Namespace) -> None:
    """Refuse what the shape does not allow: one sentence that names the option and the remedy."""
    problem = case.problem
    if problem.num_experts > EXPERTS_MAX:
        raise UsageError(f"--num-experts {problem.num_experts} must be at most {EXPERTS_MAX}")
    if problem.num_experts % problem.world:
        below = problem.num_experts // problem.world * problem.world
        near = " or ".join(str(count) for count in (below, below + problem.world) if count)
        raise UsageError(
            f"--num-experts {problem.num_experts} must be a multiple of the {problem.world} ranks "
            f"(--num-nodes {problem.nodes} x --gpu-per-node {problem.world // problem.nodes}): use {near}"
        )
    if problem.topk > problem.num_experts:
        raise UsageError(f"--num-topk {problem.topk} must be 1 to {problem.num_experts} (--num-experts)")
    if options.rank is not None and options.rank >= problem.world:
        raise UsageError(f"--rank {options.rank} must be 0 to {problem.world - 1}, there are {problem.world} ranks")
    _check_routing(case)


def _check_routing(case: Case) -> None:
    problem = case.problem
    try:
        spec = case.spec
    except ValueError as error:
        raise UsageError(f"--routing {problem.routing}: {error}; `{REFERENCE}` is the script's") from error
    shape = (problem.num_experts, problem.topk)
    trouble = check_routing(spec or RoutingSpec("deepep"), problem.world, problem.nodes, *shape)
    if trouble and case.groups:
        most = case.groups * (problem.num_experts // problem.nodes)
        raise UsageError(f"--num-topk {problem.topk} must be 1 to {most}: a token {_reach(case)}")
    if spec is None and too_small(problem):
        need = f"--num-tokens x --hidden and --num-tokens x --num-experts must both be {GROUP} or more"
        raise UsageError(f"--num-tokens {problem.tokens} is too few for the reference routing: {need}")
    if spec is not None and spec.law == FILE_LAW:
        trouble = trouble or check_routing_file(spec.path, problem.world, problem.tokens, *shape)
    if trouble:
        raise UsageError(f"--routing {problem.routing}: {trouble}; match the shape's options to it or give another")


def _reach(case: Case) -> str:
    return f"chooses among the experts of {case.groups} of the {case.problem.nodes} nodes"


def _run(case: Case, options: argparse.Namespace) -> int:
    tokens = count_tokens(case)
    shown = range(case.problem.world) if options.rank is None else [options.rank]
    ranks = [rank_record(case, rank, tokens[rank]) for rank in shown]
    total = total_record(case, tokens)
    if options.json:
        json.dump({"config": config(case), "ranks": ranks, "total": total}, sys.stdout, indent=1)
        sys.stdout.write("\n")
    elif options.csv:
        writer = csv.DictWriter(sys.stdout, list(ranks[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(ranks)
    else:
        sys.stdout.writelines(f"{line}\n" for line in _text(case, ranks, total))
    sys.stdout.flush()
    return 0


def config(case: Case) -> Record:
    """What was asked for. num_topk_groups is None where the routing has no group cap."""
    problem = case.problem
    return {
        "num_nodes": problem.nodes,
        "gpu_per_node": problem.world // problem.nodes,
        "world_size": problem.world,
        "num_tokens": problem.tokens,
        "hidden": problem.hidden,
        "num_experts": problem.num_experts,
        "num_topk": problem.topk,
        "num_topk_groups": case.groups,
        "routing": problem.routing,
        "rules": case.rules,
        "kernel_type": case.kernel_type if case.rules == "mori" else None,
        "total_gbps": case.total_gbps,
    }


def _text(case: Case, ranks: list[Record], total: Record) -> Iterator[str]:
    yield from header(case)
    for record in ranks:
        yield ""
        yield from rank_block(case, record)
    yield ""
    yield from total_block(case, total)


if __name__ == "__main__":
    raise SystemExit(main())
