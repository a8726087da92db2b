"""The same requests on an async and on an offline engine, in a separate process:"""

import asyncio
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support import async_changes
from support.async_calls import COUNT, KINDS, ask, params, prompt, refusal, taken, vector
from support.async_lenses import stream_of_lenses
from support.engine_view import inspect
from support.engines import ALL_SITES, engine, name_vectors
from support.output_results import results, scores

TAPPED = [*ALL_SITES, "rot_q", "z"]
ARGUMENTS = ("capture", "steer", "edits", "probes")
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "num_gpu_blocks_override": 512,
    "seed": 0,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "midstream": {"sites": TAPPED, "bank_rows": 24, "readout_bytes": 1 << 16},
}


def plan(nth: int) -> dict[str, Any]:
    """What request `nth` asks for; five kinds, each met with every output kind."""
    from midstream import Ablate, Capture, Gate, Probe, Steer
    from midstream.plan import Mass

    read, push = vector(nth % 4), vector(4 + nth % 4)
    gate = Gate(Steer(push, 2, 3.0), {"direction": read, "layer": 0})
    return [
        {"capture": Capture("all", ALL_SITES)},
        {"steer": Steer(push, 1, 0.5), "probes": [Probe(read, 2, name="after")]},
        {
            "probes": [
                Probe(read, 0, name="a", positions="generated"),
                Probe(push, 2, name="b", positions=[0, -1, "last_row"]),
                Probe(push, 1, name="c", positions="prompt"),
                Probe(attention=Mass(slice(0, 5)), layer=1, heads=[1, 0], name="d"),
            ]
        },
        {
            "edits": [Ablate(read, "all"), gate],
            "probes": Probe(push, 1, name="p"),
            "capture": Capture(2, positions="generated"),
        },
        {},
    ][nth % 5]


async def mix(llm: Any, found: dict[str, Any]) -> None:
    found["mix"] = await asyncio.gather(
        *(ask(llm, f"r{n}", prompt(n), params(n), **plan(n)) for n in range(COUNT))
    )
    found["plain"] = await ask(llm, "plain", prompt(0), params(0))
    several = params(0, n=2, kind="FINAL_ONLY")
    found["several"] = await ask(llm, "several", prompt(3), several, **plan(3))
    # A call that vLLM rejects before it begins leaves nothing behind: see `check_integrity`.
    with pytest.raises(TypeError, match="typo"):
        await ask(llm, "typo", prompt(3), params(3), **plan(3), typo=1)
    await inspect(llm).check_integrity()


async def errors(llm: Any, found: dict[str, Any]) -> None:
    """Requests that are refused or go wrong, among others that do not."""

    completion = sys.modules["midstream.runtime.frontend.results.delivery"]
    assemble = completion.assemble

    def spoil(output: Any, *rest: Any) -> Any:
        results = assemble(output, *rest)
        if output.request_id != "bad":
            return results
        return {
            index: replace(one, receipt=replace(one.receipt, problems=("spoilt",)))
            for index, one in results.items()
        }

    completion.assemble = spoil
    good, bad, other = await asyncio.gather(
        ask(llm, "good", prompt(1), params(0), **plan(1)),
        refusal(ask(llm, "bad", prompt(1), params(0), **plan(1))),
        ask(llm, "other", prompt(4), params(0)),
    )
    completion.assemble = assemble
    found["errors"] = {"good": good["receipt"]["status"], "bad": bad, "other": other["reason"]}
    await inspect(llm).check_integrity()


async def cancel_at_the_door(llm: Any) -> str:
    """Cancel a call while vLLM prepares it in a thread, which then continues."""
    front = llm._front_end
    admit, entered, leave, left = front.admit, *(threading.Event() for _ in range(3))

    def slow(*arguments: Any) -> Any:
        entered.set()
        # Not for ever: releases without such a thread do it in the loop.
        leave.wait(2)
        try:
            return admit(*arguments)
        finally:
            left.set()

    front.admit = slow
    task = asyncio.create_task(ask(llm, "door", prompt(1), params(0, max_tokens=100), **plan(1)))
    await asyncio.to_thread(entered.wait)
    task.cancel()
    [ended] = await asyncio.gather(task, return_exceptions=True)
    leave.set()
    await asyncio.to_thread(left.wait)
    del front.admit
    return type(ended).__name__


