"""Cost of what acts on a running request: gates that latch, probes that stop, controllers.

    python benchmarks/acting.py [--shapes 8b] [--batches 256] [--plain-engines 2] \
        [--by sequences streams] [--kv-gib 4] [--rounds 5] [--seconds 400] [--json FILE]

Seconds of one step in which each sequence generates a token. All sequences ask for the same, at
the middle layer, and all edits are too small to change the values:

- gate: an addition behind a gate that is always open, in an engine without and in one with memory
  for gates (`gate_states`); latch: the same gate with `hold="rest"`.
- probe: one score for each token; probe that stops: `act=Stop` at a score that is never reached.
- sync controller: an addition and a probe, and a `Threshold` in the engine core at a score that is
  never reached; "switching": at 0, so that strengths change often.

Then the same on `AsyncLLM`, with a stream for each sequence, without gates and with a controller
beside the engine (async controller). `--by` selects one of the two. Variants take turns as in
overhead.py. With `--plain-engines 1`, "plain" and "plain again" are one engine, where memory is
short.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import engines
import overhead
import shapes

SKIPPED, STEPS = 8, 48
TOKENS = SKIPPED + STEPS + overhead.LAST
NEVER = 1e30
BY = ["sequences", "streams"]
WITHOUT, WITH = "midstream", "midstream with gate_states"
# By variant: the engine, and the name of what is asked.
OFFLINE = {
    "idle": (WITHOUT, ""),
    "gate": (WITHOUT, "gate"),
    "gate, with gate_states": (WITH, "gate"),
    "latch": (WITH, "latch"),
    "probe": (WITHOUT, "probe"),
    "probe that stops": (WITHOUT, "stop"),
    "addition and probe": (WITHOUT, "steer"),
    "sync controller": (WITHOUT, "sync"),
    "sync controller, switching": (WITHOUT, "sync switching"),
}
SERVED = {
    "idle": (WITHOUT, ""),
    "addition and probe": (WITHOUT, "steer"),
    "async controller": (WITHOUT, "async"),
    "async controller, switching": (WITHOUT, "async switching"),
    "sync controller": (WITHOUT, "sync"),
}


def main() -> int:
    """Measure every shape, and write the table."""
    parser = engines.arguments(__doc__, list(shapes.SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[256])
    parser.add_argument("--plain-engines", type=int, choices=(1, 2), default=2)
    parser.add_argument("--by", nargs="+", choices=BY, default=BY)
    args = parser.parse_args()
    run = engines.Run("acting", args, plain_engines=args.plain_engines, shapes={})
    for shape in args.shapes:
        into = run.results["shapes"][shape] = {}
        for by in args.by:
            is_served = by == "streams"
            wanted = SERVED if is_served else OFFLINE
            makers = engines_of(shape, args, is_served)
            with run.limited(), run.engines(makers, ("plain", WITHOUT)) as started:
                into |= started[WITHOUT].call(described if is_served else engines.describe)
                for batch in args.batches:
                    function = stream_step if is_served else decode_step
                    given = variants(started, wanted, function, shape, batch)
                    run.measure(into, f"decode, {batch} {by}", given)
    return run.finish()


def engines_of(shape: str, args: Any, is_served: bool) -> dict[str, tuple[Any, ...]]:
    """Return what makes each engine, by its name."""
    model, settings = shapes.write(shape, engines.CACHE), engines.settings(shape, args)
    plain, tapped = (served_plain, served) if is_served else (engines.plain, engines.tapped)
    names = overhead.PLAIN[: args.plain_engines]
    found: dict[str, tuple[Any, ...]] = dict.fromkeys(names, (plain, model, settings))
    found[WITHOUT] = tapped, model, settings, {}
    if not is_served:
        found[WITH] = tapped, model, settings, {"gate_states": max(args.batches)}
    return found


def variants(
    started: Any, wanted: dict[str, tuple[str, str]], function: Any, shape: str, batch: int
) -> dict[str, Any]:
    """Return what runs in turn, by name."""
    plain = {name: (name if name in started else overhead.PLAIN[0], "") for name in overhead.PLAIN}
    return {
        name: functools.partial(started[engine].call, function, asked, shape, batch)
        for name, (engine, asked) in {**plain, **wanted}.items()
        if engine in started and (has_sync() or not asked.startswith("sync"))
    }


@functools.cache
def has_sync() -> bool:
    """Return whether controllers run in the engine core."""
    from midstream import Controller

    return "mode" in inspect.signature(Controller).parameters


def asks(name: str, shape: str) -> dict[str, Any]:
    """Return `generate`'s arguments of what one sequence asks."""
    if not name:
        return {}
    from midstream import Controller, Gate, Probe, Steer, Threshold
    from midstream.plan import Stop

    layer = int(shapes.SHAPES[shape]["num_hidden_layers"]) // 2
    direction, read = overhead.vector(shape, 1), overhead.vector(shape, 2)
    steer = Steer(direction, layer)
    kind, _, how = name.partition(" ")
    if kind in ("gate", "latch"):
        hold = {"hold": "rest"} if kind == "latch" else {}
        return {"edits": Gate(steer, read, threshold=-NEVER, **hold)}
    if kind in ("probe", "stop"):
        act = Stop(above=NEVER) if kind == "stop" else None
        return {"probes": Probe(read, layer, name="p", act=act)}
    found: dict[str, Any] = {"edits": steer, "probes": Probe(read, layer, name="p")}
    if kind in ("sync", "async"):
        # Half and whole: neither is none, so that the steps have the same edits.
        law = Threshold("p", above=0.0 if how else NEVER, on=0.5, off=1.0)
        mode = {"mode": kind} if has_sync() else {}
        found["controller"] = Controller(law, **mode)
    return found


