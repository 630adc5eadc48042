#!/usr/bin/env python3
"""How often the gate is wrong, by simulation with the scatter of measured rows.

Makes docs/measured/gate_simulation.csv.

    python -m tools.gate_simulation [--nights 10000] [--out FILE]

Columns: docs/nightly.md, "What the simulation says".
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lib import gate

MEASURED = Path(__file__).resolve().parent.parent / "docs" / "measured"
FILES = ("comm_h200x2_first.csv", "comm_h200x2_repeat.csv")  # two bookings of one day, the second a start of its own
SAME = "variant timing tokens dispatch_dtype num_sms l2".split()
MANY_TOKENS = 4096
ROWS = 150
CHUNK = 50_000  # row-nights at a time
COLUMNS = "what noise night_over_start starts nights slower row_nights red red_share per_1000_nights".split()

Floats = npt.NDArray[np.float64]
Noise = Callable[[np.random.Generator, tuple[int, ...]], Floats]


# --- scatter of the measured rows -------------------------------------------------------------------------------------


@cache
def measured_starts() -> dict[tuple[str, ...], dict[str, list[float]]]:
    """ln(lat_us_p50) by row and stamp. A stamp has a row twice where its graph was made eagerly: another start."""
    found: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name in FILES:
        with (MEASURED / name).open(newline="") as file:
            for row in csv.DictReader(file):
                if row["status"] == "ok":
                    key = tuple(row[column] for column in SAME)
                    found[key][row["stamp"]].append(math.log(float(row["lat_us_p50"])))
    return found


def kind(key: tuple[str, ...]) -> tuple[str, bool]:
    """Rows that scatter alike: those of one timing, bound by the host (few tokens) or by the device (many)."""
    row = dict(zip(SAME, key, strict=True))
    return row["timing"], int(row["tokens"]) >= MANY_TOKENS


@cache
def start_sds() -> tuple[float, ...]:
    """Standard deviation of a start, as a share, of each row that has several starts: its kind's, pooled.

    A row of two starts has one degree of freedom, which would make half of the rows far too quiet and some too loud.
    """
    squares: dict[tuple[str, bool], list[float]] = defaultdict(lambda: [0.0, 0.0])
    several = {key: list(chain.from_iterable(stamps.values())) for key, stamps in measured_starts().items()}
    several = {key: values for key, values in several.items() if len(values) > 1}
    for key, values in several.items():
        total = squares[kind(key)]
        total[0] += float(np.var(values)) * len(values)
        total[1] += len(values) - 1
    return tuple(math.sqrt(squares[kind(key)][0] / squares[kind(key)][1]) for key in several)


def night_over_start() -> float:
    """Standard deviation of a night / of a start, from the rows that have two starts under both stamps.

    Means of two starts differ by var = 2 night^2 + start^2 (one-way analysis of variance); 0 where it is less.
    """
    ratios = []
    for stamps in measured_starts().values():
        if len(stamps) == 2 and all(len(starts) == 2 for starts in stamps.values()):
            start_var = float(np.mean([np.var(starts, ddof=1) for starts in stamps.values()]))
            first, second = (float(np.mean(starts)) for starts in stamps.values())
            ratios.append((first - second) ** 2 / start_var)
    return math.sqrt(max((float(np.mean(ratios)) - 1) / 2, 0.0))


# --- shapes of the noise, each of standard deviation 1 ----------------------------------------------------------------


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return rng.standard_normal(shape)


def heavy_tails(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Student's t with 3 degrees of freedom."""
    return rng.standard_t(3, shape) / math.sqrt(3)


