"""Lenses and SAEs of an asynchronous engine: what its outputs have of them while a request runs."""

from __future__ import annotations

from typing import Any

import torch

from midstream import SAE, BusyError, Features, JacobianLens, Lens


async def stream_of_lenses(llm: Any, prompt: Any, sampling: Any) -> list[Any]:
    """(finished, rows by name of the lens) on each output, whose registered lens is in use until
    the request ends. Its maps change nothing.
    """
    width = llm.info.shape.hidden_size
    await llm.lenses.register("same", JacobianLens({0: torch.eye(width), 1: torch.eye(width)}))
    assert llm.lenses.names == ("same",)
    await llm.saes.register("random", random_sae(width))
    assert llm.saes.names == ("random",)
    asked = [
        Lens(top=2, tokens=[7], stream=True),
        Lens(top=2, kind="same", stream=True),
        Features("random", 3, features=[5], stream=True),
    ]
    shown = []
    async for output in llm.generate(prompt, sampling, "lens", capture=asked):
        assert output.activations is None
        if output.lens is not None:
            rows = {name: (one.positions, one.values) for name, one in output.lens.items()}
            features = output.features["random"]
            rows["features"] = features.positions, features.values
            shown.append((output.finished, rows))
        if not output.finished:
            for registry, name in ((llm.lenses, "same"), (llm.saes, "random")):
                try:
                    registry.remove(name)
                except BusyError:
                    continue
                raise AssertionError("what is in use was removed")
    llm.lenses.remove("same")
    llm.saes.remove("random")
    return shown


def random_sae(width: int) -> SAE:
    draw = torch.Generator().manual_seed(3)
    encoder = torch.randn(width, 20, generator=draw)
    zeros = torch.zeros(20)
    where = {"hook_name": "blocks.1.hook_resid_post"}
    return SAE(encoder, zeros, encoder.T, torch.zeros(width), None, False, **where)
