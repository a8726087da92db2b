"""Lenses of an asynchronous engine: what its outputs have of them while a request runs."""

from __future__ import annotations

from typing import Any

import torch

from midstream import BusyError, JacobianLens, Lens


async def stream_of_lenses(llm: Any, prompt: Any, sampling: Any) -> list[Any]:
    """(finished, rows by name of the lens) on each output, whose registered lens is in use until
    the request ends. Its maps change nothing.
    """
    width = llm.info.shape.hidden_size
    await llm.lenses.register("same", JacobianLens({0: torch.eye(width), 1: torch.eye(width)}))
    assert llm.lenses.names == ("same",)
    asked = [Lens(top=2, tokens=[7], stream=True), Lens(top=2, kind="same", stream=True)]
    shown = []
    async for output in llm.generate(prompt, sampling, "lens", capture=asked):
        assert output.activations is None
        if output.lens is not None:
            rows = {name: (one.positions, one.values) for name, one in output.lens.items()}
            shown.append((output.finished, rows))
        if not output.finished:
            try:
                llm.lenses.remove("same")
            except BusyError:
                continue
            raise AssertionError("a lens was removed that is in use")
    llm.lenses.remove("same")
    return shown
