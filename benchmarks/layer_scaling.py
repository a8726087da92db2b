"""Cost of a capture of every token, over the number of captured layers.

    python benchmarks/layer_scaling.py [--shape 0.6b] [--layers 1 2 4 8 16 28] [--codec raw] \
        [--rounds 3] [--json FILE]

Plain vLLM and an engine with midstream do the same work: prompts, with some tokens generated after
each and without. Variants: plain vLLM; midstream without a capture (idle); a capture of every token
at 1, 2, 4, … layers, which are spread over the model. In each round all variants run once, one
after the other; figures are medians, as in `capture_cost.py`. The JSON is written after each
workload.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import capture_cost
import machine
import msgspec
import overhead
import shapes


def main() -> None:
    """Measure every workload; print its table and write the JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.6b", choices=list(shapes.SHAPES))
    parser.add_argument("--layers", nargs="+", type=int, help="default: powers of two, and all")
    parser.add_argument("--codec", default="raw")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, help="default: by the shape")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--memory", type=float, default=0.35)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    layers = shapes.SHAPES[args.shape]["num_hidden_layers"]
    counts = args.layers or [2**n for n in range(16) if 2**n < layers] + [layers]
    if not all(0 < count <= layers for count in counts):
        parser.error(f"--layers: expected 1 to {layers}, got {counts}")
    prompts = args.prompts or capture_cost.PROMPTS[args.shape]
    with tempfile.TemporaryDirectory() as folder:
        taps = {"sites": ["resid_post"], "layers": "all"}
        model = shapes.write(args.shape, Path(folder))
        plain, tapped = overhead.engines(model, args.memory, taps)
        results: dict[str, Any] = {
            "benchmark": "layer_scaling",
            "machine": machine.describe(),
            "shape": args.shape,
            "layers": layers,
            "codec": args.codec,
            "rounds": args.rounds,
            "engine": msgspec.to_builtins(tapped.info.workers[0]),
            "work": {},
        }
        found = variants(plain, tapped, layers, counts, args.codec)
        try:
            for name, tokens in {
                f"{prompts} × ({args.length} + {args.tokens}) tokens": args.tokens,
                f"prefill of {prompts} × {args.length} tokens": 1,
            }.items():
                results["work"][name] = capture_cost.compare(found, args, prompts, tokens)
                write_table(name, results["work"][name])
                if args.json:
                    args.json.write_text(json.dumps(results, indent=1, default=str) + "\n")
        finally:
            overhead.shut_down(plain, tapped)


def variants(
    plain: Any, tapped: Any, layers: int, counts: list[int], codec: str
) -> dict[str, tuple[Any, Any]]:
    """Return the engine and the capture of each variant."""
    from midstream import Capture

    found = {"plain": (plain, None), "plain again": (plain, None), "idle": (tapped, None)}
    for count in counts:
        spread = [nth * layers // count for nth in range(count)]
        found[f"{count} layers"] = (tapped, Capture(spread, codec=codec))
    return found


def write_table(work: str, measured: dict[str, dict[str, float]]) -> None:
    """Print the time of each variant, what it adds to plain vLLM, and the throughput of rows."""
    sys.stdout.write(f"{work}\n")
    for name, one in measured.items():
        line = f"  {name:12} {one['median_s']:8.3f} s {one['added']:+7.1%}"
        if one["row_bytes"]:
            line += f" {one['row_bytes'] / 1e6:10.1f} MB {one['bytes_per_s'] / 1e9:8.2f} GB/s"
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
