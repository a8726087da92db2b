"""A sink that keeps the running mean and covariance of each site and layer, in one npz file.

LLM(midstream={"sinks": {"moments": {"class": "covariance:Covariance", "path": "moments.npz"}}})
"""

from __future__ import annotations

import os

import numpy as np
import torch

from midstream.sinks import Delivery, Origin, Sink


class Covariance(Sink):
    """Writes `{site}.{layer}.mean` [hidden], `.covariance` [hidden, hidden] and `.rows`."""

    group_seconds = 1.0

    def __init__(self, path: str) -> None:
        """Args:
        path: path of the file, which is replaced by each flush.
        """
        self._path = os.path.abspath(path)
        self._sums: dict[str, torch.Tensor] = {}
        self._products: dict[str, torch.Tensor] = {}
        self._rows: dict[str, int] = {}

    def open(self, origin: Origin) -> None:
        self._width = origin.hidden_size

    def write(self, delivery: Delivery) -> None:
        zeros = torch.zeros(self._width, self._width, dtype=torch.float64)
        for (site, layer), values in delivery.activations.items():
            rows, tap = values.double(), f"{site}.{layer}"
            self._sums[tap] = self._sums.get(tap, zeros[0]) + rows.sum(dim=0)
            self._products[tap] = self._products.get(tap, zeros) + rows.T @ rows
            self._rows[tap] = self._rows.get(tap, 0) + len(rows)

    def flush(self) -> None:
        found = {}
        for tap, count in self._rows.items():
            mean = self._sums[tap] / max(count, 1)
            covariance = self._products[tap] / max(count, 1) - torch.outer(mean, mean)
            found[f"{tap}.mean"] = mean.numpy()
            found[f"{tap}.covariance"] = covariance.numpy()
            found[f"{tap}.rows"] = np.array(count)
        part = f"{self._path}.part"
        with open(part, "wb") as file:
            np.savez(file, **found)
        os.replace(part, self._path)
