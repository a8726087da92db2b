"""Latency and rate of requests without a plan, on a server with midstream and on one without.

    python benchmarks/serving.py [--model FOLDER] [--shape 0.6b] [--clients 16] [--rounds 5] \
        [--client-cpus 4] [--seconds 280] [--json FILE] [-- OPTIONS OF BOTH SERVERS]

Two servers on one machine, started like `vllm serve` and `midstream serve`, are measured in turn,
in a random order in each round. For some seconds, one client (or `--measured` of them) sends
requests without a plan, each after the answer to the one before; their latencies and their rate are
the result. The load of other clients, which are a process of their own, is meanwhile: none;
requests without a plan; and, on the server with midstream, requests that are steered, probed and
captured, each client at a layer of its own, with the rows in the response. "again" is the same
variant a second time, on the same server: its difference is noise.

Each prompt consists of random tokens, after `--shared` ones that are the same in all prompts. For
plain requests the prefix cache has the shared ones; a capture of every prompt token computes them.

`--shape` serves a shape with random weights, with the tokenizer of the model. `--client-cpus` keeps
the clients' work, most of which is reading answers, off the processors of the servers: the clients
get the last ones of this process, and the servers the others.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import httpx

sys.path.insert(0, str(Path(__file__).parent))

import engines
import shapes

NAME = "served"
# Token ids of prompts are below this. The tokenizer must have as many.
VOCABULARY = 40_000
# The other clients begin so much earlier, and end so much later, than what is measured.
MARGIN = 0.5
BASE = "with midstream, beside others"
# By name: (server, kind of the other clients' requests, None without other clients).
VARIANTS: dict[str, tuple[str, str | None]] = {
    "without midstream, alone": ("plain", None),
    "with midstream, alone": ("midstream", None),
    "without midstream, beside others": ("plain", "nothing"),
    BASE: ("midstream", "nothing"),
    "with midstream, beside others, again": ("midstream", "nothing"),
    "with midstream, beside others who ask": ("midstream", "plans"),
}


def main() -> int:
    """Measure, and write the table."""
    parser = engines.arguments(__doc__)
    models = Path(os.environ.get("MIDSTREAM_MODELS", ".models"))
    parser.add_argument("--model", type=Path, default=models / "SmolLM2-135M-Instruct")
    parser.add_argument("--shape", choices=list(shapes.SHAPES))
    parser.add_argument("--clients", type=int, default=16, help="number of other clients")
    parser.add_argument("--measured", type=int, default=1, help="number of measured clients")
    parser.add_argument("--turn", type=float, default=3.0, help="seconds of a turn")
    parser.add_argument("--words", type=int, default=64, help="tokens of a prompt")
    parser.add_argument(
        "--shared", type=int, default=0, help="tokens at the start that all prompts share"
    )
    parser.add_argument("--tokens", type=int, default=32, help="generated tokens of a request")
    parser.add_argument("--kv-gib", type=float, default=4.0, help="of each server")
    parser.add_argument(
        "--client-cpus", type=int, default=0, help="processors of the clients alone"
    )
    parser.add_argument("options", nargs="*", help="options of both servers, after --")
    args = parser.parse_args()
    if not 0 <= args.shared <= args.words:
        parser.error(f"--shared: a prompt has {args.words} tokens")
    # The servers start side by side: see engines.KV_GIB.
    memory = f"--kv-cache-memory-bytes={int(args.kv_gib * (1 << 30))}"
    model, options = args.model.resolve(), ["--gpu-memory-utilization=0.05", memory, *args.options]
    if args.shape:
        model = shapes.write(args.shape, engines.CACHE, model)
        options = ["--load-format=dummy", *options]
    names = ("clients", "measured", "words", "shared", "tokens", "client_cpus")
    about = {name: getattr(args, name) for name in names}
    cpus = sorted(os.sched_getaffinity(0))
    for_servers = cpus[: len(cpus) - args.client_cpus]
    if not for_servers:
        parser.error(f"--client-cpus: of {len(cpus)} processors none is left for the servers")
    about["server_cpus"] = len(for_servers)
    # Other processes inherit it.
    os.sched_setaffinity(0, cpus[-args.client_cpus :])
    run = engines.Run("serving", args, **about, model=model.name, options=options)
    with run.limited(), ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        others = stack.enter_context(run.engines({"others": (Clients,)}, ["others"]))["others"]
        servers = {
            name: stack.enter_context(Server(name, model, options, folder, cpus=for_servers))
            for name in ("plain", "midstream")
        }
        for name, each in servers.items():
            each.wait(run.end)
            run.stage(f"{name} is ready")
        shape = json.loads((model / "config.json").read_text())
        run.measure(
            run.results,
            "variants",
            {
                name: functools.partial(turn, others, servers[which].url, kind, shape, args)
                for name, (which, kind) in VARIANTS.items()
            },
            summary,
        )
    return run.finish()


class Server:
    """A server in a process of its own. A context manager that stops it."""

    def __init__(
        self,
        name: str,
        model: Path,
        options: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        cpus: Collection[int] | None = None,
    ) -> None:
        """Start it, without waiting for it.

        Args:
            name: `plain` or `midstream`.
            model: folder of the model.
            options: options of the command line.
            folder: gets its log.
            environment: variables besides those of this process.
            cpus: its processors; None: those of this process.
        """
        port = engines.free_port()
        words = {
            "plain": ["vllm.entrypoints.openai.api_server", "--model", str(model)],
            "midstream": ["midstream", "serve", str(model), "--sites=resid_post"],
        }[name]
        common = [f"--served-model-name={NAME}", "--host=127.0.0.1", f"--port={port}", *options]
        cache = {"VLLM_CACHE_ROOT": str(engines.CACHE / f"server-{name}")}
        self.url, self._log = f"http://127.0.0.1:{port}", folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *words, *common],
                stdout=log,
                stderr=log,
                env={**os.environ, **cache, **(environment or {})},
            )
        if cpus is not None:
            os.sched_setaffinity(self._process.pid, cpus)

    @property
    def pid(self) -> int:
        """Id of the server's process."""
        return self._process.pid

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def wait(self, end: float) -> None:
        """Return when it answers.

        Raises:
            RuntimeError: it ended, with the end of its log.
            TimeIsUpError: it does not answer before `end`.
        """
        while not is_up(self.url):
            if self._process.poll() is not None:
                raise RuntimeError(self._log.read_text()[-6000:])
            if time.monotonic() > end:
                raise engines.TimeIsUpError
            time.sleep(0.5)


