"""Charts: what is drawn is the data, in every kind of file, and hostile text stays text."""

from __future__ import annotations

import io
import re
import sys
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from support.refusals import refused
from unit.viz.drawn import drawn, read, same
from unit.viz.pages import HOSTILE, Page

from midstream import MissingExtraError, SpecError, viz

NAN, INF = float("nan"), float("inf")
VALUES = [[0.5, -1.25], [NAN, 2.0], [INF, 0.0]]
WORDS = {"row_title": "layer", "column_title": "token", "value_title": "effect", "unit": "nats"}


def some() -> viz.Chart:
    return viz.heatmap(VALUES, [0, 1, 2], [" a", "\n"], title="Effect", **WORDS)


def lines() -> viz.Chart:
    return viz.curve(
        [-2, 0, 0.5, 4],
        {"AUC": [0.5, NAN, 0.75, 1], "accuracy": [1, 0.5, 0.25, 0]},
        ranges={"accuracy": [[0.75, 0.5, 0.0, 0], [1, 0.75, 0.5, 0]]},
        title="Scores",
        x_title="strength",
        y_title="fraction",
        marked=0.5,
        level=0.5,
    )


def test_a_heatmap_has_each_value_at_its_row_and_column_and_layers_rise() -> None:
    found = drawn(some())
    same(found.image, [[0.5, -1.25], [NAN, 2.0], [2.0, 0.0]])  # infinite: at the end
    assert (found.x, found.y) == ([" a", "⏎"], ["0", "1", "2"])
    assert (found.title, found.titles, found.bar) == (
        "Effect", ("token", "layer"), "effect (nats)"
    )  # fmt: skip
    assert found.limits == (-2.0, 2.0)
    assert str(some()) == (
        "Effect\n"
        "layer↓ token     a      ⏎\n"
        "           2   inf   0.00\n"
        "           1     –   2.00\n"
        "           0  0.50  −1.25"
    )  # fmt: skip
    other = drawn(viz.heatmap(VALUES, ["q0", "q1", "q2"], "ab".__iter__(), row_title="query"))
    assert other.y == ["q2", "q1", "q0"]  # other rows start on top
    same(other.image, [[2.0, 0.0], [NAN, 2.0], [0.5, -1.25]])


def test_colours_around_a_centre_are_symmetric_and_without_one_rise() -> None:
    def of(**given: Any) -> tuple[Any, str]:
        axes = Figure().subplots()
        viz.heatmap([[1, 2, 3, 5]], ["r"], "abcd".__iter__(), **given).plot(axes)
        image = axes.images[0]
        colors = [image.cmap(image.norm(value), bytes=True)[:3] for value in (1, 3)]
        return image.get_clim(), image.colorbar.extend, *(list(map(int, one)) for one in colors)

    blue, neutral = [33, 90, 168], [244, 242, 238]
    assert of(center=3) == ((1, 5), "neither", blue, pytest.approx(neutral, abs=1))
    assert of(center=None)[:3] == ((1, 5), "neither", neutral)
    assert of(center=None, limits=(2, 3))[:3] == ((2, 3), "both", neutral)
    assert of(limits=(-1, 2))[:2] == ((-2, 2), "max")
    for values, shown in (([1, 2], (0, 2)), ([-1, 2], (-2, 2))):
        axes = Figure().subplots()
        viz.heatmap([values], ["r"], ["a", "b"]).plot(axes)
        assert axes.images[0].colorbar.ax.get_ylim() == shown  # nothing negative: no blue


