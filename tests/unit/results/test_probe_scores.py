"""What a caller gets of its probes."""

import copy
import pickle
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from unit.viz.pages import Page

from midstream.errors import SpecError
from midstream.results.probe_scores import Probes


@pytest.fixture
def probes():
    return Probes(
        {"b": torch.tensor([0.5, -1.0]), "a": torch.zeros(0)},
        {"b": torch.tensor([1, 3]), "a": torch.zeros(0, dtype=torch.int64)},
        torch.tensor([10, 11, 12, 13]),
    )


def test_it_is_a_mapping_of_names_in_the_order_of_the_plan(probes):
    assert list(probes) == ["b", "a"]
    assert len(probes) == 2
    assert "a" in probes
    assert "c" not in probes
    assert probes["b"].tolist() == [0.5, -1.0]
    assert probes.get("c") is None
    assert repr(probes) == "Probes(b: 2 scores, -1 to 0.5, a: no scores)"
    assert dict(probes.items())["a"].shape == (0,)


def test_rows_from_a_row_on_are_the_last_of_all(probes):
    assert probes.positions_of("b").tolist() == [1, 3]
    assert probes.token_ids_of("a").tolist() == []
    assert probes.rows_from("b", 0) == ([0.5, -1.0], [1, 3], [11, 13])
    assert probes.rows_from("b", 1) == ([-1.0], [3], [13])
    assert probes.rows_from("b", 2) == probes.rows_from("a", 0) == ([], [], [])


class Counted(Sequence):
    """Tokens that count how many of them were read."""

    def __init__(self, tokens):
        self.tokens, self.reads = tokens, 0

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, place):
        self.reads += 1
        return self.tokens[place]


def test_of_the_tokens_of_a_long_request_only_those_of_the_asked_rows_are_read():
    tokens = Counted(range(100, 5100))
    scores, positions = torch.arange(5000.0), torch.arange(5000)
    probes = Probes({"a": scores, "b": scores}, {"a": positions, "b": positions}, tokens)
    for name in probes:
        assert probes.rows_from(name, 4998) == ([4998.0, 4999.0], [4998, 4999], [5098, 5099])
    assert tokens.reads == 4


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_has_the_tokens_whether_or_not_they_were_looked_at(again):
    scores, positions = {"a": torch.tensor([0.5, -1.0])}, {"a": torch.tensor([1, 3])}
    for is_read in (False, True):
        probes = Probes(scores, positions, [10, 11, 12, 13])
        if is_read:
            assert probes.token_ids_of("a").tolist() == [11, 13]
        found = again(probes)
        assert found.rows_from("a", 0) == ([0.5, -1.0], [1, 3], [11, 13])
        assert found.token_ids_of("a").tolist() == [11, 13]


def test_an_unknown_name_is_refused_with_those_that_there_are(probes):
    rows_from = lambda name: probes.rows_from(name, 0)  # noqa: E731
    for ask in (probes.__getitem__, probes.positions_of, probes.token_ids_of, rows_from):
        with pytest.raises(KeyError, match="there is no probe 'c'; there are b, a"):
            ask("c")


WORDS = {11: " <b>", 12: " and", 13: "\n"}
TOKENIZER = SimpleNamespace(decode=lambda ids: WORDS[ids[0]])


def test_the_picture_is_the_text_between_the_scored_tokens_coloured_by_score(probes):
    page = Page(probes.picture(TOKENIZER).body)
    page.check_harmless()
    spans = page.all("span", cls="c")
    assert [span.text for span in spans] == [" <b>", " and", "⏎\n"]
    assert [span.classes - {"c"} for span in spans] == [{"b30"}, set(), {"b0"}]
    assert [span.attributes["title"] for span in spans] == [
        "' <b>' at 1: 0.50",
        "' and' at 2: no value",
        "'⏎' at 3: −1.00",
    ]
    assert page.one("figcaption").text == "probe b"
    assert str(probes.picture(name="b")).splitlines()[1] == "    1        0.50  ' 11'"
    assert Page(probes.picture(TOKENIZER, "a").body).all("span", cls="c") == []
    with pytest.raises(KeyError, match="there is no probe 'c'"):
        probes.picture(name="c")


def several(names=("no", "yes")):
    scores = {"two": torch.tensor([[0.25, 0.75], [1.0, 0.0]]), "one": torch.tensor([2.0])}
    positions = {"two": torch.tensor([1, 3]), "one": torch.tensor([0])}
    return Probes(scores, positions, [10, 11, 12, 13], {"two": names} if names else {})


def test_the_scores_of_classes_have_a_column_for_each():
    probes = several()
    assert probes.outputs_of("two") == ("no", "yes")
    assert several(()).outputs_of("two") == ("0", "1")
    assert probes.outputs_of("one") == ()
    assert probes.rows_from("two", 1) == ([[1.0, 0.0]], [3], [13])
    assert repr(probes) == "Probes(two: 2 scores of 2 classes, 0 to 1, one: 2)"
    again = pickle.loads(pickle.dumps(probes))
    assert again.outputs_of("two") == ("no", "yes")


def test_a_picture_is_of_one_class_and_a_plot_has_a_line_for_each():
    probes = several()
    for output in ("yes", 1):
        assert "0.75" in str(probes.picture(name="two", output=output))
    axes = probes.plot()
    assert [line.get_label() for line in axes.lines][:3] == ["two: no", "two: yes", "one"]
    for name, output, words in (
        ("two", None, "no class None; it has `no`, `yes`"),
        ("two", "maybe", "no class 'maybe'"),
        ("two", 2, "no class 2"),
        ("one", "yes", "no class 'yes'; it has one score for each token"),
    ):
        with pytest.raises(SpecError, match=words):
            probes.picture(name=name, output=output)
