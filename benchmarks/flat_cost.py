"""Cost of edits by the number of distinct vectors, and by operation.

    python benchmarks/flat_cost.py [--shapes 0.6b 8b] [--rounds 5] [--batch 256] [--json FILE]

Decode steps of one batch, with every token edited at `resid_post`: K distinct vectors for each
layer, spread over the batch's requests; then each operation at every layer. The method is that of
`overhead.py`: against plain vLLM in the same rounds.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import engines
import overhead
import shapes
from overhead import SMALL


def main() -> int:
    """Measure every shape, and write the table."""
    parser = engines.arguments(__doc__, list(shapes.SHAPES))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--distinct", nargs="*", type=int, default=[1, 16, 256])
    parser.set_defaults(tp=1, midstream={}, also=[], profiles=None)
    args = parser.parse_args()
    adds = ["add at one layer", *(f"{overhead.EVERY}{count}" for count in args.distinct)]
    asks = {name: functools.partial(overhead.asked, name) for name in adds}
    for name in operations("tiny"):
        asks[name] = functools.partial(operation, name)
    work = {f"decode, {args.batch} sequences": (overhead.decode_step, args.batch, ())}
    return overhead.over_shapes("flat_cost", args, work, asks)


def operation(name: str, shape: str, batch: int, decodes: bool) -> dict[str, Any]:
    """Return the arguments of `generate` with one operation."""
    return operations(shape)[name]


@functools.cache
def operations(shape: str) -> dict[str, dict[str, Any]]:
    """Return each operation at every layer, with amounts too small to change values."""
    from midstream import Ablate, Affine, Clamp, Feature, Gate, LoReFT, Probe, Replace, Scale, Steer

    layers = shapes.SHAPES[shape]["num_hidden_layers"]
    one, two = overhead.vector(shape, 1), overhead.vector(shape, 2)
    rows = orthonormal(shapes.SHAPES[shape]["hidden_size"], 4)
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
            Steer(one, layer=list(range(1, layers))),
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


def orthonormal(hidden: int, count: int) -> Any:
    """Return random orthonormal rows, [count, hidden]."""
    import numpy as np

    return np.linalg.qr(np.random.default_rng(0).normal(size=(hidden, count)))[0].T


if __name__ == "__main__":
    sys.exit(main())
