"""Latency of requests without a plan, on a server with midstream and on one without.

    python benchmarks/serving.py [--model FOLDER] [--clients 16] [--rounds 3] [--json FILE]

Two servers on one machine, started like `vllm serve` and `midstream serve`, are measured in turn.
One client sends requests without a plan, one after the other; its latencies are the result. The
load of other clients is, in turn: none; requests without a plan; and, on the server with midstream,
requests that are steered, probed and captured, each client at a layer of its own, with the rows in
the response.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

sys.path.insert(0, str(Path(__file__).parent))

import machine

from midstream import Capture, Probe, Steer, extra_body

NAME = "served"
START_SECONDS = 300
# By name: (server, kind of the other clients' requests, None without other clients).
VARIANTS: dict[str, tuple[str, str | None]] = {
    "without midstream, alone": ("plain", None),
    "with midstream, alone": ("midstream", None),
    "without midstream, beside others": ("plain", "nothing"),
    "with midstream, beside others": ("midstream", "nothing"),
    "with midstream, beside others who ask": ("midstream", "plans"),
}


def main() -> None:
    """Measure, and write the table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(".models/SmolLM2-135M-Instruct"))
    parser.add_argument("--clients", type=int, default=16, help="number of other clients")
    parser.add_argument("--requests", type=int, default=40, help="measured requests in each turn")
    parser.add_argument("--words", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="generated tokens of a request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*", help="options of both servers, after --")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = {
            name: stack.enter_context(server(name, args.model.resolve(), args.options, folder))
            for name in ("plain", "midstream")
        }
        shape = json.loads((args.model / "config.json").read_text())
        variants = asyncio.run(measure(urls, shape, args))
    result = {
        "benchmark": "serving",
        "machine": machine.describe(),
        **{name: getattr(args, name) for name in ("clients", "words", "tokens", "rounds")},
        "model": args.model.name,
        "options": args.options,
        "variants": variants,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    for name, one in variants.items():
        sys.stdout.write(
            f"  {name:40} median {one['median_ms']:8.2f} ms, p95 {one['p95_ms']:8.2f} ms, "
            f"others {one['others_per_s']:6.1f}/s\n"
        )


@contextmanager
def server(name: str, model: Path, options: list[str], folder: Path) -> Iterator[str]:
    """Start a server, yield its URL, and stop it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words = {
        "plain": ["vllm.entrypoints.openai.api_server", "--model", str(model)],
        "midstream": ["midstream", "serve", str(model), "--sites=resid_post"],
    }[name]
    common = [f"--served-model-name={NAME}", "--host=127.0.0.1", f"--port={port}", *options]
    command = [sys.executable, "-m", *words, *common]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + START_SECONDS
        while not is_up(url):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError((folder / f"{name}.log").read_text()[-6000:])
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def is_up(url: str) -> bool:
    """Return whether the server answers."""
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


async def measure(
    urls: dict[str, str], shape: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """Return the latencies of each variant over all rounds; the first round is a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as http:
        for nth in range(args.rounds + 1):
            for name, (which, others) in VARIANTS.items():
                took, rate = await turn(http, urls[which], others, shape, args)
                if nth:
                    seconds[name] += took
                    rates[name].append(rate)
    return {
        name: {
            "median_ms": 1e3 * statistics.median(found),
            "p95_ms": 1e3 * statistics.quantiles(found, n=20)[-1],
            "requests": len(found),
            "others_per_s": statistics.median(rates[name]),
        }
        for name, found in seconds.items()
    }


async def turn(
    http: httpx.AsyncClient,
    url: str,
    others: str | None,
    shape: dict[str, Any],
    args: argparse.Namespace,
) -> tuple[list[float], float]:
    """Return the seconds of each measured request, and the other clients' requests per second."""
    body = {
        "model": NAME, "prompt": " two" * args.words, "max_tokens": args.tokens, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    done = 0

    async def other(layer: int) -> None:
        nonlocal done
        asked = {"midstream": plan(layer, shape["hidden_size"])} if others == "plans" else {}
        while True:
            answer = await http.post(f"{url}/v1/completions", json={**body, **asked})
            answer.raise_for_status()
            assert not asked or answer.json()["midstream"]["receipt"]["status"] == "ok"
            done += 1

    layers = shape["num_hidden_layers"]
    number = args.clients if others else 0
    beside = [asyncio.create_task(other(1 + each % (layers - 1))) for each in range(number)]
    took, begun = [], time.perf_counter()
    for _ in range(args.requests):
        start = time.perf_counter()
        (await http.post(f"{url}/v1/completions", json=body)).raise_for_status()
        took.append(time.perf_counter() - start)
    rate = done / (time.perf_counter() - begun)
    for task in beside:
        # A task that failed ends with its exception, not with CancelledError.
        task.cancel()
    ends = await asyncio.gather(*beside, return_exceptions=True)
    for end in ends:
        if not isinstance(end, asyncio.CancelledError):
            raise RuntimeError("one of the other clients failed") from end
    return took, rate


def plan(layer: int, hidden: int) -> dict[str, Any]:
    """Return the plan of another client's requests, as the midstream field of the body."""
    vector = torch.full((hidden,), 0.1)
    asked = extra_body(
        capture=Capture([layer], positions="prompt"),
        steer=Steer(vector, layer, 0.1),
        probes=Probe(vector, layer, name="p"),
        activations="inline",
    )
    return asked["midstream"]


if __name__ == "__main__":
    main()
