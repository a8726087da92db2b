"""Activation patching: cells per second of `llm.sweep`, against one request or forward per cell.

    python benchmarks/sweep.py [--shapes 0.6b] [--model FOLDER] [--lengths 9 128] [--positions 9] \
        [--loop 64] [--rounds 3] [--seconds 280] [--json FILE]

The grid is every layer at `resid_pre`, and the last positions of a prompt of random tokens; the
metric is the difference of two logits. Variants, on the same weights:

- `llm.sweep`: all cells in one batch.
- one request per cell: the same engine, `generate` with one `Replace` at a time.
- TransformerLens: `patching.generic_activation_patch` on a TransformerBridge, one forward per cell.

The last two run `--loop` cells spread over the grid; times are per cell. "differs by" is the
largest difference of the metric from `llm.sweep` on these cells. Without `--model`, weights are
random and are written once. The prefix cache is emptied before each measurement.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import engines
import shapes

A, B = 17, 29  # tokens of the metric
SWEEP, REQUESTS, LENS = "llm.sweep", "one request per cell", "TransformerLens"


def main() -> int:
    """Measure every shape, and write the table."""
    parser = engines.arguments(__doc__, list(shapes.SHAPES), rounds=3)
    parser.add_argument("--model", type=Path, help="folder of a model, instead of random weights")
    parser.add_argument("--lengths", nargs="+", type=int, default=[9, 128], help="of prompts")
    parser.add_argument("--positions", type=int, default=9, help="columns of the grid")
    parser.add_argument("--loop", type=int, default=64, help="cells of the variants with a loop")
    parser.set_defaults(shapes=["0.6b"])
    args = parser.parse_args()
    run = engines.Run("sweep", args, positions=args.positions, shapes={})
    for shape in [args.model.name] if args.model else args.shapes:
        model = args.model or with_weights(shape)
        makers: dict[str, tuple[Any, ...]] = {"midstream": (tapped, model, settings(shape, args))}
        if importlib.util.find_spec("transformer_lens"):
            makers[LENS] = bridged, model
        with run.limited(), run.engines(makers, ("midstream",)) as started:
            into = run.results["shapes"][shape] = {**started["midstream"].call(engines.describe)}
            for length in args.lengths:
                variants = variants_of(started, length, min(args.positions, length), args.loop)
                run.measure(into, f"prompts of {length} tokens", variants, summary)
    return run.finish()


def settings(shape: str, args: Any) -> dict[str, Any]:
    """Return vLLM's arguments for an engine with the weights of a folder."""
    import torch

    own = {"load_format": "auto", "enable_prefix_caching": True}
    if not torch.cuda.is_available():
        own["block_size"] = 32  # vLLM's default there is 128
    return engines.settings(shape, args, **own)


def with_weights(shape: str) -> Path:
    """Return a folder with random weights of a shape, which are written once.

    It has a tokenizer of one word: TransformerLens needs one, though prompts are token ids.
    """
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = shapes.write(shape, engines.CACHE / "weights")
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        words = Tokenizer(WordLevel({"<|end|>": 0}, unk_token="<|end|>"))
        special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|end|>")
        PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return folder


def tapped(model: Path, settings: dict[str, Any]) -> Any:
    """Create midstream's `LLM` with `resid_pre` tapped."""
    from midstream import LLM

    return LLM(str(model), **settings, midstream={"sites": ["resid_pre"], "layers": "all"})


def bridged(model: Path) -> Any:
    """Create TransformerLens's bridge to transformers' model."""
    import torch
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    found = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device)
    tokenizer = AutoTokenizer.from_pretrained(model)
    named = {"hf_model": found, "tokenizer": tokenizer, "device": device, "dtype": dtype}
    return TransformerBridge.boot_transformers(str(model), **named)


def variants_of(started: Any, length: int, positions: int, loop: int) -> dict[str, Any]:
    """Return what runs in turn, by name."""
    call = started["midstream"].call
    found = {
        SWEEP: functools.partial(call, sweep, length, positions, loop),
        REQUESTS: functools.partial(call, requests, length, positions, loop),
    }
    if LENS in started:
        layers = call(num_layers)
        found[LENS] = functools.partial(started[LENS].call, lens, length, positions, loop, layers)
    return found


def num_layers(llm: Any) -> int:
    """Return the number of layers of an engine's model."""
    return int(llm.info.shape.num_layers)


