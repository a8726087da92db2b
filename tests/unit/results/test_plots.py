"""Plots of results: each value is at its layer, token and head, under titles that name it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from unit.viz.drawn import Drawn, drawn, same

from midstream import SpecError
from midstream.results.activations import Activations
from midstream.results.probe_scores import Probes
from midstream.results.readouts.attention import AttentionRows
from midstream.results.readouts.features import FeatureRows
from midstream.results.readouts.lens import LensRows
from midstream.results.readouts.norms import NormResults, NormRows

NAN = float("nan")
WORDS = ["The", " <b>", " sat", "\n", " $"]
TOKENIZER: Any = SimpleNamespace(decode=lambda ids: WORDS[ids[0]])
FULL = [[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], [[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]]]


def attention(reduce: str, values: Any, keys: Any = None) -> AttentionRows:
    """Two queries, at positions 1 and 2, of the heads 0 and 3."""
    places = None if keys is None else torch.tensor(keys)
    return AttentionRows(reduce, torch.tensor(values), places, torch.tensor([1, 2]), (0, 3))


def has_words(found: Drawn, title: str, titles: tuple[str, str], bar: str) -> None:
    assert (found.title, found.titles, found.bar) == (title, titles, bar)


def test_attention_is_a_cell_for_each_query_and_key_or_head() -> None:
    weight = "attention weight (share)"
    found = drawn(attention("full", FULL))
    has_words(found, "attention, mean of 2 heads", ("key", "query"), weight)
    same(found.image, [[0.4, 0.3, 0.3], [0.75, 0.25, 0.0]])  # the first query is on top
    assert (found.y, found.x) == (["2", "1"], ["0", "1", "2"])
    found = drawn(attention("full", FULL), tokens=WORDS, head=3)
    assert found.title == "attention, head 3"
    assert (found.y[1], found.x[:2]) == ("1  <b>", ["0 The", "1  <b>"])
    same(found.image, [[0.6, 0.3, 0.1], [1, 0, 0]])
    with pytest.raises(SpecError, match=r"head: expected one of \[0, 3\], got 1"):
        attention("full", FULL).plot(head=1)
    hidden = -float("inf")
    found = drawn(attention("scores", [[[1.0, 2.0, hidden]] * 2, [[1.0, 2.0, 4.0]] * 2]))
    same(found.image, [[1, 2, 4], [1, 2, NAN]])
    assert found.bar == "score before the softmax (logits)"
    for reduce, bar in (("mass", "attention mass (share)"), ("entropy", "entropy (nats)")):
        found = drawn(attention(reduce, [[0.5, 1.0], [0.25, 0.75]]))
        has_words(found, f"{reduce} of attention", ("head", "query"), bar)
        same(found.image, [[0.25, 0.75], [0.5, 1]])
        assert found.x == ["0", "3"]


def test_the_keys_with_most_weight_are_a_line_for_each_query_and_head() -> None:
    keys = [[[0, 1], [0, -1]], [[2, 1], [0, 1]]]
    values = [[[0.5, 0.5], [1.0, 0.0]], [[0.5, 0.3], [0.6, 0.3]]]
    found = drawn(attention("top_keys", values, keys), tokens=WORDS)
    assert found.y[::-1][:2] == ["1  <b>, head 0", "1  <b>, head 3"]
    assert found.texts[:4] == ["0 The", "1  <b>", "0 The", ""]
    same(found.image, [[0.6, 0.3], [0.5, 0.3], [1, NAN], [0.5, 0.5]])


def norms() -> NormResults:
    rows = {
        ("resid_post", layer): NormRows(
            torch.tensor([10.0**layer, 0.0, 1e4]), torch.tensor([0, 3, 4])
        )
        for layer in range(2)
    }
    return NormResults({**rows, ("z", 1): NormRows(torch.tensor([3.0]), torch.tensor([4]))}, 2)


def test_norms_are_a_cell_for_each_layer_and_position() -> None:
    found = drawn(norms(), site="resid_post", tokens=WORDS)
    has_words(found, "norms at resid_post", ("position", "layer"), "log₁₀ of the L2 norm")
    same(found.image, [[0, NAN, 4], [1, NAN, 4]])
    assert (found.y, found.x) == (["0", "1"], ["0 The", "3 ⏎", "4  $"])
    for site in (None, "mlp_out"):
        with pytest.raises(SpecError, match=f"site: expected one of resid_post, z, got {site!r}"):
            norms().plot(site=site)
    mixed = NormResults({**norms(), ("z", 0): NormRows(torch.ones(1), torch.tensor([1]))})
    with pytest.raises(SpecError, match="the layers of z have norms at different positions"):
        mixed.plot(site="z")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_drawn_by_the_norms_of_their_rows(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    taps = {("resid_post", 0): (3, 8), ("resid_post", 1): (3, 8), ("z", 1): (3, 8)}
    values = {tap: torch.randn(size, generator=generator).to(dtype) for tap, size in taps.items()}
    places = dict.fromkeys(taps, torch.tensor([0, 2, 3]))
    made = Activations(values, places, torch.arange(4), 2)
    found = drawn(made, site="resid_post")
    expected = [values["resid_post", layer].double().norm(dim=1).log10() for layer in (0, 1)]
    same(found.image, np.stack(expected))
    assert (found.x, found.y) == (["0", "2", "3"], ["0", "1"])


def features(chosen: tuple[int, ...]) -> FeatureRows:
    """Two positions; one feature is active at the second."""
    return FeatureRows(
        torch.tensor([[7, 2], [40, -1]]),
        torch.tensor([[3.0, 1.5], [0.25, 0.0]]),
        chosen,
        torch.tensor([[1.5], [0.0]])[:, : len(chosen)],
        torch.tensor([9, 1]),
        torch.tensor([3, 4]),
        "resid_post",
        12,
    )


def test_features_are_a_cell_for_each_of_the_most_active_or_chosen_ones_and_position() -> None:
    found = drawn(features(()))
    title = "features at resid_post of layer 12"
    has_words(found, title, ("position", "feature"), "activation")
    same(found.image, [[NAN, 0.25], [1.5, NAN], [3, NAN]])  # the most active one is on top
    assert (found.y, found.x) == (["40", "2", "7"], ["3", "4"])
    found = drawn(features(()), tokens=WORDS, top=1)
    assert (found.y, found.x) == (["7"], ["3 ⏎", "4  $"])
    found = drawn(features((2,)))
    assert found.y == ["2"]
    same(found.image, [[1.5, 0.0]])
    assert features((2,)).picture(rows=slice(1)).title == f"{title}: 1 of 2 positions"


def lens() -> LensRows:
    """Two positions, two layers, a vocabulary of four; token 2 was chosen."""
    logits = torch.tensor(
        [[[0.0, 1, 2, 3], [3.0, 2, 1, 0]], [[1.0, 5, 0, 2], [0.0, 0, 9, 1]]], dtype=torch.float32
    )
    values, ids = logits.topk(2)
    ranks = 1 + (logits > logits[..., 2:3]).sum(-1, keepdim=True)
    total, places = logits.logsumexp(-1), torch.tensor([3, 7])
    return LensRows(values, ids, (2,), logits[..., 2:3], ranks, total, places, (4, 11))


def test_lens_tokens_are_by_layer_and_position_coloured_by_probability() -> None:
    found = drawn(lens(), tokenizer=TOKENIZER)
    has_words(found, "", ("position", "layer"), "probability")
    assert (found.y, found.x, found.limits) == (["4", "11"], ["3", "7"], (0, 1))
    expected = lens().logprobs[..., 0].T.exp().numpy()
    same(found.image, expected)
    assert found.texts == ["'\\n'", "' <b>'", "'The'", "' sat'"]
    found = drawn(lens().table(TOKENIZER, row=1))
    has_words(found, "position 7", ("rank of the token", "layer"), "probability")
    assert found.x == ["1", "2", "' sat'"]
    assert found.texts[2::3] == ["#4", "#1"]
    same(found.image[:, 2], [NAN, NAN])


def test_probes_are_lines_over_the_tokens() -> None:
    given = {"b": torch.tensor([0.5, -1.0]), "a": torch.zeros(0)}
    places = {"b": torch.tensor([1, 3]), "a": torch.zeros(0, dtype=torch.int64)}
    probes = Probes(given, places, torch.tensor([0, 1, 2, 3]))
    found = drawn(probes, tokenizer=TOKENIZER)
    assert (found.x, found.titles) == ([" <b>", "⏎"], ("token", "score"))
    same(found.lines["b"], [0.5, -1])
    same(found.lines["a"], [NAN, NAN])
    alone = Probes({"b": given["b"]}, places, torch.tensor([0, 1, 2, 3]))
    assert drawn(alone).titles == ("position", "score of b")
    many = {str(n): torch.tensor([float(n)]) for n in range(9)}
    axes = Figure().subplots()
    Probes(many, dict.fromkeys(many, torch.tensor([2])), [0, 1, 2]).plot(axes)
    assert [line.get_ydata().tolist() for line in axes.lines] == [[n] for n in range(9)]
    assert Probes({}, {}, [])._repr_mimebundle_() == {"text/plain": "Probes()"}


def test_notebooks_show_a_chart_or_why_there_is_none() -> None:
    one_site = NormResults({tap: rows for tap, rows in norms().items() if tap[0] != "z"})
    for result in (attention("full", FULL), features(()), lens(), lens().table(), one_site):
        data, _ = result._repr_mimebundle_()
        assert sorted(data) == ["image/png", "image/svg+xml", "text/plain"]
    shown = norms()._repr_mimebundle_()  # of two sites
    assert shown["text/plain"].startswith(repr(norms()))
    assert "site: expected one of resid_post, z, got None" in shown["text/plain"]
