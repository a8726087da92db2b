"""Probes fitted to an engine's texts: rows of transformers, and the same scores on the engine."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine.asking import ask_all
from sklearn.base import clone
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from support.engines import HAS_GPU
from support.oracle_edits import EditOracle

from midstream import Probe
from midstream.errors import SpecError
from midstream.lab.fit import FittedProbe
from midstream.lab.fit.probes import AttentionFit

TOLERANCE = 5e-3 if HAS_GPU else 2e-4  # of the largest score
made = np.random.default_rng(0)
LABELS = np.tile([0, 1], 16)
# A token in the middle tells the class.
TEXTS = [
    [*made.integers(20, 190, 3 + nth % 3).tolist(), 5 + label, *made.integers(20, 190, 4).tolist()]
    for nth, label in enumerate(LABELS)
]


def reference_rows(oracle: EditOracle, site: str, layer: int) -> list[np.ndarray]:
    """The rows of each text, float64 [tokens, width]."""
    return [oracle.run(text).values[site, layer].double().numpy() for text in TEXTS]


def live(llm: Any, probe: Probe) -> np.ndarray:
    """The engine's score at the last token of each text."""
    outputs = ask_all(llm, TEXTS, 1, probes=probe)
    assert not any(output.receipt.problems for output in outputs)
    return np.array([output.probes[probe.name][-1].double().numpy() for output in outputs])


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max()


def test_the_rows_are_transformers_and_the_engines_scores_scikit_learns_decisions(wide, oracle):
    found = Probe.fit(wide, TEXTS, LABELS, "linear", 1, seed=2, name="guard", site="mlp_out")
    rows = np.stack([rows[-1] for rows in reference_rows(oracle, "mlp_out", 1)])
    error = np.abs(found.data.rows - rows).max() / np.abs(rows).max()
    assert error <= TOLERANCE
    # On the engine's rows in float64: only the probe's weights are float32.
    model = make_pipeline(
        StandardScaler(), LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")
    )
    wanted = (
        clone(model).fit(found.data.rows.astype("f8"), LABELS).decision_function(found.data.rows)
    )
    np.testing.assert_allclose(found.decision_function(TEXTS), wanted, rtol=1e-4, atol=1e-4)
    close(live(wide, found.probe), wanted)
    known = found.info
    assert (known.width, known.num_layers) == (64, 3)
    assert known.model == str(wide.model_config.model).rpartition("/")[2]
    assert found.probe.positions == Probe(np.ones(64), 1, positions="last_prompt").positions


@pytest.mark.parametrize(
    ("kind", "text_pool"), [("linear", "mean"), ("mlp", "max"), (AttentionFit(2, steps=30), None)]
)
def test_the_score_at_the_last_token_is_the_texts_score_on_transformers_rows(
    wide, oracle, kind, text_pool
):
    found = FittedProbe.fit(wide, TEXTS, LABELS, kind, 2, "prompt", pool=text_pool, held_out=0.25)
    assert len(found.data.rows) == sum(map(len, TEXTS))
    close(live(wide, found.probe), found.decision_function(reference_rows(oracle, "resid_post", 2)))
    again = found.decision_function(TEXTS)
    np.testing.assert_allclose(again[found.texts], found.scores, rtol=1e-3, atol=1e-3)


def test_means_of_several_layers_and_of_several_classes(wide, oracle):
    names = [["code", "poem", "talk"][nth % 3] for nth in range(len(TEXTS))]
    found = FittedProbe.fit(wide, TEXTS, names, "linear", 1, "prompt", held_out=3)
    close(live(wide, found.probe), found.decision_function(reference_rows(oracle, "resid_post", 1)))
    assert found.probe.classes.names == ("code", "poem", "talk")
    joined = FittedProbe.fit(
        wide, TEXTS, LABELS, "linear", [2, 0], "prompt", reduce="mean", held_out=3
    )
    assert joined.probe.layer == [0, 2]
    rows = [reference_rows(oracle, "resid_post", layer) for layer in (0, 2)]
    means = np.stack(
        [np.concatenate([part.mean(0) for part in both]) for both in zip(*rows, strict=True)]
    )
    close(live(wide, joined.probe), joined.decision_function(means))


def test_another_model_is_refused_and_positions_that_select_nothing(wide):
    found = FittedProbe.fit(wide, TEXTS, LABELS, "linear", 1, held_out=2)
    other = found.probe.with_info(replace(found.info, model="org/Large"))
    with pytest.raises(SpecError, match=r"probes: the probe was fitted on org/Large .* runs llama"):
        ask_all(wide, TEXTS[:1], 1, probes=other)
    narrow = Probe(torch.ones(32), 1).with_info(replace(found.info, width=32))
    with pytest.raises(SpecError, match=r"width 32, 3 layers\), and the engine runs .*\(width 64"):
        ask_all(wide, TEXTS[:1], 1, probes=narrow)
    for arguments, problem in (
        ({"layer": 9}, "layer: "),
        ({"layer": 1, "positions": [40]}, "positions"),
        ({"layer": 1, "site": "final_norm"}, "layer: got 1, but `final_norm`"),
    ):
        with pytest.raises(SpecError, match=problem):
            FittedProbe.fit(wide, TEXTS, LABELS, "linear", **arguments)
    with pytest.raises(SpecError, match="labels: 31 for 32 texts; give one each"):
        FittedProbe.fit(wide, TEXTS, LABELS[1:], "linear", 1)
