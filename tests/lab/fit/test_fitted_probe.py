"""Probes fitted to rows, against scikit-learn; nothing leaks from what is held out."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.fit.test_references import fill
from sklearn.base import clone
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from support.refusals import refused_calls

from midstream import Probe
from midstream.errors import MissingExtraError, SpecError
from midstream.lab.fit import FittedProbe
from midstream.lab.fit.probes import AttentionFit
from midstream.lab.fit.probes.held_out import splits_of
from midstream.lab.fit.probes.labelled_rows import Labels, rows_in_memory
from midstream.lab.fit.probes.row_scores import score_rows
from midstream.plan.positions.positions import Positions
from midstream.plan.probe_files.info import ProbeInfo
from midstream.plan.scores.rule import NO_TOKENS
from midstream.plan.shape import ModelShape
from midstream.results.activations import Activations

SEED, TEXTS, WIDTH = 3, 60, 12
KINDS = {
    "linear": LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"),
    "mlp": MLPClassifier((16,), solver="lbfgs", alpha=1.0, max_iter=5000, random_state=SEED),
}


def planted(texts=TEXTS, width=WIDTH, strength=0.8, seed=0):
    """Rows of two classes [texts, width] of other scales, and their labels."""
    made = np.random.default_rng(seed)
    labels = np.tile([0, 1, 1], texts // 3)
    rows = made.normal(size=(texts, width)) @ (np.eye(width) + made.normal(size=(width, width)) / 9)
    rows += strength * labels[:, None] * made.normal(size=width)
    return 5 + rows * made.uniform(0.1, 10, width), labels


def decisions(model, rows):
    """`decision_function`, or the log odds of a network, float64 [rows]."""
    if hasattr(model, "decision_function"):
        return model.decision_function(rows)
    return (
        np.log(model.predict_proba(rows) @ [[0], [1]])[:, 0]
        - np.log(model.predict_proba(rows) @ [[1], [0]])[:, 0]
    )


# A network takes long to fit.
@pytest.mark.parametrize(("kind", "folds"), [("linear", 5), ("mlp", 2)])
def test_held_out_scores_are_those_of_a_cross_validation_by_scikit_learn(kind, folds):
    rows, labels = planted()
    given = {} if folds == 5 else {"held_out": folds}  # 5 by default
    found = FittedProbe.from_rows(rows, labels, kind, layer=7, seed=SEED, name="guard", **given)
    model = make_pipeline(StandardScaler(), KINDS[kind])
    wanted, folds = np.empty(TEXTS), StratifiedGroupKFold(folds, shuffle=True, random_state=SEED)
    for train, test in folds.split(rows, labels, np.arange(TEXTS)):
        wanted[test] = decisions(clone(model).fit(rows[train], labels[train]), rows[test])
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(found.scores, wanted, rtol=0, atol=2e-5 * scale)
    assert found.auc.value == pytest.approx(roc_auc_score(labels, wanted), abs=1e-12)
    np.testing.assert_array_equal(found.labels, labels)
    whole = decisions(model.fit(rows, labels), rows)
    np.testing.assert_allclose(found.decision_function(rows), whole, atol=2e-5 * scale)
    probability = model.predict_proba(rows)
    np.testing.assert_allclose(found.predict_proba(rows), probability, atol=1e-4)
    assert (found.probe.layer, found.probe.name) == (7, "guard")


def test_the_penalty_of_a_logistic_regression_is_that_of_the_least_loss_on_held_out_groups():
    rows, labels = planted()
    found = FittedProbe.from_rows(rows, labels, layer=0, held_out=2, seed=SEED)
    losses = {}
    folds = StratifiedGroupKFold(3, shuffle=True, random_state=SEED)
    for c in 10.0 ** np.arange(-4, 2):
        model = make_pipeline(StandardScaler(), LogisticRegression(C=c, max_iter=5000))
        parts = []
        for train, test in folds.split(rows, labels, np.arange(TEXTS)):
            shares = model.fit(rows[train], labels[train]).predict_proba(rows[test])
            parts.append(-np.log(shares[np.arange(len(test)), labels[test]]).mean())
        losses[c] = np.mean(parts)
    best = min(losses, key=losses.get)
    assert found.info.recipe["C"] == best
    model = make_pipeline(StandardScaler(), LogisticRegression(C=best, max_iter=5000))
    wanted = model.fit(rows, labels).decision_function(rows)
    np.testing.assert_allclose(found.decision_function(rows), wanted, atol=1e-4)


def test_layers_are_joined_and_a_classifier_of_ones_own_is_fitted_as_it_is():
    rows, labels = planted(width=8)
    ridge = RidgeClassifier(3.0)
    found = FittedProbe.from_rows(
        torch.tensor(rows).reshape(TEXTS, 2, 4), labels, ridge, layer=[9, 2], site="mlp_out"
    )
    assert (found.probe.layer, found.probe.site) == ([9, 2], "mlp_out")
    wanted = clone(ridge).fit(rows, labels).decision_function(rows)
    np.testing.assert_allclose(found.decision_function(rows), wanted, atol=1e-5)
    assert not hasattr(ridge, "coef_")
    assert (found.info.recipe["kind"], found.info.scaler) == ("RidgeClassifier", "")
    with pytest.raises(SpecError, match="RidgeClassifier need not be log odds"):
        found.predict_proba(rows)
    assert found.calibrate().fitted.predict_proba(rows).shape == (TEXTS, 2)


def test_a_network_of_ones_own_is_scored_by_its_log_odds():
    rows, labels = planted()
    network = MLPClassifier((5,), activation="tanh", solver="lbfgs", alpha=3.0, random_state=1)
    model = make_pipeline(StandardScaler(), network)
    found = FittedProbe.from_rows(rows, labels, model, layer=0, held_out=2)
    wanted = decisions(clone(model).fit(rows, labels), rows)
    np.testing.assert_allclose(found.decision_function(rows), wanted, rtol=1e-4, atol=1e-4)
    assert found.info.recipe["kind"] == "Pipeline"


def needles(texts=80, width=10, seed=0, classes=2):
    """Texts of 6 to 11 tokens, of which one tells the class: it has a mark, and the sign there."""
    made = np.random.default_rng(seed)
    owners = np.repeat(np.arange(texts), made.integers(6, 12, texts))
    labels = np.tile(np.arange(classes), texts // classes + 1)[:texts]
    rows = made.normal(size=(len(owners), width))
    for text in range(texts):
        token = made.choice(np.flatnonzero(owners == text))
        rows[token, 0] += 6
        rows[token, 1] = 6 * labels[text] - 3
    return 20 + rows * 3, labels, owners


def test_an_attention_probe_finds_the_token_that_tells_and_its_weights_are_of_plain_rows():
    rows, labels, owners = needles()
    arguments = {"layer": 5, "owners": owners, "seed": SEED, "held_out": 0.4}
    found = FittedProbe.from_rows(rows, labels, "attention", **arguments)
    assert found.auc.value > 0.9
    assert found.accuracy.value > 0.8  # so the bias is that of plain rows
    assert found.auc.value > FittedProbe.from_rows(rows, labels, "linear", **arguments).auc.value
    pool, bias = found.probe.attention_pool, found.probe.bias
    (query,), (value,) = pool.query, pool.value
    for text, score in enumerate(found.decision_function([rows[owners == n] for n in range(80)])):
        mine = rows[owners == text]
        weights = np.exp(mine @ query.numpy() - (mine @ query.numpy()).max())
        wanted = (weights / weights.sum()) @ (mine @ value.numpy()) + bias
        assert score == pytest.approx(wanted, abs=1e-5)
        _, live = found.probe.rule.follow(
            NO_TOKENS, np.stack([mine @ query.numpy(), mine @ value.numpy()], 1)
        )
        assert live[-1] == pytest.approx(score, abs=1e-5)
    short = AttentionFit(heads=2, steps=20)
    first, again = (FittedProbe.from_rows(rows, labels, short, **arguments) for _ in range(2))
    assert again.probe == first.probe != found.probe
    assert len(first.probe.attention_pool.value) == 2
    assert found.info.recipe["heads"] == 1
    assert 0 < found.info.recipe["steps"] <= 1000


def test_training_stops_at_the_least_loss_of_texts_that_are_not_trained_on():
    rows, _, owners = needles(texts=40)
    labels = np.random.default_rng(0).permutation(np.tile([0, 1], 20))
    found = FittedProbe.from_rows(rows, labels, "attention", layer=0, owners=owners, held_out=0.5)
    assert found.info.recipe["steps"] < 100  # nothing tells these labels


def test_several_classes_are_told_by_multinomial_regression_and_each_against_the_others():
    made = np.random.default_rng(0)
    labels = np.tile([0, 1, 2], 40)
    rows = made.normal(size=(120, 6)) + 1.2 * np.eye(3, 6)[labels]
    names = np.array(["code", "poem", "talk"])
    found = FittedProbe.from_rows(rows, names[labels], layer=2, held_out=2, seed=SEED)
    model = make_pipeline(
        StandardScaler(), LogisticRegression(C=found.info.recipe["C"], max_iter=5000)
    )
    wanted = model.fit(rows, labels).predict_proba(rows)
    np.testing.assert_allclose(found.predict_proba(rows), wanted, atol=1e-4)
    assert (found.probe.classes.names, found.probe.link) == (tuple(names), "softmax")
    assert found.accuracy.value == (found.scores.argmax(1) == labels).mean()
    assert found.info.scores["accuracy"] == found.accuracy.value > 0.5
    for index, name in enumerate(names):
        view = found.of(name)
        wanted_area = roc_auc_score(labels == index, found.scores[:, index])
        assert view.auc.value == pytest.approx(wanted_area, abs=1e-12)
        np.testing.assert_allclose(view.predict_proba(rows)[:, 1], wanted[:, index], atol=1e-4)
        chosen = view.threshold(0.05)
        assert chosen.fpr.value == (found.scores[labels != index, index] >= chosen.value).mean()
        assert chosen.probe.info.recipe["class"] == name
        assert view.calibrate().brier < 0.25
    curve = view.learning_curve([60])
    assert curve.aucs[0].value == pytest.approx(view.auc.value, abs=1e-9)
    refused_calls(
        (lambda: found.auc, "", "fitted.of.* is of one of 'code', 'poem', 'talk'"),
        (lambda: found.threshold(0.1), "", "several classes"),
        (lambda: found.calibrate(), "", "several classes"),
        (lambda: found.of("song"), "name", "expected one of 'code', 'poem', 'talk', got 'song'"),
        (lambda: found.of("talk").of("talk"), "name", "expected one of no class"),
    )
    assert "accuracy=" in repr(found)


@pytest.mark.parametrize(("pool", "own"), [("mean", "mean:4096"), ("max", "max"), ("last", "none")])
@pytest.mark.parametrize("classes", [2, 3])
def test_the_score_at_the_last_token_is_that_of_the_text(pool, own, classes):
    rows, labels, owners = needles(texts=60, classes=classes)
    found = FittedProbe.from_rows(rows, labels, "linear", layer=0, owners=owners, pool=pool)
    assert found.probe.pool == own
    mine = rows[owners == 7]
    if classes == 2:
        numbers = mine @ found.probe.direction.numpy() + found.probe.bias
    else:
        weights = np.stack([row.numpy() for row in found.probe.classes.weights])
        numbers = mine @ weights.T + found.probe.classes.bias.numpy()
    _, live = found.probe.rule.follow(NO_TOKENS, numbers)
    np.testing.assert_allclose(live[-1], found.decision_function([mine])[0], atol=1e-5)


def test_a_mean_of_rows_has_the_mean_of_scores_and_one_row_has_no_pool():
    rows, labels, owners = needles(texts=60)
    arguments = {"labels": labels, "layer": 0, "owners": owners, "reduce": "mean", "held_out": 0.5}
    assert FittedProbe.from_rows(rows, kind="linear", **arguments).probe.pool == "mean:4096"
    assert FittedProbe.from_rows(rows, kind="mlp", **arguments).probe.pool == "none"
    assert FittedProbe.from_rows(rows[:60], labels, "linear", layer=0).probe.pool == "none"


def tokens_of_texts(texts=40, tokens=8, width=48, seed=0):
    """Tokens that are almost the same within a text, with labels that nothing tells."""
    made = np.random.default_rng(seed)
    centers = made.normal(size=(texts, width))
    owners = np.repeat(np.arange(texts), tokens)
    rows = centers[owners] + 0.01 * made.normal(size=(len(owners), width))
    return rows, made.permutation(np.tile([0, 1], texts // 2)), owners


def test_random_labels_are_not_told_although_each_text_has_many_alike_tokens():
    areas = []
    for seed in range(4):
        rows, labels, owners = tokens_of_texts(seed=seed)
        found = FittedProbe.from_rows(rows, labels, "linear", layer=0, owners=owners, seed=seed)
        areas.append(found.auc.value)
        # The same rows, of which each is said to be a text of its own: tokens leak.
        leaking = FittedProbe.from_rows(rows, labels[owners], "linear", layer=0, seed=seed)
        assert leaking.auc.value > 0.95
    # The mean of 4 areas of 20 and 20 texts has a standard deviation of 0.05.
    assert abs(np.mean(areas) - 0.5) < 0.15, areas


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_no_group_is_both_fitted_and_held_out_and_each_text_is_held_out_once(data):
    texts = data.draw(st.integers(8, 30))
    keys = st.lists(st.integers(0, 9), min_size=texts, max_size=texts)
    groups = data.draw(st.none() | keys)
    labels = data.draw(st.lists(st.integers(0, 1), min_size=texts, max_size=texts))
    held_out = data.draw(st.integers(2, 6) | st.sampled_from([0.2, 0.5]))
    if len(set(labels)) < 2:
        return
    owners = np.sort(data.draw(st.lists(st.integers(0, texts - 1), max_size=20)) + [*range(texts)])
    rows = np.ones((len(owners), 2))
    known = rows_in_memory(rows, Labels.read(labels), (0,), owners, groups)
    try:
        splits = splits_of(known, held_out, SEED)
    except SpecError:
        return  # too few groups of a class
    for split in splits:
        assert not set(known.groups[split.fitted]) & set(known.groups[split.held_out])
        assert sorted([*split.fitted, *split.held_out]) == list(range(texts))
        assert set(known.of(split.fitted).labels.indices.tolist()) == {0, 1}
        counts = [np.isin(owners, part).sum() for part in split]
        assert [len(known.of(part).rows) for part in split] == counts
    if isinstance(held_out, int):
        assert sorted(np.concatenate([split.held_out for split in splits])) == list(range(texts))


def test_tokens_are_reduced_and_pooled_by_text_in_whatever_order_they_come():
    made = np.random.default_rng(1)
    owners = np.repeat(np.arange(30), made.integers(1, 6, 30))
    labels = np.tile([0, 1], 15)
    rows = made.normal(size=(len(owners), 4)) + labels[owners, None]
    of_text = [rows[owners == text] for text in range(30)]
    means = np.stack([part.mean(0) for part in of_text])
    lasts = np.stack([part[-1] for part in of_text])
    arguments = {"kind": "linear", "layer": 0, "held_out": 2, "seed": SEED}
    for reduce, wanted in (("mean", means), ("last", lasts)):
        found = FittedProbe.from_rows(rows, labels, owners=owners, reduce=reduce, **arguments)
        same = FittedProbe.from_rows(wanted, labels, **arguments)
        np.testing.assert_allclose(found.scores, same.scores, rtol=1e-9)
        assert found.data.digest != same.data.digest or reduce
    order = made.permutation(len(owners))
    for pool, of in (("mean", np.mean), ("max", np.max), ("last", lambda part: part[-1])):
        found = FittedProbe.from_rows(rows, labels, owners=owners, pool=pool, **arguments)
        scores = score_rows(found.probe, rows)
        wanted = [of(scores[owners == text]) for text in range(30)]
        np.testing.assert_allclose(found.decision_function(of_text), wanted, rtol=1e-9)
        if pool != "last":  # of which the order is the meaning
            mixed = FittedProbe.from_rows(
                rows[order], labels, owners=owners[order], pool=pool, **arguments
            )
            np.testing.assert_allclose(mixed.scores, found.scores, rtol=1e-6)


def test_a_part_that_is_held_out_is_scored_by_the_probe_itself():
    rows, labels = planted()
    found = FittedProbe.from_rows(rows, labels, "linear", layer=0, held_out=0.3, seed=SEED)
    assert len(found.texts) == 18
    np.testing.assert_array_equal(found.labels, labels[found.texts])
    np.testing.assert_array_equal(found.scores, found.decision_function(rows[found.texts]))
    rest = np.setdiff1d(np.arange(TEXTS), found.texts)
    model = make_pipeline(StandardScaler(), KINDS["linear"]).fit(rows[rest], labels[rest])
    np.testing.assert_allclose(
        found.scores, model.decision_function(rows[found.texts]), atol=1e-4
    )  # fmt: skip


@pytest.mark.parametrize("labels", ["tag", "dict", "function"])
def test_rows_of_a_store_are_fitted_as_they_are_in_memory(tmp_path, labels):
    rows, kinds = planted(width=16)
    rows = rows.astype(np.float32).reshape(TEXTS, 2, 8)
    upper, lower = rows[kinds == 1][:20], rows[kinds == 0]
    store = fill(tmp_path / "s", upper, lower, rows_per_request=2)
    by = {"tag": "tag", "dict": {}, "function": lambda request: request[0] == "p"}[labels]
    if labels == "dict":
        by = {request.request: request.request[0] for request in store.requests}
    found = FittedProbe.from_store(store.select(), by, "linear", seed=SEED)
    # Its requests are p0, n0, p1, …, of two rows each.
    joined = np.stack([upper.reshape(10, 2, 2, 8), lower.reshape(10, 2, 2, 8)], 1)
    wanted = FittedProbe.from_rows(
        joined.reshape(40, 2, 8), [1, 0] * 10, "linear", layer=[0, 1],
        owners=np.arange(40) // 2, seed=SEED,
    )  # fmt: skip
    np.testing.assert_allclose(found.scores, wanted.scores, rtol=1e-5, atol=1e-5)
    assert found.info.classes == {"function": ("0", "1")}.get(labels, ("n", "p"))
    assert (found.info.model, found.info.width, found.probe.layer) == ("acme/tiny", 8, [0, 1])
    thirds = FittedProbe.from_store(
        store.select(layer=1), by, "linear", groups=lambda request: int(request[1:]) // 3
    )
    assert len(set(thirds.data.groups.tolist())) == 4


class Engine:
    """An `AsyncLLM` whose row of a token is a fixed vector, and which takes its time."""

    model_config = SimpleNamespace(model="org/fake")
    info = SimpleNamespace(shape=ModelShape(2, 6, {("resid_post", 1)}))

    def __init__(self, table):
        self.table = table

    def get_tokenizer(self):
        return lambda text: {"input_ids": [ord(letter) % len(self.table) for letter in text]}

    async def generate(self, prompt, params, *, capture, edits, probes):
        ids = prompt["prompt_token_ids"]
        assert (capture.positions, edits, probes) == (Positions("last_prompt"), None, None)
        await asyncio.sleep(0.01 * (ids[-1] % 3))
        tap = "resid_post", 1
        rows, places = torch.tensor(self.table[ids[-1:]]), torch.tensor([len(ids) - 1])
        activations = Activations({tap: rows}, {tap: places}, ids)
        yield SimpleNamespace(prompt_token_ids=ids, activations=activations)


def test_a_fit_on_an_async_engine_has_each_texts_own_row():
    made = np.random.default_rng(0)
    table = made.normal(size=(40, 6)).astype(np.float32)
    texts = ["".join(made.choice(list("abcdefgh"), 5)) for _ in range(TEXTS)]
    labels = [int(text[-1] in "abcd") for text in texts]
    engine = Engine(table)
    found = asyncio.run(FittedProbe.fit_async(engine, texts, labels, "linear", 1, seed=SEED))
    rows = table[[ord(text[-1]) % 40 for text in texts]]
    wanted = FittedProbe.from_rows(rows, labels, "linear", layer=1, seed=SEED)
    np.testing.assert_allclose(found.scores, wanted.scores, rtol=1e-9)
    assert (found.info.model, found.info.width, found.info.num_layers) == ("org/fake", 6, 2)
    with pytest.raises(SpecError, match="not fitted on an LLM: give rows"):
        found.decision_function(texts)


def test_what_is_known_of_a_fit_comes_back_from_its_file(tmp_path):
    rows, labels = planted()
    names = np.where(labels, "rude", "kind").tolist()
    found = FittedProbe.from_rows(rows, names, "linear", layer=4, held_out=3, seed=SEED)
    chosen = found.calibrate().fitted.threshold(0.1)
    chosen.probe.save(tmp_path / "guard.safetensors")
    read = Probe.load(tmp_path / "guard.safetensors")
    assert (read, read.info) == (chosen.probe, chosen.probe.info)
    known = read.info
    assert known.classes == ("kind", "rude")
    assert known.threshold == chosen.value
    assert known.recipe.items() >= {
        "kind": "linear", "held_out": 3, "seed": SEED, "texts": TEXTS, "positions": None,
    }.items()  # fmt: skip
    assert known.scores["auc"] == found.auc.value
    assert known.scores["fpr_high"] == chosen.fpr.high
    assert {"brier", "ece", "tpr", "positives"} <= known.scores.keys()
    assert len(known.data_hash) == 64
    other = FittedProbe.from_rows(rows, names[::-1], "linear", layer=4, seed=SEED)
    assert other.info.data_hash != known.data_hash
    shares = found.calibrate().fitted.predict_proba(rows)[:, 1]
    np.testing.assert_allclose(known.calibration(found.decision_function(rows)), shares)
    assert set(read.diff(other.probe).fields) >= {"bias", "info.data_hash", "info.scores.auc"}


def test_labels_are_numbers_bools_and_names_and_one_class_is_the_positive_one():
    rows, labels = planted()
    arguments = {"kind": "linear", "layer": 0, "held_out": 2, "seed": SEED}
    plain = FittedProbe.from_rows(rows, labels.tolist(), **arguments)
    for values in (labels, labels == 1, torch.tensor(labels), ["b" if n else "a" for n in labels]):
        found = FittedProbe.from_rows(rows, values, **arguments)
        np.testing.assert_array_equal(found.scores, plain.scores)
    names = ["harmful" if n else "safe" for n in labels]
    found = FittedProbe.from_rows(rows, names, positive="harmful", **arguments)
    np.testing.assert_array_equal(found.scores, plain.scores)
    assert found.info.classes == ("safe", "harmful")
    swapped = FittedProbe.from_rows(rows, labels, positive=0, **arguments)
    np.testing.assert_allclose(swapped.scores, -plain.scores, rtol=1e-6, atol=1e-9)
    assert swapped.info.classes == ("1", "0")


def test_what_cannot_be_fitted_is_refused_by_its_argument(monkeypatch):
    rows, labels = planted()

    def fit(**changes):
        def call():
            arguments = {"rows": rows, "labels": labels, "kind": "linear", "layer": 0}
            return FittedProbe.from_rows(**{**arguments, **changes})

        return call

    found = fit()()
    few = [1, *[0] * (TEXTS - 1)]
    refused_calls(
        (fit(kind="svm"), "kind", "expected one of `linear`, `logistic`, .* got 'svm'"),
        (fit(kind=3), "kind", "or a classifier of scikit-learn, got `int`"),
        (fit(layer=None), "layer", "missing"),
        (fit(layer=[1, 2]), "layer", "2 layers for rows of shape"),
        (fit(layer=[1, 1]), "layer", "distinct layers"),
        (fit(site="reside"), "site", "did you mean"),
        (fit(reduce="max"), "reduce", "expected one of"),
        (fit(pool="min"), "pool", "expected one of `mean`, `max`, `last`, got 'min'"),
        (fit(kind="attention", pool="mean"), "pool", "expected one of `last`, got 'mean'"),
        (fit(kind="attention", reduce="mean"), "reduce", "weighs the rows of a text itself"),
        (fit(kind="attention", layer=[0, 1], rows=rows.reshape(-1, 2, 6)), "layer", "one layer"),
        (lambda: AttentionFit(heads=129), "heads", "at most 128"),
        (lambda: AttentionFit(learning_rate=0), "learning_rate", "a positive number, got 0"),
        (fit(held_out=1), "held_out", "at least 2 folds, or a share below 1"),
        (fit(held_out=1.5), "held_out", "expected a number between 0 and 1, got 1.5"),
        (fit(held_out=0.001), "held_out", "."),
        (fit(seed=-1), "seed", "at least 0"),
        (fit(labels=labels[1:]), "labels", "expected rows of the texts 0 to 58"),
        (fit(labels=[-1, *labels[1:]]), "labels[0]", "a whole number from 0, .* got -1"),
        (fit(labels=["a", *labels[1:]]), "labels[1]", "the name of a class, .* got 1"),
        (fit(labels=[0.5, *labels[1:]]), "labels[0]", "got `float`"),
        (fit(labels=[1, 2, 0] * 20, kind="mlp"), "kind", "mlp tells two classes, got 3"),
        (fit(labels=[1, 2, 0] * 20, positive=1), "positive", r"3 classes; fitted.of\('1'\)"),
        (fit(labels=range(TEXTS)), "labels", "at least 2 texts"),
        (fit(labels=[1] * TEXTS), "labels", "expected 2 to 256 classes, got 1: '1'"),
        (fit(labels=few), "labels", "at least 2 texts, or groups, of each class"),
        (fit(labels=few[1:] + [1], kind="logistic", held_out=2), "labels", "at least 2 texts"),
        (fit(positive="2"), "positive", "expected one of '0' and '1', got '2'"),
        (fit(groups=[1, 2]), "groups", "expected 60 keys, one for each text, got 2"),
        (fit(groups=[[1]] * TEXTS), "groups", "hashed"),
        (fit(groups=labels), "labels", "at least 2 texts, or groups"),
        (fit(owners=[0] * TEXTS), "owners", "texts 0 to 59"),
        (fit(rows=rows * np.nan), "rows", "not finite"),
        (fit(rows=rows[:, 0]), "rows", r"expected real numbers \[n, width\]"),
        (lambda: found.decision_function(rows[:, :3]), "texts[0]", "rows of 12 numbers, got"),
        (lambda: found.decision_function(["a text"]), "texts", "not fitted on an LLM: give rows"),
        (lambda: Probe.fit("gpt2", ["a"], [1], "linear", 3), "labels", "2 to 256 classes"),
        (lambda: Probe.fit("gpt2", ["a"] * 2, [1, 0], "linear", 3), "llm", "write LLM"),
        (lambda: found.by_slice(["a"]), "values", "expected 60"),
        (lambda: found.calibrate("beta"), "method", "expected one of"),
        (lambda: found.threshold(0), "fpr", "between 0 and 1"),
        (lambda: found.learning_curve([3]), "sizes[0]", "expected 4 to 48 texts, got 3"),
        (lambda: found.learning_curve([8, 49]), "sizes[1]", "expected 4 to 48 texts, got 49"),
    )  # fmt: skip
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"Probe.fit needs the package sklearn.*\[fit\]"):
        fit()()


def test_a_probe_with_another_recipe_is_not_the_same_fit():
    rows, labels = planted()
    found = FittedProbe.from_rows(rows, labels, "linear", layer=0, seed=SEED)
    again = FittedProbe.from_rows(rows, labels, "linear", layer=0, seed=SEED)
    assert (found.probe, found.info) == (again.probe, again.info)
    assert isinstance(found.info, ProbeInfo)
    other = FittedProbe.from_rows(rows, labels, "linear", layer=0, seed=SEED + 1)
    assert replace(other.info, recipe={}, scores={}) == replace(found.info, recipe={}, scores={})
    assert not np.array_equal(other.folds, found.folds)
