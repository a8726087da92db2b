"""`FittedProbe`: a probe fitted to labelled texts, with its scores of texts that were held out."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from midstream.errors import SpecError
from midstream.lab.fit.batches import capture_texts_async
from midstream.lab.fit.probes.estimators import KINDS
from midstream.lab.fit.probes.held_out import fit_split, splits_of
from midstream.lab.fit.probes.held_out_scores import HeldOutScores
from midstream.lab.fit.probes.intervals import Floats
from midstream.lab.fit.probes.labelled_rows import (
    LabelledRows,
    Labels,
    rows_in_memory,
    stored_rows,
)
from midstream.lab.fit.probes.recipe import Recipe
from midstream.lab.fit.probes.row_scores import score_texts
from midstream.plan.forms import LayersLike, PositionsLike
from midstream.sites import SiteName

if TYPE_CHECKING:
    from midstream.store.selection import Selection

Pool = Literal["mean", "max", "last"]
Reduce = Literal["", "mean", "last"]


@dataclass(frozen=True, eq=False)
class FittedProbe(HeldOutScores):
    """A probe that tells two classes of texts apart, and how well it does so on others.

    Scores, and all that is computed of them, are of held-out texts: of a text that the probe which
    scored it was not fitted on. Tokens of a text, and texts of a group, are held out together.

    With folds, the scores are those of a probe per fold, and `probe` is fitted to all texts: a
    threshold then is of probes that are almost this one. With a part held out, they are its own.
    """

    @staticmethod
    def fit(
        llm: Any,
        texts: Any,
        labels: Any,
        kind: Any = "logistic",
        layer: LayersLike | None = None,
        positions: PositionsLike = "last_prompt",
        site: SiteName = "resid_post",
        *,
        reduce: Reduce = "",
        pool: Pool | None = None,
        held_out: float = 5,
        groups: Any = None,
        positive: Any = None,
        name: str = "probe",
        seed: int = 0,
    ) -> FittedProbe:
        """Capture labelled texts in one batch, fit a probe, and score texts that are held out.

        Kinds, by scikit-learn on rows scaled by a `StandardScaler`, which the weights contain:

        - "linear": `LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")`.
        - "logistic": `LogisticRegression`, with C of 10⁻⁴ to 10 that has the least loss on held-out
          groups of the texts that are fitted; of more than two classes it is multinomial.
        - "mlp": `MLPClassifier` with 16 hidden units, `solver="lbfgs"`, `alpha=1.0`.
        - "attention": an attention probe, trained by torch: `AttentionFit`, which may be given too.
        - an unfitted classifier that `Probe.from_sklearn` reads; its rows are not scaled.

        Args:
            llm: an `LLM`.
            texts: texts, lists of token ids, or chats, as `Directions.fit` reads them.
            labels: a label per text: 0 or 1, a bool, or the name of a class. With more than two
                classes the kind is "linear" or "logistic", and the scores are probabilities.
            kind: see above.
            layer: the layer, or a list of layers whose vectors are joined.
            positions: which tokens are read; any form of Positions. The probe has it too. The first
                token of many models has a vector that is hundreds of times as long as others:
                `Positions(slice(1, None), phase="prompt")` leaves it out of means and of fits to
                every token.
            site: a site whose vectors are as wide as the model.
            reduce: the row of a text is the "mean" over its tokens, or the "last"; "": each token
                is a row with the label of its text.
            pool: the score of a text is the "mean", the "max" or the "last" of those of its rows;
                None: the mean, of an attention probe the last. The probe has the pool too, so that
                its score at the last token is that of the text.
            held_out: a number of folds, at most one per text or group of a class; or the share of
                the texts, below 1, that are held out of the fit.
            groups: a key per text: those of one key, such as a topic, are held out together.
                Confidence intervals take texts as independent: with groups they are too narrow.
            positive: the class that scores higher; None: the last one when sorted, as 1 and True.
            name: of the probe.
            seed: of the splits and of the network.

        Raises:
            SpecError: an argument is malformed, or a class has too few texts.
            MissingExtraError: scikit-learn is not installed.
        """
        recipe = Recipe.read(kind, reduce, pool, held_out, seed).at(layer, site, positions, name)
        known = Labels.read(labels, positive)
        outputs = recipe.capture(llm, texts, known)
        data = recipe.rows_of(llm, outputs, known, groups)
        return FittedProbe._of(data, recipe, llm)

    @staticmethod
    async def fit_async(
        llm: Any,
        texts: Any,
        labels: Any,
        kind: Any = "logistic",
        layer: LayersLike | None = None,
        positions: PositionsLike = "last_prompt",
        site: SiteName = "resid_post",
        *,
        reduce: Reduce = "",
        pool: Pool | None = None,
        held_out: float = 5,
        groups: Any = None,
        positive: Any = None,
        name: str = "probe",
        seed: int = 0,
    ) -> FittedProbe:
        """Fit as `fit` does, on an `AsyncLLM`, whose requests run concurrently. Chats are captured
        as token ids, so positions that select messages, as `Role`, are rejected.
        """
        recipe = Recipe.read(kind, reduce, pool, held_out, seed).at(layer, site, positions, name)
        known = Labels.read(labels, positive)
        recipe.check_texts(llm, texts, known)
        outputs = await capture_texts_async(llm, texts, recipe.to_capture())
        data = recipe.rows_of(llm, outputs, known, groups)
        return await asyncio.to_thread(FittedProbe._of, data, recipe)

    @staticmethod
    def from_rows(
        rows: Any,
        labels: Any,
        kind: Any = "logistic",
        layer: LayersLike | None = None,
        site: SiteName = "resid_post",
        *,
        owners: Any = None,
        reduce: Reduce = "",
        pool: Pool | None = None,
        held_out: float = 5,
        groups: Any = None,
        positive: Any = None,
        name: str = "probe",
        seed: int = 0,
    ) -> FittedProbe:
        """Fit rows in memory.

        Args:
            rows: [n, width], or of several layers [n, layers, width]; any float dtype.
            labels: a label per text, see `fit`.
            layer: the layer of the rows, or the list of the layers.
            owners: [n] integers, the text of each row, from 0; None: each row is a text.
            kind, site, reduce, pool, held_out, groups, positive, name, seed: see `fit`.

        Raises:
            SpecError, MissingExtraError: see `fit`.
        """
        recipe = Recipe.read(kind, reduce, pool, held_out, seed).at(layer, site, None, name)
        data = rows_in_memory(rows, Labels.read(labels, positive), recipe.layers, owners, groups)
        return FittedProbe._of(recipe.reduced(data), recipe)

    @staticmethod
    def from_store(
        selection: Selection,
        labels: Any,
        kind: Any = "logistic",
        *,
        reduce: Reduce = "",
        pool: Pool | None = None,
        held_out: float = 5,
        groups: Any = None,
        positive: Any = None,
        name: str = "probe",
        seed: int = 0,
    ) -> FittedProbe:
        """Fit rows of a store: each request is a text. All rows are kept in memory. The probe reads
        all tokens: `fitted.probe.replace(positions=…)` has others.

        Args:
            selection: what `store.select(…)` returned, of one site; vectors of several layers are
                joined.
            labels: "tag", the tag of each request; a dict by request; or a function of its id.
            groups: a function of a request's id that returns its key; None: a request is a group.
            kind, reduce, pool, held_out, positive, name, seed: see `fit`.

        Raises:
            SpecError, MissingExtraError: see `fit`.
            StoreError: rows are damaged.
        """
        recipe = Recipe.read(kind, reduce, pool, held_out, seed)
        data = stored_rows(selection, labels, positive, groups, reduce)
        recipe = recipe.at(list(data.layers), data.site, None, name)
        return FittedProbe._of(data, recipe)

    @staticmethod
    def _of(data: LabelledRows, recipe: Recipe, llm: Any = None) -> FittedProbe:
        splits = splits_of(data, recipe.held_out, recipe.seed)
        parts = [
            fit_split(data, split, recipe.estimator, recipe.pool, recipe.seed) for split in splits
        ]
        # With one part held out, the probe is what scored it.
        is_part = len(splits) == 1
        probe, chosen = parts[0][:2] if is_part else recipe.estimator.fit(data, recipe.seed)
        order = np.argsort(np.concatenate([split.held_out for split in splits]))
        texts = np.concatenate([split.held_out for split in splits])[order]
        scores = np.concatenate([part[2] for part in parts])[order]
        folds = np.repeat(range(len(splits)), [len(split.held_out) for split in splits])[order]
        labels = data.labels.indices[texts]
        placed = recipe.placed(probe, data)
        fitted = FittedProbe(placed, scores, labels, texts, folds, data, recipe, llm)
        info = recipe.info_of(data, chosen, fitted.summary())
        return replace(fitted, probe=placed.with_info(info))

    def decision_function(self, texts: Any) -> Floats:
        """Return the score of each text, float64 [texts], or of several classes [texts, classes].

        That is what the engine returns at the last token of a text, which is read at the same
        positions.

        Args:
            texts: texts, token ids or chats, which the engine of `fit` runs; rows [texts, layers ·
                width]; or a list of such arrays, [rows, layers · width], one for each text.

        Raises:
            SpecError: the probe was not fitted on an `LLM`, or rows have another shape.
        """
        rows, owners = self.recipe.read_rows(self.llm, texts, self.data.rows.shape[1])
        scores = score_texts(self.probe, rows, owners, self.recipe.pool)
        return scores if self.output is None else scores[:, self.output]

    def predict_proba(self, texts: Any) -> Floats:
        """Return the probability of each class, float64 [texts, 2], in the order of `info.classes`.

        It is of the map of `calibrate`; without, of the log odds that the score is for the kinds
        that have a name. Of more than two classes it is the score. Of one of them, `of(name)`, the
        second is its probability.

        Args:
            texts: see `decision_function`.

        Raises:
            SpecError: see `decision_function`; or the scores are of a classifier of your own, and
                not calibrated.
        """
        scores, calibration = self.decision_function(texts), self.info.calibration
        if scores.ndim == 2:
            return scores
        if calibration is None and self.recipe.estimator.name not in KINDS:
            raise SpecError(
                "kind",
                f"scores of {self.recipe.estimator.name} need not be log odds: use "
                "fitted.calibrate().fitted",
            )
        if calibration is not None:
            positive = calibration(scores)
        else:
            positive = scores if self.output is not None else (1 + np.tanh(scores / 2)) / 2
        return np.stack([1 - positive, positive], axis=1)

    def __repr__(self) -> str:
        counts = f"{len(self.texts)} of {len(self.data.labels)} texts held out"
        score = f"auc={self.auc}" if self.scores.ndim == 1 else f"accuracy={self.accuracy}"
        return f"FittedProbe({self.recipe.estimator.name}, {counts}, {score})"
