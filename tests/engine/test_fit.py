"""Directions of an engine's prompts, against fits on transformers' rows, by repeng too."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from engine.asking import ask_all
from support.engines import HAS_GPU
from support.oracle_edits import At, EditOracle
from transformers import BatchEncoding

from midstream import Capture, Directions
from midstream.errors import SpecError

TOLERANCE = 5e-4 if HAS_GPU else 1e-5
METHODS = ["mean", "pca", "lat", "logistic", "lda"]
made = np.random.default_rng(0)
PAIRS = 12
STEMS = [made.integers(3, 190, 6 + nth % 4).tolist() for nth in range(PAIRS)]
POSITIVE = [[*stem, 11, 12, 13, 50 + nth] for nth, stem in enumerate(STEMS)]
NEGATIVE = [[*stem, 21, 22, 50 + nth] for nth, stem in enumerate(STEMS)]


def reference_rows(oracle: EditOracle, prompts: list[list[int]], site: str) -> np.ndarray:
    """The last row of each prompt, [prompts, layers, width]."""
    runs = [oracle.run(prompt).values for prompt in prompts]
    rows = [[run[site, layer][-1] for layer in range(oracle.num_layers)] for run in runs]
    return np.stack([torch.stack(each).numpy() for each in rows])


def check_close(found: Directions, wanted: Directions, tolerance: float = TOLERANCE) -> None:
    """Vectors and midpoints by the length of each, and scores."""
    assert found.layers == wanted.layers
    for mine, theirs in ((found.vectors, wanted.vectors), (found.midpoints, wanted.midpoints)):
        error = np.linalg.norm(mine - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
        assert error.max() <= tolerance, error
    for layer in wanted.layers:
        mine, theirs = found.scores[layer], wanted.scores[layer]
        assert mine.auc == pytest.approx(theirs.auc, abs=2 / PAIRS**2)
        assert mine.d_prime == pytest.approx(theirs.d_prime, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_a_fit_on_prompts_equals_one_on_transformers_rows(wide, oracle, method):
    site = "resid_post" if method != "mean" else "mlp_out"
    found = Directions.fit(wide, POSITIVE, NEGATIVE, method, site=site, seed=1)
    rows = [reference_rows(oracle, prompts, site) for prompts in (POSITIVE, NEGATIVE)]
    wanted = Directions.from_rows(*rows, method, site=site, seed=1)
    # A solver that stops at a gradient, and a small gap between eigenvalues, enlarge rounding.
    check_close(found, wanted, TOLERANCE if method == "mean" else 100 * TOLERANCE)
    assert (found.site, found.method, found.model_type) == (site, method, "llama")


def test_rows_of_several_tokens_and_their_mean(wide, oracle):
    runs = [[oracle.run(p).values for p in prompts] for prompts in (POSITIVE, NEGATIVE)]
    each = [
        [torch.stack([run["resid_post", n] for n in (0, 2)], 1) for run in side] for side in runs
    ]
    found = Directions.fit(wide, POSITIVE, NEGATIVE, layers=[0, -1], positions="prompt")
    owners = tuple(np.repeat(range(PAIRS), [len(one) for one in side]) for side in each)
    stacked = [torch.cat(side) for side in each]
    check_close(found, Directions.from_rows(*stacked, layers=[0, 2], groups=owners))
    found = Directions.fit(
        wide, POSITIVE, NEGATIVE, layers=[0, 2], positions=[2, "last_prompt"], reduce="mean"
    )
    means = [torch.stack([one[[2, -1]].mean(0) for one in side]) for side in each]
    check_close(found, Directions.from_rows(*means, layers=[0, 2]))


def test_the_probe_reads_plus_and_minus_one_and_the_edit_moves_by_two(wide, oracle):
    found = Directions.fit(wide, POSITIVE, NEGATIVE, "lda")[1]
    probe = found.probe("mood", positions="last_prompt")
    for edits, moved in (None, 0.0), (found.steer(1.5), 3.0):
        outputs = ask_all(wide, POSITIVE + NEGATIVE, 1, probes=probe, edits=edits)
        scores = np.array([float(output.probes["mood"]) for output in outputs])
        assert scores[:PAIRS].mean() == pytest.approx(1 + moved, abs=1e-4)
        assert scores[PAIRS:].mean() == pytest.approx(-1 + moved, abs=1e-4)
    (output,) = ask_all(
        wide, [POSITIVE[0]], 1, edits=found.ablate(layer="all"), capture=Capture("all")
    )
    unit = torch.from_numpy(found.unit)
    assert float((output.activations["resid_post"] @ unit).abs().max()) <= 1e-4
    wanted = oracle.run(POSITIVE[0], [At(found.ablate(layer="all"))])
    difference = output.activations["resid_post", 2] - wanted.values["resid_post", 2]
    assert float(difference.abs().max()) <= 10 * TOLERANCE


class IdTokenizer:
    """Token ids written as numbers, for repeng."""

    def __call__(self, texts: list[str], **_: Any) -> BatchEncoding:
        rows = [list(map(int, text.split())) for text in texts]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        return BatchEncoding({"input_ids": ids, "attention_mask": mask})


def test_pca_is_repengs(wide: Any, oracle: EditOracle, monkeypatch: pytest.MonkeyPatch) -> None:
    # repeng 0.4 names a type that NumPy 2 has no more.
    monkeypatch.setattr(np, "float_", np.float64, raising=False)
    repeng = pytest.importorskip("repeng")
    entries = [
        repeng.DatasetEntry(" ".join(map(str, one)), " ".join(map(str, other)))
        for one, other in zip(POSITIVE, NEGATIVE, strict=True)
    ]
    theirs = repeng.ControlVector.train(oracle.model, IdTokenizer(), entries, hidden_layers=[0, 1])
    mine = Directions.fit(wide, POSITIVE, NEGATIVE, "pca", layers=[0, 1])
    for layer in (0, 1):
        # Theirs has the sign of most pairs, ours that of the class means.
        assert abs(np.dot(mine[layer].unit, theirs.directions[layer])) > 1 - 1e-5
    sys.modules.pop("repeng")


def test_prompts_that_cannot_be_fitted_are_rejected(wide):
    fit = Directions.fit
    chat = [{"role": "user", "content": "x"}]
    for given, match in (
        (("text", NEGATIVE), "positive: expected a list of prompts, got `str`"),
        ((POSITIVE, []), "negative: expected at least one prompt"),
        ((POSITIVE[0], NEGATIVE), "positive: expected a list of prompts, got one prompt"),
        ((POSITIVE, chat), "negative: expected a list of prompts, got one prompt"),
        ((POSITIVE, [chat]), "positive: expected either chats alone, or texts and token ids"),
        ((POSITIVE, NEGATIVE[:5], "pca"), "method: .pca. needs pairs, got 12 positive and 5"),
        ((POSITIVE, NEGATIVE, "pcs"), "method: expected one of"),
        ((POSITIVE, NEGATIVE, "lat", "all", "prompt"), "positions: .* one row of each prompt"),
        ((POSITIVE, NEGATIVE, "mean", [99]), "^layers: .*99"),
        ((POSITIVE, NEGATIVE, "mean", "all", 50), r"^positions"),
        ((POSITIVE, NEGATIVE, "mean", "all", "last_prompt", "embed"), "^site: embed is not tapped"),
        ((POSITIVE, NEGATIVE, "mean", "all", "last_prompt", "logits"), "^site"),
    ):
        with pytest.raises(SpecError, match=match):
            fit(wide, *given)
    with pytest.raises(SpecError, match='reduce: expected "" or "mean", got \'max\''):
        fit(wide, POSITIVE, NEGATIVE, reduce="max")
