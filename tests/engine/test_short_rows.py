"""Rows of SmolLM2 that edits make much shorter than the stream; its first token is 22,696 long."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.asking import ask_all
from support.engines import ALL_SITES, HAS_GPU, engine
from torch import Tensor

from midstream import Capture, Replace, Scale, Steer

PROMPT = [1, 504, 3575, 282, 4649, 314, 7042]
LAYER = 20
LENGTHS = (100.0, 1.0, 0.01)
# A rounding in bfloat16 is 2⁻⁹ to 2⁻⁸ of each number; a capture rounds the row once more.
ROUNDING = {"bfloat16": 2.0**-8, "float32": 2.0**-20}


# By day without a GPU in the dtype that rounds.
NIGHT = () if HAS_GPU else (pytest.mark.nightly,)


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=NIGHT)])
def served(request: pytest.FixtureRequest, smollm2: Path) -> Iterator[tuple[Any, str]]:
    """An engine and its dtype. Without a prefix cache, as rows depend on how much was cached."""
    settings = {"dtype": request.param, "midstream": {"sites": [*ALL_SITES, "attn_in"]}}
    with engine(smollm2, enable_prefix_caching=False, enforce_eager=not HAS_GPU, **settings) as llm:
        yield llm, request.param


def rows_of(llm: Any, site: str, layer: int, edits: list[Any]) -> list[Tensor]:
    """The rows of a site for each of some edits, all in one batch, [tokens, width] each."""
    outputs = ask_all(llm, [PROMPT] * len(edits), 1, edits=edits, capture=Capture([layer], site))
    assert all(output.receipt.status == "ok" for output in outputs)
    return [output.activations[site, layer].double() for output in outputs]


@pytest.mark.model
def test_short_rows_are_what_was_asked_for_at_every_position(served):
    draw = torch.Generator().manual_seed(3)
    direction = torch.nn.functional.normalize(torch.randn(576, generator=draw), dim=0)
    llm, dtype = served
    for site in ALL_SITES:
        place = {"layer": LAYER, "site": site}
        # The edit, and what it makes of the plain row: a factor of that, and what is added.
        asked: dict[str, tuple[Any, float, Tensor | float]] = {
            "a vector": (Steer(direction, scale=5.0, **place), 1.0, 5 * direction)
        }
        for size in LENGTHS:
            row = size * direction
            asked[f"of length {size}"] = Replace(row.tolist(), **place), 0.0, row
        for factor in (0.01, 1e-6, 3.0):
            asked[f"times {factor}"] = Scale(factor, **place), factor, 0.0
        # In one batch: in half precision, rows depend on the size of the batch.
        edits = [None, *([edit] for edit, _, _ in asked.values())]
        plain, *found = rows_of(llm, site, LAYER, edits)
        assert plain[0].norm() > 20_000
        assert plain[1].norm() < 1_000
        for (name, (_, factor, added)), got in zip(asked.items(), found, strict=True):
            row = factor * plain + added
            off = (got - row).norm(dim=1) / row.norm(dim=1)
            # The row on entry, which a factor multiplies, was rounded when it was captured.
            assert float(off.max()) < 2 * ROUNDING[dtype], (site, name, off)


@pytest.mark.model
def test_what_is_ablated_to_zero_is_zero_for_the_layer_that_reads_it(served):
    """A norm would make large numbers of what rounding leaves."""
    place, zeros = {"layer": LAYER, "site": "resid_pre"}, [0.0] * 576
    edits = [[Scale(0, **place)], [Replace(zeros, **place)], [Scale(zeros, **place)]]
    for rows in rows_of(served[0], "attn_in", LAYER, edits):
        assert not rows.any()
