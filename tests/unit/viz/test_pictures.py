"""Pictures: every value is there, hostile text stays text, and keys reach every cell."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.refusals import refused
from unit.viz.pages import HOSTILE, Page

from midstream import viz
from midstream.errors import SpecError
from midstream.viz.curves import ticks
from midstream.viz.markup import escape, visible

NAN = float("nan")


def every_kind(texts: list[str]) -> dict[str, viz.Picture]:
    """A picture of each kind that has these texts wherever one can be."""
    first, numbers = texts[0], list(range(len(texts)))
    words = {"title": first, "row_title": first, "column_title": first, "unit": first}
    grid = [[text, text] for text in texts]
    return {
        "heatmap": viz.heatmap([numbers, numbers], [first, first], texts, **words),
        "texts": viz.heatmap(
            [[1, 2]] * len(texts), texts, ["a", first], texts=grid, details=grid, **words
        ),
        "tokens": viz.tokens(texts, numbers, title=first, unit=first),
        "curve": viz.curve(
            [1, 2, 4],
            {text: [1, NAN, 3] for text in texts[:6]},
            background={f"{text} behind": [0, 1, 0] for text in texts},
            title=first,
            x_title=first,
            y_title=first,
        ),
        "answers": viz.answers(
            dict(enumerate(texts)), prompt=first, notes=dict(enumerate(texts)), title=first
        ),
    }


def test_hostile_text_stays_text_in_every_place() -> None:
    for turn in range(len(HOSTILE)):
        for picture in every_kind(HOSTILE[turn:] + HOSTILE[:turn]).values():
            check_harmless(picture)


def check_harmless(picture: viz.Picture) -> None:
    page = Page(picture._repr_html_())
    page.check_harmless()
    assert {each.name for each in page.all()} <= {
        *("div", "style", "figure", "figcaption", "table", "tr", "th", "td", "span", "i", "script"),
        *("svg", "g", "rect", "line", "path", "circle", "text", "title", "details", "summary", "p"),
        "strong",
    }
    assert len(page.all("script")) == 1
    assert "alert" not in page.one("script").text
    said = " ".join([each.text for each in page.all()] + [str(e.attributes) for e in page.all()])
    assert "alert(1)" in said  # it is shown, as text
    assert not set(said) & set("\u202e\u2066\ud800\x00\x1b\x9f")
    str(picture)


def test_a_saved_page_allows_only_its_own_style_and_script(tmp_path: Path) -> None:
    for picture in every_kind(["a", "<b>"]).values():
        path = picture.save(tmp_path / "picture.html")
        assert path == tmp_path / "picture.html"
        page = Page(path.read_text(encoding="utf-8"))
        page.check_harmless()
        metas = [each.attributes for each in page.all("meta")]
        (policy,) = [meta["content"] for meta in metas if "http-equiv" in meta]
        sources = dict(part.split(maxsplit=1) for part in policy.split("; "))
        assert sources["default-src"] == sources["base-uri"] == sources["form-action"] == "'none'"
        for name, kind_of in (("style", "style-src"), ("script", "script-src")):
            digest = hashlib.sha256(page.one(name).text.encode()).digest()
            assert sources[kind_of] == f"'sha256-{base64.b64encode(digest).decode()}'"
        assert page.one("body").classes == {"midstream"}


def test_every_cell_has_a_label_and_one_is_a_tab_stop() -> None:
    roles = {"grid": "gridcell", "listbox": "option"}
    pictures = every_kind(["a", "b", "c"])
    for kind in ("heatmap", "texts", "tokens", "curve"):
        page = Page(pictures[kind].body)
        cells = page.all(cls="c")
        assert cells
        assert all(cell.attributes["aria-label"] for cell in cells)
        assert [cell for cell in cells if "tabindex" in cell.attributes] == [cells[0]]
        assert cells[0].attributes["tabindex"] == "0"
        (box,) = [each for each in page.all() if "data-columns" in each.attributes]
        assert {cell.attributes["role"] for cell in cells} == {roles[box.attributes["role"]]}
        assert len(cells) % int(box.attributes["data-columns"]) == 0
        assert page.one(cls="readout").attributes["aria-hidden"] == "true"


def test_a_heatmap_has_each_value_as_text_and_tells_its_row_and_column() -> None:
    picture = viz.heatmap(
        [[0.5, -1.25], [NAN, 2.0]],
        [11, 4],
        [" a", "\n"],
        title="Effect",
        row_title="layer",
        column_title="token",
        unit="nats",
    )
    page = Page(picture.body)
    cells = page.all("td")
    assert [cell.text for cell in cells] == ["0.50", "−1.25", "–", "2.00"]
    assert [cell.attributes["aria-label"] for cell in cells] == [
        "layer 11, token  a: 0.50 nats",
        "layer 11, token ⏎: −1.25 nats",
        "layer 4, token  a: no value",
        "layer 4, token ⏎: 2.00 nats",
    ]
    assert all(cell.attributes["title"] == cell.attributes["aria-label"] for cell in cells)
    assert [cell.classes - {"c"} for cell in cells] == [{"b25"}, {"b8"}, set(), {"b40"}]
    assert [th.text for th in page.all("th", scope="row")] == ["11", "4"]
    assert [th.text for th in page.all("th", scope="col")] == [" a", "⏎"]
    assert page.one("figcaption").text == "Effect"
    assert [each.text for each in page.one(cls="legend").children] == ["−2.00", "", "2.00 nats"]
    assert str(picture) == (
        "Effect\n"
        "layer↓ token     a      ⏎\n"
        "          11  0.50  −1.25\n"
        "           4     –   2.00"
    )  # fmt: skip


def test_colours_around_a_centre_are_symmetric_and_without_one_rise() -> None:
    def bins(**given: Any) -> list[str]:
        page = Page(viz.heatmap([[1, 2, 3, 5]], ["r"], "abcd".__iter__(), **given).body)
        return [" ".join(cell.classes - {"c"}) for cell in page.all("td")]

    assert bins(center=3) == ["b0", "b10", "b20", "b40"]
    assert bins(center=None) == ["b20", "b25", "b30", "b40"]
    assert bins(center=None, limits=(2, 3)) == ["b20", "b20", "b40", "b40"]
    assert bins(limits=(-1, 2)) == ["b30", "b40", "b40", "b40"]


def test_equal_values_have_one_colour_and_infinite_ones_those_of_the_ends() -> None:
    for value in (0.0, 7.0, -7.0):
        for center, expected in ((value, "b20"), (None, "b40")):
            page = Page(viz.heatmap([[value] * 3], ["r"], ["a", "b", "c"], center=center).body)
            assert all(cell.classes == {"c", expected} for cell in page.all("td"))
    page = Page(viz.heatmap([[float("inf"), -float("inf"), 1.0]], ["r"], ["a", "b", "c"]).body)
    assert [" ".join(cell.classes - {"c"}) for cell in page.all("td")] == ["b40", "b0", "b40"]
    assert page.all("td")[1].attributes["aria-label"] == "r, b: −inf"


LARGEST = 1.7e308


def test_the_largest_and_smallest_numbers_are_drawn() -> None:
    for numbers in ([-LARGEST, LARGEST], [0, LARGEST], [2e-323, 0], [LARGEST] * 2):
        lines = {"background": {"b": numbers}, "level": numbers[1]}
        pictures = [viz.curve([0, 1], {"a": numbers}, **lines, fmt=".2e")]
        for center in (0.0, None, 3.0):
            pictures.append(viz.heatmap([numbers], ["a"], [0, 1], center=center, fmt=".2e"))
            pictures.append(viz.tokens(["a", "b"], numbers, center=center, fmt=".2e"))
        for picture in pictures:
            for number in numbers:
                assert f"{number:.2e}".replace("-", "−") in picture.text
            assert not {"nan", "inf"} & set(re.findall(r"[a-z]+", picture.body))


def test_lists_arrays_and_tensors_give_the_same_picture() -> None:
    for values in (
        [[1.5, -2.0]],
        np.array([[1.5, -2.0]], np.float16),
        torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16, requires_grad=True),
    ):
        assert viz.heatmap(values, ["r"], ["a", "b"]) == viz.heatmap([[1.5, -2]], ["r"], ["a", "b"])


def test_small_pictures_show_numbers_and_large_ones_colours_alone() -> None:
    def style(rows: int, columns: int) -> set[str]:
        return (
            Page(viz.heatmap(np.zeros((rows, columns)), range(rows), range(columns)).body)
            .one("table")
            .classes
        )

    assert style(10, 15) == {"heat"}
    assert style(10, 16) == {"heat", "dense"}
    assert style(3, 60) == {"heat", "dense", "many"}


def test_many_numbered_rows_are_labelled_at_every_fifth_and_the_marked_one() -> None:
    page = Page(viz.heatmap(np.zeros((30, 9)), range(30), range(9), marked=7).body)
    shown = [th.text for th in page.all("th", scope="row") if not th.children]
    assert shown == ["0", "5", "7", "10", "15", "20", "25"]
    assert [row.text[:1] for row in page.all("tr", cls="marked")] == ["7"]


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
        ({"details": [["a"], ["b"]]}, "details: expected 2 rows of 2 texts"),
        ({"marked": 2}, "marked: expected an index of `rows`, 0 to 1, got 2"),
    )


def test_a_heatmap_has_a_largest_size() -> None:
    size = "values: 20100 cells, and a picture has at most 20000"
    refused(
        lambda columns: viz.heatmap(np.zeros((100, columns)), range(100), range(columns)),
        (201, size),
    )
    assert viz.heatmap(np.zeros((2, 200)), range(2), range(200)).body.count("<td") == 400


def test_an_empty_heatmap_is_a_picture() -> None:
    for rows, columns in (([], ["a"]), (["a"], []), ([], [])):
        picture = viz.heatmap([[] for _ in rows], rows, columns)
        assert Page(picture._repr_html_()).all("td") == []


def test_tokens_are_one_text_with_a_colour_each() -> None:
    picture = viz.tokens(["The", " cat", "\n\n", " ", "\u202e"], [0, 1, -1, NAN, 0.5], unit="x")
    page = Page(picture.body)
    spans = page.all("span", cls="c")
    assert [span.text for span in spans] == ["The", " cat", "⏎\n⏎\n", " ", "\\u202e"]
    assert [" ".join(span.classes - {"c"}) for span in spans] == ["b20", "b40", "b0", "", "b30"]
    assert [span.attributes["aria-label"] for span in spans] == [
        "'The' at 0: 0.00 x",
        "' cat' at 1: 1.00 x",
        "'⏎⏎' at 2: −1.00 x",
        "'␣' at 3: no value",
        r"'\\u202e' at 4: 0.50 x",
    ]
    assert page.one(cls="text").attributes["dir"] == "auto"
    assert "    1      1.00 x  ' cat'" in str(picture).splitlines()


def test_wrong_tokens_are_rejected() -> None:
    refused(
        lambda given: viz.tokens(*given),
        (("ab", [1, 2]), "texts: expected a list of `str`"),
        ((["a", 3], [1, 2]), "texts: expected a list of `str`"),
        ((["a"], [1, 2]), "values: expected 1, as `texts` has, got 2"),
    )
    refused(
        lambda positions: viz.tokens(["a"], [1], positions=positions),
        ([1, 2], "positions: expected 1, as `texts` has, got 2"),
    )


def test_a_curve_tells_all_values_of_a_place_and_breaks_at_gaps() -> None:
    picture = viz.curve(
        [-2, 0, 0.5, 4],
        {"AUC": [0.5, NAN, 0.75, 1], "accuracy": [1, 0.5, 0.25, 0]},
        background={"first": [0, 0, 0, 0]},
        title="Scores",
        x_title="strength",
        marked=0.5,
        level=0.5,
    )
    page = Page(picture.body)
    assert [band.attributes["aria-label"] for band in page.all("rect", cls="c")] == [
        "strength −2: AUC 0.5, accuracy 1, first 0",
        "strength 0: accuracy 0.5, first 0",
        "strength 0.5: AUC 0.75, accuracy 0.25, first 0",
        "strength 4: AUC 1, accuracy 0, first 0",
    ]
    chart = page.one("svg", cls="chart")
    lines = {e.attributes["class"]: e.attributes["d"] for e in chart.children if e.name == "path"}
    assert [lines[name].count("M") for name in ("back", "line0", "line1")] == [1, 2, 1]
    assert len(page.all("circle", cls="dot0")) == 3
    marked = float(page.one("line", cls="mark").attributes["x1"])
    # Halfway up the axis from −2 to 4 is 1; 0.5 lies at 5/12.
    assert marked == pytest.approx(56 + (540 - 56 - 16) * 2.5 / 6, abs=0.1)
    table = [[cell.text for cell in row.children] for row in page.all("tr")]
    assert table[0] == ["strength", "AUC", "accuracy", "first"]
    assert table[2] == ["0", "–", "0.5", "0"]
    assert str(picture).splitlines()[:3] == [
        "Scores",
        "strength   AUC  accuracy  first",
        "      −2   0.5         1      0",
    ]


def test_the_values_beside_a_curve_are_few_and_round() -> None:
    for span in (1e-6, 0.3, 0.55, 1.0, 3.3, 7.0, 42.0, 1e5):
        page = Page(viz.curve([0, 1], {"a": [0.0, span]}).body)
        labels = [text.text for text in page.all("text", cls="end")]
        assert 3 <= len(labels) <= 9, span
        assert all(len(label) <= 6 for label in labels), span
    assert ticks(0, 3e-13) == pytest.approx([n * 5e-14 for n in range(7)], rel=1e-9)
    assert "1e−13" in viz.curve([0, 1], {"KL": [0, 3e-13]}).body


def test_digits_of_other_kinds_are_labels_as_any() -> None:
    """`²` is a digit, and no number."""
    names = ["1", "²"] * 10
    assert "²" in viz.heatmap(np.zeros((20, 20)), names, names).body


def test_a_curve_of_one_place_or_of_equal_values_is_drawn() -> None:
    for x, y in (([3], [0.5]), ([0, 1], [2, 2]), ([0, 1], [0, 0]), ([0, 1], [NAN, NAN])):
        assert len(Page(viz.curve(x, {"a": y}).body).all("rect", cls="c")) == len(x)


def test_a_wrong_curve_is_rejected() -> None:
    ascend = "x: expected one or more finite numbers that ascend"
    refused(
        lambda given: viz.curve(*given),
        (([], {"a": []}), ascend),
        (([0, 0], {"a": [1, 2]}), ascend),
        (([0, NAN], {"a": [1, 2]}), ascend),
        (([0, 1e308], {"a": [1, 2]}), r"x: expected numbers within ±1e\+300, got 1e\+308"),
        (([0, 1], {"a": [1]}), r"series\['a'\]: expected 2 values, as `x` has, got 1"),
        (([0], {str(n): [1] for n in range(7)}), "series: expected at most 6 lines, got 7"),
    )


def test_answers_stand_by_rising_strength_with_their_notes() -> None:
    picture = viz.answers(
        {2: "So glad!", -0.5: "", 0: "Fine.\nThanks."}, prompt="How?", notes={2: "reads +1"}
    )
    page = Page(picture.body)
    cards = page.all(cls="answer")
    assert [card.text for card in cards] == [
        "−0.5(nothing)",
        "plainFine.\nThanks.",
        "+2reads +1So glad!",
    ]
    assert [" ".join(card.classes - {"answer"}) for card in cards] == ["b15", "b20", "b40"]
    assert page.one(cls="prompt").text == "How?"
    assert str(picture).splitlines()[0] == "“How?”"
    with pytest.raises(SpecError, match="notes: there is no completion of strength 3"):
        viz.answers({2: "x"}, notes={3: "y"})
    refused(
        viz.answers,
        ({"x": "y"}, "texts: expected a number, got `str`"),
        ({1: SimpleNamespace(outputs=[])}, r"texts\[1\]: expected .* an output of `generate`, got"),
        ({1: 2}, r"texts\[1\]: expected `str` or an output .*, got `int`"),
    )


def test_answers_of_outputs_are_their_first_completions() -> None:
    def output(*texts: str) -> SimpleNamespace:
        return SimpleNamespace(outputs=[SimpleNamespace(text=text) for text in texts])

    picture = viz.answers({1: output("Glad.", "Other."), 0: "Plain."})
    assert [card.text for card in Page(picture.body).all(cls="answer")] == [
        "plainPlain.",
        "+1Glad.",
    ]


def test_invisible_characters_of_a_token_are_shown() -> None:
    for token, shown in (
        (" Paris", " Paris"),
        ("  ", "␣␣"),
        ("a\r\n\tb", "a␍⏎⇥b"),
        ("\u200bx", "\\u200bx"),
        ("\u200d", "\\u200d"),
        ("👩\u200d🔬", "👩\u200d🔬"),
        ("\ud83d", "\\ud83d"),
        ("\x85", "\\x85"),
        ("שלום", "שלום"),
    ):
        assert visible(token) == shown, token


def test_text_is_escaped_for_elements_and_attributes() -> None:
    assert escape("<a b='c' d=\"e\">&") == "&lt;a b=&#x27;c&#x27; d=&quot;e&quot;&gt;&amp;"
    assert escape("\u202ea\x00\ud800\n") == "\ufffda\ufffd\ufffd\n"


def test_pictures_need_numpy_alone() -> None:
    code = (
        "import sys; from midstream import viz; viz.heatmap([[1]], ['a'], ['b'])._repr_html_();"
        "print(sorted({'torch', 'vllm', 'jinja2', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
