"""CPU time of one HTTP request in the server's processes, by what the request asks for.

    python benchmarks/request_cost.py [--hidden 576] [--layers 30] [--clients 16] \
        [--seconds 280] [--json FILE] [--beside CHECKOUT]

A server of a model with random weights and little work a token runs on this machine, so that the
cost of requests is not lost in that of the model. Clients without pauses send requests of one kind;
the CPU time of each of the server's processes over that time, divided by the number of requests, is
the result. Kinds take turns in rounds, and figures are medians over rounds. On a GPU with one
device, the worker is in the engine core's process, and the model is compiled and runs in CUDA
graphs; on a CPU the worker has its own, and the model runs eagerly. With --profiles,
`pstats` reads what is written: one profile of the main thread of each process.

What a request costs depends on what else the machine does. With --beside, a server of another
checkout of midstream runs as well, and for each kind of a round the two take turns; the results of
the other go to a file that has its commit in the name. With --without, so does a server of vLLM
alone, which gets the requests without a plan.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent))

import machine
import serving

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 199
START_SECONDS = 300
VECTOR = "tone"  # name of the server's vector
# Requests in flight, and CPU time of threads that wait for others, vary less with one thread.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
PROCESSES = ("API server", "engine core", "worker")
# What a server allows, raised so that it keeps all rows of a run.
LIMITS = {"held_captures": 60000, "client_captures": 60000, "held_seconds": 20}
OPTIONS = (
    "--dtype=float32", "--max-model-len=512", "--block-size=32", "--max-num-seqs=64",
    "--no-enable-log-requests", "--disable-uvicorn-access-log",
    "--kv-cache-memory-bytes=1073741824", "--gpu-memory-utilization=0.05",
)  # fmt: skip
# Runs first in each of the server's processes. Processes that wait for each other spin, which
# charges the time of one to the others: here they sleep, and seldom look, as each look costs the
# engine core some 10 µs, and their number is that of milliseconds that the worker's step took.
STARTUP = """
import cProfile, os, signal, time
os.sched_yield = lambda: time.sleep(0.005)
profile = cProfile.Profile(time.thread_time)
def start(*_):
    profile.enable()
def write(*_):
    profile.disable()
    profile.dump_stats(os.path.join(os.environ["REQUEST_COST_PROFILES"], f"{os.getpid()}.prof"))
signal.signal(signal.SIGRTMIN + 1, start)
signal.signal(signal.SIGRTMIN + 2, write)
"""


def main() -> None:
    """Measure, and write the table and the JSON after each round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=320, help="requests of a kind in a round")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=2, help="generated tokens of a request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="no round begins that would end later")
    parser.add_argument("--kinds", nargs="+", help="kinds of requests to measure [all]")
    parser.add_argument("--profiles", type=Path, help="folder for a profile of each process")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--beside", type=Path, help="another checkout, measured in turn")
    parser.add_argument("--without", action="store_true", help="vLLM alone, measured in turn")
    args = parser.parse_args()
    end = time.monotonic() + (args.seconds or math.inf)
    bodies = requests(args)
    if args.kinds:
        bodies = {name: bodies[name] for name in args.kinds}
    sources = [ROOT, *filter(None, [args.beside]), *([None] if args.without else [])]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        model, sides = make_model(Path(name) / "model", args.hidden, args.layers), []
        for source in sources:
            folder = Path(name) / f"server {len(sides)}"
            folder.mkdir()
            started = stack.enter_context(server(model, folder, source, args.profiles))
            processes = processes_of(psutil.Process(started.pid))
            side = Side(started.url, processes, described(args, source or ROOT), args.json)
            side.is_plain = source is None
            if side.json is not None and source != ROOT:
                other = side.results["machine"]["commit"] if source else "without"
                side.json = side.json.with_stem(f"{side.json.stem}-{other}")
            sides.append(side)
        measure(sides, bodies, args, end)
    for side, source in zip(sides, sources, strict=True):
        sys.stdout.write(f"{'vLLM alone' if source is None else source}:\n")
        write_table(side.results)


