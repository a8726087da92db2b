"""Sweeps of an asynchronous engine."""

from __future__ import annotations

import asyncio
from typing import Any

from midstream import LogitDiff, SpecError
from support.engine_view import inspect

PROMPT = [5, 17, 33, 101, 8, 77, 54, 23, 9]
SOURCE = [5, 17, 33, 150, 8, 77, 54, 23, 9]
ASKED: dict[str, Any] = {
    "layers": [0, 2],
    "sites": ["resid_pre", "z"],
    "groups": {"third": 3, "end": [6, 7, 8], "all": "prompt"},
}
METRIC = LogitDiff(70, 71)


async def sweep(llm: Any) -> dict[str, Any]:
    """A sweep with its cells as they come, one that is cancelled, and one that is refused."""
    cells: list[Any] = []

    def on_cell(cell: Any, value: float) -> None:
        cells.append((cell.index, value))

    found = await llm.sweep(PROMPT, SOURCE, METRIC, on_cell=on_cell, **ASKED)
    await inspect(llm).check_integrity()
    task = asyncio.create_task(llm.sweep(PROMPT, SOURCE, METRIC, repeats=500))
    while not llm.output_processor.request_states:
        await asyncio.sleep(0.001)
    task.cancel()
    (ended,) = await asyncio.gather(task, return_exceptions=True)
    while llm.output_processor.request_states:
        await asyncio.sleep(0.01)
    await inspect(llm).check_integrity()
    refused = ""
    try:
        await llm.sweep(PROMPT, SOURCE[1:], METRIC)
    except SpecError as error:
        refused = error.path
    return {
        "sweep": found.to_json(),
        "cells": cells,
        "cancelled": type(ended).__name__,
        "refused": refused,
    }
