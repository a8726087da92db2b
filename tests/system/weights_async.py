"""An async engine whose weights change while requests run: `python -m … MODEL OTHER FILE`."""

import asyncio
import sys
from typing import Any

import torch
from support.async_run import SETTINGS
from support.engines import greedy, name_vectors, tokens

PROMPT = [5, 17, 33, 101, 8, 77, 54, 23] * 5
TOKEN, WIDTH = 17, 64


async def last(llm: Any, name: str, count: int, **asked: Any) -> dict[str, Any]:
    """The last output of a request."""
    outputs = llm.generate(tokens(PROMPT), greedy(count, detokenize=False), name, **asked)
    output = [output async for output in outputs][-1]
    (one,) = output.outputs
    found = {"tokens": list(one.token_ids), "cached": output.num_cached_tokens}
    if one.receipt is not None:
        found["versions"] = [(v.number, v.name) for v in one.receipt.weight_versions]
        found["status"] = one.receipt.status
    if one.activations is not None:
        found["rows"] = one.activations["resid_post", 2]
    return found


async def run(model: str, other: str) -> dict[str, Any]:
    from midstream import AsyncLLM, Capture, Steer

    settings = {
        **SETTINGS, "block_size": 32, "enable_prefix_caching": True,
        "midstream": {**SETTINGS["midstream"], "reuse_bytes": 1 << 20},
    }  # fmt: skip
    llm = AsyncLLM(model, **settings)
    found: dict[str, Any] = {}
    reuse = Capture([2], "resid_post", reuse=True)
    edit = Steer(token=TOKEN, layer=1, scale=3.0)
    try:
        await llm.ready()
        for nth, weights in enumerate((model, other)):
            if nth:
                before = await steps(llm)
                over = asyncio.create_task(last(llm, "over", 120, capture=[Capture(2)]))
                while await steps(llm) < before + 5:
                    await asyncio.sleep(0.01)
                await llm.collective_rpc("reload_weights", kwargs={"weights_path": weights})
                found["over"] = await over
                await llm.update_weight_version("step 1")
            found[f"first{nth}"] = await last(llm, f"a{nth}", 4, capture=reuse)
            found[f"again{nth}"] = await last(llm, f"b{nth}", 4, capture=reuse)
            found[f"steered{nth}"] = await last(llm, f"c{nth}", 4, capture=Capture(2), edits=edit)
            found[f"direction{nth}"] = await llm.lenses.direction(TOKEN, 1)
        version = await llm.weight_version()
        found["version"] = version.number, version.name
        found["usage"] = (await llm.usage())["weight_version"]
    finally:
        llm.shutdown()
    return found


async def steps(llm: Any) -> int:
    """How many steps the worker has run."""
    (worker,) = (await llm.usage())["workers"]
    return int(worker["steps"]["steps"])


if __name__ == "__main__":
    name_vectors()
    torch.save(asyncio.run(run(sys.argv[1], sys.argv[2])), sys.argv[3])
