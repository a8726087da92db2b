"""Methods against scikit-learn, and scores against a cross-validation that is written out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.metrics import accuracy_score, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from unit.store.making import header, write
from unit.store.making import rows_of as stored_rows

from midstream.errors import SpecError
from midstream.lab.fit import Directions, estimate, samples
from midstream.lab.fit.folds import Folds
from midstream.lab.fit.moments import Moments, together
from midstream.store import Entry, TapRows, open_store

SEED = 3
METHODS = ["mean", "pca", "lat", "logistic", "lda"]
# Rows that are kept, and rows that are more than their width, which are accumulated.
SIZES = [(20, 64), (70, 16)]


def classes(count, width):
    """Two classes, [count, 2 layers, width], apart along one axis, with correlated components."""
    made = np.random.default_rng(0)
    mix = made.normal(size=(width, width)) / np.sqrt(width)
    rows = made.normal(size=(2, count, 2, width)) @ mix + made.normal(size=(count, 2, width))
    rows[0] += made.normal(size=width)
    return rows[0] + 5.0, rows[1] + 5.0


def labelled(positive, negative):
    return np.concatenate([positive, negative]), np.repeat([1, 0], [len(positive), len(negative)])


def reference(method, positive, negative, signs):
    """The direction [width] of one layer by scikit-learn, of length 1, positives higher."""
    if method == "mean":
        found = positive.mean(0) - negative.mean(0)
    elif method in ("pca", "lat"):
        found = PCA(1, svd_solver="full").fit((positive - negative) * signs[:, None]).components_[0]
    elif method == "lda":
        model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.1)
        found = model.fit(*labelled(positive, negative)).coef_[0]
    else:
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        model.fit(*labelled(positive, negative))
        found = model[1].coef_[0] / model[0].scale_
    unit = found / np.linalg.norm(found)
    return unit * np.sign((positive.mean(0) - negative.mean(0)) @ unit)


def signs_of(method, count):
    return (
        np.random.default_rng(SEED).choice([-1.0, 1.0], count)
        if method == "lat"
        else np.ones(count)
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("count", "width"), SIZES)
def test_a_direction_is_scikit_learns(method, count, width):
    positive, negative = classes(count, width)
    found = Directions.from_rows(positive, negative, method, seed=SEED)
    for layer in range(2):
        upper, lower = positive[:, layer], negative[:, layer]
        unit = reference(method, upper, lower, signs_of(method, count))
        wanted = (upper.mean(0) - lower.mean(0)) @ unit * unit
        error = np.abs(found[layer].vector - wanted).max() / np.abs(wanted).max()
        assert error <= 1e-6, error


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("count", "width"), SIZES)
def test_scores_are_those_of_fits_without_each_fold(method, count, width):
    positive, negative = classes(count, width)
    groups = np.arange(count) // 2
    found = Directions.from_rows(positive, negative, method, seed=SEED, groups=groups, folds=4)
    folds = Folds.assign(groups, groups, 4, SEED)
    assert folds.count == found.num_folds == 4
    signs = signs_of(method, count)
    for layer in range(2):
        projected = np.empty((2, count))
        for fold in range(4):
            out = folds.positive == fold
            upper, lower = positive[~out, layer], negative[~out, layer]
            unit = reference(method, upper, lower, signs[~out])
            middle, half = (upper.mean(0) + lower.mean(0)) / 2, (upper - lower).mean(0) @ unit / 2
            for side, rows in enumerate((positive, negative)):
                projected[side, out] = (rows[out, layer] - middle) @ unit / half
        score = found.scores[layer]
        wanted = metrics(projected)
        assert (score.auc, score.accuracy, score.d_prime) == pytest.approx(wanted, rel=1e-6)
        # The jackknife: the spread of what is left without each of four folds.
        rest = np.stack([metrics(projected[:, folds.positive != fold]) for fold in range(4)])
        errors = np.sqrt(3 / 4 * ((rest - rest.mean(0)) ** 2).sum(0))
        given = score.auc_error, score.accuracy_error, score.d_prime_error
        assert given == pytest.approx(errors, rel=1e-5, abs=1e-9)


def metrics(projected):
    """AUC, accuracy and d′ of projections [2 classes, rows]."""
    truth, every = np.repeat([1, 0], projected.shape[1]), projected.reshape(-1)
    d_prime = -np.diff(projected.mean(1))[0] / np.sqrt(projected.var(1, ddof=1).mean())
    return roc_auc_score(truth, every), accuracy_score(truth, every > 0), d_prime


@pytest.mark.parametrize("method", ["pca", "lat", "lda"])
def test_moments_give_what_the_rows_give(method, monkeypatch):
    positive, negative = classes(24, 64)  # fewer rows than their width, which are kept
    kept = Directions.from_rows(positive, negative, method, seed=SEED)
    monkeypatch.setattr(estimate, "_Kept", estimate._Accumulated)
    monkeypatch.setattr(samples, "BLOCK", 7)
    streamed = Directions.from_rows(positive, negative, method, seed=SEED)
    np.testing.assert_allclose(streamed.vectors, kept.vectors, rtol=1e-5, atol=1e-7)
    for layer in range(2):
        assert streamed.scores[layer].auc == kept.scores[layer].auc
        assert streamed.scores[layer].d_prime == pytest.approx(kept.scores[layer].d_prime)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 99))
@settings(max_examples=40)
def test_moments_of_parts_add_up_to_those_of_the_whole(sizes, seed):
    made = np.random.default_rng(seed)
    # Far from zero, where sums of squares would cancel.
    parts = [1e4 + made.normal(size=(size, 3)) for size in sizes]
    whole = np.concatenate(parts)
    found = together([Moments.of(part, with_scatter=True) for part in parts])
    assert found.count == len(whole)
    if len(whole):
        np.testing.assert_allclose(found.mean, whole.mean(0), rtol=1e-12)
        centred = whole - whole.mean(0)
        np.testing.assert_allclose(found.scatter, centred.T @ centred, atol=1e-6)


def test_a_group_that_leaks_is_held_out_together():
    """The classes differ by topic alone: only a fit with a topic's rows separates its others."""
    made = np.random.default_rng(0)
    topics = np.repeat(np.arange(12), 6)
    rows = [(10 * made.normal(size=(12, 1, 120)))[topics] for _ in range(2)]
    rows = [each + made.normal(size=each.shape) for each in rows]
    alone = Directions.from_rows(*rows, "lda", groups=(np.arange(72), np.arange(72) + 72))
    together_ = Directions.from_rows(*rows, "lda", groups=(topics, topics + 12))
    assert alone.scores[0].auc > 0.95
    assert together_.scores[0].auc < 0.75


