"""The edits of a cell that patches one feature of a sparse autoencoder (SAE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.plan import Feature, Sites
from midstream.plan.shape import ModelShape
from midstream.plan.vectors.named_lookup import FeatureSource
from midstream.sites import Tap, show_tap


@dataclass(frozen=True)
class FeaturePatch:
    """Features of an SAE, by id, each as an edit of no layer in particular."""

    by_id: Mapping[int, Feature]

    @staticmethod
    def of(source: FeatureSource, ids: Sequence[int]) -> FeaturePatch:
        by_id = {}
        for feature_id in ids:
            try:
                weights = source.weights_of([feature_id], "set")
            except SpecError as error:
                path = "features" if error.path == "index" else "sae"
                raise SpecError(path, error.problem) from None
            by_id[feature_id] = Feature(**weights, value=0.0, layer=0)
        return FeaturePatch(by_id)

    def check_width(self, taps: frozenset[Tap], shape: ModelShape) -> None:
        """Check that the SAE reads vectors as wide as those of all cells."""
        width = next(iter(self.by_id.values())).encoder[0].size
        for tap in sorted(taps):
            if shape.width(tap) != width:
                raise SpecError(
                    "sites",
                    f"the SAE reads vectors of {width} numbers, those of {show_tap(tap)} have "
                    f"{shape.width(tap)}",
                )

    def activations(self, feature_id: int, rows: NDArray[np.float32]) -> list[float]:
        """Return the activation of a feature in each of some vectors [rows, width]."""
        feature = self.by_id[feature_id]
        preactivations = rows.astype(np.float64) @ feature.encoder[0].numpy() + feature.bias[0]
        return [
            float(activation)
            for activation in np.where(preactivations > feature.threshold[0], preactivations, 0.0)
        ]

    def edits(
        self,
        feature_id: int,
        tap: Tap,
        values: Sequence[float],
        alpha: float,
        positions: Sequence[int],
    ) -> list[Feature]:
        """Return edits that make the activation a of a feature (1 − alpha) · a + alpha · value."""
        places = [list(positions)] if len(values) == 1 else [[position] for position in positions]
        edits = []
        for value, where in zip(values, places, strict=True):
            changes = [("set", value)]
            if alpha != 1.0:
                # The second reads nothing, so that the first does not change what it does.
                changes = [("scale", 1.0 - alpha), ("add", alpha * value)]
            edits += [self._edit(feature_id, tap, mode, amount, where) for mode, amount in changes]
        return edits

    def _edit(
        self, feature_id: int, tap: Tap, mode: str, value: float, positions: list[int]
    ) -> Feature:
        feature, (site, layer) = self.by_id[feature_id], tap
        return Feature(
            feature.encoder,
            feature.decoder,
            layer,
            mode,  # type: ignore[arg-type]
            value,
            feature.bias[0],
            feature.threshold[0],
            site=Sites(site),
            positions=positions,
        )
