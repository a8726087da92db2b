"""Cost of a capture of every token, over the number of captured layers.

    python benchmarks/layer_scaling.py [--shapes 0.6b] [--layers 1 2 4 8 16 28] [--codec raw] \
        [--rounds 5] [--seconds 280] [--json FILE]

The method is that of `capture_cost.py`. Variants: plain vLLM; midstream without a capture (idle); a
capture of every token at 1, 2, 4, … layers, which are spread over the model.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import capture_cost


def main() -> int:
    """Measure every workload, and write the table."""
    parser = capture_cost.arguments(__doc__)
    parser.set_defaults(shapes=["0.6b"])
    parser.add_argument("--layers", nargs="+", type=int, help="default: powers of two, and all")
    parser.add_argument("--codec", default="raw")
    args = parser.parse_args()

    def captures(layers: int) -> capture_cost.Captures:
        counts = args.layers or [2**n for n in range(16) if 2**n < layers] + [layers]
        found: capture_cost.Captures = {"idle": None}
        for count in counts:
            spread = [nth * layers // count for nth in range(count)]
            found[f"{count} layers"] = {"layers": spread, "codec": args.codec}
        return found

    return capture_cost.over_shapes("layer_scaling", args, captures)


if __name__ == "__main__":
    sys.exit(main())
