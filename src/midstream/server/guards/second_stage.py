"""Second stages of guards: a probe of an ended request, by a request of the server's own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from midstream.errors import SpecError
from midstream.plan.probe import Probe
from midstream.results.probe_scores import Probes

# As `AsyncLLM.generate`: (prompt, parameters, request id, probes=…, lora_request=…).
Generate = Callable[..., AsyncGenerator[Any, None]]


async def read_again(
    generate: Generate, prompt: Any, output: Any, completion: Any, named: Mapping[str, Any]
) -> Probes | None:
    """Return the scores of a probe of the prompt and the tokens of a completion; None: the probe's
    phase has none. Raises SpecError if the prompt is not of tokens.

    Args:
        generate: the engine's.
        prompt: that of the request, as vLLM's server rendered it.
        output, completion: of the request, which has ended.
        named: `probe`; `name`, the id of the server's own request; `most`, the longest prompt that
            the engine takes; `lora_request`.
    """
    from vllm import SamplingParams

    tokens = output.prompt_token_ids
    if not tokens:
        raise SpecError("prompt", "is not of tokens, which a second stage reads")
    every = [*tokens, *completion.token_ids][: named["most"]]
    again: Any = {"prompt_token_ids": every}
    if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
        # With the images of the prompt, which are at the same places.
        again = {name: value for name, value in prompt.items() if name != "prompt"} | again
    probe = _placed(named["probe"], len(tokens), len(every))
    if probe is None:
        return None
    params = SamplingParams(max_tokens=1, temperature=0.0)
    vllm_args = {name: named[name] for name in ("lora_request",) if named[name] is not None}
    probes: Probes | None = None
    async for read in generate(again, params, named["name"], probes=probe, **vllm_args):
        probes = read.outputs[0].probes
    return probes


def _placed(probe: Probe, prompt: int, total: int) -> Probe | None:
    """Return the probe of the same tokens, which are all of a prompt now; None: there are none."""
    phase = probe.positions.phase
    start, stop = {"prompt": (0, prompt), "generated": (prompt, total)}.get(phase, (0, total))
    if stop <= start:
        return None
    return probe.replace(positions=slice(start, stop), phase=None)