def test_a_curve_has_all_values_ranges_and_marks() -> None:
    axes = Figure().subplots()
    lines().plot(axes)
    found = read(axes)
    same(found.lines["AUC"], [0.5, NAN, 0.75, 1])
    same(found.lines["accuracy"], [1, 0.5, 0.25, 0])
    (bars,) = (one for one in axes.collections if len(one.get_segments()) == 4)
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert ends == [[0.75, 1], [0.5, 0.75], [0, 0.5], [0, 0]]
    assert found.texts == ["strength 0.5"]
    assert (found.title, found.titles) == ("Scores", ("strength", "fraction"))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["AUC", "accuracy"]
    assert str(lines()).splitlines()[:3] == [
        "Scores",
        "strength   AUC  accuracy  from    to",
        "      −2   0.5         1  0.75     1",
    ]
    many = range(200)
    band = viz.curve(many, {"a": many}, ranges={"a": [many, many]}, log=True, labels=many)
    axes = Figure().subplots()
    band.plot(axes)
    assert axes.get_yscale() == "log"
    assert len(axes.collections) == 1  # a band
    assert len(axes.get_xticklabels()) < 60
    for values, wanted in (([0.02, 3e4], ["10⁻¹", "10⁰", "10⁴"]), ([20, 50], ["20", "30"])):
        (_, axes), *_ = [viz.curve([0, 1], {"a": values}, log=True)._new(Figure)]
        axes[0].figure.draw_without_rendering()
        ticks = [text.get_text() for text in axes[0].get_yticklabels(which="both")]
        assert set(wanted) <= set(ticks), ticks
        assert not [text for text in ticks if "$" in text], ticks
    axes = Figure().subplots()
    viz.curve([0], {str(n): [n] for n in range(9)}).plot(axes)
    assert [line.get_ydata().tolist() for line in axes.lines] == [[n] for n in range(9)]
    # Points at every place hide dashes: in print without colours the markers differ.
    assert len({line.get_marker() for line in axes.lines[:6]}) == 6
    assert [text.get_text() for text in axes.get_legend().get_texts()][-2:] == ["5", "3 more"]


def test_the_name_of_a_marked_place_stands_on_a_level_that_would_strike_it_through() -> None:
    # A level at the foot of the axes, one in the middle, and none.
    for level, stands in ((0.0, True), (5.0, False), (None, False)):
        axes = Figure().subplots()
        viz.curve([0, 1, 2], {"d": [0.0, 9, 10]}, marked=2, level=level).plot(axes)
        (name,) = axes.texts
        low, high = axes.get_ylim()
        assert name.xy[1] == pytest.approx((level - low) / (high - low) if stands else 0)


def test_as_many_labels_are_drawn_as_there_is_space_for() -> None:
    axes = Figure(figsize=(4, 3)).subplots()
    viz.heatmap(np.zeros((60, 300)), range(60), range(300), row_title="layer", marked=41).plot(axes)
    found = read(axes)
    assert found.y == [str(n) for n in range(0, 60, 5) if n != 40] + ["41"]
    assert found.x == [str(n) for n in range(0, 300, 20)]
    (row,) = (patch for patch in axes.patches if patch.get_width() == 300)
    assert row.get_y() == 40.5
    names = ["1", "²"] * 10  # `²` is a digit, and no number
    assert "²" in drawn(viz.heatmap(np.zeros((20, 20)), names, names)).y


def test_texts_are_in_their_cells() -> None:
    texts = [["a", "$b$"], ["", "a text that is much too long"]]
    found = drawn(viz.heatmap([[0, 1], [NAN, 2]], [0, 1], [0, 1], texts=texts, center=None))
    assert found.texts == ["a", "$b$", "", "a text that is mu…"]


@pytest.mark.parametrize("make", [some, lines])
def test_a_file_is_of_the_kind_that_its_name_says(tmp_path: Path, make: Any) -> None:
    chart = make()
    kinds = {"a.svg": b"<?xml", "a.pdf": b"%PDF", "A.PNG": b"\x89PNG", "a.html": b"<!DOCTYPE html>"}
    for name in kinds if make is lines else ("a.svg",):
        start = kinds[name]
        path = chart.save(tmp_path / name)
        assert path == tmp_path / name
        assert path.read_bytes().startswith(start)
    for name in ("a.svg", "a.pdf") if make is lines else ():  # equal charts have equal files
        assert make().encode(name[1:]) == (tmp_path / name).read_bytes()
    words = {each.text for each in ElementTree.parse(tmp_path / "a.svg").iter() if each.text}
    assert {chart.title, *("layer", "effect (nats)") * (make is some)} <= words  # text is text
    if make is lines:
        pdf = (tmp_path / "a.pdf").read_bytes()
        assert b"/Type3" not in pdf
        assert b"CIDFontType2" in pdf or b"/TrueType" in pdf
    known = r"path: expected a name that ends in \.svg, \.pdf, \.png or \.html, got "
    refused(lambda name: chart.save(tmp_path / name), ("a.gif", known + "'a.gif'"), ("a", known))
    refused(
        lambda name: viz.tokens(["a"], [1]).save(tmp_path / name),
        ("a.svg", r"path: expected a name that ends in \.html, got 'a\.svg'"),
    )