def test_a_classifier_of_scikit_learn_is_a_method():
    positive, negative = classes(30, 8)
    model = make_pipeline(StandardScaler(), RidgeClassifier(alpha=3.0))
    found = Directions.from_rows(positive, negative, model)
    assert found.method == "Pipeline"
    assert not hasattr(model[1], "coef_"), "the caller's is not fitted"
    fitted = model.fit(*labelled(positive[:, 1], negative[:, 1]))
    unit = np.ravel(fitted[1].coef_) / fitted[0].scale_
    np.testing.assert_allclose(found[1].unit, unit / np.linalg.norm(unit), rtol=1e-5)


def fill(root, positive, negative, rows_per_request=1):
    """A store of two shards, whose requests `p0`, `n0`, `p1`, … have rows in order."""
    head = header(dtype="float32", hidden_size=positive.shape[2])
    entries = []
    for nth in range(len(positive) // rows_per_request):
        mine = slice(nth * rows_per_request, (nth + 1) * rows_per_request)
        for name, rows in (("p", positive), ("n", negative)):
            taps = {
                ("resid_post", layer): stored_rows(
                    torch.tensor(rows[mine, layer], dtype=torch.float32), head
                )
                for layer in range(rows.shape[1])
            }
            entries.append(Entry(request=f"{name}{nth}", prompt_tokens=99, taps=taps, tag=name))
    middle = len(entries) // 2
    write(root, entries[:middle], head)
    write(root, entries[middle:], head)
    return open_store(root)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("count", "width"), SIZES)
