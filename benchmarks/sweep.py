"""Activation patching: cells per second of `llm.sweep`, against one request or forward per cell.

    python benchmarks/sweep.py [--shapes 0.6b] [--model FOLDER] [--lengths 68] [--positions 68] \
        [--sites resid_pre attn_out mlp_out] [--loop 256] [--rounds 3] [--seconds 280] [--json FILE]

The grid is every layer at some sites, and the last positions of a prompt of random tokens; the
metric is the difference of two logits. The defaults are the sites of TransformerLens's
`get_act_patch_block_every` and 68 tokens: 5,712 cells of the 0.6B shape. Variants, on the same
weights:

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
import itertools
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import engines
import shapes

Cell = tuple[str, int, int]  # site, layer, position

A, B = 17, 29  # tokens of the metric
SWEEP, REQUESTS, LENS = "llm.sweep", "one request per cell", "TransformerLens"


def main() -> int:
    """Measure every shape, and write the table."""
    parser = engines.arguments(__doc__, list(shapes.SHAPES), rounds=3)
    parser.add_argument("--model", type=Path, help="folder of a model, instead of random weights")
    parser.add_argument("--lengths", nargs="+", type=int, default=[68], help="of prompts")
    parser.add_argument("--positions", type=int, default=68, help="columns of the grid")
    parser.add_argument("--sites", nargs="+", default=["resid_pre", "attn_out", "mlp_out"])
    parser.add_argument("--loop", type=int, default=256, help="cells of the variants with a loop")
    parser.set_defaults(shapes=["0.6b"])
    args = parser.parse_args()
    run = engines.Run("sweep", args, positions=args.positions, sites=args.sites, shapes={})
    for shape in [args.model.name] if args.model else args.shapes:
        model = args.model or with_weights(shape)
        makers: dict[str, tuple[Any, ...]] = {
            "midstream": (tapped, model, settings(shape, args), args.sites)
        }
        if importlib.util.find_spec("transformer_lens"):
            makers[LENS] = bridged, model
        with run.limited(), run.engines(makers, ("midstream",)) as started:
            into = run.results["shapes"][shape] = {**started["midstream"].call(engines.describe)}
            for length in args.lengths:
                variants = variants_of(started, args, length)
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


def tapped(model: Path, settings: dict[str, Any], sites: list[str]) -> Any:
    """Create midstream's `LLM` with these sites tapped."""
    from midstream import LLM

    return LLM(str(model), **settings, midstream={"sites": sites, "layers": "all"})


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


def variants_of(started: Any, args: Any, length: int) -> dict[str, Any]:
    """Return what runs in turn, by name."""
    call = started["midstream"].call
    places = range(length - min(args.positions, length), length)
    grid = list(itertools.product(args.sites, range(call(num_layers)), places))
    # Cells of the variants with a loop, spread over the grid.
    cells = sorted(random.Random(0).sample(grid, min(args.loop, len(grid))))
    found = {
        SWEEP: functools.partial(call, sweep, length, args.sites, list(places), cells),
        REQUESTS: functools.partial(call, requests, length, args.sites, cells),
    }
    if LENS in started:
        found[LENS] = functools.partial(started[LENS].call, lens, length, args.sites, cells)
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


def sweep(
    llm: Any, length: int, sites: list[str], places: list[int], cells: list[Cell]
) -> dict[str, Any]:
    """Time `llm.sweep` of the whole grid."""
    from midstream import LogitDiff

    corrupt, clean = prompts(length)
    llm.reset_prefix_cache()
    given = {"sites": sites, "positions": places, "use_tqdm": False}
    start = time.perf_counter()
    found = llm.sweep(corrupt, clean, LogitDiff(A, B), **given)
    seconds = time.perf_counter() - start
    order = found.coords["site"]
    values = [
        float(found.values[order.index(site), layer, place - places[0]])
        for site, layer, place in cells
    ]
    return {
        "seconds": seconds,
        "cells": found.values.size,
        "values": values,
        "noise_floor": found.noise_floor,
        "cached": found.receipts.cached_tokens / found.receipts.prompt_tokens,
    }


def requests(llm: Any, length: int, sites: list[str], cells: list[Cell]) -> dict[str, Any]:
    """Time one request per cell."""
    from vllm import SamplingParams

    from midstream import Capture, Replace

    corrupt, clean = prompts(length)
    llm.reset_prefix_cache()
    params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=[A, B])
    start = time.perf_counter()
    source = llm.generate(
        {"prompt_token_ids": clean}, params, capture=Capture("all", sites), use_tqdm=False
    )[0]
    values = []
    for site, layer, place in cells:
        row = source.activations[site, layer][place]
        edit = Replace(row, layer, site=site, positions=place)
        prompt = {"prompt_token_ids": corrupt}
        output = llm.generate(prompt, params, edits=edit, use_tqdm=False)[0]
        found = output.outputs[0].logprobs[0]
        values.append(found[A].logprob - found[B].logprob)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "cells": len(cells), "values": values}


def lens(model: Any, length: int, sites: list[str], cells: list[Cell]) -> dict[str, Any]:
    """Time TransformerLens's loop over cells."""
    import pandas
    import torch
    from transformer_lens import patching

    corrupt, clean = (torch.tensor([one], device=model.cfg.device) for one in prompts(length))
    values: dict[Cell, float] = {}
    start = time.perf_counter()
    with torch.inference_mode():
        _, cache = model.run_with_cache(
            clean, names_filter=lambda name: any(site in name for site in sites)
        )
        for site in sites:
            mine = [cell for cell in cells if cell[0] == site]
            found = patching.generic_activation_patch(
                model,
                corrupt,
                cache,
                lambda logits: logits[0, -1, A].float() - logits[0, -1, B].float(),
                patching.layer_pos_patch_setter,
                site,
                index_axis_names=None,
                index_df=pandas.DataFrame([cell[1:] for cell in mine], columns=["layer", "pos"]),
            )
            values |= zip(mine, found.tolist(), strict=True)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "cells": len(cells), "values": [values[cell] for cell in cells]}


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