def test_a_notebook_has_an_svg_and_a_png_and_text() -> None:
    data, about = some()._repr_mimebundle_()
    assert sorted(data) == ["image/png", "image/svg+xml", "text/plain"]
    assert 150 < about["image/png"]["width"] < 500
    assert data["text/plain"] == str(some())
    assert not hasattr(some(), "_repr_html_")  # a code host would show it without colours


def test_without_matplotlib_the_numbers_are_shown_and_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = r'needs the package matplotlib: pip install "midstream\[plot\]"'
    for use in (some().plot, lambda: some().save(tmp_path / "a.png"), lambda: some().body):
        with pytest.raises(MissingExtraError, match=message):
            use()
    assert not list(tmp_path.iterdir())
    data = some()._repr_mimebundle_()
    assert list(data) == ["text/plain"]
    assert re.search(message, data["text/plain"])
    assert str(some()) in data["text/plain"]


def test_charts_are_drawn_beside_one_another_with_one_bar_for_equal_colours() -> None:
    other = viz.heatmap([[1, 2]], [0], [" a", "b"], title="More", limits=(-2, 2), **WORDS)
    further = viz.heatmap([[1, 2]], [0], [1, 2], limits=(0, 9), **WORDS)
    beyond = viz.heatmap([[9, -9]], [0], [1, 2], limits=(-2, 2), **WORDS)
    for second, bars in ((other, 1), (further, 2), (beyond, 1)):
        chart = viz.Chart.beside("Both", [some(), second])
        figure = Figure()
        axes = figure.subplots(1, 2)
        assert list(chart.plot(axes)) == list(axes)
        same(read(axes[1]).image, [[9, -9] if second is beyond else [1, 2]])
        assert len(figure.axes) == 2 + bars
    assert axes[0].images[0].colorbar.extend == "both"  # of either panel
    assert str(chart).startswith("Both\n\nEffect\n")
    refused(
        chart.plot,
        (axes[0], "ax: expected 2, one for each panel, got 1"),
        ([1, 2], "ax: expected `Axes` of matplotlib, got `int`"),
    )
    import matplotlib

    matplotlib.use("Agg")
    made = chart.plot()
    assert made.shape == (2,)
    assert made[0].figure.get_suptitle() == "Both"
    matplotlib.pyplot.close(made[0].figure)


def test_the_largest_the_smallest_and_no_numbers_are_drawn() -> None:
    largest = 1.7e308
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for numbers in ([-largest, largest], [0, largest], [2e-323, 0], [largest] * 2, [NAN, NAN]):
            axes = Figure(figsize=(2, 2)).subplots(1, 4)
            viz.curve([0, 1], {"a": numbers}).plot(axes[0])
            for each, center in zip(axes[1:], (0.0, None, 3.0), strict=True):
                found = viz.heatmap([numbers], ["a"], [0, 1], center=center, fmt=".2e")
                found.plot(each)
                for number in numbers:
                    shown = "–" if number != number else f"{number:.2e}".replace("-", "−")
                    assert shown in found.text
            axes[0].figure.savefig(io.BytesIO())
        for rows, columns in (([], ["a"]), (["a"], []), ([], [])):
            assert drawn(viz.heatmap([[] for _ in rows], rows, columns)).image is None


def test_lists_arrays_and_tensors_give_the_same_picture() -> None:
    for values in (
        [[1.5, -2.0]],
        np.array([[1.5, -2.0]], np.float16),
        torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16, requires_grad=True),
    ):
        same(drawn(viz.heatmap(values, ["r"], ["a", "b"])).image, [[1.5, -2]])


def test_hostile_text_stays_text_and_is_no_formula() -> None:
    texts = [*HOSTILE, "$\\frac{$", "\ufffe", "_"]
    first, numbers = "".join(texts), list(range(len(texts)))
    words = {"title": first, "row_title": first, "column_title": first, "value_title": first}
    grid = [[text, text] for text in texts]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        for nth, chart in enumerate((
            viz.heatmap([numbers, numbers], [first, first], texts, **words, unit=first),
            viz.heatmap([[1, 2]] * len(texts), texts, ["a", first], texts=grid, **words),
            viz.curve(
                numbers, dict.fromkeys(texts, numbers), labels=texts, title=first,
                x_title=first, y_title=first,
            ),
        )):  # fmt: skip
            page = Page(chart.encode(".html").decode())  # from the SVG
            page.check_harmless()
            if nth == 0:
                ElementTree.fromstring(chart.encode(".svg"))
            chart.plot(Figure().subplots())
    said = " ".join(each.text for each in page.all())
    assert "$\\frac{$" in said
    assert not set(said) & set("\u202e\u2066\ud800\x00\x1b\x9f\ufffe")