def test_a_fit_on_stored_rows_equals_one_on_the_rows(method, count, width, tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "BLOCK", 9)
    positive, negative = (rows.astype(np.float32) for rows in classes(count, width))
    store = fill(tmp_path / "s", positive, negative)
    found = Directions.from_store(store.select(tag="p"), store.select(tag="n"), method, seed=SEED)
    wanted = Directions.from_rows(positive, negative, method, seed=SEED)
    assert (found.layers, found.site, found.method) == ((0, 1), "resid_post", method)
    np.testing.assert_allclose(found.vectors, wanted.vectors, rtol=1e-6)
    np.testing.assert_allclose(found.midpoints, wanted.midpoints, rtol=1e-6)
    assert found.scores == wanted.scores


def test_rows_of_a_stored_request_are_held_out_together(tmp_path):
    positive, negative = (rows.astype(np.float32) for rows in classes(24, 6))
    store = fill(tmp_path / "s", positive, negative, rows_per_request=3)
    selections = store.select(tag="p"), store.select(tag="n")
    requests = np.arange(24) // 3
    found = Directions.from_store(*selections, seed=SEED)
    assert (
        found.scores == Directions.from_rows(positive, negative, groups=requests, seed=SEED).scores
    )
    found = Directions.from_store(*selections, groups=lambda name: int(name[1:]) // 2, seed=SEED)
    pairs = requests // 2
    assert found.scores == Directions.from_rows(positive, negative, groups=pairs, seed=SEED).scores
    # Without as many requests in both, each request is a group.
    few = store.select(request=[f"n{nth}" for nth in range(5)])
    found = Directions.from_store(selections[0], few, seed=SEED)
    groups = (requests, requests[:15] + 8)
    assert (
        found.scores
        == Directions.from_rows(positive, negative[:15], groups=groups, seed=SEED).scores
    )


def test_selections_that_cannot_be_fitted_are_rejected(tmp_path):
    positive, negative = (rows.astype(np.float32) for rows in classes(6, 6))
    store = fill(tmp_path / "s", positive, negative)
    both = store.select(tag="p"), store.select(tag="n")
    with pytest.raises(SpecError, match="groups: expected a function of a request's id"):
        Directions.from_store(*both, groups=[1, 2])
    with pytest.raises(SpecError, match=r"negative: its rows have layers \(1,\)"):
        Directions.from_store(both[0], store.select(tag="n", layer=1))
    with pytest.raises(SpecError, match="positive: expected rows of one site, got no rows"):
        Directions.from_store(store.select(position=50), both[1])


def test_layers_of_other_requests_are_rejected(tmp_path):
    """Their rows would be held out with those of the first layer's requests, and paired."""
    head = header(hidden_size=4, dtype="float32")
    rows = stored_rows(torch.ones(3, 4), head)
    entries = [
        Entry(request=f"{tag}{layer}", prompt_tokens=3, taps={("resid_post", layer): rows}, tag=tag)
        for tag in "pn"
        for layer in (0, 1)
    ]
    write(tmp_path / "s", entries, head)
    store = open_store(tmp_path / "s")
    both = store.select(tag="p"), store.select(tag="n")
    with pytest.raises(SpecError, match="positive: the rows at layer 1 are of other requests than"):
        Directions.from_store(*both)
    of_one = (store.select(tag=tag, layer=1) for tag in "pn")
    assert Directions.from_store(*of_one).layers == (1,)
    later = TapRows(rows.data, rows.positions + 1, rows.token_ids)
    taps = {("resid_post", 0): rows, ("resid_post", 1): later}
    apart = [replace(each, taps=taps) for each in entries]
    write(tmp_path / "t", apart, head)
    store = open_store(tmp_path / "t")
    found = Directions.from_store(store.select(tag="p"), store.select(tag="n"))
    assert found.layers == (0, 1)
