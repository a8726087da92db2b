"""An async engine whose rows go to sinks, in a separate process."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import torch
from support.async_calls import taken
from support.async_run import SETTINGS
from support.engine_view import inspect
from support.engines import greedy, tokens

COUNT = 24
NAMES = ("memory", "store", "keeping", "rows")
KINDS = ("CUMULATIVE", "DELTA", "FINAL_ONLY")


def prompt(nth: int) -> dict[str, list[int]]:
    return tokens(list(range(3 + nth, 8 + 2 * nth)))


def params(nth: int, **more: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind[more.pop("kind", KINDS[nth % 3])]
    return greedy(**{"max_tokens": 4 + nth % 4, "detokenize": False, **more}, output_kind=kind)


def as_rows(found: dict[Any, Any]) -> dict[Any, Any]:
    """What `AsTheyCome.whole` gives of raw float32 rows, as `taken` has it."""
    return {
        tap: (encoded.contiguous().view(torch.float32), *rest)
        for tap, (encoded, *rest) in found.items()
    }


async def ask(llm: Any, name: str, given: Any, sampling: Any, capture: Any) -> Any:
    """The last output of a call; none before it may have results."""
    last = None
    async for output in llm.generate(given, sampling, name, capture=capture):
        assert last is None or last.capture_results is None
        last = output
    return last


def kept(output: Any) -> dict[str, Any]:
    return {name: (one.status, one.reason) for name, one in output.capture_results.items()}


async def at_once(llm: Any, found: dict[str, Any]) -> None:
    from midstream import Capture
    from midstream.store import open_store

    captures = [Capture("all", sink=name, tag="many") for name in NAMES]
    outputs = await asyncio.gather(
        *(ask(llm, f"r{n}", prompt(n), params(n), captures) for n in range(COUNT))
    )
    keeping = inspect(llm).sink("keeping")
    given = {one.request_id: one for one in keeping.given}
    store = open_store(outputs[0].capture_results["store"].manifest["store"])
    rows = inspect(llm).sink("rows")
    pieces = {output.request_id: rows.whole(output.request_id) for output in outputs}
    found["many"] = [
        {
            "memory": taken(output.activations),
            "store": taken(store.get(output.capture_results["store"].manifest["request"])),
            "keeping": taken(given[output.request_id].activations),
            "rows": as_rows(pieces[output.request_id][0]),
            "pieces": len(pieces[output.request_id][1]),
            "generated": len(given[output.request_id].generated_token_ids),
            "kept": kept(output),
            "receipt": output.receipt.to_dict(),
        }
        for output in outputs
    ]
    found["shards"] = len(store.shards)
    await inspect(llm).check_integrity()


async def problems(llm: Any, found: dict[str, Any]) -> None:
    from midstream import Capture

    async def told(name: str, capture: Any) -> tuple[str, Any]:
        output = await ask(llm, name, prompt(1), params(0), capture)
        return output.receipt.status, kept(output)

    keeping = inspect(llm).sink("keeping")
    keeping.go.clear()
    slow = asyncio.create_task(told("slow", Capture("all", sink="keeping")))
    given_up = asyncio.create_task(told("given up", Capture("all", sink="keeping")))
    found["passing"] = await told("passing", Capture(1, sink="store"))
    found["slow is done"] = slow.done()
    given_up.cancel()
    await asyncio.wait([given_up])
    keeping.go.set()
    found["slow"] = await slow
    await inspect(llm).check_integrity()


async def named(llm: Any, found: dict[str, Any]) -> None:
    from midstream import Capture
    from midstream.errors import ExistsError

    capture = Capture(1, sink="store", request_id="mine")

    async def told(name: str, asked: Any) -> str:
        try:
            output = await ask(llm, name, prompt(1), params(0), asked)
        except ExistsError as error:
            return f"{error.path}: {error.problem}"
        return str(output.capture_results["store"].status)

    before = (await llm.usage())["totals"]
    found["named"] = await asyncio.gather(*(told(f"n{nth}", capture) for nth in range(8)))
    after = (await llm.usage())["totals"]
    completions = [sum(totals["completions"].values()) for totals in (before, after)]
    found["named, computed"] = completions[1] - completions[0]
    found["named, aborted"] = after["aborted"] - before["aborted"]
    found["named again"] = await told("again", capture)
    leaving = Capture(1, sink="store", request_id="left")
    stream = llm.generate(prompt(1), params(0, kind="CUMULATIVE"), "leaves", capture=leaving)
    await anext(stream)
    found["named by one that runs"] = await told("beside", leaving)
    await stream.aclose()
    found["named by one that left"] = await told("after", leaving)
    await inspect(llm).check_integrity()


async def session(llm: Any, found: dict[str, Any]) -> None:
    from vllm.engine.protocol import StreamingInput

    from midstream import Capture

    async def inputs() -> AsyncGenerator[Any, None]:
        for nth in range(2):
            yield StreamingInput(prompt(nth))
            await asyncio.sleep(0.05)

    captures = [Capture(1), Capture(1, sink="keeping"), Capture(1, sink="rows")]
    output = await ask(llm, "session", inputs(), params(1, max_tokens=3), captures)
    keeping = inspect(llm).sink("keeping")
    found["session"] = (
        taken(output.activations), taken(keeping.given[-1].activations), kept(output)
    )  # fmt: skip
    put_together, pieces = inspect(llm).sink("rows").whole("session")
    found["session pieces"] = (as_rows(put_together), len(pieces))


async def main(model: str, folder: Path, found: dict[str, Any]) -> None:
    from midstream import AsyncLLM

    sinks = {
        "store": {"root": str(folder / "store"), "group_seconds": 0.2},
        "keeping": {"queue_bytes": 20_000},
        "rows": {"queue_bytes": 20_000},
    }
    llm = AsyncLLM(model, **{**SETTINGS, "midstream": {"sinks": sinks}})
    try:
        await at_once(llm, found)
        await problems(llm, found)
        await session(llm, found)
        await named(llm, found)
        keeping = inspect(llm).sink("keeping")
    finally:
        llm.shutdown()
    found["closed"] = keeping.calls[-1]


if __name__ == "__main__":
    from midstream.runtime.frontend.results import row_streamer
    from midstream.sinks import registry as finding

    row_streamer.CHECK_SECONDS = 0.0
    offered = {"keeping": "Keeping", "rows": "AsTheyCome"}
    finding.entry_points = lambda group: [  # type: ignore[assignment]
        EntryPoint(name, f"support.sinking:{cls}", group) for name, cls in offered.items()
    ]
    collected: dict[str, Any] = {}
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), collected))
    torch.save(collected, Path(sys.argv[2]) / "found.pt")
