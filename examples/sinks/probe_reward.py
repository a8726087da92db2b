"""A sink that turns rows into rewards: the mean of a linear probe over each completion.

A training loop reads the JSON lines, or is given the sink itself and asks for its `rewards`:

rewards = ProbeReward("probe.npy", layer=12)
llm = LLM(midstream={"sinks": {"reward": rewards}})
llm.captures.set("reward", Capture(12, positions="generated"), sink="reward")
"""

from __future__ import annotations

import json
import math

import numpy as np

from midstream.sinks import Delivery, Sink


class ProbeReward(Sink):
    """Computes the mean over a completion's rows of ⟨h, v⟩, at one layer of `resid_post`."""

    def __init__(self, vector: str, layer: int, path: str = "") -> None:
        """Args:
        vector: path of an .npy file with v [hidden].
        layer: the layer.
        path: path of a file for JSON lines; empty: none.
        """
        self._vector = vector
        self._layer = layer
        self._path = path
        self._lines: list[str] = []
        self.rewards: dict[tuple[str, int], float] = {}

    def open(self, origin: object) -> None:
        self._v = np.load(self._vector, allow_pickle=False).astype(np.float64)

    def write(self, delivery: Delivery) -> None:
        rows = delivery.activations["resid_post", self._layer].double().numpy()
        reward = float((rows @ self._v).mean()) if len(rows) else math.nan
        self.rewards[delivery.request_id, delivery.completion] = reward
        line = {
            "request": delivery.request_id,
            "completion": delivery.completion,
            "text": delivery.text,
            "reward": None if math.isnan(reward) else reward,
        }
        self._lines.append(json.dumps(line) + "\n")

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        if self._path:
            with open(self._path, "a", encoding="utf-8") as file:
                file.writelines(lines)
