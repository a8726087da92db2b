"""`AsyncLLM(layers=…)` in a separate process."""

import asyncio
import sys
import warnings
from typing import Any

import torch
from support.engines import ENVIRONMENT as ENVIRONMENT

LAYERS = [1, -1]
PROMPT = "The capital of France is"
LENGTH = 64


def shown(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "id": output.request_id,
        "prompt": list(output.prompt_token_ids),
        "tokens": list(completion.token_ids),
        "text": completion.text,
        "finished": output.finished,
        "reason": completion.finish_reason,
        "hidden": {layer: rows.clone() for layer, rows in output.hidden_states.items()},
        "prefill": {layer: rows.clone() for layer, rows in output.prefill_hidden_states.items()},
        "aliases": output.hidden is output.hidden_states is completion.hidden
        and output.prefill_hidden is output.prefill_hidden_states is completion.prefill_hidden,
    }


async def ask(llm: Any, *given: Any, prompt: Any = PROMPT, **more: Any) -> list[dict[str, Any]]:
    return [shown(output) async for output in llm.generate(prompt, *given, **more)]


async def main(model: str, found: dict[str, Any]) -> None:
    from support.engine_view import inspect
    from vllm.sampling_params import RequestOutputKind

    from midstream import AsyncLLM, SamplingParams
    from midstream.api.default_capture import DefaultCapture

    llm = AsyncLLM(
        model=model,
        layers=LAYERS,
        include_prefill=True,
        max_model_len=LENGTH,
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=True,
        num_gpu_blocks_override=512,
    )

    def default(**flags: Any) -> None:
        given = {"include_prefill": False, "include_decode": True, "last_prefill_token": False}
        flags = {**given, "last_decode_token": False, **flags}
        llm._default_capture = DefaultCapture.parse(LAYERS, **flags)

    def sampling(max_tokens: int = 12, **more: Any) -> Any:
        return SamplingParams(n=1, temperature=0, ignore_eos=True, max_tokens=max_tokens, **more)

    try:
        # The seed's own words; the first two run at once.
        params = SamplingParams(n=1, temperature=0.7, top_p=0.95, max_tokens=12, ignore_eos=True)
        found["plain"], found["at once"] = await asyncio.gather(ask(llm, params), ask(llm, params))
        found["delta"] = await ask(llm, sampling(output_kind=RequestOutputKind.DELTA))
        found["final"] = await ask(llm, sampling(output_kind=RequestOutputKind.FINAL_ONLY))
        default(last_prefill_token=True, last_decode_token=True)
        found["last rows"] = await ask(llm, sampling())
        default(last_token_row=True)
        found["with last"] = await ask(llm, sampling())
        found["one token"] = await ask(llm, sampling(1))
        stopping = sampling(40, stop=[found["final"][-1]["text"][2:4]])
        found["stopped"] = await ask(llm, stopping)
        delta = sampling(output_kind=RequestOutputKind.DELTA)
        found["with last delta"] = await ask(llm, delta)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found["full"] = await ask(llm, sampling(None))
        found["warned"] = [
            str(one.message) for one in caught if "last_token_row" in str(one.message)
        ]

        llm.remove_hooks()
        last = [output async for output in llm.generate(PROMPT, sampling(4), "mine")][-1]
        found["removed"] = (last.request_id, last.activations, hasattr(last, "hidden"))
        await inspect(llm).check_integrity()
    finally:
        llm.shutdown()


if __name__ == "__main__":
    results: dict[str, Any] = {}
    asyncio.run(main(sys.argv[1], results))
    torch.save(results, sys.argv[2])
