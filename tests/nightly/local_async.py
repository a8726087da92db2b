"""Functions on an async engine, whose worker is another process:

python -m nightly.local_async MODEL OUT
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import torch
from support.engines import greedy, tokens
from support.local_functions import PARENT, fail, halve

PROMPT = tokens([3 + nth % 150 for nth in range(150)])


async def last(stream: Any) -> Any:
    return [output async for output in stream][-1]


async def run(model: Path) -> dict[str, Any]:
    from midstream import AsyncLLM, Capture, Local
    from midstream.errors import ReceiptError, SpecError

    llm = AsyncLLM(
        str(model),
        dtype="float32",
        max_model_len=256,
        skip_tokenizer_init=True,
        num_gpu_blocks_override=64,
        max_num_batched_tokens=512,
        seed=0,
        midstream={"hooks": "local"},
    )
    names = iter(range(100))

    def ask(**asked: Any) -> Any:
        params = greedy(1, detokenize=False)
        return last(llm.generate(PROMPT, params, request_id=f"r{next(names)}", **asked))

    capture = Capture([1])
    found: dict[str, Any] = {}
    plain = await ask(capture=capture)
    found["plain"] = plain.activations["resid_post", 1]
    out = await ask(capture=capture, edits=Local(halve, 1))
    found["local"] = out.activations["resid_post", 1]
    (called,) = out.receipt.called
    found["called"] = called.name, called.rows, called.calls
    try:
        await ask(edits=Local(lambda h, info: h, 1))
    except SpecError as error:
        found["rejected"] = str(error)
    beside, failed = await asyncio.gather(
        ask(capture=capture), ask(edits=Local(fail, 0)), return_exceptions=True
    )
    assert isinstance(failed, ReceiptError)
    found["failed"] = str(failed)
    found["beside"] = beside.activations["resid_post", 1]
    llm.shutdown()
    return found


if __name__ == "__main__":
    os.environ[PARENT] = str(os.getpid())
    torch.save(asyncio.run(run(Path(sys.argv[1]))), sys.argv[2])