@dataclass(eq=False)
class Side:
    """A server, and what was measured of it."""

    url: str
    processes: dict[int, str]  # names by their ids
    results: dict[str, Any]
    json: Path | None
    is_plain: bool = False  # whether it is vLLM alone
    rounds: dict[str, list[dict[str, float]]] = field(default_factory=dict)  # by kind


def described(args: argparse.Namespace, source: Path) -> dict[str, Any]:
    """Return the results of a checkout's server before the first round."""
    asked = ("hidden", "layers", "clients", "requests", "prompt", "tokens", "rounds")
    return {
        "benchmark": "request_cost",
        "machine": {**machine.describe(source), "cores": os.cpu_count()},
        **{name: getattr(args, name) for name in asked},
        "kinds": {},
    }


def requests(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the fields of each kind of request, besides the prompt."""
    import torch

    from midstream import Capture, Probe, Steer, extra_body

    body = {
        "model": serving.NAME, "max_tokens": args.tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    vector = torch.full((args.hidden,), 0.1)
    middle = args.layers // 2
    one = Capture([middle], positions="last_prompt")
    every = Capture("all", positions="last_prompt")
    return {
        "plain": body,
        "handle, 1 layer": body | extra_body(capture=one, activations="handle"),
        "inline, 1 layer": body | extra_body(capture=one, activations="inline"),
        "inline, all layers": body | extra_body(capture=every, activations="inline"),
        "edit": body | extra_body(steer=Steer(vector, middle, 0.1)),
        "edit by name": body | extra_body(steer=Steer(VECTOR, middle, 0.1)),
        "probe by name": body | extra_body(probes=Probe(VECTOR, middle, name="p")),
        "probe": body | extra_body(probes=Probe(vector, middle, name="p")),
        "plain, streamed": {**body, "stream": True},
        "probe, streamed": {**body, "stream": True}
        | extra_body(probes=Probe(vector, middle, name="p")),
    }


def make_model(folder: Path, hidden: int, layers: int) -> Path:
    """Write a small Llama with random weights, and a tokenizer of one word per token."""
    import safetensors.torch
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
    vectors = {"vector": torch.full((hidden,), 0.1)}
    safetensors.torch.save_file(vectors, folder.parent / f"{VECTOR}.safetensors")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@contextmanager
def server(
    model: Path, folder: Path, source: Path | None, profiles: Path | None
) -> Iterator[serving.Server]:
    """Start a server of a checkout, yield it once it answers, and stop it."""
    import torch

    (folder / "sitecustomize.py").write_text(STARTUP)
    paths = [
        str(folder),
        str((source or ROOT) / "src"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    if profiles is not None:
        profiles.mkdir(parents=True, exist_ok=True)
        environment["REQUEST_COST_PROFILES"] = str(profiles.resolve())
    settings = {"http": LIMITS, "vectors": {VECTOR: str(model.parent / f"{VECTOR}.safetensors")}}
    options = [*([f"--settings={json.dumps(settings)}"] if source else []), *OPTIONS]
    if not torch.cuda.is_available():
        # A CPU has no graphs, and to compile the model there takes minutes.
        options.append("--enforce-eager")
    name = "midstream" if source else "plain"
    with serving.Server(name, model, options, folder, environment) as started:
        started.wait(time.monotonic() + START_SECONDS)
        yield started


def measure(
    sides: list[Side], bodies: dict[str, dict[str, Any]], args: argparse.Namespace, end: float
) -> None:
    """Add the CPU time of each kind of request to the results; the first round is a warm-up. No
    round begins that would not end before `end`, on the monotonic clock.
    """
    longest = 0.0
    for number in range(args.rounds + 1):
        started = time.monotonic()
        if started + longest > end:
            break
        if number == 1 and args.profiles:
            tell(sides, signal.SIGRTMIN + 1)
        for name, body in bodies.items():
            # Who is first alternates, as a load of others may begin or end meanwhile.
            asked = [side for side in sides if not (side.is_plain and "midstream" in body)]
            for side in asked[:: 1 if number % 2 else -1]:
                figures = measure_kind(side, body, args, args.requests // (1 if number else 4))
                if number:
                    side.rounds.setdefault(name, []).append(figures)
        # The first round has a quarter of the requests.
        longest = max(longest, (time.monotonic() - started) * (1 if number else 4))
        for side in sides:
            side.results["kinds"] = {
                name: {what: statistics.median(of[what] for of in rounds) for what in rounds[0]}
                for name, rounds in side.rounds.items()
            }
            if side.json:
                side.json.write_text(json.dumps(side.results, indent=1) + "\n")
    if args.profiles:
        tell(sides, signal.SIGRTMIN + 2)
        time.sleep(3)


def measure_kind(
    side: Side, body: dict[str, Any], args: argparse.Namespace, number: int
) -> dict[str, float]:
    """Send requests of one kind; return their figures."""
    steps = steps_of(side)
    before = cpu_seconds(side.processes)  # what it takes to ask for the steps does not count
    began = time.perf_counter()
    asyncio.run(send(side.url, body, number, args))
    took = time.perf_counter() - began
    spent = cpu_seconds(side.processes)
    steps = steps_of(side) - steps
    figures = {name: 1e3 * (spent[name] - before[name]) / number for name in spent}
    return {**figures, "steps_per_request": steps / number, "requests_per_s": number / took}


def processes_of(server: psutil.Process) -> dict[int, str]:
    """Return the names of the server's processes, by their ids."""
    found = {server.pid: "API server"}
    for core in busy(server.children()):
        found[core.pid] = "engine core"
        found.update((worker.pid, "worker") for worker in busy(core.children()))
    return found


def busy(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return processes that have loaded vLLM: Python's tracker of shared memory has not."""
    return [one for one in processes if one.cpu_times().user > 1]


def steps_of(side: Side) -> int:
    """Return the number of forward passes that the worker has run; 0 of vLLM alone."""
    if side.is_plain:
        return 0
    status = httpx.get(f"{side.url}/v1/midstream/status").raise_for_status().json()
    steps: int = status["workers"][0]["steps"]["steps"]
    return steps


def tell(sides: list[Side], number: int) -> None:
    """Send a signal to each process."""
    for side in sides:
        for pid in side.processes:
            os.kill(pid, number)


def cpu_seconds(processes: dict[int, str]) -> dict[str, float]:
    """Return the CPU time that processes have used, by their names."""
    found: dict[str, float] = {}
    for pid, name in processes.items():
        used = psutil.Process(pid).cpu_times()
        found[name] = found.get(name, 0.0) + used.user + used.system
    return found


async def send(url: str, body: dict[str, Any], number: int, args: argparse.Namespace) -> None:
    """Send requests from several connections, each as soon as it has the answer to the last. No
    prompt occurs twice: the prefix cache would serve it to requests without a probe alone.
    """
    prompts = [random.choices(range(VOCABULARY), k=args.prompt) for _ in range(number)]
    waiting = [json.dumps({**body, "prompt": prompt}).encode() for prompt in prompts]
    headers = {"Content-Type": "application/json"}

    async def client() -> None:
        async with httpx.AsyncClient(timeout=START_SECONDS) as http:
            while waiting:
                content = waiting.pop()
                answer = await http.post(f"{url}/v1/completions", content=content, headers=headers)
                found = answer.raise_for_status().content
                if b'"choices"' not in found or (b'"midstream"' in content) != (
                    b'"midstream"' in found
                ):
                    raise RuntimeError(f"unexpected answer: {found[:600]!r}")

    await asyncio.gather(*(client() for _ in range(args.clients)))


def write_table(results: dict[str, Any]) -> None:
    """Write the figures to the terminal."""
    for name, one in results["kinds"].items():
        times = " ".join(
            f"{process} {one[process]:6.2f} ms," for process in PROCESSES if process in one
        )
        sys.stdout.write(
            f"{name:20} {times} {one['steps_per_request']:.2f} steps, "
            f"{one['requests_per_s']:6.1f} requests/s\n"
        )


if __name__ == "__main__":
    main()
