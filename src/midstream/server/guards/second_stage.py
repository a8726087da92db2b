"""Second stages of guards: a probe of an ended request, by a request of the server's own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from midstream.errors import NothingSelectedError, ReceiptError, SpecError
from midstream.plan import Plan
from midstream.plan.positions.positions import Positions
from midstream.plan.probe import Probe
from midstream.results.probe_scores import Probes
from midstream.results.receipt import Receipt
from midstream.runtime.frontend.request.call_plan import CallPlan, with_plan

# As `AsyncLLM.generate`: (prompt, parameters, request id, lora_request=…).
Generate = Callable[..., AsyncGenerator[Any, None]]


async def read_again(
    generate: Generate, prompt: Any, output: Any, completion: Any, named: Mapping[str, Any]
) -> Probes | None:
    """Return the scores of a probe of the prompt and the tokens of a completion; None: the probe
    selects none of them. Raises SpecError if the prompt is not of tokens, and ReceiptError if
    scores are missing, or none of them is finite.

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
    vllm_args = {name: named[name] for name in ("lora_request",) if named[name] is not None}
    plan = CallPlan(Plan.make(probes=probe), is_own=True)
    for suffix, skips_cache in (("", None), ("-computed", True)):
        params = SamplingParams(
            max_tokens=1, temperature=0.0, skip_reading_prefix_cache=skips_cache
        )
        last: Any = None
        try:
            own = with_plan(params, plan)
            async for read in generate(again, own, named["name"] + suffix, **vllm_args):
                last = read.outputs[0]
        except NothingSelectedError:
            return None
        # The cache has the tokens of the first request, maybe without this probe's scores.
        if last is None or last.receipt is None or not _lacks_scores(last.receipt):
            break
    return _checked(last, probe.name)


def _lacks_scores(receipt: Receipt) -> bool:
    return any(probed.unscored for probed in receipt.probed)


def _checked(completion: Any, name: str) -> Probes:
    """Return the scores of a completion of which none is missing."""
    if completion is None or completion.probes is None or name not in completion.probes:
        raise ReceiptError("the second request ended without scores")
    if completion.receipt is not None:
        completion.receipt.check()
    probes: Probes = completion.probes
    scores = probes[name]
    if len(scores) and not scores.isfinite().any():
        raise ReceiptError("none of the scores is finite")
    return probes


def _placed(probe: Probe, prompt: int, total: int) -> Probe | None:
    """Return the probe of the same tokens, which are all of a prompt now; None: there are none."""
    phase = probe.positions.phase
    start, stop = {"prompt": (0, prompt), "generated": (prompt, total)}.get(phase, (0, total))
    if stop <= start:
        return None
    here = Positions(slice(start, stop), exclude=probe.positions.exclude)
    return probe.replace(positions=here, phase=None)
