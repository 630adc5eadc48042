"""Unions and intersections of many groups of time intervals at once, without a loop over them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lib.trace import Floats, Ints


class Intervals(NamedTuple):
    """Intervals [start_us, end_us), each in one group: three arrays of one length, ordered by group, then start."""

    group: Ints
    start_us: Floats
    end_us: Floats

    def us(self, groups: int) -> Floats:
        """[groups] float64: the length per group."""
        return np.bincount(self.group, self.end_us - self.start_us, minlength=groups).astype(np.float64)

    def of(self, group: int) -> tuple[Floats, Floats]:
        """Starts and ends of one group."""
        low, high = np.searchsorted(self.group, [group, group + 1])
        return self.start_us[low:high], self.end_us[low:high]


def running_max(group: Ints, value: Floats) -> Floats:
    """For each element the largest value of its group up to it; `group` is ascending.

    Goes by integer ranks, which are exact where an offset a group would eat the digits of a time stamp.
    """
    by_value = np.argsort(value, kind="stable")
    rank = np.empty(len(value), np.int64)
    rank[by_value] = np.arange(len(value))
    highest = np.maximum.accumulate(group * len(value) + rank)
    return value[by_value[highest - group * len(value)]]


def union(group: Ints, start_us: Floats, end_us: Floats) -> Intervals:
    """The union within each group. Intervals that touch become one."""
    if not len(group):
        return Intervals(group, start_us, end_us)
    order = np.lexsort((start_us, group))
    group, start_us = group[order], start_us[order]
    reach = running_max(group, end_us[order])
    opens = np.concatenate([[True], (group[1:] != group[:-1]) | (start_us[1:] > reach[:-1])])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(group)) - 1
    return Intervals(group[first], start_us[first], reach[last])


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """Where both are, group by group; each of the two is a union."""
    group = np.concatenate([a.group, a.group, b.group, b.group])
    time = np.concatenate([a.start_us, a.end_us, b.start_us, b.end_us])
    step = np.repeat([1, -1, 1, -1], [len(a.group), len(a.group), len(b.group), len(b.group)])
    order = np.lexsort((step, time, group))  # an end before a start of the same time
    group, time = group[order], time[order]
    both = np.flatnonzero(np.cumsum(step[order]) == 2)
    both = both[time[both + 1] > time[both]]
    return Intervals(group[both], time[both], time[both + 1])
