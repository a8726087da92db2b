"""Cost of captures of one call, and throughput of rows to the caller.

    python benchmarks/capture_cost.py [--shapes 0.6b 8b] [--rounds 5] [--seconds 280] [--json FILE]

For each shape, two engines of plain vLLM and one with midstream do the same work: prompts, with
some tokens generated after each and without. Variants: plain vLLM; midstream without a capture
(idle); the last prompt token of every layer; every token of every layer, with each codec. They take
turns as in `overhead.py`, and each engine has a core process of its own (vLLM's default); figures
are medians.

`median_s` is the time of the call, which returns when all rows are in the caller's memory. `read_s`
is the additional time to create a tensor of every layer of every prompt and to read it.
`bytes_per_s` is the captured bytes over the sum of both, which includes the model's run time.
`stream.py` measures captures in steady state, without the end of a call that nothing hides.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import engines
import overhead
import shapes

# Number of prompts by shape: rows of some gigabytes, and less than half of the arena.
PROMPTS = {"tiny": 16, "0.6b": 256, "8b": 64}
CODECS = ("raw", "full8", "rp8:k=512,seed=0", "topk8:k=64")
# By name: the arguments of `Capture`, None without a capture.
Captures = dict[str, dict[str, Any] | None]


def main() -> int:
    """Measure every shape, and write the table."""
    parser = arguments(__doc__)
    parser.add_argument("--codecs", nargs="*", default=list(CODECS))
    args = parser.parse_args()
    captures: Captures = {
        "idle": None,
        "last prompt token": {"layers": "all", "positions": "last_prompt"},
        **{f"every token, {one}": {"layers": "all", "codec": one} for one in args.codecs},
    }
    return over_shapes("capture_cost", args, lambda layers: captures)


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options of the scripts that capture in one call."""
    parser = engines.arguments(description, list(shapes.SHAPES))
    parser.add_argument("--prompts", type=int, help="default: by the shape")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.set_defaults(tp=1, midstream={}, also=[])
    return parser


def over_shapes(benchmark: str, args: argparse.Namespace, captures: Any) -> int:
    """Measure the captures, a function of the number of layers, on each shape."""
    run = engines.Run(benchmark, args, shapes={})
    for shape in args.shapes:
        prompts = args.prompts or PROMPTS[shape]
        layers = shapes.SHAPES[shape]["num_hidden_layers"]
        with run.limited(), run.engines(overhead.makers(shape, args)) as started:
            into = run.results["shapes"][shape] = {
                **started["midstream"].call(engines.describe),
                "layers": layers,
                "work": {},
            }
            asked: Captures = dict.fromkeys(overhead.PLAIN)
            asked |= fitting(captures(layers), shapes.SHAPES[shape]["hidden_size"])
            for work, tokens in {
                f"{prompts} × ({args.length} + {args.tokens}) tokens": args.tokens,
                f"prefill of {prompts} × {args.length} tokens": 1,
            }.items():
                run.measure(
                    into["work"],
                    work,
                    {
                        name: functools.partial(
                            started[name if name in overhead.PLAIN else "midstream"].call,
                            generate, capture, prompts, args.length, tokens,
                        )
                        for name, capture in asked.items()
                    },
                    summary,
                )  # fmt: skip
    return run.finish()


def fitting(captures: Captures, hidden: int) -> Captures:
    """Return the captures whose codec accepts vectors of that width."""
    return {
        name: capture
        for name, capture in captures.items()
        if hidden >= 512 or not (capture or {}).get("codec", "").startswith("rp8")
    }


def generate(
    llm: Any, capture: dict[str, Any] | None, count: int, length: int, tokens: int
) -> tuple[float, float, int]:
    """Return the seconds of one call, the seconds to read all rows, and the rows' size in bytes."""
    from midstream import Capture

    params, prompts = overhead.sampling(tokens), overhead.random_prompts(count, length)
    asked = {} if capture is None else {"capture": Capture(**capture)}
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False, **asked)
    returned = time.perf_counter()
    nbytes = 0
    if capture is not None:
        for output in outputs:
            for site, layer in output.activations:
                rows = output.activations.encoded(site, layer)
                rows[-1, -1].item()
                nbytes += rows.numel()
    return returned - start, time.perf_counter() - returned, nbytes


def summary(values: dict[str, list[tuple[float, float, int]]]) -> dict[str, Any]:
    """Return the medians of each variant."""
    found = engines.seconds({name: [one[0] for one in each] for name, each in values.items()})
    for name, each in values.items():
        one, nbytes = found[name], each[-1][2]
        read = statistics.median(read for _, read, _ in each)
        if "plain" in found:
            one["added"] = one["median_s"] / found["plain"]["median_s"] - 1
        one |= {
            "read_s": read,
            "row_bytes": nbytes,
            "bytes_per_s": nbytes / (one["median_s"] + read),
        }
    return found


if __name__ == "__main__":
    sys.exit(main())
