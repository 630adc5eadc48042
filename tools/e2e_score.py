"""Which answers are right, and whether a candidate is as good as its reference: paired, with its interval."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

# Answers of GSM8K end in "#### 42"; lm-evaluation-harness calls these two filters strict-match and flexible-extract.
STRICT = re.compile(r"#### ?(-?[0-9.,]+)")
NUMBER = re.compile(r"-?\$?[0-9][0-9,]*(?:\.[0-9]+)?")
CONFIDENCE = 0.95


def strict(text: str) -> str:
    """The number behind the first ####, "" if there is none."""
    found = STRICT.search(text)
    return cleaned(found[1]) if found else ""


def flexible(text: str) -> str:
    """The last number in the text, "" if there is none."""
    found = NUMBER.findall(text)
    return cleaned(found[-1]) if found else ""


EXTRACT = {"strict": strict, "flexible": flexible}


def cleaned(number: str) -> str:
    """One spelling: no $, no thousands' commas, no point at the end, no zeros behind a point."""
    text = number.replace(",", "").replace("$", "").rstrip(".")
    return text.rstrip("0").rstrip(".") if "." in text else text


@dataclass(frozen=True)
class Paired:
    """The same questions answered twice: counts of both right, only the reference, only the candidate, neither."""

    both: int
    reference_only: int
    candidate_only: int
    neither: int

    @property
    def questions(self) -> int:
        return self.both + self.reference_only + self.candidate_only + self.neither

    @property
    def reference(self) -> float:
        return (self.both + self.reference_only) / self.questions

    @property
    def candidate(self) -> float:
        return (self.both + self.candidate_only) / self.questions

    @property
    def difference(self) -> float:
        """Candidate less reference, as shares of the questions."""
        return (self.candidate_only - self.reference_only) / self.questions


def paired(reference: Sequence[bool], candidate: Sequence[bool]) -> Paired:
    """Raises ValueError for no questions or another number of them."""
    pairs = list(zip(reference, candidate, strict=True))
    if not pairs:
        raise ValueError("no question was answered by both")
    counts = [pairs.count(each) for each in ((True, True), (True, False), (False, True), (False, False))]
    return Paired(*counts)


def wilson(share: float, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of one proportion."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - half) / (1 + z * z / count), (middle + half) / (1 + z * z / count)


def interval(pair: Paired, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Interval of candidate less reference for paired proportions.

    Method 10 of R. G. Newcombe, "Improved confidence intervals for the difference between binomial proportions based on
    paired data", Statistics in Medicine 17 (1998) 2635-2650: Wilson intervals of both shares, joined with the
    correlation of the pairs, its numerator corrected for continuity.
    """
    n = pair.questions
    a, b, c, d = pair.both, pair.candidate_only, pair.reference_only, pair.neither
    first, second = pair.candidate, pair.reference
    (low1, high1), (low2, high2) = wilson(first, n, confidence), wilson(second, n, confidence)
    margins = (a + b) * (c + d) * (a + c) * (b + d)
    numerator = float(a * d - b * c)
    if numerator > 0:
        numerator = max(numerator - n / 2, 0)
    phi = numerator / math.sqrt(margins) if margins else 0.0
    below1, above1, below2, above2 = first - low1, high1 - first, second - low2, high2 - second
    down = math.sqrt(max(below1**2 - 2 * phi * below1 * above2 + above2**2, 0))
    up = math.sqrt(max(below2**2 - 2 * phi * below2 * above1 + above1**2, 0))
    return pair.difference - down, pair.difference + up


def chance(pair: Paired) -> float:
    """How probable flips at least this uneven are if both are equally good: McNemar's test, exact and two-sided."""
    flips = pair.reference_only + pair.candidate_only
    fewer = min(pair.reference_only, pair.candidate_only)
    tail = sum(math.comb(flips, each) for each in range(fewer + 1)) / 2**flips
    return min(1.0, 2 * tail)
