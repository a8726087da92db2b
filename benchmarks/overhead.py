"""Overhead of midstream: plain vLLM against the same engine with taps, idle and in use.

    python benchmarks/overhead.py [--shapes 0.6b 8b] [--batches 1 2 16 256] [--tp 2] \
        [--also '{"tapped_model": "always"}'] [--before ../other/src] [--profiles FOLDER] \
        [--seconds 280] [--json FILE]

Two engines of plain vLLM ("plain" and "plain again") and one with midstream take turns, each in a
process of its own, in a random order in each round. Times are medians over rounds, and percentages
medians of the differences from plain vLLM in the same round. Plain vLLM runs with its defaults:
torch.compile and CUDA graphs enabled. Model weights are random; their values do not change the
work. Each `--also` adds an engine with other settings, measured idle; `--before` one with the
package of another commit, measured in everything that the first is.

With --profiles, one more turn of each variant and workload is sampled: the stacks of the thread
that runs the model, in a file for flame graph tools, and how long a step runs on the device and the
device waits for the host; see stack_samples.py. A second turn writes the times of the device's
kernels, by name, to a file beside it.

decode: seconds of one step of a batch that only generates: the mean over all steps in which each
sequence gets a token, at most 115. The engine's core is a process of its own, as by default, and
its clock is read: the front end, which gets its outputs, may lag behind it.
prefill: seconds of a batch of prompts with one generated token each.
"a neighbour asks": the last sequence of the batch captures a row of one layer in each step.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import engines
import shapes
from stack_samples import DeviceKernels, StackSamples, StreamTimes

# Tokens of each sequence; those that other benchmarks add to theirs; least number of timed steps.
TOKENS, LAST, LEAST = 116, 4, 16
PROMPT = 32
# Edits are too small to change the values: with random weights the stream is small, and its values
# decide how much power the matrix products draw, and so how fast they run.
SMALL = 1e-6
PLAIN = ("plain", "plain again")
BEFORE = "before"
EVERY = "add at every layer, K = "
ASKED = ("a neighbour asks", EVERY + "1", EVERY + "256")


def main() -> int:
    """Measure every shape, and write the table."""
    parser = engines.arguments(__doc__, list(shapes.SHAPES))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 2, 16, 256])
    parser.add_argument("--prefill-prompts", type=int, default=16, help="0: no prefill")
    parser.add_argument("--prefill-length", type=int, default=1024)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--asked", nargs="*", default=ASKED, help="variants besides the idle ones")
    parser.add_argument("--name", default="overhead", choices=["overhead", "overhead_sites"])
    parser.add_argument("--midstream", type=json.loads, default={}, help="settings, as JSON")
    parser.add_argument("--also", type=json.loads, action="append", default=[], metavar="SETTINGS")
    parser.add_argument("--before", type=Path, help="folder with another `midstream` package")
    parser.add_argument("--profiles", type=Path, help="folder for a file of each variant")
    args = parser.parse_args()
    if args.profiles and args.tp > 1:
        parser.error("--profiles: several ranks run the model in other processes")
    asks = {name: functools.partial(asked, name) for name in args.asked}
    name = args.name if args.tp == 1 else "overhead_tp"
    return over_shapes(name, args, workloads(args), asks)


# The shape, the number of prompts, and whether they generate; and what makes arguments of it.
Of = tuple[str, int, bool]
Ask = Callable[[str, int, bool], dict[str, Any]]
# By name: what runs in an engine's process, the number of prompts, and further arguments.
Workloads = dict[str, tuple[Callable[..., float], int, tuple[int, ...]]]


def workloads(args: argparse.Namespace) -> Workloads:
    """Return function, arguments and number of prompts by the name of a workload."""
    found: Workloads = {
        f"decode, {batch} sequences": (decode_step, batch, ()) for batch in args.batches
    }
    if args.prefill_prompts:
        name = f"prefill, {args.prefill_prompts} × {args.prefill_length} tokens"
        found[name] = timed, args.prefill_prompts, (args.prefill_length, 1)
    return found


def over_shapes(
    benchmark: str, args: argparse.Namespace, works: Workloads, asks: dict[str, Ask]
) -> int:
    """Measure the workloads on each shape, and return the exit status.

    Args:
        benchmark: name in the results.
        args: options, those of `main`.
        works: workloads.
        asks: by variant: makes the arguments of `generate`, in the engine's process.
    """
    run = engines.Run(benchmark, args, tensor_parallel_size=args.tp, shapes={})
    environment = engines.FUNCTIONS_TO_WORKERS if args.profiles else {}
    needed = "plain", "midstream"
    for shape in args.shapes:
        with run.limited(), run.engines(makers(shape, args), needed, **environment) as started:
            into = run.results["shapes"][shape] = {}
            into |= started["midstream"].call(engines.describe)
            for work, (function, batch, more) in works.items():
                of = shape, batch, function is decode_step
                calls = {
                    name: (started[engine].call, function, ask, of, *more)
                    for name, (engine, ask) in variants(started, asks).items()
                }
                run.measure(
                    into, work, {name: functools.partial(*each) for name, each in calls.items()}
                )
                for name, (call, *given) in calls.items() if args.profiles else ():
                    file = re.sub(r"\W+", "-", f"{shape} {work} {name}").strip("-")
                    call(sampled, args.profiles.resolve() / f"{file}.txt", *given)
    return run.finish()


def makers(shape: str, args: argparse.Namespace) -> dict[str, tuple[Any, ...]]:
    """Return what makes each engine, by its name."""
    model = shapes.write(shape, engines.CACHE)
    settings = engines.settings(shape, args, tensor_parallel_size=args.tp)
    # Enough for 256 vectors of each layer.
    layers = shapes.SHAPES[shape]["num_hidden_layers"]
    midstream = {"bank_rows": 256 * layers + 1024, "max_edits": 1 << 17} | args.midstream
    found: dict[str, tuple[Any, ...]] = dict.fromkeys(PLAIN, (engines.plain, model, settings))
    found["midstream"] = engines.tapped, model, settings, midstream
    for also in args.also:
        found[idle(also)] = engines.tapped, model, settings, midstream | also
    before = getattr(args, "before", None)  # an option of this benchmark alone
    if before is not None:
        found[BEFORE] = of_package, before.resolve(), model, settings, midstream
    return found


def of_package(folder: Path, *given: Any) -> Any:
    """Return the engine of another `midstream` package, which this process has not imported."""
    sys.path.insert(0, str(folder))
    llm = engines.tapped(*given)
    assert Path(sys.modules["midstream"].__file__ or "").is_relative_to(folder)
    return llm


def idle(also: dict[str, Any]) -> str:
    """Return the name of an engine with other settings, and of its variant."""
    return "idle, " + ", ".join(f"{name} = {value}" for name, value in also.items())


def variants(started: Iterable[str], asks: dict[str, Ask]) -> dict[str, tuple[str, Ask]]:
    """Return the name of the engine and what is asked of it, by the name of the variant."""
    found: dict[str, tuple[str, Ask]] = {
        name if name != "midstream" else "idle": (name, nothing) for name in started
    }
    found |= {name: ("midstream", ask) for name, ask in asks.items()}
    if BEFORE in started:
        found |= {f"{name} ({BEFORE})": (BEFORE, ask) for name, ask in asks.items()}
    return found


def nothing(shape: str, batch: int, decodes: bool) -> dict[str, Any]:
    """Return no arguments of `generate`."""
    return {}


@functools.cache
def asked(name: str, shape: str, batch: int, decodes: bool) -> dict[str, Any]:
    """Return `generate`'s arguments of a variant: `EVERY` and a number, or a key of `forms`."""
    from midstream import Capture, Scale, Steer

    layers = shapes.SHAPES[shape]["num_hidden_layers"]

    def add(count: int, *, only: tuple[int, ...] = ()) -> dict[str, Any]:
        kinds = [
            [Steer(vector(shape, nth, layer), layer=layer) for layer in only or range(layers)]
            for nth in range(min(count, batch))
        ]
        return {"steer": [kinds[nth % len(kinds)] for nth in range(batch)]}

    if name.startswith(EVERY):
        return add(int(name.removeprefix(EVERY)))
    one_row = [Capture([layers // 2], positions="generated" if decodes else "last_prompt")]
    forms: dict[str, Callable[[], dict[str, Any]]] = {
        "a neighbour asks": lambda: {"capture": [None] * (batch - 1) + [one_row]},
        "add at one layer": lambda: add(1, only=(layers // 2,)),
        "capture z of every token, every layer": lambda: {"capture": Capture("all", "z")},
        "scale one head of z": lambda: {
            "edits": [Scale(1.0 + SMALL, layers // 2, site="z", head=3)]
        },
        "capture last prompt token, every layer": lambda: {
            "capture": Capture("all", positions="last_prompt")
        },
        "capture every token, one layer": lambda: {"capture": Capture([layers // 2])},
        "capture every token, every layer, gathered": lambda: {
            "capture": Capture("all", return_="gathered")
        },
        "capture every token, every layer, sharded": lambda: {
            "capture": Capture("all", return_="sharded")
        },
    }
    return forms[name]()


def vector(shape: str, *seed: int) -> Any:
    """Return small random numbers, one per dimension of the model."""
    import numpy as np

    drawn = np.random.default_rng(seed).normal(0, SMALL, shapes.SHAPES[shape]["hidden_size"])
    return drawn.astype(np.float32)


def decode_step(llm: Any, ask: Ask, of: Of) -> float:
    """Return the seconds of one decode step: the mean over steps in which all requests generate."""
    with core_steps(llm, of[1]) as steps:
        timed(llm, ask, of, PROMPT, TOKENS)
    return steps.mean()


def sampled(llm: Any, file: Path, function: Callable[..., float], *given: Any) -> None:
    """Run a workload, and write to a file the stacks of the thread that runs the model meanwhile,
    and how long a step took on the device; run it again, and write the device's kernels.
    """
    for begin, end, path in (
        (begin_samples, end_samples, file),
        (begin_kernels, end_kernels, file.with_suffix(".kernels.txt")),
    ):
        llm.llm_engine.collective_rpc(begin)
        function(llm, *given)
        llm.llm_engine.collective_rpc(end, args=(str(path),))


def begin_samples(worker: Any) -> None:
    """Begin to sample this thread, which runs the model, and to time the device's steps."""
    import torch

    times = StreamTimes()
    block = times.of(worker.model_runner) if torch.cuda.is_available() else nullcontext()
    block.__enter__()
    samples = StackSamples()
    worker.midstream_samples = samples, times, block
    samples.start()


def end_samples(worker: Any, file: str) -> None:
    """Stop, and write what was sampled."""
    import torch

    samples, times, block = worker.midstream_samples
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    block.__exit__(None, None, None)
    samples.stop(Path(file), times.show())


def begin_kernels(worker: Any) -> None:
    """Begin to record the device's kernels."""
    worker.midstream_kernels = DeviceKernels()
    worker.midstream_kernels.start()


def end_kernels(worker: Any, file: str) -> None:
    """Stop, and write their times."""
    worker.midstream_kernels.stop(Path(file))


@contextmanager
def step_ends(llm: Any) -> Iterator[list[float]]:
    """Yield a list that gets the time at which each of the engine's steps ends, in seconds."""
    engine = llm.llm_engine
    step = engine.step
    ends: list[float] = []

    def timed_step() -> Any:
        out = step()
        ends.append(time.perf_counter())
        return out

    engine.step = timed_step
    try:
        yield ends
    finally:
        del engine.step


class CoreSteps:
    """When the core made the outputs of the steps in which each sequence of a batch got a token."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._times: list[float] = []

    def see(self, outputs: Any) -> None:
        """Note a step. Prompts come one after the other, so that the first sequence ends early."""
        if len(outputs.outputs) == self._batch:
            self._times.append(outputs.timestamp)

    def mean(self) -> float:
        """Return the mean seconds of a step."""
        assert len(self._times) > LEAST, f"{len(self._times)} steps of all sequences"
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1)


@contextmanager
def core_steps(llm: Any, batch: int) -> Iterator[CoreSteps]:
    """Yield the times of steps of a batch of so many sequences."""
    core = llm.llm_engine.engine_core
    get_output = core.get_output
    steps = CoreSteps(batch)

    def seen() -> Any:
        outputs = get_output()
        steps.see(outputs)
        return outputs

    core.get_output = seen
    try:
        yield steps
    finally:
        del core.get_output


def full_steps(llm: Any, batch: int, tokens: int, given: dict[str, Any]) -> tuple[float, list[Any]]:
    """Return the mean seconds of steps in which all sequences generate, and the outputs.

    Args:
        llm: the engine.
        batch: number of sequences.
        tokens: number of tokens of each sequence.
        given: arguments of `generate`.
    """
    with core_steps(llm, batch) as steps:
        outputs = llm.generate(
            random_prompts(batch, PROMPT), sampling(tokens), use_tqdm=False, **given
        )
    return steps.mean(), outputs


def timed(llm: Any, ask: Ask, of: Of, length: int, tokens: int) -> float:
    """Return the seconds of one `generate`."""
    params, prompts = sampling(tokens), random_prompts(of[1], length)
    given = ask(*of)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, **given)
    return time.perf_counter() - start


def sampling(tokens: int, **more: Any) -> Any:
    """Return parameters for so many greedy tokens."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more
    )


def random_prompts(count: int, length: int) -> list[Any]:
    """Return prompts of random token ids, the same in each call."""
    draw = random.Random(count * length)
    return [
        {"prompt_token_ids": [draw.randrange(3, 500) for _ in range(length)]} for _ in range(count)
    ]


if __name__ == "__main__":
    sys.exit(main())
