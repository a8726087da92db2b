"""Throughput of captured rows to a disk, compared with `dd`.

    python benchmarks/disk.py [FOLDER …] [--gib 2] [--rounds 5] [--shape 0.6b|none] \
        [--tokenizer FOLDER] [--seconds 280] [--json FILE]

dd: the same number of bytes of random data, in files as large as a shard, each followed by fsync,
like the store's. store: a `midstream.store.Writer` that writes rows of an 8B model's layers at full
speed. served: `LLM.generate` with the sink `store`, every layer of every prompt token, until all
rows are durable; this includes the model's run time. captured: the same rows by the job of
`midstream capture`, from a file of prompts, on an engine that runs already. The variants take
turns; figures are medians. Each FOLDER is a workload of its own, such as one on a disk and one in
memory (/dev/shm).

`--shape none` measures without an engine. A FOLDER in memory then shows the time of the writer
itself: checksums, copies, system calls.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import engines
import overhead
import shapes

HIDDEN, LAYERS, TOKENS = 4096, 32, 64
NO_ENGINE = "none"


def main() -> int:
    """Measure each folder, and write the table."""
    parser = engines.arguments(__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="on the disks to measure")
    parser.add_argument("--gib", type=int, default=2)
    parser.add_argument("--shape", choices=[*shapes.SHAPES, NO_ENGINE], default="0.6b")
    parser.add_argument("--kv-gib", type=float)
    parser.add_argument("--length", type=int, default=512)
    models = Path(os.environ.get("MIDSTREAM_MODELS", ".models"))
    parser.add_argument("--tokenizer", type=Path, default=models / "SmolLM2-135M-Instruct")
    args = parser.parse_args()
    about = {"gib": args.gib, "shape": args.shape, "cores": os.cpu_count()}
    run = engines.Run("disk", args, **about, places={})
    with run.limited(), ExitStack() as stack:
        folders = {}
        for base in args.folders or [Path(tempfile.gettempdir())]:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=base)))
            folders["memory" if str(folder).startswith("/dev/shm") else "disk"] = folder
        started = stack.enter_context(run.engines(makers(folders, args), ()))
        for place, folder in folders.items():
            ways = writers(place, folder, started, args)
            timed = {way: functools.partial(rate, ways[way], folder / way) for way in ways}
            run.measure(run.results["places"], place, timed, summary)
    return run.finish()


def makers(folders: dict[str, Path], args: argparse.Namespace) -> dict[str, tuple[Any, ...]]:
    """Return what makes the engine, whose sinks are stores in the folders."""
    if args.shape == NO_ENGINE:
        return {}
    model = shapes.write(args.shape, engines.CACHE, args.tokenizer)
    settings = engines.settings(args.shape, args, skip_tokenizer_init=False)
    store = "midstream.sinks.store_sink:StoreSink"
    sinks = {
        f"on-{place}": {"class": store, "root": str(folder / "served")}
        for place, folder in folders.items()
    }
    return {"midstream": (engines.tapped, model, settings, {"sinks": sinks})}


def writers(
    place: str, folder: Path, started: dict[str, Any], args: argparse.Namespace
) -> dict[str, Callable[[], int]]:
    """Return the ways to write to a folder. Each returns the number of bytes."""
    from midstream.store.writer import SHARD_BYTES

    nbytes = args.gib << 30
    ways: dict[str, Callable[[], int]] = {
        "dd": lambda: by_dd(folder / "dd", nbytes // SHARD_BYTES, SHARD_BYTES),
        "store": lambda: by_store(folder / "store", nbytes),
    }
    if "midstream" in started:
        config = shapes.SHAPES[args.shape]
        row = config["num_hidden_layers"] * config["hidden_size"] * 2
        prompts = max(1, nbytes // (args.length * row))
        call = started["midstream"].call
        ways["served"] = lambda: call(served, f"on-{place}", prompts, args.length)
        data = folder / "prompts.jsonl"
        data.write_text(f"{json.dumps({'text': ' two' * args.length})}\n" * prompts)
        ways["captured"] = lambda: call(captured, data, folder / "captured")
    return ways


def rate(write: Callable[[], int], folder: Path) -> float:
    """Return the GB/s of one way, and delete what it wrote."""
    subprocess.run(["sync"], check=True)
    start = time.perf_counter()
    written = write()
    took = time.perf_counter() - start
    for leftover in folder.iterdir():
        # The store of the running engine's sink remains, without its shards.
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    return written / took / 1e9


def summary(values: dict[str, list[float]]) -> dict[str, Any]:
    """Return median, minimum and maximum of each way."""
    return {
        way: {"gb_s": statistics.median(each), "min": min(each), "max": max(each)}
        for way, each in values.items()
    }


def by_dd(target: Path, files: int, nbytes: int) -> int:
    """Write files with dd, each of `nbytes` bytes, and return the number of bytes."""
    target.mkdir(exist_ok=True)
    source = random_file(nbytes)
    for nth in range(files):
        subprocess.run(
            ["dd", f"if={source}", f"of={target / str(nth)}", "bs=16M", "conv=fsync"],
            check=True,
            capture_output=True,
        )
    return files * nbytes


@functools.cache
def random_file(nbytes: int) -> Path:
    """Return a file of random bytes, in memory, so that dd waits only for what it writes to."""
    source = Path(tempfile.mkstemp(dir="/dev/shm")[1])
    source.write_bytes(torch.randint(256, (nbytes,), dtype=torch.uint8).numpy().tobytes())
    atexit.register(source.unlink)
    return source


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


def served(llm: Any, sink: str, prompts: int, length: int) -> int:
    """Capture prompts to a sink, and return the size of the durable rows in bytes."""
    from midstream import Capture

    outputs = llm.generate(
        overhead.random_prompts(prompts, length),
        overhead.sampling(1),
        use_tqdm=False,
        capture=Capture(layers="all", sink=sink),
    )
    statuses = {one.capture_results[sink].status for one in outputs}
    if statuses != {"ok"}:
        raise RuntimeError(f"expected every capture result to be ok, got {statuses}")
    config = llm.llm_engine.model_config
    row = config.get_hidden_size() * config.dtype.itemsize
    return prompts * length * int(config.hf_config.num_hidden_layers) * row


def captured(llm: Any, data: Path, out: Path) -> int:
    """Run the job of `midstream capture`, and return the size of the durable rows in bytes."""
    from midstream import Capture
    from midstream.lab.jobs.engine import VllmEngine
    from midstream.lab.jobs.job import Job
    from midstream.lab.jobs.run import CaptureRun

    config = llm.llm_engine.model_config
    capture = Capture(layers="all", positions="prompt")
    job = Job(model=config.model, data=str(data), out=str(out), capture=capture)
    with CaptureRun(job) as run:
        found = run.work(lambda job: VllmEngine(llm, job))
    if found.status:
        raise RuntimeError(f"expected every line to be stored, got {found}")
    return int(found.counts.nbytes)


if __name__ == "__main__":
    sys.exit(main())
