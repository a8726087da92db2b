"""TransformerLens's `run_with_cache`: its `RemoteBridge` on midstream, against its `boot_vllm`.

    python benchmarks/remote_bridge.py [--shapes 0.6b] [--model FOLDER] [--lengths 16 128 512] \
        [--ranks 1] [--rounds 7] [--seconds 280] [--json FILE]

Needs TransformerLens 4.3 beside the packages of the extra `gpu`: see scripts/transformer_lens.sh.
Both engines have the same weights and compile; midstream's has its prefix cache on, `boot_vllm` has
none. A workload is one prompt of random tokens, another in each round, and what is cached:

- every: the outputs of all layers, of their attention and MLPs, and the embedding, by
  TransformerLens's names: what `boot_vllm` has, but for `ln_final.hook_normalized`.
- one: `hook_resid_post` of the middle layer.

Logits of every position are returned in both. "differs by" is the largest difference of the cache's
vectors, relative to the largest vector of the name.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import engines
import shapes
import sweep

OURS, THEIRS = "midstream", "boot_vllm"
SITES = ["embed", "attn_out", "mlp_out", "resid_post"]


def main() -> int:
    """Measure every shape, and write the table."""
    parser = engines.arguments(__doc__, list(shapes.SHAPES), rounds=7)
    parser.add_argument("--model", type=Path, help="folder of a model, instead of random weights")
    parser.add_argument("--lengths", nargs="+", type=int, default=[16, 128, 512], help="of prompts")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks of each engine")
    parser.set_defaults(shapes=["0.6b"])
    args = parser.parse_args()
    run = engines.Run("remote_bridge", args, ranks=args.ranks, shapes={})
    for shape in [args.model.name] if args.model else args.shapes:
        model = args.model or sweep.with_weights(shape)
        given = engines.settings(shape, args, load_format="auto", max_num_batched_tokens=2048)
        given["tensor_parallel_size"] = args.ranks
        makers = {OURS: (ours, model, given), THEIRS: (theirs, model, given)}
        with run.limited(), run.engines(makers, (OURS,)) as started:
            into = run.results["shapes"][shape] = {}
            for length in args.lengths:
                for what in ("every", "one"):
                    variants = {
                        name: functools.partial(each.call, cached, length, what)
                        for name, each in started.items()
                    }
                    run.measure(into, f"{what}, {length} tokens", variants, summary)
    return run.finish()


def ours(model: Path, settings: dict[str, Any]) -> Any:
    """Create the bridge on an engine of midstream."""
    from midstream import LLM
    from midstream.lab.harness.transformer_lens import remote_bridge

    own = {**settings, "enable_prefix_caching": True}
    return remote_bridge(LLM(str(model), **own, midstream={"sites": SITES}), _tokenizer(model))


def theirs(model: Path, settings: dict[str, Any]) -> Any:
    """Create TransformerLens's own bridge to vLLM, with the same settings where it takes them."""
    import torch
    from transformer_lens.model_bridge.remote_bridge import RemoteBridge

    own = dict(settings)
    for name in ("enable_prefix_caching", "skip_tokenizer_init"):  # which it sets itself
        del own[name]
    own["dtype"] = getattr(torch, own["dtype"])
    return RemoteBridge.boot_vllm(str(model), tokenizer=_tokenizer(model), **own)


def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def cached(bridge: Any, length: int, what: str) -> dict[str, Any]:
    """Time `run_with_cache` of a prompt; the same prompts come to both bridges, once each."""
    import numpy as np
    import torch

    seen: dict[tuple[int, str], int] = bridge.__dict__.setdefault("midstream_seen", {})
    seen[length, what] = seen.get((length, what), -1) + 1
    draw = np.random.default_rng([length, len(what), seen[length, what]])
    ids = torch.from_numpy(draw.integers(100, 40_000, (1, length)) % bridge.cfg.d_vocab)
    middle = bridge.cfg.n_layers // 2
    name = f"blocks.{middle}.hook_resid_post"
    blocks = ("hook_out", "attn.hook_out", "mlp.hook_out")
    every = {f"blocks.{n}.{hook}" for n in range(bridge.cfg.n_layers) for hook in blocks}
    names = (every | {"embed.hook_out"}).__contains__ if what == "every" else name
    start = time.perf_counter()
    logits, cache = bridge.run_with_cache(ids, names_filter=names)
    seconds = time.perf_counter() - start
    rows = cache["blocks.0.hook_out" if what == "every" else name].float()
    return {
        "seconds": seconds,
        "names": len(cache),
        "rows": rows[0, -1].tolist(),
        "token": int(logits[0, -1].argmax()),
    }


def summary(values: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the medians, how many times longer `boot_vllm` takes, and how far its rows are."""
    found: dict[str, Any] = {}
    for name, rounds in values.items():
        taken = [one["seconds"] for one in rounds]
        found[name] = {
            "median_s": statistics.median(taken),
            "min_s": min(taken),
            "max_s": max(taken),
            "rounds": len(rounds),
            "names": rounds[-1]["names"],
        }
    if THEIRS in values and OURS in values:
        pairs = list(zip(values[OURS], values[THEIRS], strict=False))
        found[THEIRS]["times"] = found[THEIRS]["median_s"] / found[OURS]["median_s"]
        found[THEIRS]["same_tokens"] = sum(a["token"] == b["token"] for a, b in pairs)
        found[THEIRS]["differs_by"] = max(
            max(abs(x - y) for x, y in zip(a["rows"], b["rows"], strict=True))
            / max(map(abs, a["rows"]))
            for a, b in pairs
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
