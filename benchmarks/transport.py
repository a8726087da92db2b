"""Throughput of the transport alone: from the device's ring to tensors in another process.

    python benchmarks/transport.py [--step-mib 256] [--steps 40] [--json FILE]

This process transfers whole steps of rows to the arena, like a worker. Another process maps the
arena, reads part of each step, and releases it: a byte of every MiB, and in a second run a byte of
every page of 4 KiB, which measures mostly the reader. For comparison, a copy to pinned memory
without a reader. On a CPU both are copies in memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import machine

HIDDEN = 4096
MIB, PAGE = 1 << 20, 4096


def main() -> None:
    """Measure, and write the table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step-mib", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"benchmark": "transport", "machine": machine.describe()}
    results["bus_gb_s"] = bus(args.step_mib << 20, args.steps)
    for codec in ("raw", "full8", "rp8:k=512,seed=0", "topk8:k=64"):
        one = results[codec] = measure(codec, args.step_mib << 20, args.steps)
        sys.stdout.write(
            f"{codec:18} {one['vectors_gb_s']:7.2f} GB/s of vectors, {one['moved_gb_s']:7.2f} GB/s "
            f"moved, {one['pages_gb_s']:7.2f} GB/s if every page is read\n"
        )
    sys.stdout.write(f"{'copy alone':18} {results['bus_gb_s']:7.2f} GB/s\n")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


def bus(step: int, steps: int) -> float:
    """Return the GB/s of a plain copy to the host."""
    source, _ = make_ring(step)
    target = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
    target.copy_(source)
    _wait(source)
    start = time.perf_counter()
    for _ in range(steps):
        target.copy_(source, non_blocking=True)
    _wait(source)
    return steps * step / (time.perf_counter() - start) / 1e9


def measure(name: str, step: int, steps: int) -> dict[str, float]:
    """Return the GB/s from the ring until the reader has read the last page."""
    from midstream.codecs import RowEncoding, parse_codec
    from midstream.transport.arena import Arena, ArenaSettings
    from midstream.transport.base import Parcel
    from midstream.transport.ring_copy import host_transport

    codec = parse_codec(name)
    ring, rows = make_ring(2 * step)
    rows //= 2
    width = codec.row_bytes(HIDDEN, ring.dtype)
    encoding = RowEncoding.of(codec, (HIDDEN,), HIDDEN)
    # A power of two, so that each segment has exactly one step.
    settings = ArenaSettings(8 * step, 1 << 20, "block", Path("/tmp"))
    arena = Arena(settings, ring.is_cuda)
    transport = host_transport(ring, arena)
    tally = torch.zeros(1, 4, dtype=torch.int32, device=ring.device)
    scores = torch.zeros(0, 1, device=ring.device)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    reader = spawn.Process(target=read, args=(there, arena.leases.address))
    reader.start()
    here.recv()

    def ship() -> Any:
        parcel = Parcel(transport.reserve(rows), rows, rows * width, encoding)
        return transport.ship([parcel], tally, scores)

    waiting: list[Any] = []

    def deliver(shipment: Any) -> None:
        shipment.wait()
        (extent,) = shipment.extents
        number = arena.lease([extent.segment])
        places = arena.describe([extent.segment])
        here.send((number, extent.segment, places, extent.offset, extent.memory.numel(), stride))

    took: dict[int, float] = {}
    for stride in (PAGE, MIB, PAGE):  # the first is a warm-up
        start = time.perf_counter()
        for _ in range(steps):
            waiting.append(ship())
            if len(waiting) > 2:
                deliver(waiting.pop(0))
            while len(arena.leases) > 4:
                arena.sweep()
        while waiting:
            deliver(waiting.pop(0))
        here.send("done?")
        here.recv()
        took[stride] = time.perf_counter() - start
    here.send(None)
    reader.join()
    moved = steps * rows * width
    return {
        "vectors_gb_s": steps * rows * HIDDEN * ring.dtype.itemsize / took[MIB] / 1e9,
        "moved_gb_s": moved / took[MIB] / 1e9,
        "pages_gb_s": moved / took[PAGE] / 1e9,
    }


def read(pipe: Any, address: Any) -> None:
    """Map each message's extent of the arena, and read its bytes at the message's stride."""
    from midstream.transport.reader import MappedArena

    arena = MappedArena(address)
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        if message == "done?":
            pipe.send("done")
            continue
        number, segment, places, offset, nbytes, stride = message
        arena.update(places, [])
        rows = arena.lease(number, [segment])[segment][offset : offset + nbytes]
        rows[::stride].sum().item()
        del rows


def make_ring(nbytes: int) -> tuple[torch.Tensor, int]:
    """Return a ring of random vectors, and their number."""
    on_device = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_device else torch.float32
    rows = nbytes // (HIDDEN * dtype.itemsize)
    ring = torch.randn(rows, HIDDEN, device="cuda" if on_device else "cpu").to(dtype)
    return ring, rows


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
