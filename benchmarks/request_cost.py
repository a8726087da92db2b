"""CPU time of one HTTP request in the server's processes, by what the request asks for.

    python benchmarks/request_cost.py [--hidden 576] [--layers 30] [--clients 16] \
        [--seconds 280] [--json FILE]

A server of a model with random weights and little work a token runs on this machine, so that the
cost of requests is not lost in that of the model. Clients without pauses send requests of one kind;
the CPU time of each of the server's processes over that time, divided by the number of requests, is
the result. Kinds take turns in rounds, and figures are medians over rounds. On a GPU with one
device, the worker is in the engine core's process, and the model is compiled and runs in CUDA
graphs; on a CPU the worker has its own, and the model runs eagerly. With --profiles,
`pstats` reads what is written: one profile of the main thread of each process.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent))

import machine
import serving

VOCABULARY = 199
START_SECONDS = 300
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
    args = parser.parse_args()
    end = time.monotonic() + (args.seconds or math.inf)
    bodies = requests(args)
    if args.kinds:
        bodies = {name: bodies[name] for name in args.kinds}
    given = ("hidden", "layers", "clients", "requests", "prompt", "tokens", "rounds")
    results: dict[str, Any] = {
        "benchmark": "request_cost",
        "machine": {**machine.describe(), "cores": os.cpu_count()},
        **{name: getattr(args, name) for name in given},
        "kinds": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", args.hidden, args.layers)
        with server(model, Path(folder), args.profiles) as started:
            measure(results, bodies, started, args, end)
    write_table(results)


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
        "probe": body | extra_body(probes=Probe(vector, middle, name="p")),
        "plain, streamed": {**body, "stream": True},
        "probe, streamed": {**body, "stream": True}
        | extra_body(probes=Probe(vector, middle, name="p")),
    }


def make_model(folder: Path, hidden: int, layers: int) -> Path:
    """Write a small Llama with random weights, and a tokenizer of one word per token."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
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
def server(model: Path, folder: Path, profiles: Path | None) -> Iterator[serving.Server]:
    """Start a server, yield it once it answers, and stop it."""
    import torch

    (folder / "sitecustomize.py").write_text(STARTUP)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    if profiles is not None:
        profiles.mkdir(parents=True, exist_ok=True)
        environment["REQUEST_COST_PROFILES"] = str(profiles.resolve())
    options = [f"--settings={json.dumps({'http': LIMITS})}", *OPTIONS]
    if not torch.cuda.is_available():
        # A CPU has no graphs, and to compile the model there takes minutes.
        options.append("--enforce-eager")
    with serving.Server("midstream", model, options, folder, environment) as started:
        started.wait(time.monotonic() + START_SECONDS)
        yield started


def measure(
    results: dict[str, Any],
    bodies: dict[str, dict[str, Any]],
    server: serving.Server,
    args: argparse.Namespace,
    end: float,
) -> None:
    """Add the CPU time of each kind of request to the results; the first round is a warm-up. No
    round begins that would not end before `end`, on the monotonic clock.
    """
    processes = processes_of(psutil.Process(server.pid))
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in bodies}
    longest = 0.0
    for nth in range(args.rounds + 1):
        started = time.monotonic()
        if started + longest > end:
            break
        if nth == 1 and args.profiles:
            tell(processes, signal.SIGRTMIN + 1)
        for name, body in bodies.items():
            number = args.requests if nth else args.requests // 4
            before, steps = cpu_seconds(processes), steps_of(server.url)
            began = time.perf_counter()
            asyncio.run(send(server.url, body, number, args))
            took = time.perf_counter() - began
            spent, steps = cpu_seconds(processes), steps_of(server.url) - steps
            if nth:
                found = {each: 1e3 * (spent[each] - before[each]) / number for each in spent}
                more = {"steps_per_request": steps / number, "requests_per_s": number / took}
                rounds[name].append({**found, **more})
                results["kinds"][name] = {
                    each: statistics.median(one[each] for one in rounds[name])
                    for each in rounds[name][0]
                }
        # The first round has a quarter of the requests.
        longest = max(longest, (time.monotonic() - started) * (1 if nth else 4))
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")
    if args.profiles:
        tell(processes, signal.SIGRTMIN + 2)
        time.sleep(3)


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


def steps_of(url: str) -> int:
    """Return the number of forward passes that the worker has run."""
    status = httpx.get(f"{url}/v1/midstream/status").raise_for_status().json()
    steps: int = status["workers"][0]["steps"]["steps"]
    return steps


def tell(processes: dict[int, str], number: int) -> None:
    """Send a signal to each process."""
    for pid in processes:
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
