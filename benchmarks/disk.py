"""Throughput of captured rows to a disk, compared with `dd`.

    python benchmarks/disk.py [FOLDER] [--gib 2] [--rounds 3] [--shape 0.6b|none] [--json FILE]

dd: the same number of bytes of random data, in files as large as a shard, each followed by fsync,
like the store's. store: a `midstream.store.Writer` that writes rows of an 8B model's layers at full
speed. served: `LLM.generate` with the sink `store`, every layer of every prompt token, until all
rows are durable; this includes the model's run time. The variants take turns; figures are medians.

`--shape none` measures without an engine. A FOLDER in memory (/dev/shm) then shows the time of the
writer itself: checksums, copies, system calls.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import machine
import shapes

HIDDEN, LAYERS, TOKENS = 4096, 32, 64
NO_ENGINE = "none"


def main() -> None:
    """Measure, and write the table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="on the disk to measure")
    parser.add_argument("--gib", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=[*shapes.SHAPES, NO_ENGINE], default="0.6b")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--memory", type=float, default=0.3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        results = measure(Path(name), args)
    plain = results["ways"]["dd"]["gb_s"]
    for way, one in results["ways"].items():
        sys.stdout.write(f"{way:8} {one['gb_s']:6.2f} GB/s  {one['gb_s'] / plain:6.0%} of dd\n")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of all variants, in GB/s."""
    from midstream.store.writer import SHARD_BYTES

    nbytes = args.gib << 30
    # In memory, so that dd waits only for the disk it writes to.
    source = Path(tempfile.mkstemp(dir="/dev/shm")[1])
    source.write_bytes(torch.randint(256, (SHARD_BYTES,), dtype=torch.uint8).numpy().tobytes())
    ways: dict[str, Callable[[], int]] = {
        "dd": lambda: by_dd(source, folder / "dd", nbytes // SHARD_BYTES),
        "store": lambda: by_store(folder / "store", nbytes),
    }
    if args.shape != NO_ENGINE:
        config = shapes.SHAPES[args.shape]
        per_prompt = args.length * config["num_hidden_layers"] * config["hidden_size"] * 2
        prompts = max(1, nbytes // per_prompt)
        llm = make_engine(shapes.write(args.shape, folder), folder / "served", args.memory)
        ways["served"] = lambda: served(llm, prompts, args.length)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    try:
        for nth in range(args.rounds + 1):
            for way, write in ways.items():
                subprocess.run(["sync"], check=True)
                start = time.perf_counter()
                written = write()
                took = time.perf_counter() - start
                if nth:
                    rates[way].append(written / took / 1e9)
                for leftover in (folder / way).iterdir():
                    leftover.unlink()
    finally:
        source.unlink()
    return {
        "benchmark": "disk",
        "machine": machine.describe(),
        "rounds": args.rounds,
        "gib": args.gib,
        "shape": args.shape,
        "cores": os.cpu_count(),
        "folder": "memory" if str(folder).startswith("/dev/shm") else "disk",
        "ways": {
            way: {"gb_s": statistics.median(all_), "min": min(all_), "max": max(all_)}
            for way, all_ in rates.items()
        },
    }


def by_dd(source: Path, target: Path, files: int) -> int:
    """Write files with dd, and return the number of bytes."""
    target.mkdir(exist_ok=True)
    for nth in range(files):
        subprocess.run(
            ["dd", f"if={source}", f"of={target / str(nth)}", "bs=16M", "conv=fsync"],
            check=True,
            capture_output=True,
        )
    return files * source.stat().st_size


def by_store(target: Path, nbytes: int) -> int:
    """Write rows to a store, and return their size in bytes."""
    from midstream.store import Entry, Header, TapRows, Writer

    rows = torch.randint(0, 256, (LAYERS, TOKENS, 2 * HIDDEN), dtype=torch.uint8)
    ids = torch.arange(TOKENS)
    taps = {("resid_post", n): TapRows(rows[n], ids, ids) for n in range(LAYERS)}
    header = Header(
        model="random",
        revision="",
        hidden_size=HIDDEN,
        dtype="bfloat16",
        codec="raw",
        vllm="",
        midstream="",
    )
    count = nbytes // rows.numel()
    with Writer(target, header) as writer:
        for nth in range(count):
            writer.add(Entry(request=str(nth), prompt_tokens=TOKENS, metadata={}, taps=taps))
    return count * rows.numel()


def make_engine(model: Path, root: Path, memory: float) -> Any:
    """Create an engine with the sink `store`."""
    from midstream import LLM

    return LLM(
        str(model),
        midstream={
            "sites": ["resid_post"],
            "layers": "all",
            "sinks": {"store": {"root": str(root)}},
        },
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=memory,
        enable_prefix_caching=False,
        seed=0,
    )


def served(llm: Any, prompts: int, length: int) -> int:
    """Capture prompts to the sink `store`, and return the size of the durable rows in bytes."""
    from midstream import Capture, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    draw = random.Random(0)
    ids = [[draw.randrange(3, 500) for _ in range(length)] for _ in range(prompts)]
    outputs = llm.generate(
        [{"prompt_token_ids": one} for one in ids],
        params,
        use_tqdm=False,
        capture=Capture(layers="all", sink="store"),
    )
    statuses = {one.capture_results["store"].status for one in outputs}
    if statuses != {"ok"}:
        raise RuntimeError(f"expected every capture result to be ok, got {statuses}")
    config = llm.llm_engine.model_config
    row = config.get_hidden_size() * config.dtype.itemsize
    return prompts * length * config.hf_config.num_hidden_layers * row


if __name__ == "__main__":
    main()
