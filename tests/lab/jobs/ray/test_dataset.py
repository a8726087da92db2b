"""Columns of a capture in a pipeline, without Ray: cells of one column are of one width."""

import asyncio

import numpy as np
import pytest
from lab.jobs.fakes import LAYERS, WIDE_ORIGIN, FakeEngine, job, tokens_of, vector

from midstream.lab.jobs.ray.dataset import _Capturer


class Wide(FakeEngine):
    origin = WIDE_ORIGIN


@pytest.mark.parametrize(("engine", "widths"), [(FakeEngine, (8, 8)), (Wide, (8, 12))])
def test_a_tap_has_rows_of_its_width_also_where_there_are_none(tmp_path, engine, widths):
    capturer = _Capturer(job(tmp_path), engine, str(tmp_path), {})
    texts = ["hello", "too long", "to you"]

    async def batches():
        return [batch async for batch in capturer({"text": np.array(texts, dtype=object)})]

    (batch,) = asyncio.run(batches())
    assert [bool(reason) for reason in batch["error"]] == [False, True, False]
    for layer, width in zip(LAYERS, widths, strict=True):
        cells = batch[f"resid_post.{layer}"]
        assert [cell.shape for cell in cells] == [(1, width), (0, width), (1, width)]
        for text, cell in zip(texts, cells, strict=True):
            place = len(text) - 1
            expected = vector(tokens_of(text)[place], place, layer, width).numpy()
            assert not len(cell) or np.array_equal(cell[0], expected)
