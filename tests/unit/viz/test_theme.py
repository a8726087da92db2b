"""Colours can be told apart and read in both modes, and the style sheet loads nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from midstream.viz import theme
from midstream.viz.color_scale import NUM_BINS


def parsed(color: str) -> theme.Rgb:
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    return int(digits[:2], 16), int(digits[2:4], 16), int(digits[4:], 16)


def contrast(one: theme.Rgb, other: theme.Rgb) -> float:
    low, high = sorted(theme.luminance(color) + 0.05 for color in (one, other))
    return high / low


def test_luminance_is_that_of_the_standard() -> None:
    """Values of WCAG 2's own examples."""
    assert theme.luminance((255, 255, 255)) == pytest.approx(1)
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert contrast((119, 119, 119), (255, 255, 255)) == pytest.approx(4.48, abs=0.01)


def test_text_on_every_colour_has_the_contrast_that_the_standard_asks_for() -> None:
    for index in range(NUM_BINS):
        for color in theme.bin_colors(index):
            assert contrast(color, parsed(theme.ink_on(color))) >= 4.5


@pytest.mark.parametrize("mode", [0, 1])
def test_text_and_lines_contrast_with_their_ground_in_both_modes(mode: int) -> None:
    colors = {name: parsed(pair[mode]) for name, pair in theme.COLORS.items()}
    for ground in (colors["page"], colors["card"]):
        assert contrast(colors["ink"], ground) > 7
        assert contrast(colors["soft"], ground) > 4.5
        for line in theme.LINES:
            assert contrast(parsed(line[mode]), ground) > 3


def test_lines_are_told_apart_without_colours_and_are_no_colour_of_a_scale() -> None:
    for part in (2, 3):  # dashes, markers
        assert len({line[part] for line in theme.LINES}) == len(theme.LINES)
    # On a dark page lines are lighter, and a scale's ends are not.
    assert not {parsed(light) for light, *_ in theme.LINES} & set(theme.LIGHT)


def test_the_figures_style_has_the_colours_of_the_pages_light_mode() -> None:
    style = (Path(theme.__file__).parent / "paper.mplstyle").read_text()
    found = {f"#{one}" for one in re.findall(r"color: ([0-9a-f]{6})$", style, re.M)}
    assert found == {theme.COLORS[name][0] for name in ("ink", "soft", "line")}
    assert found < set(theme.VARIABLES)


def test_every_bin_has_a_rule_and_the_ends_are_those_of_the_palette() -> None:
    style = theme.style_sheet()
    for index in range(NUM_BINS):
        assert re.search(rf"\.b{index} {{ --c: light-dark\(#\w{{6}}, #\w{{6}}\)", style)
    for index, end in ((0, 0), (NUM_BINS // 2, 1), (NUM_BINS - 1, 2)):
        assert theme.bin_colors(index) == (theme.LIGHT[end], theme.DARK[end])


def test_the_style_sheet_loads_nothing_and_cannot_end_early() -> None:
    style = theme.style_sheet() + theme.PAGE_CSS
    assert not re.search(r"url\(|@import|https?:|</|&", style)


def test_every_rule_is_confined_to_pictures() -> None:
    """A notebook has other outputs, which a picture must leave as they are."""
    style = re.sub(r"/\*.*?\*/", "", theme.style_sheet(), flags=re.S)
    selectors = re.findall(r"([^{}]+){[^{}]*}", style)
    assert len(selectors) > 60
    for group in selectors:
        for selector in group.split(","):
            assert "midstream" in selector, selector
