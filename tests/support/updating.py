"""Requests whose edits change while they run: an engine stepped by hand, and a replay by hooks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from midstream import Capture, Steer
from midstream.results.receipt import Receipt
from support.oracle import HookEdit, Oracle, relative_error

WIDTH = 64
PROMPT = [5, 17, 33, 101, 8, 77, 54, 23, 9]
TOLERANCE = 1e-4
TIE = 1e-3


def vector(seed: int) -> Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))


def steps_ahead(llm: Any) -> int:
    """How many steps are scheduled before the scores of a step are known; none on a CPU."""
    return int(llm.llm_engine.vllm_config.scheduler_config.async_scheduling)


@dataclass
class Stepped:
    """Requests that the caller steps."""

    llm: Any  # the engine
    outputs: dict[str, Any] = field(default_factory=dict)  # finished outputs, by request id

    def add(self, name: str, prompt: Sequence[int], params: Any, **asked: Any) -> None:
        """Add a request with a plan."""
        from midstream.plan import Plan
        from midstream.runtime.frontend.request.call_plan import with_plan

        plan = Plan.make(**asked)
        self.llm.llm_engine.add_request(
            name, {"prompt_token_ids": list(prompt)}, with_plan(params, plan)
        )

    def step(self, count: int = 1) -> None:
        """Run some steps."""
        for _ in range(count):
            for output in self.llm.llm_engine.step():
                if output.finished:
                    self.outputs[output.request_id] = output

    def preempt(self) -> None:
        """Let the scheduler preempt all requests that run."""
        for request in list(self.scheduler.running):
            self.scheduler.running.remove(request)
            self.scheduler._preempt_request(request, 0.0)

    def finish(self) -> dict[str, Any]:
        """Run until all requests have ended, and return their outputs."""
        while self.llm.llm_engine.has_unfinished_requests():
            self.step()
        return self.outputs

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler, of an engine core in this process."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler


def held(receipt: Receipt) -> list[tuple[int, int]]:
    """The positions at which each version held."""
    return [one.positions for one in receipt.versions]


def check_replay(
    oracle: Oracle,
    prompt: Sequence[int],
    completion: Any,
    versions: Mapping[int, Sequence[HookEdit]],
    is_greedy: bool = True,
) -> None:
    """Compare a completion with transformers, where each version's edits hold at the positions that
    the receipt lists.
    """
    receipt = completion.receipt
    where = {one.number: one.positions for one in receipt.versions} or {0: (0, 1 << 30)}
    edits = [
        HookEdit(edit.site, edit.layer, edit.vector, edit.scale, _both(edit.where, *where[number]))
        for number, each in versions.items()
        for edit in each
    ]
    _compare(oracle, prompt, completion, edits, is_greedy)


def _compare(
    oracle: Oracle,
    prompt: Sequence[int],
    completion: Any,
    edits: Sequence[HookEdit],
    is_greedy: bool,
) -> None:
    assert completion.receipt.status == "ok", completion.receipt
    # The last token has a row where a probe or a controller stopped the request at it.
    logits, seen = oracle.run([*prompt, *completion.token_ids], edits)
    if is_greedy:
        mine = logits[len(prompt) - 1 : -1]
        best = mine.max(-1).values
        chosen = mine.gather(1, torch.tensor(list(completion.token_ids))[:, None])[:, 0]
        assert (best - chosen < TIE).all(), "a token is not the likeliest of the replay"
    for tap in getattr(completion, "activations", None) or ():
        rows = completion.activations[tap]
        positions = completion.activations.positions_of(*tap)
        assert relative_error(rows.float(), seen[tap][positions]) < TOLERANCE, tap


def _both(where: Callable[[int], bool], start: int, stop: int) -> Callable[[int], bool]:
    return lambda position: start <= position < stop and where(position)


def steer(vector: Tensor, layer: int, scale: float = 1.0, **more: Any) -> tuple[Steer, HookEdit]:
    """An edit of every token, and the hook that does the same."""
    return (
        Steer(vector, layer, scale, **more),
        HookEdit("resid_post", layer, vector, scale, lambda _: True),
    )


def everything() -> Capture:
    """Every row of every layer."""
    return Capture("all")


def check_versions(
    oracle: Oracle,
    prompt: Sequence[int],
    completion: Any,
    sets: Mapping[str, Sequence[HookEdit]],
    is_greedy: bool = True,
) -> None:
    """Compare a completion whose controller chose versions; see `check_replay`."""
    versions = completion.receipt.versions
    edits = []
    for one in versions:
        name = one.source.removesuffix(" failed").partition("/")[2]
        for edit in sets[name]:
            where = _both(edit.where, *one.positions)
            scale = edit.scale * one.scale
            edits.append(HookEdit(edit.site, edit.layer, edit.vector, scale, where))
    _compare(oracle, prompt, completion, edits if versions else list(sets[""]), is_greedy)
