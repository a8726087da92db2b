"""Cost of edits by the number of distinct vectors, and by operation.

    python benchmarks/flat_cost.py [--shapes 0.6b 8b] [--rounds 5] [--batch 256] [--json FILE]

Decode steps of one batch, with every token edited at `resid_post`: K distinct vectors for each
layer, spread over the batch's requests; then each operation at every layer. Also the idle engine at
several batch sizes. The method is that of `overhead.py`: against plain vLLM in the same rounds.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent))

import machine
import overhead
import shapes

# Edits are too small to change the values: with random weights the stream is small, and its values
# decide how much power the matrix products draw, and so how fast they run.
SMALL = 1e-6


def main() -> None:
    """Measure every shape, and write the table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["0.6b", "8b"], choices=list(shapes.SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--distinct", nargs="+", type=int, default=[1, 16, 256])
    parser.add_argument("--idle-batches", nargs="*", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--memory", type=float, default=0.35)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {
        "benchmark": "flat_cost",
        "machine": machine.describe(),
        "rounds": args.rounds,
        "shapes": {},
    }
    overhead.over_shapes(results, args, measure)
    overhead.write_table(results)


def measure(model: Path, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of every workload and variant, in seconds."""
    config = shapes.SHAPES[shape]
    layers = config["num_hidden_layers"]
    capacity = {"bank_rows": max(args.distinct) * layers + 1024, "max_edits": 1 << 17}
    plain, tapped = overhead.engines(
        model, args.memory, {"sites": ["resid_post"], "layers": "all", **capacity}
    )
    out: dict[str, Any] = {
        "graphs": overhead.graphs(tapped),
        "engine": msgspec.to_builtins(tapped.info.workers[0]),
    }
    baseline = {"plain": (plain, {}), "plain again": (plain, {}), "idle": (tapped, {})}
    for batch in args.idle_batches:
        out[f"decode, {batch} sequences"] = overhead.compare(
            baseline, args.rounds, lambda llm, kw, n=batch: overhead.decode_step(llm, kw, n)
        )
    edits = distinct_vectors(config, args) | operations(config)
    variants = baseline | {name: (tapped, asked) for name, asked in edits.items()}
    out[f"decode, {args.batch} sequences"] = overhead.compare(
        variants, args.rounds, lambda llm, kw: overhead.decode_step(llm, kw, args.batch)
    )
    return out


def distinct_vectors(config: dict[str, Any], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return additions at one layer, and at every layer with K distinct vectors for each layer."""
    from midstream import Steer

    layers = config["num_hidden_layers"]
    found: dict[str, dict[str, Any]] = {
        "add at one layer": {"steer": [Steer(vector(config, 0), layer=layers // 2)]}
    }
    for count in args.distinct:
        kinds = [
            [Steer(vector(config, nth, layer), layer=layer) for layer in range(layers)]
            for nth in range(count)
        ]
        found[f"add at every layer, K = {count}"] = {
            "steer": [kinds[nth % count] for nth in range(args.batch)]
        }
    return found


def operations(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each operation at every layer, with amounts too small to change values."""
    from midstream import Ablate, Affine, Clamp, Feature, Gate, LoReFT, Probe, Replace, Scale, Steer

    one, two = vector(config, 1), vector(config, 2)
    rows = orthonormal(config, 4)
    every: dict[str, Any] = {"layer": "all"}
    steer = Steer(one, **every)
    edits: dict[str, Any] = {
        "add, norm matched": Steer(one, norm="match", scale=SMALL, **every),
        "add, norm kept": Steer(one, norm="keep", **every),
        "ablate a direction": Ablate(one, **every),
        "ablate a subspace of 4": Ablate(rows, subspace=True, **every),
        "clamp": Clamp(one, value=1.0, strength=SMALL, **every),
        "gated addition, own probe": Gate(steer, {"direction": two}, sharpness=1.0),
        "gated addition, one earlier probe": Gate(
            Steer(one, layer=list(range(1, config["num_hidden_layers"]))),
            {"direction": two, "layer": 0, "site": "resid_post"},
        ),
        "SAE feature": Feature(one, two, mode="set", value=1.0, **every),
        "affine of rank 4": Affine(rows, rows, scale=SMALL, **every),
        "LoReFT of rank 4": LoReFT(rows, rows, [SMALL] * 4, **every),
        "replace a row": Replace(one, alpha=SMALL, **every),
        "scale": Scale(1.0 + SMALL, **every),
    }
    found: dict[str, dict[str, Any]] = {name: {"edits": [edit]} for name, edit in edits.items()}
    found["probe at one layer"] = {"probes": [Probe(one, layer=0)]}
    return found


def vector(config: dict[str, Any], *seed: int) -> list[float]:
    """Return small random numbers, one per dimension of the model."""
    draw = random.Random(repr(seed))
    return [draw.gauss(0, SMALL) for _ in range(config["hidden_size"])]


def orthonormal(config: dict[str, Any], count: int) -> Any:
    """Return random orthonormal rows, [count, hidden]."""
    import numpy as np

    wide = np.random.default_rng(0).normal(size=(config["hidden_size"], count))
    return np.linalg.qr(wide)[0].T


if __name__ == "__main__":
    main()
