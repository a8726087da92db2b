"""Capture of every layer of every prompt token: midstream against its alternatives.

    python benchmarks/against.py [--shapes 0.6b 8b] [--rounds 3] [--json FILE]

All variants have the same prompts, of one length, and take turns in one run; figures are medians.
The time of a variant ends when all vectors are tensors in this process and were read.

plain vLLM: no captures; the baseline of the other variants.
midstream: `LLM.generate(capture=…)`, with the engine in a separate process, vLLM's default.
transformers: `output_hidden_states=True` without the language head, every batch full and without
padding, in the fastest of several batch sizes, copied into pinned memory while the next batch is
computed.
extract_hidden_states: vLLM's own connector, which writes a file for each request; here to memory
(tmpfs), and read by vLLM's own function. It needs a GPU.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import machine
import overhead
import shapes

BATCH_SIZES = (8, 16, 32, 64)
# By prompt and layer: [tokens, hidden].
Vectors = list[list[torch.Tensor]]
Run = Callable[[], Vectors]


def main() -> None:
    """Measure every shape, and write the table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["0.6b", "8b"], choices=list(shapes.SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument(
        "--memory", type=float, default=0.24, help="share of device memory an engine may use"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {
        "benchmark": "against",
        "machine": machine.describe(),
        "rounds": args.rounds,
        "prompts": args.prompts,
        "length": args.length,
        "shapes": {},
    }
    overhead.over_shapes(results, args, measure)
    for shape, measured in results["shapes"].items():
        sys.stdout.write(f"{shape}, {args.prompts} × {args.length} tokens\n")
        for name, one in measured["variants"].items():
            line = f"  {name:34} {one['median_s']:8.3f} s {one['tokens_per_s']:10.0f} tokens/s"
            sys.stdout.write(f"{line} {one['gb_s']:7.2f} GB/s\n")
        sys.stdout.write(f"  {measured['agreement']}\n")


def measure(model: Path, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the median of each variant, and the error of midstream against vLLM's connector."""
    layers = shapes.SHAPES[shape]["num_hidden_layers"]
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 500) for _ in range(args.length)] for _ in range(args.prompts)]
    taps = {"sites": ["resid_post"], "layers": "all"}
    plain, tapped = overhead.engines(model, args.memory, taps)
    engines = [plain, tapped]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        runs: dict[str, Run] = {
            "plain vLLM": lambda: generate(plain, prompts),
            "midstream": lambda: captured(tapped, prompts, layers),
            **through_transformers(model, prompts),
        }
        if torch.cuda.is_available():
            extracting = extractor(model, layers, args.memory, folder)
            engines.append(extracting)
            runs["extract_hidden_states"] = lambda: extracted(extracting, prompts, folder)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        nbytes = dict.fromkeys(runs, 0)
        first: dict[str, torch.Tensor] = {}
        for nth in range(args.rounds + 1):
            for name, run in runs.items():
                start = time.perf_counter()
                found = run()
                nbytes[name] = sum(read_pages(layer) for layers in found for layer in layers)
                took = time.perf_counter() - start
                if nth:
                    seconds[name].append(took)
                elif found:
                    first[name] = torch.stack(found[0])
                del found
    overhead.shut_down(*engines)
    tokens = args.prompts * args.length
    named = {name: statistics.median(values) for name, values in seconds.items()}
    fastest = min((n for n in named if n.startswith("transformers")), key=named.__getitem__)
    return {
        "engine": msgspec.to_builtins(tapped.info.workers[0]),
        "layers": layers,
        "agreement": agreement(first),
        "variants": {
            name: {
                "median_s": median,
                "min_s": min(seconds[name]),
                "max_s": max(seconds[name]),
                "tokens_per_s": tokens / median,
                "bytes": nbytes[name],
                "gb_s": nbytes[name] / median / 1e9,
            }
            for name, median in named.items()
            if not name.startswith("transformers") or name == fastest
        },
    }


def read_pages(vectors: torch.Tensor) -> int:
    """Read a number of each page of the vectors, and return their size in bytes."""
    vectors[:, :: 2048 // vectors.element_size()].sum().item()
    return vectors.numel() * vectors.element_size()


def generate(llm: Any, prompts: list[list[int]]) -> Vectors:
    """Run the prompts without a capture, and return no vectors."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
    return []


def captured(llm: Any, prompts: list[list[int]], layers: int) -> Vectors:
    """Return the vectors that midstream captures."""
    from vllm import SamplingParams

    from midstream import Capture

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    outputs = llm.generate(
        [{"prompt_token_ids": one} for one in prompts],
        params,
        use_tqdm=False,
        capture=Capture(layers="all"),
    )
    return [[one.activations["resid_post", n] for n in range(layers)] for one in outputs]


def through_transformers(model: Path, prompts: list[list[int]]) -> dict[str, Run]:
    """Return a variant of transformers for each batch size."""
    from transformers import AutoConfig, AutoModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.set_default_dtype(dtype)
    with torch.device(device):
        network = AutoModel.from_config(AutoConfig.from_pretrained(model)).eval()
    torch.set_default_dtype(torch.float32)
    tokens = torch.tensor(prompts, device=device)

    @torch.inference_mode()
    def run(size: int) -> Vectors:
        found: Vectors = []
        for batch in tokens.split(size):
            states = network(batch, output_hidden_states=True, use_cache=False).hidden_states[1:]
            # To pinned memory, which PyTorch caches for the next round.
            kept = [state.to("cpu", non_blocking=True) for state in states]
            found.extend([state[nth] for state in kept] for nth in range(len(batch)))
        if device == "cuda":
            torch.cuda.synchronize()
        return found

    sizes = [size for size in BATCH_SIZES if size <= len(prompts)]
    return {f"transformers, batches of {size}": (lambda s=size: run(s)) for size in sizes}


def extractor(model: Path, layers: int, memory: float, folder: str) -> Any:
    """Create an engine that writes every layer's vectors to files. Its layer n is the input of
    midstream's layer n.
    """
    from vllm import LLM

    return LLM(
        str(model),
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        gpu_memory_utilization=memory,
        enable_prefix_caching=False,
        seed=0,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": list(range(1, layers + 1))}
            },
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        },
    )


def extracted(llm: Any, prompts: list[list[int]], folder: str) -> Vectors:
    """Return the vectors that vLLM's connector writes, and delete its files."""
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        load_hidden_states,
    )

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
    found = [
        load_hidden_states(one.kv_transfer_params["hidden_states_path"])["hidden_states"]
        for one in outputs
    ]
    for path in Path(folder).iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return [list(one.unbind(1)) for one in found]


def agreement(first: dict[str, torch.Tensor]) -> str:
    """Describe the error between the two variants with equal weights, on the first prompt."""
    if "extract_hidden_states" not in first:
        return "not compared: extract_hidden_states needs a GPU"
    mine, theirs = first["midstream"].float(), first["extract_hidden_states"].float()
    if mine.shape != theirs.shape:
        return f"shapes differ: {tuple(mine.shape)} and {tuple(theirs.shape)}"
    apart = ((mine - theirs).norm(dim=-1) / theirs.norm(dim=-1)).flatten()
    return (
        "midstream against extract_hidden_states, relative error of a vector: median "
        f"{apart.median():.2%}, worst {apart.max():.2%}"
    )


if __name__ == "__main__":
    main()
