"""`Directions`: directions fitted to two classes of texts, or read from files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from midstream.lab.fit import files, json_form
from midstream.lab.fit.batches import capture_rows_async
from midstream.lab.fit.direction_set import DirectionSet
from midstream.lab.fit.estimate import Estimate
from midstream.lab.fit.hub_files import DirectionsFiles
from midstream.lab.fit.prompts import capture_rows, read_capture, read_classes
from midstream.lab.fit.train import FitOptions, PromptFit, fit_rows, fit_store
from midstream.plan.forms import LayersLike, PositionsLike
from midstream.sites import SiteName

if TYPE_CHECKING:
    from midstream.store.selection import Selection


class Directions(DirectionsFiles, DirectionSet):
    """Directions between two classes by layer, fitted to their rows; see `DirectionSet` for use.

    Scores are of rows that a direction was not fitted on.
    """

    @staticmethod
    def fit(
        llm: Any,
        positive: Any,
        negative: Any = None,
        method: Any = "mean",
        layers: LayersLike = "all",
        positions: PositionsLike = "last_prompt",
        site: SiteName = "resid_post",
        *,
        reduce: str = "",
        folds: int = 5,
        groups: Any = None,
        seed: int = 0,
    ) -> Directions:
        """Capture prompts of two classes in one batch, and fit a direction at each layer.

        Methods, for class means μ₊ and μ₋:

        - "mean": μ₊ − μ₋. Rimsky et al. 2024 (arXiv:2312.06681); Marks and Tegmark 2023
          (arXiv:2310.06824), who call it mass-mean.
        - "pca": first principal component of the differences of pairs, less their mean, as repeng's
          `pca_diff` (https://github.com/vgel/repeng).
        - "lat": the same with a random sign for each pair, so that the mean difference stays in.
          Linear artificial tomography, Zou et al. 2023 (arXiv:2310.01405).
        - "logistic": weights of scikit-learn's `LogisticRegression(max_iter=1000)` on standardised
          components (`StandardScaler`). Alain and Bengio 2016 (arXiv:1610.01644).
        - "lda": S⁻¹(μ₊ − μ₋) with S the covariance within the classes, shrunk by 0.1: Fisher 1936;
          equal to scikit-learn's `LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.1)`.
        - an unfitted classifier of scikit-learn that `Probe.from_sklearn` reads: its weights.

        Whatever the method, each vector is scaled so that its length is the distance between the
        class means along it. All sums are in float64.

        Scores are by cross-validation: each row is projected onto a direction that was fitted
        without the row's group, and the projections of all folds are scored together.

        Args:
            llm: an `LLM`.
            positive, negative: lists of prompts: texts, lists of token ids, or chats. A chat that
                ends with the assistant's turn is read up to the end of its content; after another
                turn the assistant's is begun. With as many in both, prompt i of one and prompt i of
                the other are a pair, which is held out together. Without `negative` they are pairs
                (positive, negative), or objects with these attributes, as repeng's DatasetEntry.
            method: see above. "pca" and "lat" need pairs, and one row per prompt.
            layers: any form of Layers; "all": every layer at which the site is tapped.
            positions: which tokens; any form of Positions. Each token is a row.
            site: a site whose vectors are as wide as the model.
            reduce: "mean": the row of a prompt is the mean over its tokens; "": see `positions`.
            folds: number of folds, at most one per group. 0: no scores. There are none either where
                a class has a single group.
            groups: a key per pair, or (keys of the positives, of the negatives): rows of one key,
                such as a topic, are held out together.
            seed: seed of the folds and of the signs of "lat".

        Raises:
            SpecError: an argument is malformed, or the method needs pairs.
            MissingExtraError: the method needs scikit-learn, which is not installed.
        """
        options = FitOptions.read(method, site, folds, groups, seed)
        positive, negative = read_classes(llm, positive, negative)
        read = PromptFit.read(positive, negative, options)
        capture = read_capture(layers, options.site, positions, reduce)
        classes = capture_rows(llm, positive, negative, capture)
        return Directions._of(*read.fit(llm, classes))

    @staticmethod
    async def fit_async(
        llm: Any,
        positive: Any,
        negative: Any = None,
        method: Any = "mean",
        layers: LayersLike = "all",
        positions: PositionsLike = "last_prompt",
        site: SiteName = "resid_post",
        *,
        reduce: str = "",
        folds: int = 5,
        groups: Any = None,
        seed: int = 0,
    ) -> Directions:
        """Fit as `fit` does, on an `AsyncLLM`, whose requests run concurrently. Chats are captured
        as token ids, so positions that select messages, as `Role`, are rejected.
        """
        options = FitOptions.read(method, site, folds, groups, seed)
        positive, negative = read_classes(llm, positive, negative)
        read = PromptFit.read(positive, negative, options)
        capture = read_capture(layers, options.site, positions, reduce)
        classes = await capture_rows_async(llm, positive, negative, capture)
        return Directions._of(*await asyncio.to_thread(read.fit, llm, classes))

    @staticmethod
    def from_rows(
        positive: Any,
        negative: Any,
        method: Any = "mean",
        layers: Any = None,
        site: SiteName = "resid_post",
        *,
        folds: int = 5,
        groups: Any = None,
        seed: int = 0,
    ) -> Directions:
        """Fit directions to rows in memory.

        Args:
            positive, negative: [rows, layers, width], arrays or tensors of any float dtype, or
                `{layer: [rows, width]}`. With as many in both, row i of one and row i of the other
                are a pair.
            layers: the layers of an array's second dimension; None: 0, 1, ….
            site: the site of the rows.
            method, folds, groups, seed: see `fit`.

        Raises:
            SpecError, MissingExtraError: see `fit`.
        """
        options = FitOptions.read(method, site, folds, groups, seed)
        return Directions._of(*fit_rows(positive, negative, layers, options))

    @staticmethod
    def from_store(
        positive: Selection,
        negative: Selection,
        method: Any = "mean",
        *,
        folds: int = 5,
        groups: Any = None,
        seed: int = 0,
    ) -> Directions:
        """Fit directions to rows of a store, which are read in blocks and twice.

        "mean" needs 16 bytes per fold and component; "pca", "lat" and "lda" up to 8 · width² bytes
        per fold and class, of one layer at a time; a classifier all rows of one layer.

        Args:
            positive, negative: what `store.select(…)` returned, of one site and the same layers.
            groups: a function of a request's id that returns its key, see `fit`. None: the rows of
                a request are held out together; with as many requests in both selections, and none
                in both, so are those of the k-th of each.
            method, folds, seed: see `fit`. "pca" and "lat" compare row i with row i.

        Raises:
            SpecError, MissingExtraError: see `fit`.
            StoreError: rows are damaged.
        """
        return Directions._of(*fit_store(positive, negative, method, folds, groups, seed))

    @staticmethod
    def _of(
        estimates: Mapping[int, Estimate], site: Any, method: str, folds: int, model_type: str = ""
    ) -> Directions:
        return Directions(
            np.stack([estimate.vector for estimate in estimates.values()]).astype(np.float32),
            tuple(estimates),
            site,
            np.stack([estimate.midpoint for estimate in estimates.values()]).astype(np.float32),
            MappingProxyType(
                {n: estimate.score for n, estimate in estimates.items() if estimate.score}
            ),
            method,
            folds,
            model_type,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, which `load` and `llm.vectors.register(name, path)` read.

        Its tensors are the vectors, `resid_post.15` and so on; midpoints and scores are JSON in its
        metadata.

        Raises:
            SpecError: the name does not end in .safetensors.
            OSError: the file cannot be written.
        """
        files.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Directions:
        """Read what `save` wrote, or any file of vectors of one site that `llm.vectors` reads.

        Without the metadata of `save` there are neither midpoints nor scores.

        Raises:
            SpecError: the file is missing, damaged, malicious or of another format.
        """
        return Directions(*files.load(path))

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, which `from_json` reads: the form in which a server sends a fit."""
        return json_form.to_json(self)

    @staticmethod
    def from_json(value: object) -> Directions:
        """Read what `to_json` returned.

        Raises:
            SpecError: a field is unknown, missing or malformed.
        """
        return Directions(*json_form.from_json(value))

    def to_gguf(self, path: str | os.PathLike[str], model_type: str | None = None) -> None:
        """Write a control vector of llama.cpp and repeng: tensors `direction.N` for the output of
        layer N, from 0, float32. Layer 0 cannot be steered there and is left out with a warning.

        Args:
            path: the file; one that exists is replaced.
            model_type: `controlvector.model_hint`; None: the model's type, if known.

        Raises:
            SpecError: the site is not resid_post, or layer 0 is the only layer.
            MissingExtraError: the package gguf is not installed.
        """
        hint = self.model_type if model_type is None else model_type
        files.write_gguf(self.site, self.by_layer(), path, hint)

    @staticmethod
    def from_gguf(path: str | os.PathLike[str]) -> Directions:
        """Read a control vector: `load`, for a file of this format.

        Raises:
            SpecError: it is not a control vector, or damaged.
        """
        return Directions(*files.load_gguf(path))

    @staticmethod
    def from_repeng(control_vector: Any) -> Directions:
        """Read repeng's `ControlVector`, whose directions are of `resid_post`.

        Args:
            control_vector: an object with `directions`, {layer: [width]}, and `model_type`.

        Raises:
            SpecError: another object, or a malformed direction.
        """
        return Directions(*files.of_repeng(control_vector))

    def to_repeng(self) -> dict[str, Any]:
        """Return the arguments of repeng's `ControlVector`: `ControlVector(**found.to_repeng())`.

        Raises:
            SpecError: the site is not resid_post.
        """
        files.check_site(self.site)
        return {"model_type": self.model_type, "directions": self.by_layer()}
