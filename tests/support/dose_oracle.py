"""Doses of edits by plain hooks on transformers in float32, and edits of several kinds."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from midstream import Ablate, Replace, Scale, Steer
from support.engines import HAS_GPU
from support.oracle_edits import At, EditOracle

HIDDEN = 64
TOLERANCE = 5e-4 if HAS_GPU else 1e-4


def vector(seed: int) -> torch.Tensor:
    return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed))


def assert_doses(
    output: Any, prompt: Sequence[int], edits: Sequence[At], oracle: EditOracle, cached: int = 0
) -> None:
    """Each edit's dose is that of the stream right before it, over the rows that it changed."""
    tokens = [*prompt, *output.outputs[0].token_ids][:-1]
    found = {(dose.what, dose.site, dose.layer): dose for dose in output.receipt.edited.doses}
    wanted = {}
    for number, at in enumerate(edits):
        tap = ("resid_post", at.edit.layers.indices[0])
        # As hooks of the same tap run in the order given, later ones of it see what this one did.
        before = oracle.run(tokens, edits[:number])
        row = before.values[tap].double()
        changed = oracle.run(tokens, edits[: number + 1]).values[tap].double() - row
        rows = [n for n in range(cached, len(tokens)) if at.where(n)]
        ratios = (changed.norm(dim=1) / row.norm(dim=1))[rows]
        wanted[(f"edits[{number}]", *tap)] = float(ratios.mean()), float(ratios.max()), len(rows)
    assert found.keys() == wanted.keys()
    for key, (mean, largest, count) in wanted.items():
        dose = found[key]
        assert dose.tokens == count
        assert dose.mean == pytest.approx(mean, rel=TOLERANCE, abs=1e-6)
        assert dose.largest == pytest.approx(largest, rel=TOLERANCE, abs=1e-6)


def each_kind(last: int) -> list[At]:
    """Two edits of one row, of several kinds, some of all tokens and some of a few; layers ascend,
    so that what comes later never changes what comes before.
    """
    return [
        At(Steer(vector(1), 0, scale=0.3)),
        At(Steer(vector(2), 0, scale=-0.5, positions="prompt"), lambda n: n < last),
        At(Ablate(vector(3), layer=1)),
        At(Steer(vector(4), 1, scale=0.2, positions="generated"), lambda n: n >= last),
        At(Scale(1.25, layer=1, positions=slice(2, 7)), lambda n: 2 <= n < 7),
        At(Replace(vector(5), layer=2, positions=[4]), lambda n: n == 4),
        At(Steer(vector(6), 2, scale=0.4, norm="match")),
    ]
