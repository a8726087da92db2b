"""Calls of an async engine, and all that they give."""

import asyncio
from pathlib import Path
from typing import Any

import torch

from support.engines import greedy, tokens
from support.output_results import logprobs, results, scores
from support.own_process import python

WIDTH = 64
COUNT = 20
KINDS = ("CUMULATIVE", "DELTA", "FINAL_ONLY")


def results_of(module: str, model: Path, folder: Path) -> dict[str, Any]:
    """What a program saves: `python -m MODULE MODEL FILE`."""
    out = folder / "found.pt"
    python("-m", module, model, out, timeout=580)
    found: dict[str, Any] = torch.load(out, weights_only=False)
    return found


def vector(seed: int) -> torch.Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))


def prompt(nth: int) -> dict[str, list[int]]:
    return tokens(range(3 + nth, 20 + 4 * nth))


def params(nth: int, **more: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    given = {"max_tokens": 6 + nth % 5, "detokenize": False, **more}
    kind = RequestOutputKind[given.pop("kind", KINDS[nth % 3])]
    if given.get("n", 1) > 1:
        return SamplingParams(ignore_eos=True, seed=3, output_kind=kind, **given)
    return greedy(**given, output_kind=kind)


async def ask(llm: Any, name: str, given: Any, sampling: Any, **asked: Any) -> dict[str, Any]:
    """One call, and all that it gave."""
    partial, generated, shown = [], [], []
    async for output in llm.generate(given, sampling, name, **asked):
        new = list(output.outputs[0].token_ids)
        shown.append(len(new))
        generated = [*generated, *new] if sampling.output_kind.name == "DELTA" else new
        if not output.finished:
            partial.append((len(generated), scores(output), output.activations, output.receipt))
    return {
        "partial": partial,
        "generated": generated,
        "shown": shown,
        "outputs": [results(one) for one in output.outputs],
        "reason": output.outputs[0].finish_reason,
        "stop_reason": output.outputs[0].stop_reason,
        **results(output),
        **(logprobs(output) if sampling.output_kind.name == "CUMULATIVE" else {}),
    }


async def refusal(call: Any) -> tuple[str, str]:
    [found] = await asyncio.gather(call, return_exceptions=True)
    return type(found).__name__, str(found)


def taken(activations: Any) -> Any:
    """Rows as plain values."""
    return {
        tap: (rows.clone(), activations.positions_of(*tap), activations.token_ids_of(*tap))
        for tap, rows in activations.items()
    }


def assert_close(mine: Any, theirs: Any) -> None:
    """(values, positions, …) per tap or probe."""
    assert (mine is None) == (theirs is None)
    if mine is None:
        return
    assert set(mine) == set(theirs)
    for name, (values, *rest) in theirs.items():
        torch.testing.assert_close(mine[name][0], values, rtol=1e-4, atol=1e-4)
        for ours, other in zip(mine[name][1:], rest, strict=True):
            assert torch.equal(ours, other)


def assert_alike(mine: Any, theirs: Any, has_plan: bool) -> None:
    """Two calls of one request gave the same."""
    assert mine["generated"] == theirs["generated"]
    assert mine["receipt"] == theirs["receipt"]
    assert (mine["receipt"] is None) == (not has_plan)
    if mine["receipt"] is not None:
        assert mine["receipt"]["status"] == "ok"
    assert_close(mine["activations"], theirs["activations"])
    assert_close(mine["probes"], theirs["probes"])
