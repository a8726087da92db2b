"""Requests of an async engine that change or end while they run; see `async_run`."""

import asyncio
import threading
from typing import Any

from support.async_calls import KINDS, ask, params, prompt, vector
from support.engine_view import inspect
from support.output_results import results


async def controllers(llm: Any) -> dict[str, Any]:
    """Requests with controllers that answer, stop, fail and hang, beside one without."""
    from midstream import Capture, Controller, Probe, Steer

    asked = {
        "steer": Steer(vector(4), 1, 2.0),
        "capture": Capture("all"),
        "probes": Probe(vector(4), 2, name="p"),
    }

    def each_third(observed: Any) -> float:
        return float(observed.tokens // 3 % 2)

    def fails(observed: Any) -> float:
        raise KeyError(observed.tokens)

    def stops(observed: Any) -> Any:
        return {"stop": True} if observed.tokens >= 12 else 0.0 if observed.tokens >= 5 else None

    def hangs(observed: Any) -> float:
        threading.Event().wait(60)
        return 0.0

    sampling = params(0, max_tokens=60, kind="CUMULATIVE")
    names = ("switches", "fails", "hangs", "ends", "stops", "alone")
    given = (
        Controller(each_third, name="third", seconds=60),
        Controller(fails, on_error="keep"),
        Controller(hangs, seconds=0.02, on_error="off"),
        Controller(fails, on_error="end"),
        Controller(stops, name="limit", seconds=60),
        None,
    )
    made = await asyncio.gather(
        *(
            ask(llm, f"c{name}", prompt(2), sampling, **asked, controller=one)
            for name, one in zip(names, given, strict=True)
        ),
        return_exceptions=True,
    )
    found = dict(zip(names, made, strict=True))
    found["ends"] = type(found["ends"]).__name__, str(found["ends"])
    return found


async def updates(llm: Any, found: dict[str, Any]) -> None:
    """Edits of two running requests change, among others; what cannot change says so."""
    from midstream import Capture, Steer

    asked = {"steer": Steer(vector(4), 1, 2.0), "capture": Capture("all")}

    async def updated(name: str) -> dict[str, Any]:
        changes = [{"scale": 0}, {"edits": [Steer(vector(5), 0, 3.0)]}, {"edits": []}]
        answers = []
        sampling = params(0, max_tokens=60, kind="DELTA")
        generated: list[int] = []
        async for output in llm.generate(prompt(2), sampling, name, **asked):
            generated += output.outputs[0].token_ids
            if changes and len(generated) >= 10 * (1 + len(answers)):
                answers.append((len(generated), await llm.update(name, **changes.pop(0))))
        shown = [(count, one.version, one.positions[0]) for count, one in answers]
        return {"generated": generated, "answers": shown, **results(output)}

    mine, other, alone = await asyncio.gather(
        updated("u0"),
        updated("u1"),
        ask(llm, "u2", prompt(2), params(0, max_tokens=60), **asked),
    )
    several = params(0, max_tokens=40, n=2, kind="FINAL_ONLY")
    task = asyncio.create_task(ask(llm, "u3", prompt(2), several, **asked))
    while not llm._front_end._admitted:
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    twice = await llm.update("u3", scale=0.5)
    controlled = await controllers(llm)
    found["updates"] = {
        "controlled": controlled,
        "mine": mine,
        "other": other,
        "alone": alone,
        "several": (twice.positions, await task),
    }
    await inspect(llm).check_integrity()


async def stops(llm: Any, found: dict[str, Any]) -> None:
    """Streams that a probe stops, beside ones that go on; `shown` has the sizes of all outputs."""
    from midstream import Probe
    from midstream.plan import Stop

    read = vector(3)
    free = Probe(read, 1, name="guard", positions="generated")
    whole = await ask(llm, "unstopped", prompt(2), params(0, max_tokens=20), probes=free)
    scores = whole["probes"]["guard"][0].tolist()
    where = next(nth for nth in range(3, 18) if scores[nth] > max(scores[:nth]))
    threshold = (scores[where] + max(scores[:where])) / 2
    guard = free.replace(act=Stop(above=threshold))
    found["stops"] = {"whole": whole, "where": where}
    for kind in KINDS:
        found["stops"][kind] = await asyncio.gather(
            ask(llm, f"stop {kind}", prompt(2), params(0, max_tokens=20, kind=kind), probes=guard),
            ask(llm, f"go {kind}", prompt(2), params(0, max_tokens=20, kind=kind), probes=free),
        )
