"""Seconds of a chat whose turns are all captured, with and without rows of earlier turns.

    python benchmarks/reuse_chat.py MODEL [--turns 32] [--question 24] [--answer 24] \
        [--rounds 3] [--layers all] [--json FILE]

Each turn's prompt is the whole conversation so far, and each turn captures every token of it at the
layers' `resid_post`. Kinds take turns in rounds, each with a conversation of its own; figures are
medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import machine

KINDS = ("no capture", "capture", "capture, reuse")
REUSE_BYTES = 8 << 30


def main() -> None:
    """Measure, and write the table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=32)
    parser.add_argument("--question", type=int, default=24, help="tokens of the user in a turn")
    parser.add_argument("--answer", type=int, default=24, help="tokens generated in a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", default="all", help="all, or indices with commas")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--block-size", type=int, default=None)
    parser.add_argument("--eager", action="store_true", help="without compilation")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    from midstream import LLM, Capture

    layers = args.layers if args.layers == "all" else [int(n) for n in args.layers.split(",")]
    block = {} if args.block_size is None else {"block_size": args.block_size}
    length = args.turns * (args.question + args.answer)
    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=length + 64,
        enable_prefix_caching=True,
        enforce_eager=args.eager,
        disable_log_stats=True,
        midstream={"reuse_bytes": REUSE_BYTES},
        **block,
    )
    captures = {
        "no capture": None,
        "capture": Capture(layers),
        "capture, reuse": Capture(layers, reuse=True),
    }
    found: dict[str, list[list[Any]]] = {kind: [] for kind in KINDS}
    chat(llm, captures["capture, reuse"], 2, args, seed=0)
    for nth in range(args.rounds):
        for kind in KINDS:
            turns = chat(llm, captures[kind], args.turns, args, seed=1 + nth)
            found[kind].append(turns)
            llm.reset_prefix_cache()
            sys.stdout.write(f"round {nth}, {kind}: {sum(turn[0] for turn in turns):.2f} s\n")
            sys.stdout.flush()
        report = report_of(args, llm, found)
        if args.json is not None:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    write_table(report)


def report_of(
    args: argparse.Namespace, llm: Any, found: dict[str, list[list[Any]]]
) -> dict[str, Any]:
    """Return the results so far as JSON values."""
    cache = llm.llm_engine.vllm_config.cache_config
    return {
        "benchmark": "reuse_chat",
        "model": Path(args.model).name,
        "turns": args.turns,
        "question": args.question,
        "answer": args.answer,
        "layers": args.layers,
        "rounds": len(found[KINDS[-1]]),
        "eager": args.eager,
        "block_size": cache.block_size,
        "machine": machine.describe(),
        "kinds": {kind: summary(rounds) for kind, rounds in found.items()},
    }


def chat(llm: Any, capture: Any, turns: int, args: argparse.Namespace, seed: int) -> list[Any]:
    """Return (seconds, tokens of the prompt, of these from the cache, reused rows) per turn."""
    from midstream import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=args.answer, ignore_eos=True, detokenize=False
    )
    draw = random.Random(seed)
    prompt: list[int] = []
    found = []
    for _ in range(turns):
        prompt += [draw.randrange(100, 190) for _ in range(args.question)]
        began = time.perf_counter()
        [out] = llm.generate({"prompt_token_ids": prompt}, params, capture=capture, use_tqdm=False)
        seconds = time.perf_counter() - began
        rows = 0 if capture is None else sum(one.reused for one in out.receipt.captured)
        found.append((seconds, len(prompt), out.num_cached_tokens, rows))
        prompt += out.outputs[0].token_ids
    return found


def summary(rounds: list[list[Any]]) -> dict[str, Any]:
    """Return medians over rounds; counts are the same in each."""
    turns = list(zip(*rounds, strict=True))
    return {
        "seconds": round(statistics.median(sum(turn[0] for turn in one) for one in rounds), 3),
        "seconds_of_each_round": [round(sum(turn[0] for turn in one), 3) for one in rounds],
        "last_turn_seconds": round(statistics.median(one[0] for one in turns[-1]), 4),
        "prompt_tokens": sum(turn[1] for turn in rounds[0]),
        "cached_tokens": sum(turn[2] for turn in rounds[0]),
        "reused_rows": sum(turn[3] for turn in rounds[0]),
    }


def write_table(report: dict[str, Any]) -> None:
    """Write a line for each kind."""
    for kind, one in report["kinds"].items():
        sys.stdout.write(
            f"{kind:16} {one['seconds']:8.2f} s, last turn {one['last_turn_seconds']:.3f} s, "
            f"{one['cached_tokens']} of {one['prompt_tokens']} prompt tokens from the cache, "
            f"{one['reused_rows']} rows reused\n"
        )


if __name__ == "__main__":
    main()
