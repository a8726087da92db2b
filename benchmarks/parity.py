"""Error of captures against transformers, at every site of every layer.

    python benchmarks/parity.py [--json FILE]

For some prompts of SmolLM2-135M-Instruct, 12 greedy tokens each: the relative error
‖found − reference‖ / ‖reference‖ over all rows of one site and layer, against transformers in
float32 with hooks. For comparison, the same error of transformers in bfloat16 against float32.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

PROMPTS = (
    "The capital of France is",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)


def main() -> None:
    """Measure every dtype, and write the table and the JSON."""
    import machine

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"benchmark": "parity", "machine": machine.describe(), "dtypes": {}}
    for dtype in ("float32", "bfloat16"):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            results["dtypes"][dtype] = pool.submit(measure, dtype).result()
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    for dtype, rows in results["dtypes"].items():
        for prompt, row in rows.items():
            sys.stdout.write(f"{dtype:9} {prompt[:32]!r:36} {json.dumps(row)}\n")


def measure(dtype: str) -> dict[str, Any]:
    """Return the median and the maximum error over all taps, for each prompt."""
    import torch
    from support.engines import ALL_SITES, engine, generated, greedy
    from support.oracle import Oracle, relative_error

    from midstream import Capture
    from midstream.lab.demo.model.smollm2 import NAME, make_smollm2

    model = make_smollm2(Path(os.environ.get("MIDSTREAM_MODELS", ROOT / ".models")) / NAME)
    oracles = {
        name: Oracle(model, "model.layers", "post_attention_layernorm", getattr(torch, name))
        for name in ("float32", "bfloat16")
    }
    found: dict[str, Any] = {}
    with engine(
        model, dtype=dtype, enforce_eager=False, max_model_len=512, gpu_memory_utilization=0.2
    ) as llm:
        for prompt in PROMPTS:
            output = llm.generate(
                prompt, greedy(12), capture=Capture(layers="all", sites=ALL_SITES), use_tqdm=False
            )[0]
            ids = [*output.prompt_token_ids, *generated(output)][:-1]
            seen = {name: oracle.run(ids)[1] for name, oracle in oracles.items()}
            pairs = {
                "midstream against float32": (output.activations, seen["float32"]),
                "midstream against bfloat16": (output.activations, seen["bfloat16"]),
                "transformers bfloat16 against float32": (seen["bfloat16"], seen["float32"]),
            }
            found[prompt] = {
                name: summary([relative_error(a[tap], b[tap]) for tap in seen["float32"]])
                for name, (a, b) in pairs.items()
            }
    return found


def summary(errors: list[float]) -> dict[str, float]:
    """Return the median, the maximum, and the share of taps with an error within 2 %."""
    return {
        "median": round(statistics.median(errors), 6),
        "worst": round(max(errors), 6),
        "within_2_percent": round(sum(error <= 0.02 for error in errors) / len(errors), 3),
    }


if __name__ == "__main__":
    main()