def prompts(length: int) -> tuple[list[int], list[int]]:
    """Return a corrupt and a clean prompt of random tokens, which differ in a third of them."""
    import numpy as np

    draw = np.random.default_rng(length)
    corrupt = draw.integers(100, 40000, length)
    clean = np.where(np.arange(length) % 3 == 1, draw.integers(100, 40000, length), corrupt)
    return corrupt.tolist(), clean.tolist()


def chosen(layers: int, length: int, positions: int, loop: int) -> list[tuple[int, int]]:
    """Return cells spread over the grid, as (layer, position)."""
    every = [(one, length - positions + nth) for one in range(layers) for nth in range(positions)]
    count = min(loop, len(every))
    return [every[nth * len(every) // count] for nth in range(count)]


def sweep(llm: Any, length: int, positions: int, loop: int) -> dict[str, Any]:
    """Time `llm.sweep` of the whole grid."""
    from midstream import LogitDiff

    corrupt, clean = prompts(length)
    llm.reset_prefix_cache()
    places = list(range(length - positions, length))
    start = time.perf_counter()
    found = llm.sweep(corrupt, clean, LogitDiff(A, B), positions=places, use_tqdm=False)
    seconds = time.perf_counter() - start
    cells = chosen(num_layers(llm), length, positions, loop)
    values = [float(found.values[0, layer, place - places[0]]) for layer, place in cells]
    return {
        "seconds": seconds,
        "cells": found.values.size,
        "values": values,
        "noise_floor": found.noise_floor,
        "cached": found.receipts.cached_tokens / found.receipts.prompt_tokens,
    }


def requests(llm: Any, length: int, positions: int, loop: int) -> dict[str, Any]:
    """Time one request per cell."""
    from vllm import SamplingParams

    from midstream import Capture, Replace

    corrupt, clean = prompts(length)
    llm.reset_prefix_cache()
    params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=[A, B])
    cells = chosen(num_layers(llm), length, positions, loop)
    start = time.perf_counter()
    source = llm.generate(
        {"prompt_token_ids": clean}, params, capture=Capture("all", "resid_pre"), use_tqdm=False
    )[0]
    values = []
    for layer, place in cells:
        row = source.activations["resid_pre", layer][place]
        edit = Replace(row, layer, site="resid_pre", positions=place)
        prompt = {"prompt_token_ids": corrupt}
        output = llm.generate(prompt, params, edits=edit, use_tqdm=False)[0]
        found = output.outputs[0].logprobs[0]
        values.append(found[A].logprob - found[B].logprob)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "cells": len(cells), "values": values}


def lens(model: Any, length: int, positions: int, loop: int, layers: int) -> dict[str, Any]:
    """Time TransformerLens's loop over cells."""
    import pandas
    import torch
    from transformer_lens import patching

    corrupt, clean = (torch.tensor([one], device=model.cfg.device) for one in prompts(length))
    cells = chosen(layers, length, positions, loop)
    start = time.perf_counter()
    with torch.inference_mode():
        _, cache = model.run_with_cache(clean, names_filter=lambda name: "resid_pre" in name)
        found = patching.generic_activation_patch(
            model,
            corrupt,
            cache,
            lambda logits: logits[0, -1, A].float() - logits[0, -1, B].float(),
            patching.layer_pos_patch_setter,
            "resid_pre",
            index_axis_names=None,
            index_df=pandas.DataFrame(cells, columns=["layer", "pos"]),
        )
        values = found.tolist()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "cells": len(cells), "values": values}


def summary(values: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the medians of each variant, and how far its values are from those of the sweep."""
    reference = values[SWEEP][-1]["values"] if SWEEP in values else None
    found = {}
    for name, rounds in values.items():
        per_cell = [one["seconds"] / one["cells"] for one in rounds]
        last = rounds[-1]
        found[name] = {
            "median_s": statistics.median(per_cell),
            "min_s": min(per_cell),
            "max_s": max(per_cell),
            "rounds": len(rounds),
            "cells": last["cells"],
            "differs_by": None
            if reference is None
            else max(abs(a - b) for a, b in zip(last["values"], reference, strict=True)),
            "spread": max(last["values"]) - min(last["values"]),
            **{key: last[key] for key in ("noise_floor", "cached") if key in last},
        }
    return found


if __name__ == "__main__":
    sys.exit(main())