def decode_step(llm: Any, name: str, shape: str, batch: int) -> float:
    """Return the mean seconds of steps in which each sequence generates a token."""
    return overhead.full_steps(llm, batch, TOKENS, asks(name, shape))[0]


class Streams:
    """An asynchronous engine and the event loop that it lives on."""

    def __init__(self, make: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.llm = self.loop.run_until_complete(make())

    def shutdown(self) -> None:
        """End the engine, then the tasks that it leaves."""
        self.llm.shutdown()
        self.loop.run_until_complete(_end_tasks())
        self.loop.close()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def served_plain(model: Path, settings: dict[str, Any]) -> Streams:
    """Create vLLM's `AsyncLLM`."""

    async def make() -> Any:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(str(model), **settings))

    return Streams(make)


def served(model: Path, settings: dict[str, Any], midstream: dict[str, Any]) -> Streams:
    """Create midstream's `AsyncLLM`, with `resid_post` of every layer tapped."""

    async def make() -> Any:
        from midstream import AsyncLLM

        tapped = {"sites": ["resid_post"], "layers": "all"} | midstream
        llm = AsyncLLM(str(model), **settings, midstream=tapped)
        await llm.ready()
        return llm

    return Streams(make)


def described(streams: Streams) -> dict[str, Any]:
    """Return the description of midstream's `AsyncLLM`."""
    return engines.description(streams.llm.vllm_config, streams.llm.info)


def stream_step(streams: Streams, name: str, shape: str, batch: int) -> float:
    """Return the mean seconds of steps in which each stream gets a token: from the time when all
    have their first ones to the time when all have `STEPS` more.
    """
    return streams.loop.run_until_complete(_stream_step(streams.llm, asks(name, shape), batch))


async def _stream_step(llm: Any, given: dict[str, Any], batch: int) -> float:
    from vllm.sampling_params import RequestOutputKind

    params = overhead.sampling(TOKENS)
    params.output_kind = RequestOutputKind.DELTA
    begun, ended = [0.0] * batch, [0.0] * batch

    async def read(nth: int, prompt: Any) -> None:
        count = 0
        async for output in llm.generate(prompt, params, f"{time.monotonic_ns()}-{nth}", **given):
            count += len(output.outputs[0].token_ids)
            now = time.perf_counter()
            if count >= SKIPPED and not begun[nth]:
                begun[nth] = now
            if count >= SKIPPED + STEPS and not ended[nth]:
                ended[nth] = now

    prompts = overhead.random_prompts(batch, overhead.PROMPT)
    await asyncio.gather(*(read(nth, prompt) for nth, prompt in enumerate(prompts)))
    return (max(ended) - max(begun)) / STEPS


if __name__ == "__main__":
    sys.exit(main())