def two_modes(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """One start in five is in a slow mode, 2.5 standard deviations up: host-bound rows look like this."""
    slow = rng.random(shape) < 0.2
    return 0.3 * rng.standard_normal(shape) + np.where(slow, 1.9, -0.475)


NOISES: dict[str, Noise] = {"normal": normal, "heavy_tails": heavy_tails, "two_modes": two_modes}


# --- nights -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    noise: str = "normal"
    night_over_start: float = 0.0
    starts: int = gate.MIN_STARTS
    nights: int = gate.MIN_NIGHTS


@cache
def largest(n: int, m: int) -> tuple[int, int]:
    """The most inversions, and the most baseline starts above tonight's best, that still make a row red."""
    inversions = bisect_right(range(n * m // 2), gate.ALPHA / 2, key=lambda most: gate.mann_whitney_p(n, m, most))
    above = bisect_right(range(m), gate.ALPHA / 2, key=lambda most: gate.precedence_p(n, m, most))
    return inversions - 1, above - 1


def draw(rng: np.random.Generator, setting: Setting, sds: Floats) -> tuple[Floats, Floats]:
    """Badness of baseline starts [row, night, start] and of tonight's, second run included [row, 2 x start]."""
    noise, rows = NOISES[setting.noise], len(sds)
    scale = sds[:, None, None]
    nights = setting.night_over_start * rng.standard_normal((rows, setting.nights + 1, 1))
    old = noise(rng, (rows, setting.nights, setting.starts)) + nights[:, :-1]
    new = noise(rng, (rows, 2 * setting.starts)) + nights[:, -1]
    return np.exp(scale * old), np.exp(sds[:, None] * new)


def limits(old: Floats) -> tuple[Floats, Floats]:
    """Baseline median and threshold of each row, as gate.threshold."""
    medians = np.median(old, axis=2)
    base = np.median(medians, axis=1)
    mad = np.median(np.abs(medians - base[:, None]), axis=1) / base
    distances = np.sort(np.abs(old.reshape(len(old), -1) / base[:, None] - 1), axis=1)
    kept = distances[:, : distances.shape[1] - math.ceil(gate.TRIM * distances.shape[1])]
    spread = np.sqrt((kept**2).mean(axis=1))
    scatter = np.maximum(gate.NIGHT_MADS * mad, gate.START_SPREADS * spread)
    return base, np.clip(scatter, gate.FLOOR, gate.CEILING)


def red(old: Floats, new: Floats) -> npt.NDArray[np.bool_]:
    """gate.judge on many rows at once, with a second run; the tests hold both against each other."""
    base, limit = limits(old)
    starts = new.shape[1] // 2
    chosen = np.flatnonzero(np.median(new[:, :starts], axis=1) / base - 1 > limit)
    result = np.zeros(len(old), dtype=bool)
    old, new, base, limit = (
        old[chosen].reshape(len(chosen), old.shape[1] * old.shape[2]),
        new[chosen],
        base[chosen],
        limit[chosen],
    )
    inversions, above = largest(new.shape[1], old.shape[1])
    ordered = (old[:, :, None] >= new[:, None, :]).sum(axis=(1, 2)) <= inversions
    ahead = (old >= new.min(axis=1)[:, None]).sum(axis=1) <= above
    result[chosen] = (np.median(new, axis=1) / base - 1 > limit) & (ordered | ahead)
    return result


def count_red(setting: Setting, row_nights: int, slower: float | str, seed: int = 0) -> int:
    """Red row-nights of `row_nights`, tonight slower by a factor, or by `twice` each row's own threshold."""
    rng, count = np.random.default_rng(seed), 0
    sds = np.resize(np.array(start_sds()), min(CHUNK, row_nights))
    for begin in range(0, row_nights, len(sds)):
        old, new = draw(rng, setting, sds[: row_nights - begin])
        factor = 1 + 2 * limits(old)[1][:, None] if slower == "twice" else float(slower)
        count += int(red(old, new * factor).sum())
    return count


# --- the file ---------------------------------------------------------------------------------------------------------


def cases(measured: float, nights: int) -> list[tuple[str, Setting, float | str, int]]:
    """(what, setting, how much slower, row-nights)"""
    ratios = (0.0, measured, 0.6, 1.0)
    quiet = [Setting(noise, ratio) for noise in NOISES for ratio in ratios]
    quiet += [Setting("normal", ratio, nights=30) for ratio in (measured, 0.6)]
    quiet += [Setting("normal", ratio, starts=8) for ratio in (measured, 0.6)]
    twice = [Setting("normal", measured, *size) for size in ((4, 5), (4, 13), (4, 30), (8, 5))]
    twice += [Setting(noise, measured) for noise in ("heavy_tails", "two_modes")]
    slow = [Setting("normal", measured, *size) for size in ((4, 5), (4, 30), (gate.MAX_STARTS, 5))]
    return [
        *[("false red", setting, 1.0, nights * ROWS) for setting in quiet],
        *[("twice the threshold", setting, "twice", 100_000) for setting in twice],
        *[("slower", setting, factor, 20_000) for factor in (1.1, 1.5, 2.5, 10.0) for setting in slow],
    ]


def markdown(rows: Iterable[Mapping[str, str]]) -> list[str]:
    """The lines of the table in docs/nightly.md."""
    lines = []
    for row in rows:
        what = f"{row['what']} x {row['slower']}" if row["what"] == "slower" else row["what"]
        share = f"{100 * float(row['red_share']):.4g} %"
        red = f"{row['per_1000_nights']} in 1,000 nights" if row["per_1000_nights"] else share
        cells = [what, row["noise"], row["night_over_start"], row["starts"], row["nights"], red]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nights", type=int, default=10_000, help="nights of 150 rows for each false red figure")
    parser.add_argument("--out", type=Path, default=MEASURED / "gate_simulation.csv")
    given = parser.parse_args()
    with given.out.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(COLUMNS)
        for what, setting, slower, row_nights in cases(night_over_start(), given.nights):
            count = count_red(setting, row_nights, slower)
            share = count / row_nights
            told = [what, setting.noise, f"{setting.night_over_start:.2f}", setting.starts, setting.nights, slower]
            per_1000_nights = f"{share * ROWS * 1000:.6g}" if what == "false red" else ""
            out.writerow([*told, row_nights, count, f"{share:.6g}", per_1000_nights])
            print(*told, row_nights, count, f"{share:.6g}", per_1000_nights, file=sys.stderr)
    with given.out.open(newline="") as file:
        print("\n".join(markdown(csv.DictReader(file))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