async def streams(llm: Any, found: dict[str, Any]) -> None:
    """Return the rows on the outputs of running requests."""
    from vllm.engine.protocol import StreamingInput

    from midstream import Capture, Probe

    captures = [
        Capture([0, 2], ALL_SITES, stream=True),
        Capture(2, positions=["last_prompt", "last_row"], stream=True),
        Capture(1, ALL_SITES),
    ]

    async def watch(nth: int, kind: str) -> dict[str, Any]:
        shown, generated, name = [], 0, f"watch {nth} {kind}"
        sampling = params(0, max_tokens=20, kind=kind)
        given = {"capture": captures, "probes": Probe(vector(0), 1, name="p")}
        async for output in llm.generate(prompt(nth), sampling, name, **given):
            count = len(output.outputs[0].token_ids)
            generated = generated + count if kind == "DELTA" else count
            if output.activations is not None:
                shown.append((generated, output.finished, taken(output.activations)))
        return {"shown": shown, **results(output)}

    found["streams"] = await asyncio.gather(
        *(watch(nth, kind) for nth in range(12) for kind in ("CUMULATIVE", "DELTA"))
    )
    plain = {"capture": Capture("all", ALL_SITES), "probes": Probe(vector(0), 1, name="p")}
    found["stream plain"] = await asyncio.gather(
        *(
            ask(llm, f"plain {nth}", prompt(nth), params(0, max_tokens=20), **plain)
            for nth in range(12)
        )
    )
    found["stream lens"] = await stream_of_lenses(llm, prompt(5), params(0, max_tokens=20))

    async def inputs() -> Any:
        yield StreamingInput(prompt(0))

    sampling = {kind: params(0, kind=kind) for kind in KINDS}
    several = params(0, n=2, kind="FINAL_ONLY")
    found["stream refused"] = [
        await refusal(ask(llm, f"no {nth}", given, one, capture=[Capture(0), captures[0]]))
        for nth, (given, one) in enumerate(
            [
                (prompt(0), sampling["FINAL_ONLY"]),
                (prompt(0), several),
                (inputs(), sampling["CUMULATIVE"]),
            ]
        )
    ]
    await inspect(llm).check_integrity()


async def aborts(llm: Any, found: dict[str, Any]) -> None:
    """Calls that end early, each in its own way."""
    long = params(0, max_tokens=100)

    async def leave_after(count: int, name: str) -> None:
        stream = llm.generate(prompt(3), long, name, **plan(3))
        async for _ in stream:
            count -= 1
            if not count:
                break
        await stream.aclose()

    await asyncio.gather(leave_after(1, "x1"), leave_after(3, "x2"))
    await inspect(llm).check_integrity()
    tasks = [asyncio.create_task(ask(llm, f"y{n}", prompt(n), long, **plan(n))) for n in range(8)]
    for wait, task in enumerate(tasks):
        await asyncio.sleep(0.01 * wait)
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    found["cancelled"] = [type(one).__name__ for one in ended]
    await inspect(llm).check_integrity()
    found["early cancel"] = await cancel_at_the_door(llm)
    await inspect(llm).check_integrity()
    outputs = []
    async for output in llm.generate(prompt(1), long, "z", **plan(1)):
        outputs.append((len(output.outputs[0].token_ids), scores(output)))
        if len(outputs) == 3:
            await llm.abort("z")
    found["aborted"] = {
        "reason": output.outputs[0].finish_reason,
        "before": outputs[-2],
        **results(output),
    }
    await inspect(llm).check_integrity()


