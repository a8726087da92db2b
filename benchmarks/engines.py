"""Engines of a benchmark, each in a process of its own, which take turns, and the results so far.

A script makes one `Run`. `Run.engines` starts the engines of a shape side by side, and
`Run.measure` has the variants of a workload take turns. The JSON is written after each round, so
that a run which is cut off leaves what it has.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import re
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import machine
import table
from shapes import QUANTISED

# By engine, so that none writes into the compile cache of another. The folder does not change from
# run to run: vLLM's keys of compiled code contain the path of the model.
CACHE = Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser() / "benchmarks"
ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# With it vLLM sends functions of a script to the thread that runs the model.
FUNCTIONS_TO_WORKERS = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
# Bytes of a KV cache, by shape. Given to each engine: vLLM would otherwise measure the memory that
# is left, and engines that start side by side would count each other's.
KV_GIB = {"tiny": 0.0625, "0.6b": 16.0, "8b": 7.0, "8b-fp8": 7.0}


class TimeIsUpError(Exception):
    """The run has used its seconds."""


class EngineError(Exception):
    """A call in an engine's process failed, or the process ended."""


class Engine:
    """A process with an object that `make` creates there; `call` runs functions on it."""

    def __init__(
        self,
        name: str,
        end: float,
        make: Callable[..., Any],
        *args: Any,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start the process, and return before `make` has.

        Args:
            name: name in messages, and of the folder of compiled code.
            end: `time.monotonic()` at which calls raise TimeIsUpError.
            make: creates the object from `args`. It must be importable by name, as must the
                functions of `call`.
            environment: variables of the process, set before vLLM is imported.
        """
        self.name, self._end = name, end
        # A compiler of C++ would take a name with a space for two.
        folder = re.sub(r"\W+", "-", name)
        found = {**ENVIRONMENT, "VLLM_CACHE_ROOT": str(CACHE / folder), **(environment or {})}
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        # Not a daemon: an engine with several ranks has processes of its own.
        self._process = spawn.Process(target=_serve, args=(theirs, found, make, args))
        self._process.start()
        theirs.close()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what `function(object, *args)` returns there.

        Raises:
            EngineError: it raised, or the process ended.
            TimeIsUpError: it did not return before the end of the run.
        """
        self.begin(function, *args)
        return self.answer()

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin a call, whose result `answer` returns."""
        # A process that has ended is found by `answer`.
        with suppress(OSError):
            self._pipe.send((function, args))

    def answer(self) -> Any:
        """Return what the running call returns; see `call`. The first is that of `make`."""
        left = self._end - time.monotonic()
        # poll(None) would return on an interrupt too; a call takes no 1e6 seconds.
        if not self._pipe.poll(max(0.0, min(left, 1e6))):
            raise TimeIsUpError
        try:
            error, value = self._pipe.recv()
        except EOFError:
            self._process.join(5)
            raise EngineError(f"the process ended, exit code {self._process.exitcode}") from None
        if error:
            raise EngineError(error)
        return value

    def leave(self) -> None:
        """Tell the process to end once it has finished its call."""
        with suppress(OSError):
            self._pipe.send(None)

    def end(self, seconds: float) -> None:
        """Wait for the process, then end it and the processes that it started."""
        self._process.join(seconds)
        if self._process.is_alive():
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid or 0, signal.SIGKILL)
            self._process.join()


def _serve(
    pipe: Any, environment: dict[str, str], make: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Run in an engine's process: create the object, then answer calls."""
    os.environ.update(environment)
    # A group of its own, so that the processes of the engine end with it.
    os.setpgrp()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    made: list[Any] = []
    _answer(pipe, lambda: made.append(make(*args)))
    with suppress(EOFError):
        while (order := pipe.recv()) is not None:
            function, args = order
            _answer(pipe, function, made[0], *args)
    for one in made:
        # vLLM's LLM has no method for this; its engine's core has.
        ends = getattr(getattr(one, "llm_engine", one), "engine_core", one)
        getattr(ends, "shutdown", lambda: None)()
    # Objects of vLLM need its modules to end, which Python's own end takes away.
    made.clear()


def _answer(pipe: Any, function: Callable[..., Any], *args: Any) -> None:
    try:
        answer = "", function(*args)
    except Exception:  # noqa: BLE001 - the caller's process reports it
        answer = traceback.format_exc(), None
    pipe.send(answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)


class Run:
    """The results of a script, which are written after each round, and the seconds that it has."""

    def __init__(self, benchmark: str, args: argparse.Namespace, **about: Any) -> None:
        """Begin.

        Args:
            benchmark: name in the results.
            args: with `rounds`, `seconds` and `json`, as `arguments` adds them.
            about: further fields of the results.
        """
        about = {"machine": {}, **about, "rounds": args.rounds}
        self.results: dict[str, Any] = {"benchmark": benchmark, **about}
        self._rounds, self._json = args.rounds, args.json
        self._began = time.monotonic()
        self.end = self._began + (args.seconds or math.inf)
        self._draw = random.Random(0)

    def stage(self, text: str) -> None:
        """Write a line with the seconds since the start to stderr."""
        sys.stderr.write(f"[{time.monotonic() - self._began:6.1f} s] {text}\n")
        sys.stderr.flush()

    def save(self) -> None:
        """Write the JSON. A cut-off leaves the former file or this one, never a part."""
        if self._json:
            part = self._json.with_name(self._json.name + ".part")
            part.write_text(json.dumps(self.results, indent=1, default=str) + "\n")
            part.replace(self._json)

    @contextmanager
    def limited(self) -> Iterator[None]:
        """End the block when the time is up or an engine that it needs fails; note it in the
        results.
        """
        try:
            yield
        except TimeIsUpError:
            self.results["stopped_after_s"] = round(time.monotonic() - self._began)
            self.stage("the time is up: the results have what was measured so far")
        except EngineError as error:
            self.failed("run", error)
        finally:
            self._describe()
            self.save()

    def _describe(self) -> None:
        """Add machine and versions to the results."""
        if not self.results["machine"]:
            self.results["machine"] = machine.describe()

    def finish(self) -> int:
        """Print the table, and return the exit status: 1 if something could not be measured."""
        sys.stdout.write(table.render(self.results) + "\n")
        return int("failed" in self.results)

    @contextmanager
    def engines(
        self,
        makers: dict[str, tuple[Any, ...]],
        needed: Collection[str] | None = None,
        **environment: str,
    ) -> Iterator[Any]:
        """Start engines side by side, and yield those that started, by name.

        Args:
            makers: by name: a function that makes the engine, and its arguments.
            needed: names of those without which nothing can be measured; None: all.
            environment: variables of the processes.

        Raises:
            EngineError: one of those did not start.
            TimeIsUpError: not all started in time.
        """
        if time.monotonic() > self.end:
            raise TimeIsUpError
        self.stage(f"start {len(makers)} engines: {'; '.join(makers)}")
        started = {
            name: Engine(name, self.end, *call, environment=environment)
            for name, call in makers.items()
        }
        ready = {}
        try:
            # While they start: it imports vLLM.
            self._describe()
            for name, engine in started.items():
                try:
                    engine.answer()
                    ready[name] = engine
                    self.stage(f"{name} is ready")
                except EngineError as error:
                    self.failed(name, error)
                    if needed is None or name in needed:
                        raise
            yield ready
        finally:
            for engine in started.values():
                engine.leave()
            late = time.monotonic() + 20
            for engine in started.values():
                # A process that is still in a call when the time is up gets no more of it.
                engine.end(0 if time.monotonic() > self.end else late - time.monotonic())

    def failed(self, what: str, error: EngineError) -> None:
        """Note what could not be measured."""
        self.results.setdefault("failed", {})[what] = str(error)[-2000:]
        self.stage(f"{what} FAILED: {error}")

    def measure(
        self,
        into: dict[str, Any],
        workload: str,
        variants: dict[str, Callable[[], Any]],
        summary: Callable[[dict[str, list[Any]]], dict[str, Any]] | None = None,
    ) -> None:
        """Run the variants in turn, in a random order in each round, and put a summary into the
        results after each round. The first round is a warm-up.

        Args:
            into: the part of the results that gets the summary.
            workload: its name there.
            variants: by name: what runs once, and returns a value.
            summary: of the values of each variant, by name. Default: of seconds.

        Raises:
            TimeIsUpError: the seconds of the run do not suffice for another round.
        """
        left = dict(variants)
        values: dict[str, list[Any]] = {name: [] for name in variants}
        longest = 0.0
        for nth in range(self._rounds + 1):
            begun = time.monotonic()
            if begun + longest > self.end:
                raise TimeIsUpError
            self.stage(f"{workload}: {f'round {nth} of {self._rounds}' if nth else 'warm-up'}")
            for name in self._draw.sample(list(left), len(left)):
                try:
                    value = left[name]()
                except EngineError as error:
                    self.failed(f"{workload}: {name}", error)
                    del left[name], values[name]
                    continue
                if nth:
                    values[name].append(value)
            longest = max(longest, time.monotonic() - begun)
            if nth and values:
                into[workload] = (summary or seconds)(values)
                self.save()


def seconds(values: dict[str, list[float]]) -> dict[str, Any]:
    """Return median, minimum, maximum and number of the seconds of each variant, and what they are
    of plain vLLM's; see `of_plain`.
    """
    return {
        name: {
            "median_s": statistics.median(found),
            "min_s": min(found),
            "max_s": max(found),
            "rounds": len(found),
            "of_plain": of_plain(values, name),
        }
        for name, found in values.items()
    }


def of_plain(values: dict[str, list[float]], name: str) -> float | None:
    """Return the median over rounds of the ratio between a variant's value and that of plain vLLM
    in the same round; None if one of them was not measured in each. A host whose speed changes from
    round to round changes both values of a round.
    """
    found, plain = values[name], values.get("plain", [])
    if not found or len(found) != len(plain):
        return None
    return statistics.median(one / other for one, other in zip(found, plain, strict=True))


def arguments(
    description: str, shapes: list[str] | None = None, rounds: int = 5
) -> argparse.ArgumentParser:
    """Return a parser of the options that all scripts have; `shapes` are those of `--shapes`."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    if shapes:
        parser.add_argument("--shapes", nargs="+", default=["0.6b", "8b"], choices=shapes)
        parser.add_argument("--kv-gib", type=float, help="of each engine; default: by the shape")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seconds", type=float, help="stop after so many, with what is measured")
    parser.add_argument("--json", type=Path)
    return parser


def settings(shape: str, args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Return vLLM's arguments for an engine with random weights."""
    import torch

    on_gpu = torch.cuda.is_available()
    return {
        "dtype": "bfloat16" if on_gpu else "float32",
        # On a CPU the scripts are only tried out.
        "enforce_eager": not on_gpu,
        "load_format": "dummy",
        "quantization": QUANTISED.get(shape),
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
        "kv_cache_memory_bytes": int((args.kv_gib or KV_GIB.get(shape, 4.0)) * (1 << 30)),
        # vLLM checks at the start that so much is free, and uses it for nothing else.
        "gpu_memory_utilization": 0.05,
        # Every run must compute its prompts: with the cache there would be no prefill.
        "enable_prefix_caching": False,
        "seed": 0,
        **more,
    }


def free_port() -> int:
    """Return a port of this host that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def plain(model: Path, settings: dict[str, Any]) -> Any:
    """Create vLLM's `LLM`."""
    from vllm import LLM

    return LLM(str(model), **settings)


def tapped(model: Path, settings: dict[str, Any], midstream: dict[str, Any]) -> Any:
    """Create midstream's `LLM`, with `resid_post` of every layer tapped."""
    from midstream import LLM

    return LLM(
        str(model), **settings, midstream={"sites": ["resid_post"], "layers": "all"} | midstream
    )


def describe(llm: Any) -> dict[str, Any]:
    """Return the description of midstream's `LLM`."""
    return description(llm.llm_engine.vllm_config, llm.info)


def description(config: Any, info: Any) -> dict[str, Any]:
    """Return the modes of compilation and of CUDA graphs, and midstream's view of the engine."""
    import msgspec

    compilation = config.compilation_config
    return {
        "graphs": f"mode {compilation.mode}, CUDA graphs {compilation.cudagraph_mode}",
        "engine": msgspec.to_builtins(info.workers[0]),
    }