def is_up(url: str) -> bool:
    """Return whether the server answers."""
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def turn(
    others: engines.Engine, url: str, kind: str | None, shape: dict[str, Any], args: Any
) -> tuple[list[float], float, float]:
    """Return the latencies of the measured clients, in seconds, and requests per second: of the
    measured clients and of the others.
    """
    body = {"model": NAME, "max_tokens": args.tokens, "temperature": 0, "ignore_eos": True}
    sizes = args.shared, args.words - args.shared
    if kind:
        asked = [
            {"midstream": plan(1 + nth % (shape["num_hidden_layers"] - 1), shape["hidden_size"])}
            if kind == "plans"
            else {}
            for nth in range(args.clients)
        ]
        others.begin(Clients.load, url, [{**body, **each} for each in asked], sizes, args.turn)
        time.sleep(MARGIN)
    rate = 0.0
    try:
        took = asyncio.run(requests(url, [body] * args.measured, sizes, args.turn))
    finally:
        if kind:
            rate = others.answer()
    return took, len(took) / args.turn, rate


async def requests(
    url: str, bodies: list[dict[str, Any]], sizes: tuple[int, int], seconds: float
) -> list[float]:
    """Send each body again and again for some seconds, and return the latency of each answer that
    came in that time.

    Args:
        url: of the server.
        bodies: of requests, without a prompt; each is that of one client.
        sizes: numbers of a prompt's tokens that are the same in all, and that are random.
        seconds: time until no request is sent any more.

    Raises:
        EngineError: a request failed, or what it asked for is not in the answer.
    """
    took: list[float] = []
    end = time.perf_counter() + seconds

    shared, own = sizes
    first = random.Random(0).choices(range(VOCABULARY), k=shared)

    async def client(body: dict[str, Any]) -> None:
        headers = {"Content-Type": "application/json"}
        rest = json.dumps(body)[1:]
        while (start := time.perf_counter()) < end:
            prompt = [*first, *random.choices(range(VOCABULARY), k=own)]
            content = f'{{"prompt": {json.dumps(prompt)}, {rest}'
            async with http.post(f"{url}/v1/completions", data=content, headers=headers) as answer:
                read = await answer.read()
            # Not parsed: that would take longer than the server's part.
            fine = answer.status == 200 and ("midstream" not in body or b'"status":"ok"' in read)
            if not fine:
                raise engines.EngineError(read[-2000:].decode(errors="replace"))
            if (now := time.perf_counter()) < end:
                took.append(now - start)

    # aiohttp takes less time for an answer than httpx: clients share this process.
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        await asyncio.gather(*(client(body) for body in bodies))
    return took


class Clients:
    """The other clients, in a process of their own."""

    def load(
        self, url: str, bodies: list[dict[str, Any]], sizes: tuple[int, int], seconds: float
    ) -> float:
        """Send requests for that time, with a margin before and after; return their rate."""
        seconds += 2 * MARGIN
        return len(asyncio.run(requests(url, bodies, sizes, seconds))) / seconds


def summary(values: dict[str, list[tuple[list[float], float, float]]]) -> dict[str, Any]:
    """Return latencies over all rounds, and medians of rates."""
    found = {}
    for name, each in values.items():
        took = [one for latencies, _, _ in each for one in latencies]
        found[name] = {
            "median_ms": 1e3 * statistics.median(took),
            "p95_ms": 1e3 * statistics.quantiles(took, n=20)[-1],
            "requests": len(took),
            "per_s": statistics.median(rate for _, rate, _ in each),
            "others_per_s": statistics.median(rate for _, _, rate in each),
        }
    return found


def plan(layer: int, hidden: int) -> dict[str, Any]:
    """Return the plan of another client's requests, as the midstream field of the body."""
    from midstream import Capture, Probe, Steer, extra_body

    vector = [0.1] * hidden
    asked = extra_body(
        capture=Capture([layer], positions="prompt"),
        steer=Steer(vector, layer, 0.1),
        probes=Probe(vector, layer, name="p"),
        activations="inline",
    )
    found: dict[str, Any] = asked["midstream"]
    return found


if __name__ == "__main__":
    sys.exit(main())
