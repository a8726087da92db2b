"""Throughput of reading a store for training, compared with a plain read of its files.

    python benchmarks/dataset.py [--folder FOLDER] [--gib 1] [--codec raw] [--json FILE]

The store has three layers of an 8B model's width, bfloat16, in shards of 256 MiB, and is in the
page cache. plain read: `readinto` of all files into one buffer of 16 MiB, by one thread; or into
new memory for each 24 MiB, as much as a batch. The other variants iterate over an epoch of batches
of 1024 tokens, or of two sequences of 512 tokens, and drop them. "first epoch" opens the store
anew, so that every byte is compared with its checksum; the others read what was compared before.
GB/s are of the files' bytes; those per second of CPU time, of all threads, depend less on what else
the machine does. The variants take turns; figures are medians.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

import engines

HIDDEN, TOKENS, BATCH = 4096, 512, 1024
TAPS = (("resid_post", 2), ("resid_post", 16), ("resid_post", 30))
PLAIN = "plain read"


def main() -> int:
    """Measure, and write the table."""
    parser = engines.arguments(__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--codec", default="raw")
    args = parser.parse_args()
    about = {"gib": args.gib, "codec": args.codec, "cores": os.cpu_count()}
    run = engines.Run("dataset", args, **about, load=os.getloadavg()[0], workloads={})
    with run.limited(), tempfile.TemporaryDirectory(dir=args.folder) as folder:
        run.stage("write the store")
        nbytes = write(Path(folder), int(args.gib * (1 << 30)), args.codec)
        timed = {
            name: functools.partial(rate, read, nbytes)
            for name, read in variants(Path(folder)).items()
        }
        run.measure(run.results["workloads"], "in the page cache", timed, summary)
    return run.finish()


def write(folder: Path, nbytes: int, codec: str) -> int:
    """Write a store of about `nbytes`, and return the bytes of its files."""
    from midstream.codecs import parse_codec
    from midstream.store import Entry, Header, TapRows, Writer

    parsed = parse_codec(codec)
    ids = torch.arange(TOKENS)
    made = torch.Generator().manual_seed(0)
    rows = [torch.randn(TOKENS, HIDDEN, generator=made).bfloat16() for _ in TAPS]
    encoded = [parsed.encode(values) for values in rows]
    taps = {tap: TapRows(data, ids, ids) for tap, data in zip(TAPS, encoded, strict=True)}
    header = Header(
        model="random",
        revision="",
        hidden_size=HIDDEN,
        dtype="bfloat16",
        codec=parsed.spec,
        vllm="",
        midstream="",
    )
    count = max(1, nbytes // sum(data.nbytes for data in encoded))
    with Writer(folder, header) as writer:
        for number in range(count):
            writer.add(Entry(request=str(number), prompt_tokens=TOKENS, metadata={}, taps=taps))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def variants(folder: Path) -> dict[str, Callable[[], Iterable[object]]]:
    """Return what to iterate over, by name."""
    from midstream.store import RowDataset, SequenceDataset, open_store

    def fresh(**options: Any) -> RowDataset:
        return RowDataset(open_store(folder), BATCH, join=TAPS, **options)

    store, buffer = open_store(folder), bytearray(16 << 20)
    kept = {
        "joined, in order": RowDataset(store, BATCH, join=TAPS, shuffle=False),
        "joined, shuffled": RowDataset(store, BATCH, join=TAPS),
        "joined, shuffled, not read ahead": RowDataset(store, BATCH, join=TAPS, prefetch=0),
        "layers apart, shuffled": RowDataset(store, 3 * BATCH),
        "sequences": SequenceDataset(store, 2, length=TOKENS, join=TAPS),
        "packed sequences": SequenceDataset(store, 1, length=2 * TOKENS, join=TAPS, packed=True),
    }
    return {
        PLAIN: lambda: plain_read(folder, lambda: buffer),
        "plain read into new memory": lambda: plain_read(
            folder, lambda: np.empty(24 << 20, np.uint8)
        ),
        **{name: functools.partial(_same, dataset) for name, dataset in kept.items()},
        "joined, shuffled, first epoch": fresh,
        "joined, shuffled, first epoch, checksums=False": lambda: fresh(checksums=False),
    }


def _same(dataset: Iterable[object]) -> Iterable[object]:
    return dataset


def plain_read(folder: Path, memory: Callable[[], Any]) -> Iterable[object]:
    """Yield the memory of each read of all files, one after the other."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer := memory()):
                yield buffer


def rate(read: Callable[[], Iterable[object]], nbytes: int) -> tuple[float, float]:
    """Return the GB/s of one variant, and those per second of CPU time."""
    start, start_cpu = time.perf_counter(), time.process_time()
    for _ in read():
        pass
    seconds = time.perf_counter() - start, time.process_time() - start_cpu
    return nbytes / seconds[0] / 1e9, nbytes / seconds[1] / 1e9


def summary(values: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Return the medians of each variant, and those of its parts of the plain read's rates in the
    same round.
    """
    rates = {
        unit: {name: [pair[number] for pair in pairs] for name, pairs in values.items()}
        for number, unit in enumerate(("gb_s", "gb_cpu_s"))
    }
    return {
        name: {
            key: value
            for unit, by_name in rates.items()
            for key, value in (
                (unit, statistics.median(by_name[name])),
                (f"{unit}_min", min(by_name[name])),
                (f"{unit}_max", max(by_name[name])),
                (
                    f"{unit}_of_plain",
                    engines.of_plain({**by_name, "plain": by_name[PLAIN]}, name),
                ),
            )
        }
        for name in values
    }


if __name__ == "__main__":
    sys.exit(main())