def test_a_page_gives_the_chart_its_fonts_and_colours_for_light_and_dark() -> None:
    page = Page(some().body)
    svg = page.one("svg", cls="chart")
    assert (svg.attributes["role"], svg.attributes["aria-label"]) == ("img", "Effect")
    assert not [each for each in page.all() if "style" in each.attributes]
    assert "var(--ink)" in {each.attributes.get("fill") for each in page.all("text")}
    assert "var(--line0)" in {each.attributes.get("stroke") for each in Page(lines().body).all()}
    assert page.one("pre", cls="numbers").text == str(some())
    ids = [each.attributes["id"] for each in page.all() if "id" in each.attributes]
    other = [e.attributes["id"] for e in Page(lines().body).all() if "id" in e.attributes]
    assert len(set(ids)) == len(ids)
    assert not set(ids) & set(other)  # two charts of a page do not refer to each other


def test_a_wrong_heatmap_is_rejected() -> None:
    right: dict[str, Any] = {"values": [[1, 2], [3, 4]], "rows": ["a", "b"], "columns": ["c", "d"]}
    refused(
        lambda given: viz.heatmap(**{**right, **given}),
        ({"values": [[1, 2]]}, r"values: expected 2 rows of 2 values, .* got shape \[1, 2\]"),
        ({"values": [[1, 2], [3]]}, "values: expected rows of numbers"),
        ({"values": [["x", 2], [3, 4]]}, "values: expected rows of numbers"),
        ({"values": [1, 2]}, r"values: expected 2 dimensions, got shape \[2\]"),
        ({"rows": "ab"}, "rows: expected a list of labels, got one `str`"),
        ({"rows": [None, "b"]}, r"rows\[0\]: expected a label, got `None`"),
        ({"fmt": "q"}, "fmt: expected a format such as '.2f', got 'q'"),
        ({"center": "x"}, "center: expected a number, got `str`"),
        ({"center": NAN}, "center: expected a finite number, got nan"),
        ({"limits": (1, 1)}, r"limits: expected low < high, got \(1, 1\)"),
        ({"limits": 3}, r"limits: expected a pair \(low, high\), got 3"),
        ({"texts": [["a", "b"]]}, "texts: expected 2 rows of 2 texts, as `values` has"),
        ({"marked": 2}, "marked: expected an index of `rows`, 0 to 1, got 2"),
    )
    for rows, more, most in ((100, {"texts": [[""] * 201] * 100}, 20_000), (5000, {}, 1_000_000)):
        with pytest.raises(SpecError, match=f"values: {rows * 201} cells, and a .* at most {most}"):
            viz.heatmap(np.zeros((rows, 201)), range(rows), range(201), **more)


def test_a_wrong_curve_is_rejected() -> None:
    ascend = "x: expected one or more finite numbers that ascend"
    refused(
        lambda given: viz.curve(*given[:2], **dict(given[2:])),
        (([], {"a": []}), ascend),
        (([0, 0], {"a": [1, 2]}), ascend),
        (([0, NAN], {"a": [1, 2]}), ascend),
        (([0, 1e308], {"a": [1, 2]}), r"x: expected numbers within ±1e\+300, got 1e\+308"),
        (([0, 1], {"a": [1]}), r"series\['a'\]: expected 2 values, as `x` has, got 1"),
        (([0], {"a": [1]}, ("labels", "ab".__iter__())), "labels: expected 1, as `x` has, got 2"),
        (([0], {"a": [1]}, ("ranges", {"b": [[1], [1]]})), r"ranges\['b'\]: .* no such line; .* a"),
        (([0], {"a": [1]}, ("ranges", {"a": [[1, 1]]})), r"ranges\['a'\]: expected \[2, 1\]"),
        (([0], {"a": [1]}, ("ranges", {"a": [[2], [3]]})), "expected lowest ≤ value ≤ highest"),
    )
