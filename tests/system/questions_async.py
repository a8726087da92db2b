"""Questions to an `AsyncLLM` about captured rows, in a separate process."""

import asyncio
import sys
from typing import Any

import torch
from support.asking_model import Hooked
from support.engines import ENVIRONMENT as ENVIRONMENT

QUESTIONS = ["What is it thinking of?", "Who?", "Where, and when?"]


async def main(model: str, found: dict[str, Any]) -> None:
    from support.engine_view import inspect
    from vllm import SamplingParams

    from midstream import AsyncLLM, Capture
    from midstream.errors import SpecError

    llm = AsyncLLM(
        model=model, max_model_len=256, dtype="float32", enforce_eager=True,
        disable_log_stats=True, num_gpu_blocks_override=512,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    subject = {"prompt_token_ids": Hooked(model).prompt("the parrot sleeps")}  # type: ignore[arg-type]

    async def last(prompt: Any, **asked: Any) -> Any:
        return [output async for output in llm.generate(prompt, params, **asked)][-1]

    try:
        source = await last(subject, capture=Capture([3], positions="prompt"))
        answers, *others = await asyncio.gather(
            llm.ask(source, QUESTIONS, 3, sampling_params=params), last(subject), last(subject)
        )
        found["answers"] = [
            (list(one.outputs[0].token_ids), one.receipt.edited.expected) for one in answers
        ]
        found["others"] = [
            (list(one.prompt_token_ids), list(one.outputs[0].token_ids)) for one in others
        ]
        found["refused"] = []
        for wrong in ({"layers": 3}, {"into": 99}):
            try:
                await llm.ask(source, QUESTIONS, 3, **wrong)
            except SpecError as error:
                found["refused"].append(str(error).partition(";")[0].partition(" (")[0])
        await inspect(llm).check_integrity()
    finally:
        llm.shutdown()


if __name__ == "__main__":
    results: dict[str, Any] = {}
    asyncio.run(main(sys.argv[1], results))
    torch.save(results, sys.argv[2])
