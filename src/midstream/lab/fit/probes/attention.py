"""`AttentionFit`: an attention probe, trained by torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from midstream.errors import SpecError
from midstream.lab.fit.probes.labelled_rows import LabelledRows
from midstream.plan.classifiers.attention_pool import MOST_HEADS, AttentionPool
from midstream.plan.probe import Probe
from midstream.validation import at, read_count, read_float32


@dataclass(frozen=True)
class AttentionFit:
    """How an attention probe is trained; the kind "attention" is one with these defaults.

    Its score of a text is Σ over heads of Σ_s softmax_s(⟨query, h_s⟩) ⟨value, h_s⟩, plus a bias:
    see `AttentionPool`. Adam (Kingma and Ba 2015) minimises the cross-entropy of all texts at once
    plus `weight_decay` · (‖query‖² + ‖value‖²), on rows of mean 0 and variance 1. A fifth of the
    texts, or of the groups, is not trained on: the weights are those of the step with the least
    cross-entropy of these, and training ends after `patience` steps without a lower one.

    Attributes:
        heads: number of heads, 1 to 128.
        learning_rate, weight_decay: above 0, and 0 or more.
        steps: at most so many.
        patience: steps.
    """

    heads: int = 1
    learning_rate: float = 0.01
    weight_decay: float = 0.01
    steps: int = 1000
    patience: int = 50

    def __post_init__(self) -> None:
        for name, most in (("heads", MOST_HEADS), ("steps", None), ("patience", None)):
            with at(name):
                count = read_count(getattr(self, name))
                if most is not None and count > most:
                    raise SpecError("", f"expected at most {most}, got {count}")
        for name in ("learning_rate", "weight_decay"):
            with at(name):
                number = read_float32(getattr(self, name))
                if number < 0 or (number == 0 and name == "learning_rate"):
                    raise SpecError("", f"expected a positive number, got {number:g}")

    def fit(self, data: LabelledRows, seed: int) -> tuple[Probe, dict[str, Any]]:
        """Return the probe, and the number of steps that its weights have seen."""
        if len(data.layers) > 1:
            raise SpecError("layer", "an attention probe reads one layer; fit one for each")
        mean = data.rows.mean(0, dtype=np.float64)
        spread = data.rows.std(0, dtype=np.float64)
        spread[spread == 0] = 1
        query, value, bias, step = self._trained((data.rows - mean) / spread, data, seed)
        # Of rows that are not scaled. A constant in the logits of a head changes no weight, and the
        # weights of a head add up to 1.
        value /= spread
        pool = AttentionPool(value=value, query=query / spread)
        bias -= float((value @ mean).sum())
        probe = Probe(None, data.layers[0], bias, data.site, attention_pool=pool)
        return probe, {"heads": self.heads, "steps": step}

    def _trained(self, rows: Any, data: LabelledRows, seed: int) -> tuple[Any, Any, float, int]:
        """Return queries and values, float64 [heads, width] each, the bias, and the step."""
        import torch

        count, width = len(data.labels), rows.shape[1]
        draw = torch.Generator().manual_seed(seed)
        weights = torch.randn(2 * self.heads, width, generator=draw) * 0.1 / width**0.5
        bias = torch.zeros(())
        parameters = [weights.requires_grad_(), bias.requires_grad_()]
        optimizer = torch.optim.Adam(parameters, lr=self.learning_rate)
        inputs = torch.as_tensor(rows, dtype=torch.float32)
        owners = torch.as_tensor(data.owners)
        targets = torch.as_tensor(data.labels.indices, dtype=torch.float32)
        groups = np.unique(data.groups, return_inverse=True)[1]
        tested = np.random.default_rng(seed).permutation(groups.max() + 1)[
            : (groups.max() + 1) // 5
        ]
        held = torch.as_tensor(np.isin(groups, tested))
        loss_of = torch.nn.functional.binary_cross_entropy_with_logits
        best, kept = float("inf"), (weights.detach().clone(), 0.0, 0)
        for step in range(1, self.steps + 1):
            logits, values = (inputs @ weights.T).split(self.heads, 1)
            shape = count, self.heads
            index = owners[:, None].expand_as(logits)
            # A constant for each text changes no weight, so no gradient has to pass it.
            top = torch.full(shape, -torch.inf).scatter_reduce(0, index, logits.detach(), "amax")
            shares = torch.exp(logits - top[owners])
            sums = torch.zeros(shape).index_add(0, owners, shares)
            weighted = torch.zeros(shape).index_add(0, owners, shares * values)
            scores = (weighted / sums).sum(1) + bias
            rest = held if held.any() else ~held
            loss = float(loss_of(scores[rest], targets[rest]).detach())
            if loss < best:
                best, kept = loss, (weights.detach().clone(), float(bias.detach()), step - 1)
            elif step - 1 >= kept[2] + self.patience:
                break
            optimizer.zero_grad()
            penalty = self.weight_decay * weights.square().sum()
            (loss_of(scores[~held], targets[~held]) + penalty).backward()
            optimizer.step()
        query, value = kept[0].double().numpy().reshape(2, self.heads, width)
        return query, value, kept[1], kept[2]
