"""Attribution patching against activation patching: how well estimates agree with real patches.

    python benchmarks/attribution.py [--model FOLDER] [--json FILE]

For two pairs of prompts of the literature, all layers and positions at three sites: estimates by
`attribution_patching` and effects by `llm.sweep`, in float32. Prints by site their correlation, and
by pair how many of the 20 cells with the largest effects are among the 20 largest estimates. The
default model is SmolLM2-135M-Instruct, which is made when absent.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import engines

SITES = ["attn_out", "mlp_out", "resid_pre"]
TOP = 20
# By name: the clean prompt, the corrupt one, and the two tokens of the metric.
PAIRS = {
    "capitals": (
        "The capital of France is the city of",
        "The capital of Japan is the city of",
        (" Paris", " Tokyo"),
    ),
    "indirect object": (
        "When Mary and John went to the store, John gave a drink to",
        "When Mary and John went to the store, Mary gave a drink to",
        (" Mary", " John"),
    ),
}


def main() -> int:
    """Compare on each pair, write the JSON after each, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", type=Path)
    parser.set_defaults(rounds=1, seconds=None)
    args = parser.parse_args()
    # The twin reads the engine's own tokenizer and settings, and runs in this process beside it.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from midstream import LLM
    from midstream.lab.attribution import Twin
    from midstream.lab.demo.model.smollm2 import NAME, make_smollm2

    model = args.model or make_smollm2(Path(".models") / NAME)
    run = engines.Run("attribution", args, model=model.name, pairs={})
    with run.limited():
        llm = LLM(str(model), dtype="float32", enforce_eager=True, midstream={"sites": SITES})
        twin = Twin(llm)
        for name in PAIRS:
            run.results["pairs"][name] = compare(llm, twin, *PAIRS[name])
            run.save()
    return run.finish()


def compare(
    llm: Any, twin: Any, clean: str, corrupt: str, tokens: tuple[str, str]
) -> dict[str, Any]:
    """Return the correlation by site, and how many of the largest effects are found."""
    import numpy as np

    from midstream import LogitDiff
    from midstream.lab.attribution import attribution_patching

    metric = LogitDiff(*tokens)
    estimates = attribution_patching(twin, clean, corrupt, metric, sites=SITES).effects
    swept = llm.sweep(corrupt, clean, metric, sites=SITES, use_tqdm=False)
    effects = swept.values - swept.corrupt
    pairs = zip(SITES, estimates, effects, strict=True)
    largest = [set(np.argsort(-abs(values.ravel()))[:TOP]) for values in (estimates, effects)]
    return {
        "correlation": {
            site: float(np.corrcoef(one.ravel(), other.ravel())[0, 1]) for site, one, other in pairs
        },
        "cells": int(effects.size),
        "top": TOP,
        "found": len(largest[0] & largest[1]),
    }


if __name__ == "__main__":
    sys.exit(main())
