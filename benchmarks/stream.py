"""Captures in steady state: prompts stream through `AsyncLLM`, and rows are read as they come.

    python benchmarks/stream.py [--shapes 0.6b 8b] [--prompts 2048] [--length 512] \
        [--in-flight 128] [--rounds 5] [--trainer cuda:1] [--seconds 280] [--profiles FOLDER]
        [--json FILE]

So many prompts are in flight all the time, each with one generated token; the tensors of a finished
prompt are made, one number of each is read, and they are released. Variants: plain vLLM in two
engines; the last prompt token of every layer; every token of every layer. They take turns, each
engine in a process of its own with a core process of its own; figures are medians over rounds.

With --trainer, the sink `tcp` also sends three layers of every token to another process, a
trainer's, which copies them to a device. At most 512 MiB wait for it, so that the rate is that of
both.

With --profiles, one more turn of each variant is sampled: the stacks of the event loop's thread and
of the thread that runs the model, each in a file for flame graph tools; see stack_samples.py.

prompts/s is the slope of a line through the times at which prompts finished, from when
as many have finished as are in flight until the last is sent: the start and the end do not count.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import engines
import overhead
import shapes
from stack_samples import StackSamples

PROMPTS = {"tiny": 384, "0.6b": 2048, "8b": 512}
THREE, TRAINER = "every token, three layers", "every token, three layers, to a trainer"
LAST, EVERY = "last prompt token, every layer", "every token, every layer"
# By variant: the engine and the arguments of `Capture`, None without a capture.
VARIANTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "plain": ("plain", None),
    "plain again": ("plain again", None),
    "idle": ("midstream", None),
    LAST: ("midstream", {"layers": "all", "positions": "last_prompt"}),
    EVERY: ("midstream", {"layers": "all"}),
    THREE: ("midstream", {}),
    TRAINER: ("midstream", {"sink": "tcp"}),
}
DEFAULTS = ["plain", "plain again", "idle", LAST, EVERY]
SPOOL_BYTES = 512 << 20
SHM = Path("/dev/shm")


def main() -> int:
    """Measure every shape, and write the table."""
    parser = engines.arguments(__doc__, list(shapes.SHAPES))
    parser.add_argument("--prompts", type=int, help="of each turn; default: by the shape")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--in-flight", type=int, default=128)
    parser.add_argument("--variants", nargs="*", default=DEFAULTS, choices=DEFAULTS)
    parser.add_argument("--trainer", metavar="DEVICE", help="torch device of the trainer's process")
    parser.add_argument("--profiles", type=Path, help="folder for two files of each variant")
    args = parser.parse_args()
    if args.trainer:
        args.variants = [*args.variants, THREE, TRAINER]
    about = {"length": args.length, "in_flight": args.in_flight}
    run = engines.Run("stream", args, **about, shapes={})
    for shape in args.shapes:
        prompts = args.prompts or PROMPTS[shape]
        if prompts < 3 * args.in_flight:
            parser.error(f"--prompts: expected at least 3 × --in-flight, got {prompts}")
        call = Stream, shapes.write(shape, engines.CACHE), engines.settings(shape, args)
        captures = {name: capture_of(name, shape) for name in args.variants}
        port = engines.free_port() if args.trainer else 0
        makers: dict[str, tuple[Any, ...]] = {
            engine: (*call, engine == "midstream", port) for engine, _ in VARIANTS.values()
        }
        if args.trainer:
            makers["trainer"] = Trainer, port, args.trainer
        environment = engines.FUNCTIONS_TO_WORKERS if args.profiles else {}
        with run.limited(), run.engines(makers, **environment) as started:
            into = run.results["shapes"][shape] = started["midstream"].call(Stream.describe)
            given = prompts, args.length, args.in_flight
            turns = {
                name: functools.partial(turn, started, name, capture, *given)
                for name, capture in captures.items()
            }
            run.measure(into, f"{prompts} prompts", turns, summary)
            for name, capture in captures.items() if args.profiles else ():
                file = args.profiles / f"{shape}-{name.replace(',', '').replace(' ', '-')}"
                engine = started[VARIANTS[name][0]]
                engine.call(Stream.profile, file.resolve(), capture, *given)
    return run.finish()


def capture_of(name: str, shape: str) -> dict[str, Any] | None:
    """Return the arguments of a variant's `Capture`; None: it captures nothing."""
    capture = VARIANTS[name][1]
    if name not in (THREE, TRAINER):
        return capture
    layers = shapes.SHAPES[shape]["num_hidden_layers"]
    return {"layers": [1, layers // 2, layers - 2], **(capture or {})}


def turn(started: Any, name: str, *given: Any) -> tuple[float, int]:
    """Return prompts per second of a variant, and the bytes of rows of a prompt."""
    rate, nbytes = started[VARIANTS[name][0]].call(Stream.turn, *given)
    _, prompts, *_ = given
    return rate, started["trainer"].call(Trainer.taken, prompts) if name == TRAINER else nbytes


class Trainer:
    """A trainer's process: a thread takes what the sink sends onto a device."""

    def __init__(self, port: int, device: str) -> None:
        self._port, self._device = port, device
        self._nbytes: dict[str, int] = {}
        self._more = threading.Condition()
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        from midstream.sinks.tcp import TcpRows

        for record in TcpRows("127.0.0.1", self._port):
            rows = [record.activations[tap].to(self._device) for tap in record.activations]
            with self._more:
                self._nbytes[record.id] = sum(each.numel() * each.element_size() for each in rows)
                self._more.notify()

    def taken(self, count: int) -> int:
        """Wait for so many prompts; return the mean bytes of their rows, and forget them."""
        with self._more:
            if not self._more.wait_for(lambda: len(self._nbytes) >= count, 60):
                raise TimeoutError(f"{len(self._nbytes)} of {count} prompts came")
            nbytes, self._nbytes = sum(self._nbytes.values()), {}
        return nbytes // count


class Stream:
    """An `AsyncLLM`, vLLM's or midstream's, with its event loop."""

    def __init__(self, model: Path, settings: dict[str, Any], tapped: bool, port: int) -> None:
        """Start it; with a port, midstream's sends rows to a trainer there."""
        self._loop = asyncio.new_event_loop()
        self._spool = tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None)
        taps: dict[str, Any] = {"sites": ["resid_post"], "layers": "all"}
        if port:
            sink = {"root": self._spool.name, "port": port, "spool_bytes": SPOOL_BYTES}
            taps["sinks"] = {"tcp": sink}
        self._llm = self._loop.run_until_complete(self._start(model, settings, tapped and taps))
        # As vLLM's server does: a full collection takes as long as dozens of steps.
        gc.collect()
        gc.freeze()

    async def _start(self, model: Path, settings: dict[str, Any], taps: Any) -> Any:
        if taps:
            from midstream import AsyncLLM

            llm = AsyncLLM(str(model), midstream=taps, **settings)
            await llm.ready()
            return llm
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM as Plain

        return Plain.from_engine_args(AsyncEngineArgs(model=str(model), **settings))

    def describe(self) -> dict[str, Any]:
        """Return the modes of compilation, and midstream's view of the engine."""
        return engines.description(self._llm.vllm_config, self._llm.info)

    def shutdown(self) -> None:
        """End the engine core."""
        self._llm.shutdown()
        self._spool.cleanup()

    def turn(
        self, capture: dict[str, Any] | None, count: int, length: int, in_flight: int
    ) -> tuple[float, int]:
        """Return prompts per second, and the bytes of rows of a prompt."""
        prompts = iter(random_prompts(count, length))
        asked = self._asked(capture)
        return self._loop.run_until_complete(self._stream(prompts, asked, in_flight))

    def profile(self, file: Path, *given: Any) -> None:
        """Write the stacks of a turn to two files whose names begin with that of `file`; see
        `turn`.
        """
        self._on_model(overhead.begin_samples)
        own = StackSamples()
        own.start()
        self.turn(*given)
        own.stop(Path(f"{file}-event-loop.txt"))
        self._on_model(overhead.end_samples, f"{file}-model.txt")

    def _on_model(self, function: Any, *given: Any) -> None:
        self._loop.run_until_complete(self._llm.collective_rpc(function, args=given))

    def _asked(self, capture: dict[str, Any] | None) -> dict[str, Any]:
        if capture is None:
            return {}
        from midstream import Capture

        return {"capture": Capture(**capture)}

    async def _stream(
        self, prompts: Any, asked: dict[str, Any], in_flight: int
    ) -> tuple[float, int]:
        params, numbers = overhead.sampling(1), itertools.count()
        ends: list[float] = []
        nbytes = sent = 0

        async def take() -> None:
            nonlocal nbytes, sent
            for prompt in prompts:
                # What has finished when the last prompt is sent is in steady state.
                sent = len(ends)
                name = f"{id(prompts)}-{next(numbers)}"
                taken = await self._take(prompt, params, name, asked)
                nbytes += taken  # not before: another prompt's may come while this one is awaited
                ends.append(time.perf_counter())

        await asyncio.gather(*(take() for _ in range(in_flight)))
        steady = ends[in_flight:sent]
        rate = statistics.linear_regression(steady, range(len(steady))).slope
        return rate, nbytes // len(ends)

    async def _take(self, prompt: Any, params: Any, name: str, asked: dict[str, Any]) -> int:
        """Return the bytes of rows of a prompt. No variable refers to them afterwards."""
        async for output in self._llm.generate(prompt, params, name, **asked):
            last = output
        return read(last.activations) if asked and last.activations else 0


@functools.lru_cache(1)
def random_prompts(count: int, length: int) -> list[Any]:
    """Return the prompts of a turn, the same in each."""
    return overhead.random_prompts(count, length)


def read(activations: Any) -> int:
    """Make each tensor, read a number of it, and return the size of all in bytes."""
    nbytes = 0
    for tap in activations:
        rows = activations[tap]
        rows[-1, -1].item()
        nbytes += rows.numel() * rows.element_size()
    return nbytes


def summary(values: dict[str, list[tuple[float, int]]]) -> dict[str, Any]:
    """Return the median rate of each variant, what it is of plain vLLM's, and GB/s of rows."""
    rates = {name: [rate for rate, _ in each] for name, each in values.items()}
    return {
        name: {
            "prompts_per_s": (rate := statistics.median(each)),
            "min": min(each),
            "max": max(each),
            "rounds": len(each),
            "of_plain": engines.of_plain(rates, name),
            "gb_s": rate * values[name][-1][1] / 1e9,
        }
        for name, each in rates.items()
    }


if __name__ == "__main__":
    sys.exit(main())
