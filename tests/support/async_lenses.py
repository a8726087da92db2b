"""Lenses and SAEs of an asynchronous engine: what its outputs have of them while a request runs."""

import asyncio
from typing import Any

import pytest
import torch

from midstream import SAE, Capture, Controller, Features, Lens, Probe, SamplingParams, Steer
from midstream.errors import BusyError, SpecError
from midstream.lenses import JacobianLens


async def stream_of_lenses(llm: Any, prompt: Any, sampling: Any) -> list[Any]:
    """(finished, rows by name of the lens) on each output, whose registered lens is in use until
    the request ends. Its maps change nothing.
    """
    width = llm.info.shape.hidden_size
    await llm.lenses.register("same", JacobianLens({0: torch.eye(width), 1: torch.eye(width)}))
    assert llm.lenses.names == ("same",)
    await check_directions(llm, prompt, sampling)
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


async def check_directions(llm: Any, prompt: Any, sampling: Any) -> None:
    """A token steers as its direction does, which is that of the lens without maps for `same`."""
    unit = await llm.lenses.direction(7, 1)
    assert abs(float(unit.norm()) - 1) < 1e-6
    edits = [Steer(token=7, layer=1, scale=3, lens="same"), Steer(unit, 1, 3)]
    rows = []
    for nth, edit in enumerate(edits):
        given = {"capture": Capture(1, positions="last_prompt"), "edits": edit}
        async for output in llm.generate(prompt, sampling, f"direction-{nth}", **given):
            last = output
        rows.append(last.activations["resid_post", 1])
    torch.testing.assert_close(rows[0], rows[1])
    await check_directions_of_changes(llm, prompt)
    with pytest.raises(SpecError, match="there is no token") as caught:
        async for _ in llm.generate(prompt, sampling, "no", edits=Steer(token=10**6, layer=1)):
            pass
    assert caught.value.path == "edits.token"


async def check_directions_of_changes(llm: Any, prompt: Any) -> None:
    """A controller may answer with a token, and a token's edit be scaled after a lens was set."""

    def decide(_seen: Any) -> Any:
        return {"edits": [Steer(token=9, layer=1, scale=3)]}

    sampling = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, detokenize=False)
    probe = Probe(name="p", direction=await llm.lenses.direction(7, 1), layer=0)
    given = {"edits": Steer(token=7, layer=1), "probes": probe}
    controller = Controller(decide, mode="async")
    last: Any = None
    async for output in llm.generate(prompt, sampling, "chosen", **given, controller=controller):
        last = output
        await asyncio.sleep(0.01)
    assert last.receipt.status == "ok"
    assert any(one.source == "controller:local" for one in last.receipt.versions)
    is_scaled = False
    async for output in llm.generate(prompt, sampling, "scaled", **given):
        last = output
        if not is_scaled:
            llm._front_end.directions.forget()
            await llm.update("scaled", scale=0.5)
            is_scaled = True
    assert [one.scale for one in last.receipt.versions] == [1.0, 0.5]


def random_sae(width: int) -> SAE:
    draw = torch.Generator().manual_seed(3)
    encoder = torch.randn(width, 20, generator=draw)
    zeros = torch.zeros(20)
    where = {"hook_name": "blocks.1.hook_resid_post"}
    return SAE(encoder, zeros, encoder.T, torch.zeros(width), None, False, **where)