async def waiting(llm: Any, found: dict[str, Any]) -> None:
    """More vectors than there is room for: 16, and 16 others, of 24."""
    from midstream import Steer

    def steers(first: int) -> list[Any]:
        return [Steer(vector(first + n), n % 3, 0.01) for n in range(16)]

    order: list[str] = []

    async def run(name: str, max_tokens: int, **asked: Any) -> Any:
        sampling = params(0, max_tokens=max_tokens)
        out = await ask(llm, name, prompt(2), sampling, **asked)
        order.append(name)
        return out

    view = inspect(llm)
    first = asyncio.create_task(run("first", 60, steer=steers(100)))
    while not llm.output_processor.request_states:
        await asyncio.sleep(0.01)
    second = asyncio.create_task(run("second", 3, steer=steers(200)))
    given_up = asyncio.create_task(run("given up", 3, steer=steers(300)))
    removed = asyncio.create_task(run("removed", 3, steer=steers(400)))
    while view.waiting() < 3:
        await asyncio.sleep(0.01)
    passing = await run("passing", 3)
    given_up.cancel()
    await llm.abort("removed")
    found["removed"] = await removed
    while view.waiting() > 1:
        await asyncio.sleep(0.01)
    found["waiting"] = {
        "first": (await first)["receipt"]["status"],
        "second": (await second)["receipt"]["status"],
        "passing": passing["reason"],
        "given up": type((await asyncio.gather(given_up, return_exceptions=True))[0]).__name__,
    }
    found["order"] = order
    await inspect(llm).check_integrity()


async def server_wide(llm: Any, found: dict[str, Any]) -> None:
    from midstream import Steer

    llm.steering.set(base=Steer(vector(9), 1, 2.0))
    found["steered"] = await ask(llm, "steered", prompt(0), params(0))
    found["bare"] = await refusal(llm.add_request("bare", prompt(0), params(0)))
    llm.steering.clear()
    found["unsteered"] = await ask(llm, "unsteered", prompt(0), params(0))
    await inspect(llm).check_integrity()


async def main(model: str, found: dict[str, Any]) -> None:
    from vllm import AsyncEngineArgs

    from midstream import AsyncLLM

    name_vectors()
    own = {**SETTINGS, "additional_config": {"midstream": SETTINGS["midstream"]}}
    del own["midstream"]
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **own))
    try:
        found["early"] = ""
        try:
            llm.sites()
        except RuntimeError as error:
            found["early"] = str(error)
        await llm.ready()
        found["sites"] = sorted(llm.info.shape.taps)
        await mix(llm, found)
        await errors(llm, found)
        await streams(llm, found)
        await aborts(llm, found)
        await waiting(llm, found)
        await async_changes.updates(llm, found)
        await async_changes.stops(llm, found)
        await server_wide(llm, found)
        await inspect(llm).check_integrity()
    finally:
        llm.shutdown()


def offline(model: Path, found: dict[str, Any]) -> None:
    with engine(model, **SETTINGS) as llm:
        # Per prompt, so that lists of edits are one request's.
        asked = {name: [listed(plan(n).get(name)) for n in range(COUNT)] for name in ARGUMENTS}
        asked["capture"] = [plan(n).get("capture") for n in range(COUNT)]
        outputs = llm.generate(
            [prompt(n) for n in range(COUNT)],
            [params(n, kind="FINAL_ONLY") for n in range(COUNT)],
            use_tqdm=False,
            **asked,
        )
        found["offline"] = [
            {"generated": list(one.outputs[0].token_ids), **results(one)} for one in outputs
        ]


def listed(value: Any) -> Any:
    return value if value is None or isinstance(value, list) else [value]


if __name__ == "__main__":
    collected: dict[str, Any] = {}
    asyncio.run(main(sys.argv[1], collected))
    offline(Path(sys.argv[1]), collected)
    torch.save(collected, sys.argv[2])
