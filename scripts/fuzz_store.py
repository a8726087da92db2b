"""Coverage-guided fuzzer of the store's reader. Needs atheris: pip install atheris.

scripts/fuzz_store.py [--seconds 600] [--corpus DIR]

A third of the inputs are unchanged files; a third get valid checksums; a third also get a valid
header, with arbitrary requests, metadata and rows. The reader may raise only StoreError or
SpecError, and use at most one minute and 2 GiB. Otherwise the exit status is not 0, and the input
is in a file `crash-…` in the current directory.
"""

from __future__ import annotations

import argparse
import struct
import sys
import tempfile
from pathlib import Path

import atheris
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

with atheris.instrument_imports(include=["midstream.store", "midstream.codecs"]):
    from unit.store.crafting import seal, take_apart
    from unit.store.making import TAPS, entry, header, shard_bytes

    from midstream.errors import SpecError, StoreError
    from midstream.store.backends.base import Folder
    from midstream.store.format.layout import Group, Layout, group_bytes, padding
    from midstream.store.maintenance.verify import verify_folder
    from midstream.store.store import Store

NAME = "fuzzed.safetensors"
AS_IT_IS, SUMMED, LAID_OUT = range(3)


class Memory:
    """One shard in memory, as its folder and its file."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __str__(self) -> str:
        return "memory"

    def names(self) -> list[str]:
        return [NAME]

    def open(self, name: str) -> Memory:
        return self

    @property
    def size(self) -> int:
        return len(self._data)

    def read(self, start: int, stop: int) -> memoryview:
        assert 0 <= start <= stop <= len(self._data), (start, stop)
        return memoryview(self._data)[start:stop]

    def gather(self, start: int, width: int, rows: np.ndarray) -> np.ndarray:
        parts = [self.read(start + row * width, start + (row + 1) * width) for row in rows.tolist()]
        return np.frombuffer(b"".join(parts), np.uint8).reshape(len(rows), width)


def read_all(folder: Folder) -> None:
    """Read everything in a store."""
    store = Store(folder)
    repr(store)
    for each in store.requests:
        assert isinstance(each.metadata, dict)
        for _, values in each.activations().items():
            assert values.ndim == 2
    for site, layer in {tap for each in store.requests for tap in each.taps}:
        rows = store.select(site=site, layer=layer, position=slice(0, 99))
        for batch in rows.batches(64):
            assert len(batch.values) == len(batch.request) == len(batch.position)


def shard_of(data: bytes) -> bytes:
    """Return the shard of an input, whose first byte selects the kind of input."""
    kind, data = data[:1], data[1:]
    if not kind or kind[0] % 3 == AS_IT_IS:
        return data
    length = int.from_bytes(data[:4], "little")
    first, rest = data[4 : 4 + length], data[4 + length :]
    if kind[0] % 3 == SUMMED:
        return seal(struct.pack("<Q", len(first)) + first, rest)
    return laid_out(first, rest)


def laid_out(requests: bytes, rest: bytes) -> bytes:
    """Return a shard of one group with these requests, then this metadata, index and rows."""
    length = int.from_bytes(rest[:4], "little")
    metadata, rows = rest[4 : 4 + length], rest[4 + length :]
    head = header()
    one = group_bytes(Group(TAPS[:1], 1), head)
    group = Group(TAPS[:1], len(rows) // one)
    rows = rows[: group.rows * one]
    metadata += b" " * padding(len(rows) + len(requests) + len(metadata))
    layout = Layout(head, (group,), len(requests), len(metadata))
    return seal(layout.head(), rows + requests + metadata)


def look(data: bytes) -> None:
    """Read one input as a shard; exceptions other than StoreError and SpecError propagate."""
    folder = Memory(shard_of(data))
    try:
        read_all(folder)
    except SpecError:
        pass
    except StoreError as error:
        if NAME not in str(error):
            raise
    verify_folder(folder)


def seeds() -> list[bytes]:
    """Return inputs that are whole shards, of every codec, and of two widths."""
    found = []
    heads = [header(codec=codec) for codec in ("raw", "full8", "rp8:k=64,seed=0", "topk8:k=4")]
    for head in [*heads, header(codec="full8", widths={TAPS[1]: 12})]:
        entries = [
            entry("a", metadata={"x": [1]}, head=head),
            entry("b", child=1, tag="t", taps=TAPS[:1], head=head),
        ]
        shard = shard_bytes(entries, head)
        length = int.from_bytes(shard[:8], "little")
        words = 2 + -(-(len(shard) - 8 - length) // 65536)
        found.append(bytes([AS_IT_IS]) + shard)
        found.append(bytes([SUMMED]) + shard[:4] + shard[8 : len(shard) - 4 * words])
    both = [entry(request, metadata={"x": [1]}, taps=TAPS[:1]) for request in ("a", "b")]
    parts = take_apart(shard_bytes(both))[1]
    requests, metadata = parts.pop("requests"), parts.pop("metadata").rstrip(b" ")
    sized = b"".join(struct.pack("<I", len(part)) + part for part in (requests, metadata))
    found.append(bytes([LAID_OUT]) + sized + b"".join(parts.values()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600, help="duration in seconds")
    parser.add_argument("--corpus", type=Path, help="folder that keeps inputs between runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = options.corpus or Path(folder)
        corpus.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(seeds()):
            read_all(Memory(shard_of(data)))
            (corpus / f"seed-{number}").write_bytes(data)
        limits = ["-rss_limit_mb=2048", "-timeout=60", "-max_len=8192"]
        arguments = [sys.argv[0], f"-max_total_time={options.seconds}", *limits, str(corpus)]
        atheris.Setup(arguments, look)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
