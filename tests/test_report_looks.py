"""Colours for everyone, a look for each of many variants, and figures as they are written."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from tools.report_looks import HUES, PHASES, Look
from tools.report_page import TEMPLATES
from tools.report_text import figure_text, short


def css_colours(block: str) -> dict[str, str]:
    text = (TEMPLATES / "report.css.j2").read_text()
    part = text.partition("{% endset %}")[0 if block == "dark" else 2]
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6})\b", part))


# Machado, Oliveira, Fernandes 2009, severity 1.0, in linear RGB.
DICHROMATS = {
    "none": np.eye(3),
    "protan": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.0992], [-0.003882, -0.0481, 1.052]]),
    "deutan": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.0474], [-0.011820, 0.0429, 0.9689]]),
    "tritan": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.1476], [0.004733, 0.6914, 0.3039]]),
}


def lab(colour: str, sight: np.ndarray) -> np.ndarray:
    srgb = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(sight @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    ratios = to_xyz @ seen / np.array([0.9505, 1.0, 1.089])
    curve = np.where(ratios > 0.008856, np.cbrt(ratios), 7.787 * ratios + 16 / 116)
    return np.array([116 * curve[1] - 16, 500 * (curve[0] - curve[1]), 200 * (curve[1] - curve[2])])


def least_distance(colours: list[str]) -> float:
    """Smallest CIE76 distance of any two, for any kind of sight."""
    pairs = itertools.combinations(colours, 2)
    return min(
        float(np.linalg.norm(lab(one, sight) - lab(other, sight)))
        for one, other in pairs
        for sight in DICHROMATS.values()
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_hues_are_told_apart_by_dichromats_too(theme: str) -> None:
    colours = css_colours(theme)
    assert least_distance([colours[f"s{number}"] for number in range(HUES)]) >= 13
    assert least_distance([colours[f"p{number}"] for number in range(len(PHASES))]) >= 13
    assert least_distance(["#d62728", "#2ca02c", "#8c564b"]) < 13, "red, green and brown of a common palette would trip"


def test_seventy_variants_look_different() -> None:
    looks = [Look(number) for number in range(72)]
    assert len({(look.css, look.marker, look.dash) for look in looks}) == 72


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (1234.56, "1235"), (82.0979, "82.1"), (0.00123, "0.00123"), (100.0, "100")]
)
def test_figures_keep_three_digits_that_count(value: float, text: str) -> None:
    assert figure_text(value) == text
    assert short("x" * 30) == "x" * 21 + "…"
