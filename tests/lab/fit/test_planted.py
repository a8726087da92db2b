"""Directions and their scores, on rows whose direction is known."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from unit.viz.drawn import drawn, read, same

from midstream.errors import SpecError
from midstream.lab.fit import Directions
from midstream.lab.fit.folds import Folds
from midstream.lab.fit.text_scores import TextScore

PAIRS, LAYERS, HIDDEN = 40, 3, 48
METHODS = ["mean", "pca", "lat", "logistic", "lda"]


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def planted(strength, seed=0):
    """Two classes `[PAIRS, LAYERS, HIDDEN]` with topics in common that differ at layer 1 alone."""
    topic = 3 * random(seed, PAIRS, LAYERS, HIDDEN)
    axis = torch.nn.functional.normalize(random(seed + 1, HIDDEN), dim=0)
    rows = [topic + random(seed + 2 + i, PAIRS, LAYERS, HIDDEN) for i in range(2)]
    rows[0][:, 1] += strength * axis
    return rows


@pytest.mark.parametrize("method", METHODS)
def test_class_means_project_to_one_and_minus_one_and_a_scale_of_one_joins_them(method):
    positive, negative = planted(4.0)
    found = Directions.from_rows(positive, negative, method)
    means = np.stack([positive.mean(0), negative.mean(0)], axis=1)
    wanted = np.tile([1.0, -1.0], (LAYERS, 1))
    np.testing.assert_allclose(found.project(means), wanted, atol=1e-4)
    for layer, one in enumerate(found):
        apart = (means[layer, 0] - means[layer, 1]) @ one.unit
        assert one.gap == pytest.approx(apart, rel=1e-5)
        assert apart > 0
        steer = one.steer(1.0)
        np.testing.assert_array_equal(steer.vector.numpy(), one.vector)
        probe = one.probe()
        scores = means[layer].astype("f8") @ probe.direction.numpy().astype("f8") + probe.bias
        np.testing.assert_allclose(scores, wanted[layer], atol=1e-4)
    if method == "mean":
        np.testing.assert_allclose(found.cosine(means), wanted, atol=1e-4)


def test_rows_in_bfloat16_as_lists_and_with_gradients_are_the_numbers_that_they_are():
    positive, negative = planted(30.0)
    halves = positive.bfloat16(), negative.bfloat16()
    found = Directions.from_rows(*halves)
    same = Directions.from_rows(*(half.double() for half in halves))
    np.testing.assert_array_equal(found.vectors, same.vectors)
    assert found.vectors.dtype == np.float32
    rows = random(0, 4, 2, 4)
    found = Directions.from_rows(rows + 1, rows)
    given_ = random(1, 2, 3, 4)
    wanted = found.project(given_)
    assert (found.project(given_.clone().requires_grad_()) == wanted).all()
    np.testing.assert_allclose(found.project(given_.tolist()), wanted, atol=1e-5)


def test_classes_that_coincide_give_zeros_and_no_probe_and_what_cannot_follow_infinite_perplexity():
    rows = random(0, 8, 2, 4)
    found = Directions.from_rows(rows, rows.clone(), folds=4)
    assert [(s.auc, s.accuracy, s.d_prime) for s in found.scores.values()] == [(0.5, 0.0, 0.0)] * 2
    assert (found.project(random(1, 2, 3, 4)) == 0).all()
    assert (found.cosine(random(1, 2, 3, 4)) == 0).all()
    with pytest.raises(SpecError, match="the class means are equal"):
        found[0].probe()
    with pytest.raises(SpecError, match="the vector is zero"):
        found[0].steer()
    for number in (-1000.0, -np.inf):
        assert TextScore((1,), np.array([number], np.float32)).perplexity == np.inf
    assert TextScore((1,), np.array([0.0], np.float32)).perplexity == 1.0


def test_wrong_arguments_and_layers_that_are_no_indices_are_rejected_by_name():
    rows = random(0, 4, 2, 3)
    fit = Directions.from_rows
    for given_, match in (
        ({"method": "pcs"}, r"method: expected one of .*did you mean `pca`"),
        ({"method": 3}, "method: expected one of .*, got `int`"),
        ({"folds": 1}, "folds: expected 0, or at least 2, got 1"),
        ({"folds": -1}, "folds: expected 0, or at least 2, got -1"),
        ({"seed": -1}, "seed: expected 0 or more, got -1"),
        ({"site": "resid_pst"}, "site: unknown site 'resid_pst'"),
        ({"layers": [3]}, "layers: expected 2 distinct layers"),
        ({"layers": [3, 3]}, "layers: expected 2 distinct layers"),
        ({"groups": "abcd"}, "groups: expected a list of keys, got `str`"),
        ({"groups": [1, 2, 3]}, "groups: expected 4 keys, one for each positive, got 3"),
        ({"groups": [[1], [2], [3], [4]]}, "groups: expected keys that can be hashed"),
    ):
        with pytest.raises(SpecError, match=match):
            fit(rows, rows, **{"method": "mean", **given_})
    with pytest.raises(SpecError, match=r"positive: expected real numbers .*got float32 \[2, 3\]"):
        fit(rows[0], rows)
    with pytest.raises(SpecError, match="positive: has numbers that are not finite"):
        fit(rows / 0, rows)
    with pytest.raises(SpecError, match=r"negative: its rows have layers \(0,\)"):
        fit(rows, rows[:, :1])
    with pytest.raises(SpecError, match=r"method: .pca. needs pairs, got 4 positive and 3"):
        fit(rows, rows[:3], "pca")
    with pytest.raises(SpecError, match=r"method: .lat. needs at least 3 pairs, got 2"):
        fit(rows[:2], rows[:2], "lat")
    with pytest.raises(SpecError, match="groups: the two rows of a pair must be of one group"):
        fit(rows, rows, "pca", groups=([1, 2, 3, 4], [4, 3, 2, 1]))
    rows = random(0, 4, 2, 4)
    for wrong in ([0.5, 1.7], "01", ["a", "b"], [True, False]):
        with pytest.raises(SpecError, match="^layers: expected"):
            Directions.from_rows(rows, rows, layers=wrong)
    for wrong in ({1.5: rows[:, 0]}, {"x": rows[:, 0]}):
        with pytest.raises(SpecError, match="^positive: expected `int`"):
            Directions.from_rows(wrong, wrong)
    twice = {0: rows[:, 0], "0": rows[:, 1]}
    with pytest.raises(SpecError, match="positive: expected each layer once"):
        Directions.from_rows(twice, twice)
    found = Directions.from_rows(rows + 1, rows)
    for wrong in (0.9, [0.9], "all"):
        with pytest.raises(SpecError, match="^layers: expected"):
            found.at(wrong)
    assert found.at(np.array([1])).layers == found.at(1).layers == (1,)


def test_layers_are_chosen_by_their_index():
    positive, negative = planted(30.0)
    found = Directions.from_rows(positive, negative, layers=[4, 9, 2])
    assert found.layers == (2, 4, 9)
    assert found.best_layer == 9
    np.testing.assert_allclose(found[4].vector, (positive - negative).mean(0)[0], atol=1e-6)
    few = found.at([9, 4])
    assert isinstance(few, Directions)
    assert few.layers == (4, 9)
    assert few[9].score == found[9].score
    np.testing.assert_array_equal(few[9].midpoint, found[9].midpoint)
    for layer in (3, -1, "4", True):
        with pytest.raises(SpecError, match=r"layer: expected one of \[2, 4, 9\], got"):
            found[layer]
    assert "9 *" in str(found)


def test_a_plot_has_what_the_layer_is_chosen_by_with_its_errors_over_the_folds():
    positive, negative = planted(30.0)
    found = Directions.from_rows(positive, negative, layers=[4, 9, 2])
    axes = Figure().subplots()
    assert found.plot(axes) is axes
    panel, scores = read(axes), [one.score for one in found]
    same(panel.lines["d′"], [score.d_prime for score in scores])
    assert panel.texts == [f"layer {found.best_layer}"]
    assert panel.titles == ("layer", "d′ (standard deviations)")
    assert panel.title == "mean at resid_post, held-out rows"
    (bars,) = (one for one in axes.collections if len(one.get_segments()) == 3)
    for segment, score in zip(bars.get_segments(), scores, strict=True):
        assert score.d_prime_error > 0
        same(segment[:, 1], score.d_prime + np.array([-1, 1]) * score.d_prime_error)
    unscored = Directions.from_rows(positive, negative, folds=0)
    assert "<td>2</td>" in unscored._repr_mimebundle_()["text/html"]
    with pytest.raises(SpecError, match="scores: nothing was held out"):
        unscored.plot()
    # Read from a file of an earlier release: no bars.
    plain = {layer: replace(score, d_prime_error=None) for layer, score in found.scores.items()}
    lines = drawn(replace(found, scores=plain)).lines
    assert [len(values) for values in lines.values()] == [len(v) for v in panel.lines.values()]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=9),
    st.lists(st.integers(0, 6), min_size=1, max_size=9),
    st.integers(2, 7),
    st.integers(0, 3),
)
@example([0, 1, 2, 3, 4], [0, 5], 5, 0)  # a class of two groups, one of them the other's too
@example([0, 1], [0, 2], 2, 0)
def test_both_classes_have_rows_outside_of_every_fold(positive, negative, most, seed):
    found = Folds.assign(np.array(positive), np.array(negative), most, seed)
    assert (found.count == 0) == (min(len(set(positive)), len(set(negative))) < 2)
    if not found.count:
        return
    sides = found.positive.tolist(), found.negative.tolist()
    assert all(len(set(side)) > 1 for side in sides)
    assert set(sides[0]) | set(sides[1]) == set(range(found.count))
    pairs = zip([*positive, *negative], [*sides[0], *sides[1]], strict=True)
    assert len(set(pairs)) == len({*positive, *negative}), "a group is in two folds"


def test_a_layer_at_which_no_class_varies_is_the_best():
    apart, noisy = torch.ones(6, 1, 4), torch.randn(6, 1, 4)
    found = Directions.from_rows(
        torch.cat([apart, noisy + 2], 1), torch.cat([-apart, noisy.flip(0)], 1)
    )
    assert found.scores[0].auc == 1.0
    assert found.scores[0].d_prime > 1e9 > found.scores[1].d_prime
    assert found.best_layer == 0
