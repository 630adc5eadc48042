"""What the commands of a run must share before anything is measured: cards, their differences, everybody's verdicts.

Pure functions on what each member says of itself; lib/nodes.py and lib/follower.py carry the words.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lib import nic
from lib.contract import Support
from lib.machine import Machine, fingerprint
from lib.plan import Case
from lib.provenance import library_environment, software
from lib.version import git_label, source_hash

if TYPE_CHECKING:
    from lib.knobs import Knobs

Card = dict[str, Any]
# What may differ from node to node: where it is, what its folders and interpreters are called, and what node 0 alone
# acts on.
OWN = frozenset(
    "NODE_RANK MASTER_ADDR CUDA_VISIBLE_DEVICES PYTHON COMM_PYTHON FI_PYTHON OUT_DIR RESUME DEBUG PEAKS BASELINE "
    "STARTS KEEP".split()
)
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
LISTED = 3  # differing cases that are named


def make_card(
    section: str, knobs: Knobs, machine: Machine, cases: Sequence[Case], env: Mapping[str, str], contended: str = ""
) -> Card:
    """What one member tells node 0 of itself. `contended`: who else uses its GPUs (lib/monitor.py)."""
    return {
        "host": socket.gethostname(),
        "section": section,
        "trouble": trouble_here(knobs, env),
        "notices": [f"contended: {contended}"] if contended else [],
        "knobs": {name: value for name, value in knobs.as_text().items() if name not in OWN},
        "code": source_hash(),
        "git": git_label(),
        "device": machine.device,
        "device and software": {"device": machine.device, **software(), **library_environment()},
        "cases": [[case_name(case), case.key, case.support.status, case.support.reason] for case in cases],
        "fingerprint": fingerprint(machine),
    }


def case_name(case: Case) -> str:
    return f"{case.variant.name} {case.timing} T={case.problem.tokens}"


def trouble_here(knobs: Knobs, env: Mapping[str, str]) -> str:
    """What this node cannot do that the knobs ask for, in one sentence; the interface's name is not ours to print."""
    wanted = env.get(GLOO_INTERFACE)
    if wanted and (absent := set(wanted.split(",")) - set(nic.interfaces())):
        there = ", ".join(nic.interfaces())
        return f"{GLOO_INTERFACE}: names {len(absent)} interface(s) that this node does not have; it has {there}"
    devices = nic.rdma_devices()
    if knobs.nic and devices and not nic.chosen(knobs.nic, devices):
        return f"NIC={knobs.nic}: leaves no RDMA device; this node has {', '.join(devices)}"
    return ""


def differences(first: Card, other: Card) -> list[str]:
    """Why these two can't measure together: each thing with both values, node 0's first. [] if they can."""
    for name in ("section", "code"):
        if first[name] != other[name]:
            shown = ("git", "code") if name == "code" else (name,)
            values = [" ".join(card[part] for part in shown) for card in (first, other)]
            return [f"{name}: {values[0]} here, {values[1]} there"]  # all that follows would differ for this reason
    found = []
    for part, nothing in (("knobs", "unset"), ("device and software", "none")):
        for name in sorted(first[part].keys() | other[part].keys()):
            here, there = (card[part].get(name, "") for card in (first, other))
            if here != there:
                found.append(f"{name}: {here or nothing} here, {there or nothing} there")
    return found or _plan_differences(first, other)


def _plan_differences(first: Card, other: Card) -> list[str]:
    plans = [{name: key for name, key, _, _ in card["cases"]} for card in (first, other)]
    only = [[name for name in plans[mine] if name not in plans[1 - mine]] for mine in (0, 1)]
    found = [
        f"plan: {_some(names)} only {where}" for names, where in zip(only, ("here", "there"), strict=True) if names
    ]
    changed = [name for name in plans[0] if name in plans[1] and plans[0][name] != plans[1][name]]
    if changed:
        found.append(f"plan: {_some(changed)} not the same there (a routing file with other contents?)")
    return found


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def agree(cards: Mapping[int, Card], names: Mapping[int, str]) -> list[str]:
    """Every reason why the members can't run together, each a sentence that names the member. [] if they can."""
    refused = [f"{names[number]}: {card['trouble']}" for number, card in cards.items() if card.get("trouble")]
    for number, card in cards.items():
        for difference in differences(cards[0], card) if number else []:
            what, _, values = difference.partition(": ")
            where = values.replace(" there", f" on {names[number]}").replace(" here", f" on {names[0]}")
            refused.append(f"{what} differs between nodes: {where}; give every node the same")
    return refused


def everyones_verdicts(cases: Sequence[Case], cards: Mapping[int, Card], names: Mapping[int, str]) -> list[Case]:
    """A case that some member can't run is run by nobody: its verdict is that of the first such member, named."""
    settled = []
    for index, case in enumerate(cases):
        support = case.support
        for number, card in cards.items():
            _, _, status, reason = card["cases"][index]
            if support.ok and status != "ok":
                support = Support(status, f"{names[number]}: {reason}")
        settled.append(replace(case, support=support))
    return settled
