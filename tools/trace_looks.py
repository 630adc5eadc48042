"""Colours and hatches of the kernels in a picture: told apart in grey by lightness, among serial ones by hatch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle

import numpy as np

from tools.trace_analysis import Analysis
from tools.trace_names import SERIAL


@dataclass(frozen=True)
class Look:
    colour: str
    hatch: str = ""


# Sends dark, receives light; combine between: what meets in one lane differs in lightness.
KNOWN = {
    "ep_dispatch_copy_to_staging": Look("#bcd3ea"),
    "dispatch_sync": Look("#f0dfb8", "//"),
    "combine_sync": Look("#f6d3a8", "\\\\"),
    "ep_combine_sync_barrier": Look("#e9c3a0", "xx"),
    "ep_combine_all": Look("#d9c2b0", ".."),
    "dispatch_inter_node_send": Look("#9e1b1b"),
    "dispatch_inter_node_ll_send": Look("#9e1b1b"),
    "dispatch_inter_node_recv": Look("#b9a8e3"),
    "dispatch_inter_node_ll_recv": Look("#b9a8e3"),
    "combine_inter_node": Look("#f0973f"),
    "combine_inter_node_ll": Look("#f0973f"),
    "dispatch_intra": Look("#1c6b3a"),
    "combine_intra_node": Look("#8ed2c2"),
    "combine_intra_node_ll": Look("#8ed2c2"),
    "dispatch_async_send_transfer": Look("#9e1b1b"),
    "dispatch_async_recv_transfer": Look("#b9a8e3"),
    "combine_async_send_transfer": Look("#c4501b"),
    "combine_async_recv_transfer": Look("#fbd19b"),
    "dispatch_async_send_copy": Look("#1c6b3a"),
    "dispatch_async_slot_assign": Look("#dcefd2"),
    "dispatch_async_send_copy_multi_block": Look("#4f9a5c"),
    "dispatch_async_recv_copy": Look("#a9dba5"),
    "combine_async_send_copy": Look("#1d5f8a"),
    "combine_async_recv_copy": Look("#a8d3ea"),
}
SERIAL_LOOKS = (
    Look("#bcd3ea"),
    Look("#f0dfb8", "//"),
    Look("#d5e8cf", "\\\\"),
    Look("#ead3e3", "xx"),
    Look("#dddddd", ".."),
)
# Dark and light in turn.
LANE_LOOKS = tuple(
    Look(colour) for colour in "#8c1d40 #f2a65a #1f5a8a #a8d8b9 #5b3a8c #e6c84f #1c6b3a #d9b3d9 #6b4423 #9ec9e8".split()
)
REST = Look("#bdbdbd")


def looks(analysis: Analysis) -> dict[str, Look]:
    """A look for each name in the chosen iterations, by lane; those busy longest choose first, the rest is grey."""
    spans = analysis.spans
    busy: dict[str, float] = {}
    lane_of: dict[str, int] = {}
    size = len(spans.names)
    lane_and_name = analysis.pieces.group % (len(spans.lanes) * size)
    total = np.bincount(lane_and_name, analysis.pieces.end_us - analysis.pieces.start_us)
    for group in np.unique(lane_and_name):
        lane, name = divmod(int(group), size)
        busy[spans.names[name]] = busy.get(spans.names[name], 0.0) + float(total[group])
        lane_of[spans.names[name]] = lane
    serial, lanes = cycle(SERIAL_LOOKS), iter(LANE_LOOKS)
    chosen = {}
    for longest in sorted(busy, key=lambda each: -busy[each]):
        is_serial = spans.lanes[lane_of[longest]] == SERIAL
        chosen[longest] = KNOWN.get(longest) or (next(serial) if is_serial else next(lanes, REST))
    return dict(sorted(chosen.items(), key=lambda item: lane_of[item[0]]))
