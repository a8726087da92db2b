"""Cost of captures, and throughput of rows to the caller.

    python benchmarks/capture_cost.py [--shapes 0.6b 8b] [--rounds 3] [--json FILE]

For each shape, an engine in a separate process (vLLM's default) and plain vLLM do the same work:
prompts, with some tokens generated after each. Variants: plain vLLM; midstream without a capture
(idle); the last prompt token of every layer; every token of every layer, with each codec. In each
round all variants run once, one after the other; figures are medians.

`median_s` is the time of the call, which returns when all rows are in the caller's memory. `read_s`
is the additional time to create a tensor of every layer of every prompt and to read it.
`bytes_per_s` is the captured bytes over the sum of both, which includes the model's run time.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

# Rows are transferred from the engine's process to this one.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import machine
import overhead
import shapes

# Number of prompts by shape: rows of some gigabytes, and less than half of the arena.
PROMPTS = {"tiny": 16, "0.6b": 256, "8b": 64}
CODECS = ("raw", "full8", "rp8:k=512,seed=0", "topk8:k=64")


def main() -> None:
    """Measure every shape, and write the table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["0.6b", "8b"], choices=list(shapes.SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, help="default: by the shape")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--codecs", nargs="*", default=list(CODECS))
    parser.add_argument("--memory", type=float, default=0.35)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {
        "benchmark": "capture_cost",
        "machine": machine.describe(),
        "rounds": args.rounds,
        "shapes": {},
    }
    overhead.over_shapes(results, args, measure)
    for shape, measured in results["shapes"].items():
        for work, variants in measured["work"].items():
            sys.stdout.write(f"{shape}, {work}\n")
            for name, one in variants.items():
                line = f"  {name:34} {one['median_s']:8.3f} s {one['added']:+7.1%}"
                if one["row_bytes"]:
                    line += f" {one['read_s']:8.3f} s {one['bytes_per_s'] / 1e9:8.2f} GB/s"
                sys.stdout.write(line + "\n")


def measure(model: Path, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of every workload and variant."""
    from midstream import Capture

    taps = {"sites": ["resid_post"], "layers": "all"}
    plain, tapped = overhead.engines(model, args.memory, taps)
    layers = shapes.SHAPES[shape]["num_hidden_layers"]
    hidden = shapes.SHAPES[shape]["hidden_size"]
    codecs = [one for one in args.codecs if not one.startswith("rp8") or hidden >= 512]
    variants: dict[str, tuple[Any, Any]] = {
        "plain": (plain, None),
        "plain again": (plain, None),
        "idle": (tapped, None),
        "last prompt token": (tapped, Capture(layers="all", positions="last_prompt")),
        **{f"every token, {one}": (tapped, Capture(layers="all", codec=one)) for one in codecs},
    }
    prompts = args.prompts or PROMPTS[shape]
    work = {
        f"{prompts} × ({args.length} + {args.tokens}) tokens": args.tokens,
        f"prefill of {prompts} × {args.length} tokens": 1,
    }
    found = {
        "engine": msgspec.to_builtins(tapped.info.workers[0]),
        "layers": layers,
        "work": {name: compare(variants, args, prompts, tokens) for name, tokens in work.items()},
    }
    overhead.shut_down(plain, tapped)
    return found


def compare(
    variants: dict[str, tuple[Any, Any]], args: argparse.Namespace, prompts: int, tokens: int
) -> dict[str, dict[str, float]]:
    """Return the medians of each variant; the first round is a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    reading: dict[str, list[float]] = {name: [] for name in variants}
    row_bytes = dict.fromkeys(variants, 0)
    for nth in range(args.rounds + 1):
        for name, (llm, capture) in variants.items():
            called, read, row_bytes[name] = run(llm, capture, args.length, prompts, tokens)
            if nth:
                seconds[name].append(called)
                reading[name].append(read)
    base = statistics.median(seconds["plain"])
    found = {}
    for name, values in seconds.items():
        median, read = statistics.median(values), statistics.median(reading[name])
        found[name] = {
            "median_s": median,
            "min_s": min(values),
            "max_s": max(values),
            "added": median / base - 1,
            "read_s": read,
            "row_bytes": row_bytes[name],
            "bytes_per_s": row_bytes[name] / (median + read),
        }
    return found


def run(llm: Any, capture: Any, length: int, count: int, tokens: int) -> tuple[float, float, int]:
    """Return the seconds of one call, the seconds to read all rows, and the rows' size in bytes."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    draw = random.Random(0)
    prompts = [
        {"prompt_token_ids": [draw.randrange(3, 500) for _ in range(length)]} for _ in range(count)
    ]
    asked = {} if capture is None else {"capture": capture}
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


if __name__ == "__main__":
    main()
