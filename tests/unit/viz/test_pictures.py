"""Pictures of text: every value is there, and hostile text stays text."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.refusals import refused
from unit.viz.pages import HOSTILE, Page

from midstream import viz
from midstream.errors import SpecError
from midstream.viz.markup import escape, visible

NAN = float("nan")


def every_kind(texts: list[str]) -> list[viz.Picture]:
    """A text and answers that have these texts wherever one can be."""
    first, numbers = texts[0], range(len(texts))
    return [
        viz.tokens(texts, list(numbers), title=first, unit=first),
        viz.answers(
            dict(enumerate(texts)), prompt=first, notes=dict(enumerate(texts)), title=first
        ),
    ]


def test_hostile_text_stays_text_in_every_place() -> None:
    for turn in range(len(HOSTILE)):
        for picture in every_kind(HOSTILE[turn:] + HOSTILE[:turn]):
            check_harmless(picture)


def check_harmless(picture: viz.Picture) -> None:
    page = Page(picture._repr_mimebundle_()["text/html"])
    page.check_harmless()
    assert {each.name for each in page.all()} <= {
        *("div", "style", "figure", "figcaption", "span", "i", "p", "strong"),
        *("details", "summary", "pre"),
    }
    assert not page.all("script")
    said = " ".join([each.text for each in page.all()] + [str(e.attributes) for e in page.all()])
    assert "alert(1)" in said  # it is shown, as text
    assert not set(said) & set("\u202e\u2066\ud800\x00\x1b\x9f")
    str(picture)


def test_a_saved_page_allows_only_its_own_style(tmp_path: Path) -> None:
    for picture in every_kind(["a", "<b>"]):
        path = picture.save(tmp_path / "picture.html")
        assert path == tmp_path / "picture.html"
        page = Page(path.read_text(encoding="utf-8"))
        page.check_harmless()
        metas = [each.attributes for each in page.all("meta")]
        (policy,) = [meta["content"] for meta in metas if "http-equiv" in meta]
        sources = dict(part.split(maxsplit=1) for part in policy.split("; "))
        assert sources["default-src"] == sources["base-uri"] == sources["form-action"] == "'none'"
        digest = hashlib.sha256(page.one("style").text.encode()).digest()
        assert sources["style-src"] == f"'sha256-{base64.b64encode(digest).decode()}'"
        assert "script-src" not in sources
        assert page.one("body").classes == {"midstream"}


def test_tokens_are_one_text_with_a_colour_each() -> None:
    picture = viz.tokens(["The", " cat", "\n\n", " ", "\u202e"], [0, 1, -1, NAN, 0.5], unit="x")
    page = Page(picture.body)
    spans = page.all("span", cls="c")
    assert [span.text for span in spans] == ["The", " cat", "⏎\n⏎\n", " ", "\\u202e"]
    assert [" ".join(span.classes - {"c"}) for span in spans] == ["b20", "b40", "b0", "", "b30"]
    assert [span.attributes["title"] for span in spans] == [
        "'The' at 0: 0.00 x",
        "' cat' at 1: 1.00 x",
        "'⏎⏎' at 2: −1.00 x",
        "'␣' at 3: no value",
        r"'\\u202e' at 4: 0.50 x",
    ]
    assert page.one(cls="text").attributes["dir"] == "auto"
    assert "    1      1.00 x  ' cat'" in str(picture).splitlines()
    assert page.one("pre", cls="numbers").text == str(picture)  # for keyboard and touch


def test_a_legend_has_the_colours_below_the_centre_only_if_there_are_such_values() -> None:
    for values, low, count in (([0.0, 2.0], "0.0", 11), ([-1.0, 2.0], "−2.0", 21)):
        page = viz.tokens(["a", "b"], values, fmt=".1f").body
        legend = page.partition('class="legend"')[2]
        assert legend.startswith(f"><span>{low}</span>")
        assert legend.count("<i class=") == count


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
        ("\ufffe", "\\ufffe"),
        ("שלום", "שלום"),
    ):
        assert visible(token) == shown, token


def test_text_is_escaped_for_elements_and_attributes() -> None:
    assert escape("<a b='c' d=\"e\">&") == "&lt;a b=&#x27;c&#x27; d=&quot;e&quot;&gt;&amp;"
    assert escape("\u202ea\x00\ud800\n") == "\ufffda\ufffd\ufffd\n"


@pytest.mark.engine  # starts processes
def test_texts_and_numbers_need_numpy_alone() -> None:
    code = (
        "import sys; from midstream import viz; str(viz.heatmap([[1]], ['a'], ['b']));"
        "viz.tokens(['a'], [1]).body;"
        "print(sorted({'torch', 'vllm', 'jinja2', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
