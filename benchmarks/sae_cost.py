"""Cost of sparse autoencoders: `Features`, `Feature` and `Reconstruct`, against plain vLLM.

    python benchmarks/sae_cost.py [--shapes 8b] [--batches 1 32] [--features 16384 131072] \
        [--kv-gib 4] [--rounds 5] [--seconds 280] [--json FILE]

Two SAEs with random weights, of `--features` features, read `resid_post` of the middle layer. Each
token of each sequence asks for the 32 most active features, has eight features edited, or is
reconstructed (the last two with the smaller SAE). Variants take turns as in overhead.py.

decode: seconds of one step in which each sequence generates a token.
a bystander's token: one sequence of the largest batch asks for nothing, the others do as the
variant says; the mean seconds between its tokens. In "plain" none asks.
a bystander's slowest token: the same while the others' prompts of `--length` tokens are computed;
the most seconds between two of its tokens.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import engines
import overhead
import shapes

SKIPPED, STEPS, TOP, EDITED = 8, 48, 32, 8
TOKENS = SKIPPED + STEPS + overhead.LAST
# Names of the SAEs.
SMALL, LARGE = "small", "large"


def main() -> int:
    """Measure every shape, and write the table."""
    parser = engines.arguments(__doc__, list(shapes.SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--features", nargs=2, type=int, default=[16384, 131072])
    parser.add_argument("--length", type=int, default=512, help="of the prompts that arrive")
    args = parser.parse_args()
    run = engines.Run("sae_cost", args, features=args.features, shapes={})
    for shape in args.shapes:
        with run.limited(), run.engines(makers(shape, args), ("plain", "midstream")) as started:
            into = run.results["shapes"][shape] = {**started["midstream"].call(engines.describe)}
            for batch in args.batches:
                work = functools.partial(variants, started, args.features, decode_step, batch)
                run.measure(into, f"decode, {batch} sequences", work())
            batch = max(args.batches)
            if batch > 1:
                given = started, args.features, bystander, batch
                run.measure(into, "a bystander's token", variants(*given, overhead.PROMPT, False))
                name = f"a bystander's slowest token, {batch - 1} prompts of {args.length} tokens"
                run.measure(into, name, variants(*given, args.length, True))
    return run.finish()


def makers(shape: str, args: Any) -> dict[str, tuple[Any, ...]]:
    """Return what makes each engine, by its name."""
    model, settings = shapes.write(shape, engines.CACHE), engines.settings(shape, args)
    found: dict[str, tuple[Any, ...]] = dict.fromkeys(
        overhead.PLAIN, (engines.plain, model, settings)
    )
    found["midstream"] = with_saes, shape, model, settings, args.features
    return found


def with_saes(shape: str, model: Path, settings: dict[str, Any], features: list[int]) -> Any:
    """Create midstream's `LLM` with both SAEs registered, the first with its decoder."""
    width, layer = shapes.SHAPES[shape]["hidden_size"], middle(shape)
    few, many = features
    room = 8 * few * (width + 1) + 4 * many * (width + 2) + (1 << 20)
    llm = engines.tapped(
        model,
        settings,
        {"readout_bytes": room, "reconstruct": {f"resid_post:{layer}": few}},
    )
    for name, count in zip((SMALL, LARGE), features, strict=True):
        llm.saes.register(name, random_sae(width, count, layer))
    return llm


def middle(shape: str) -> int:
    """Return the layer that the SAEs read."""
    return int(shapes.SHAPES[shape]["num_hidden_layers"]) // 2


def random_sae(width: int, features: int, layer: int) -> Any:
    """Return a ReLU SAE with random directions, whose reconstruction of h is about h."""
    import torch

    from midstream import SAE

    draw = torch.Generator().manual_seed(features)
    encoder = torch.randn(width, features, generator=draw).mul_((2 / features) ** 0.5)
    return SAE(
        encoder,
        torch.zeros(features),
        encoder.T,
        torch.zeros(width),
        hook_name=f"blocks.{layer}.hook_resid_post",
    )


def variants(started: Any, features: list[int], function: Any, batch: int, *more: Any) -> Any:
    """Return what runs in turn, by name."""
    few, many = (f"{count:,}" for count in features)
    asks = {
        "idle": "",
        f"top {TOP} of {few} features": SMALL,
        f"top {TOP} of {many} features": LARGE,
        f"{EDITED} features edited": "edit",
        f"reconstructed from {few} features": "reconstruct",
    }
    found = {
        name: functools.partial(started[name].call, function, "", batch, *more)
        for name in overhead.PLAIN
        if name in started
    }
    call = started["midstream"].call
    for name, asked in asks.items():
        found[name] = functools.partial(call, function, asked, batch, *more)
    return found


def asked(name: str, batch: int, asking: int) -> dict[str, Any]:
    """Return `generate`'s arguments for a batch whose last `asking` sequences ask."""
    if not name:
        return {}
    from midstream import Feature, Features, Reconstruct

    if name in (SMALL, LARGE):
        argument, one = "capture", [Features(name, TOP)]
    else:
        argument = "edits"
        # Almost what it was, so that the values of later layers do not change.
        factor = 1.0 + overhead.SMALL
        edits: dict[str, Any] = {
            "edit": lambda: Feature(sae=SMALL, index=range(EDITED), mode="scale", value=factor),
            "reconstruct": lambda: Reconstruct(SMALL),
        }
        one = [edits[name]()]
    return {argument: [None] * (batch - asking) + [one] * asking}


def decode_step(llm: Any, name: str, batch: int) -> float:
    """Return the mean seconds of steps in which each sequence generates a token and asks."""
    return overhead.full_steps(llm, batch, TOKENS, asked(name, batch, batch))[0]


def bystander(llm: Any, name: str, batch: int, length: int, slowest: bool) -> float:
    """Return the seconds between tokens of a sequence that asks for nothing, while others ask.

    Args:
        llm: the engine.
        name: what the others ask for.
        batch: number of sequences, with this one.
        length: number of tokens of the others' prompts.
        slowest: whether to return the most seconds between two tokens, from the first one on. Else
            the mean once all generate.
    """
    own, *_ = overhead.random_prompts(1, overhead.PROMPT)
    prompts = [own, *overhead.random_prompts(batch - 1, length)]
    params = overhead.sampling(SKIPPED + overhead.LAST + (0 if slowest else STEPS))
    with token_times(llm) as times:
        llm.generate(prompts, params, use_tqdm=False, **asked(name, batch, batch - 1))
    between = [after - before for before, after in itertools.pairwise(times)]
    if slowest:
        return max(between)
    return sum(between[SKIPPED : SKIPPED + STEPS]) / STEPS


@contextmanager
def token_times(llm: Any) -> Iterator[list[float]]:
    """Yield a list that gets the time of each token of the first request, in seconds."""
    engine = llm.llm_engine
    step = engine.step
    times: list[float] = []
    first: list[Any] = []

    def timed_step() -> Any:
        if not first:
            first.append(next(iter(engine.output_processor.request_states.values())))
        out = step()
        more = first[0].detokenizer.num_output_tokens() - len(times)
        times.extend([time.perf_counter()] * more)
        return out

    engine.step = timed_step
    try:
        yield times
    finally:
        del engine.step


if __name__ == "__main__":
    sys.exit(main())
