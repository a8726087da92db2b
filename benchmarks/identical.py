"""Tokens and logprobs of plain vLLM against those of midstream while nobody asks: equal to the bit?

    python benchmarks/identical.py [--shapes 0.6b 8b] [--model FOLDER] [--prompts 500] \
        [--logprobs 5] [--seconds 280] [--json FILE]

Each engine runs in a process of its own and gets the same prompts in the same call, so that its
batches are the same: random prompts of 4 to 200 tokens, each with 4 to 48 greedy tokens and the
logprobs of the most likely ones. `plain again` is a second engine of plain vLLM: where it differs
from the first, nothing follows from a difference of midstream's. `idle after captures` is the
engine with midstream after it has served requests that capture. The exit status is 0 if every
engine's answers are identical to plain vLLM's.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import engines
import overhead
import shapes

# Of a prompt: of each generated token, its id, and ids and logprobs of the most likely ones.
Answer = list[tuple[int, list[tuple[int, float]]]]


def main() -> int:
    """Compare on every shape, and write the table."""
    parser = engines.arguments(__doc__, list(shapes.SHAPES))
    parser.add_argument("--model", type=Path, help="a model with weights, in place of the shapes")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--logprobs", type=int, default=5)
    parser.set_defaults(tp=1, midstream={}, also=[])
    args = parser.parse_args()
    about = {"prompts": args.prompts, "logprobs": args.logprobs}
    run = engines.Run("identical", args, **about, shapes={})
    del run.results["rounds"]
    different = False
    for shape in [args.model.name] if args.model else args.shapes:
        makers = with_weights(args) if args.model else overhead.makers(shape, args)
        # In one process, so that all prompts are there before the first step.
        in_process = run.engines(makers, VLLM_ENABLE_V1_MULTIPROCESSING="0")
        with run.limited(), in_process as started:
            asked = args.prompts, args.logprobs
            into = run.results["shapes"][shape] = {
                **started["midstream"].call(engines.describe),
                "compared": {},
            }
            run.stage(f"{shape}: plain")
            plain = started["plain"].call(answers, *asked)
            for name, engine in (
                ("plain again", "plain again"),
                ("idle", "midstream"),
                ("idle after captures", "midstream"),
            ):
                run.stage(f"{shape}: {name}")
                if name == "idle after captures":
                    started[engine].call(capture, args.prompts)
                found = compare(plain, started[engine].call(answers, *asked))
                into["compared"][name] = found
                different |= not found["identical"]
                run.stage(f"{shape}, {name}: {'' if found['identical'] else 'NOT '}identical")
                run.save()
    return int(run.finish() or different or "stopped_after_s" in run.results)


def with_weights(args: Any) -> dict[str, tuple[Any, ...]]:
    """Return what makes each engine of a model with weights."""
    settings = engines.settings(args.model.name, args, load_format="auto")
    return dict.fromkeys(overhead.PLAIN, (engines.plain, args.model, settings)) | {
        "midstream": (engines.tapped, args.model, settings, {})
    }


def answers(llm: Any, count: int, logprobs: int) -> list[Answer]:
    """Return tokens and logprobs of every prompt."""
    draw = random.Random(0)
    prompts = [
        {"prompt_token_ids": [draw.randrange(3, 500) for _ in range(draw.randint(4, 200))]}
        for _ in range(count)
    ]
    params = [overhead.sampling(draw.randint(4, 48), logprobs=logprobs) for _ in prompts]
    return [
        [
            (token, [(number, float(one.logprob)) for number, one in likely.items()])
            for token, likely in zip(one.token_ids, one.logprobs, strict=True)
        ]
        for output in llm.generate(prompts, params, use_tqdm=False)
        for one in output.outputs
    ]


def capture(llm: Any, count: int) -> None:
    """Serve requests of which every other one captures."""
    from midstream import Capture

    asked = [[Capture("all")] if nth % 2 else None for nth in range(count)]
    prompts = overhead.random_prompts(count, 16)
    llm.generate(prompts, overhead.sampling(8), use_tqdm=False, capture=asked)


def compare(plain: list[Answer], other: list[Answer]) -> dict[str, Any]:
    """Return the numbers of prompts with other tokens and with other logprobs, and the largest
    difference of a logprob before the tokens differ.
    """
    largest, tokens, logprobs = 0.0, 0, 0
    for mine, theirs in zip(plain, other, strict=True):
        tokens += [token for token, _ in mine] != [token for token, _ in theirs]
        logprobs += mine != theirs
        for (token, likely), (found, others) in zip(mine, theirs, strict=False):
            values = dict(others)
            largest = max(
                largest, *(abs(value - values[n]) for n, value in likely if n in values), 0.0
            )
            if token != found:
                break
    return {
        "identical": plain == other,
        "prompts": len(plain),
        "tokens": sum(map(len, plain)),
        "other_tokens": tokens,
        "other_logprobs": logprobs,
        "largest_difference": largest,
    }


if __name__ == "__main__":
    sys.exit(main())
