"""Overhead of midstream: plain vLLM against the same engine with taps, idle and in use.

    python benchmarks/overhead.py [--shapes 0.6b 8b] [--rounds 5] [--tp 2] [--json FILE]

Every figure is a median over rounds. In each round all variants run once, one after the other, so
drift of the machine affects all equally. Plain vLLM runs with its defaults: torch.compile and CUDA
graphs enabled. Model weights are random; their values do not change the work.

decode: seconds of one step of a batch that only generates: the mean over 96 consecutive steps after
all prompts are processed.
prefill: seconds of a batch of prompts with one generated token each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

# With several GPUs the engine and its workers run in separate processes.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", str(int("--tp" in sys.argv)))
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import machine
import shapes

# Numbers of untimed steps (including prefill), of timed steps, and of steps after them.
SKIPPED, STEPS, LAST = 16, 96, 4
PROMPT = 32


def main() -> None:
    """Measure every shape, and write the table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["0.6b", "8b"], choices=list(shapes.SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 256])
    parser.add_argument("--prefill-prompts", type=int, default=16)
    parser.add_argument("--prefill-length", type=int, default=1024)
    parser.add_argument(
        "--memory", type=float, default=0.3, help="share of device memory an engine may use"
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {
        "benchmark": "overhead" if args.tp == 1 else "overhead_tp",
        "tensor_parallel_size": args.tp,
        "machine": machine.describe(),
        "rounds": args.rounds,
        "shapes": {},
    }
    over_shapes(results, args, measure)
    write_table(results)


def over_shapes(
    results: dict[str, Any],
    args: argparse.Namespace,
    measure: Callable[[Path, str, argparse.Namespace], dict[str, Any]],
) -> None:
    """Measure each shape in its own process, add it to `results["shapes"]`, and write the JSON."""
    with tempfile.TemporaryDirectory() as folder:
        for name in args.shapes:
            # One process per shape: vLLM does not release an engine's memory within a process.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                model = shapes.write(name, Path(folder))
                results["shapes"][name] = pool.submit(measure, model, name, args).result()
            if args.json:
                args.json.write_text(json.dumps(results, indent=2) + "\n")


def measure(model: Path, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of every workload and variant, in seconds."""
    from midstream import Capture, Steer

    tapping = {"sites": ["resid_post"], "layers": "all"}
    plain, tapped = engines(model, args.memory, tapping, tensor_parallel_size=args.tp)
    config = shapes.SHAPES[shape]
    vector = [random.Random(0).gauss(0, 0.01) for _ in range(config["hidden_size"])]
    one = [Steer(vector, layer=config["num_hidden_layers"] // 2)]
    every = [Steer(vector, layer=layer) for layer in range(config["num_hidden_layers"])]
    middle = config["num_hidden_layers"] // 2
    last = Capture(layers="all", positions="last_prompt")
    variants: dict[str, tuple[Any, dict[str, Any]]] = {
        "plain": (plain, {}),
        "plain again": (plain, {}),
        "idle": (tapped, {}),
        "steer one layer": (tapped, {"steer": one}),
        "steer every layer": (tapped, {"steer": every}),
        "capture last prompt token, every layer": (tapped, {"capture": last}),
        "capture every token, one layer": (tapped, {"capture": Capture(layers=[middle])}),
    }
    if args.tp > 1:
        for mode in ("gathered", "sharded"):
            every_row = Capture(layers="all", return_=mode)
            variants[f"capture every token, every layer, {mode}"] = tapped, {"capture": every_row}
    out: dict[str, Any] = {
        "graphs": graphs(tapped),
        "engine": msgspec.to_builtins(tapped.info.workers[0]),
    }
    for batch in args.batches:
        out[f"decode, {batch} sequences"] = compare(
            variants, args.rounds, lambda llm, kw, n=batch: decode_step(llm, kw, n)
        )
    out[f"prefill, {args.prefill_prompts} × {args.prefill_length} tokens"] = compare(
        variants,
        args.rounds,
        lambda llm, kw: timed(llm, kw, args.prefill_prompts, args.prefill_length, 1),
    )
    if args.tp > 1:
        shut_down(plain, tapped)
    return out


def engines(model: Path, memory: float, midstream: dict[str, Any], **more: Any) -> tuple[Any, Any]:
    """Create a plain vLLM engine, and the same engine with midstream."""
    import torch
    from vllm import LLM as Plain

    from midstream import LLM

    settings = {
        "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
        "gpu_memory_utilization": memory,
        # Every run must compute its prompts: with the cache there would be no prefill.
        "enable_prefix_caching": False,
        "seed": 0,
        **more,
    }
    return Plain(str(model), **settings), LLM(str(model), **settings, midstream=midstream)


def shut_down(*llms: Any) -> None:
    """End the processes of engines: a pool's process waits at exit for its own child processes."""
    for llm in llms:
        llm.llm_engine.engine_core.shutdown()


def compare(
    variants: dict[str, tuple[Any, dict[str, Any]]],
    rounds: int,
    run: Callable[[Any, dict[str, Any]], float],
) -> dict[str, Any]:
    """Return median, minimum and maximum of each variant. Variants alternate; the first round is a
    warm-up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for nth in range(rounds + 1):
        for name, (llm, asked) in variants.items():
            value = run(llm, asked)
            if nth:
                seconds[name].append(value)
    return {
        name: {
            "median_s": statistics.median(values),
            "min_s": min(values),
            "max_s": max(values),
        }
        for name, values in seconds.items()
    }


def decode_step(llm: Any, asked: dict[str, Any], batch: int) -> float:
    """Return the seconds of one decode step: the mean over steps in which all requests generate."""
    engine = llm.llm_engine
    step, ends = engine.step, []

    def timed_step() -> Any:
        out = step()
        ends.append(time.perf_counter())
        return out

    engine.step = timed_step
    try:
        timed(llm, asked, batch, PROMPT, SKIPPED + STEPS + LAST)
    finally:
        del engine.step
    return (ends[SKIPPED + STEPS - 1] - ends[SKIPPED - 1]) / STEPS


def timed(llm: Any, asked: dict[str, Any], batch: int, length: int, tokens: int) -> float:
    """Return the seconds of one `generate`."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    draw = random.Random(batch * length)
    prompts = [
        {"prompt_token_ids": [draw.randrange(3, 500) for _ in range(length)]} for _ in range(batch)
    ]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, **asked)
    return time.perf_counter() - start


def graphs(llm: Any) -> str:
    """Return the engine's modes of compilation and of CUDA graphs."""
    compilation = llm.llm_engine.vllm_config.compilation_config
    return f"mode {compilation.mode}, CUDA graphs {compilation.cudagraph_mode}"


def write_table(results: dict[str, Any]) -> None:
    """Print the table of added time against plain vLLM in the same rounds."""
    write = sys.stdout.write
    where = results["machine"]
    write(f"\n{where['device']}, vLLM {where['vllm']}, torch {where['torch']}, {where['date']}\n")
    for shape, workloads in results["shapes"].items():
        runner = workloads["engine"]["runner"]
        ranks = results.get("tensor_parallel_size", 1)
        write(f"\n{shape}: {workloads['graphs']}, runner {runner}, TP {ranks}\n")
        for workload, variants in workloads.items():
            if not isinstance(variants, dict) or "plain" not in variants:
                continue
            base = variants["plain"]["median_s"]
            write(f"  {workload}: plain {base * 1e3:.3f} ms\n")
            for name, value in variants.items():
                if name != "plain":
                    write(f"    {name:<46} {(value['median_s'] / base - 1) * 100:+6.1f} %\n")


if __name__ == "__main__":
    main()
