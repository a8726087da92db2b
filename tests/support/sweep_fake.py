"""Sweeps of a fake engine: its tokens are characters, and its log-probabilities are formulas."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from midstream.api.traffic import RUN_ID, Traffic
from midstream.errors import SpecError
from midstream.lab.sweep import Sweep
from midstream.lab.sweep.async_run import run_job
from midstream.lab.sweep.job import SweepContext, SweepJob, SweepPrompt, SweepRun
from midstream.lab.sweep.source import PromptSource
from midstream.plan.positions.prompt import Prompt
from midstream.results.activations import Activations
from midstream.results.receipt import Edited, Receipt
from midstream.validation import at

A, B = ord("x"), ord("z")


@dataclass(frozen=True)
class FakeParams:
    """Parameters of a run."""

    extra_args: dict[str, Any]
    n: int = 1


def logprob_of(token: int, layer: int, position: int) -> float:
    """The log-probability of a token after a patch at a layer and position."""
    return -float(token % 7) - (16 * layer + position) * (token % 3 + 1) / 64


def expected() -> NDArray[np.float32]:
    """The differences of two tokens by site, layer and position."""
    cells = [[logprob_of(A, n, p) - logprob_of(B, n, p) for p in range(4)] for n in range(4)]
    return np.array([cells], np.float32)


def unpatched(token: int, prompt: tuple[int, ...]) -> float:
    """The log-probability of a token after a prompt."""
    return -float(token % 7) - sum(prompt) % 11


class FakeSweeps:
    """Sweeps of a `FakeEngine`."""

    info: Any
    vectors: Any
    seats: int
    states: dict[str, bool]
    generate: Any

    waiting = 0

    def traffic(self) -> Traffic:
        others = [each for name, each in self.states.items() if not name.startswith(RUN_ID)]
        return Traffic(len(others), others.count(False), self.waiting, self.seats)

    def prepare_sweep(
        self, prompt: Any, request: Any, template: Mapping[str, Any], **given: Any
    ) -> Any:
        self.template = template
        with at("metric"):
            metric = request.metric.with_ids(_id)
        source = request.source
        other = None
        if isinstance(source, PromptSource):
            other = _prompt("source", source.prompt)
        target = _prompt("prompt", prompt)
        context = SweepContext(self.info.shape, self.vectors.lookup, **given)
        job = SweepJob(request.with_metric(metric), context, target, other, request.metric)
        return SimpleNamespace(job=job)

    async def run_sweep(self, sweep: Any, vllm_args: Mapping[str, Any], **given: Any) -> Sweep:
        self.vllm_args = vllm_args
        del given["most_bytes"]

        async def output_of(run: SweepRun, more: Mapping[str, Any]) -> Any:
            self.vllm_args = {**vllm_args, **more}
            name = f"{RUN_ID}{uuid.uuid4().hex}"
            params = FakeParams({"midstream": run.plan})
            # As the engine does it: past the `generate` that a server replaces.
            prompt = "".join(map(chr, run.token_ids))
            outputs = type(self).generate(self, prompt, params, name)
            last = [output async for output in outputs][-1]
            return _output(last, run)

        return await run_job(sweep.job, output_of, **given)


def _output(last: Any, run: SweepRun) -> Any:
    edits = run.plan.edits if run.plan is not None else ()
    captures = run.plan.captures if run.plan is not None else ()
    assert len(edits) <= 1

    class Logprobs(dict[int, Any]):
        def __missing__(self, token: int) -> Any:
            if edits:
                [(layer,)] = [edits[0].layers.indices]
                [position] = edits[0].positions.include
                return SimpleNamespace(logprob=logprob_of(token, layer, position))
            return SimpleNamespace(logprob=unpatched(token, run.token_ids))

    count = len(run.token_ids)
    rows: Any = None
    if captures:
        layers = [layer for one in captures for layer in one.layers.indices]
        values = {("resid_post", layer): torch.full((count, 3), float(layer)) for layer in layers}
        rows = Activations(
            values, dict.fromkeys(values, torch.arange(count)), torch.tensor(run.token_ids)
        )
    receipt = None
    if run.plan is not None:
        receipt = Receipt(last.request_id, count, 1, (), Edited(len(edits), len(edits), len(edits)))
    return SimpleNamespace(
        prompt_token_ids=run.token_ids,
        num_cached_tokens=0,
        receipt=receipt,
        activations=rows,
        outputs=[SimpleNamespace(logprobs=[Logprobs()])],
    )


def _prompt(name: str, value: Any) -> SweepPrompt:
    with at(name):
        if isinstance(value, (list, tuple)) and isinstance(value[0], Mapping):
            value = "".join(message["content"] for message in value)
        if isinstance(value, str):
            value = list(map(ord, value))
        if not isinstance(value, (list, tuple)):
            raise SpecError("", "expected a prompt")
        ids = tuple(value)
        return SweepPrompt(Prompt(len(ids), ids), tuple(map(chr, ids)))


def _id(text: str) -> int:
    if len(text) != 1:
        raise SpecError("", f"{text!r} is {len(text)} tokens; give a text that is one")
    return ord(text)
