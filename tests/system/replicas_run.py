"""The same requests on two replicas and on a single engine, in a separate process."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import psutil
import torch
from support.async_calls import ask, taken, vector
from support.async_run import SETTINGS as SINGLE
from support.async_run import listed
from support.engine_view import inspect
from support.engines import ALL_SITES, engine, greedy, name_vectors, tokens
from support.output_results import results

from midstream.runtime.frontend.rpc.replicas import busy

REPLICAS = 2
COUNT = 50
SEVERAL = 4
MIDSTREAM = {"sites": ALL_SITES, "bank_rows": 24}
SETTINGS: dict[str, Any] = {
    # vLLM's CPU backend cannot sample with a seed where a prompt comes in chunks.
    **SINGLE, "max_num_batched_tokens": 512, "midstream": MIDSTREAM, "max_num_seqs": 16,
}  # fmt: skip


def prompt(nth: int) -> dict[str, list[int]]:
    return tokens(range(3 + nth, 14 + 2 * nth))


def plan(nth: int) -> dict[str, Any]:
    """What request `nth` asks for; five kinds, each met with every output kind."""
    from midstream import Ablate, Capture, Gate, Probe, Steer

    # Not the same vectors each time: replicas hold different ones.
    one, two, three = (vector(50 + nth + 7 * n) for n in range(3))
    gate = Gate(Steer(two, 2, 0.6), {"direction": one, "layer": 0})
    return [
        {"capture": Capture("all", ALL_SITES)},
        {
            "steer": [Steer(one, 1, 0.5, norm="match"), Steer(two, 0, 0.7, phase="generated")],
            "capture": Capture(2, positions=["last_prompt", "generated"]),
        },
        {
            "edits": [Ablate(torch.stack([one, two]), 1), gate],
            "probes": Probe(three, 2, name="after"),
        },
        {
            "probes": [
                Probe(one, 0, name="a", positions="generated"),
                Probe(two, 2, name="b", positions=[0, -1, "last_row"]),
            ]
        },
        {},
    ][nth % 5]


def params(nth: int, **more: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind[more.pop("kind", ("CUMULATIVE", "DELTA", "FINAL_ONLY")[nth % 3])]
    given = {"max_tokens": 5 + nth % 7, "detokenize": False, **more}
    return greedy(**given, output_kind=kind)


def sampled(nth: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    given = {"n": 3, "seed": nth, "max_tokens": 8, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**given, output_kind=RequestOutputKind.FINAL_ONLY)


class Spy:
    """Recorder of the engine to which vLLM sends each request; its call of all engines fails."""

    def __init__(self, client: Any) -> None:
        self.sent: dict[str, int] = {}
        choose = client.get_core_engine_for_request

        def noted(request: Any) -> Any:
            identity = choose(request)
            self.sent[request.request_id] = client.core_engines.index(identity)
            return identity

        async def first_answer(*_: Any) -> Any:
            raise AssertionError("that reaches all engines and returns the first one's answer")

        client.get_core_engine_for_request = noted
        client.collective_rpc_async = first_answer

    def of(self, name: str) -> list[int]:
        """The engines of the requests of one call: vLLM puts something before and behind its id."""
        return [nth for given, nth in self.sent.items() if f"{name}-" in given]


async def reported_idle(llm: Any) -> None:
    """Wait until the engines have reported to the load balancer that they are idle."""
    for _ in range(1000):
        if not any(busy(llm.engine_core)):
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


async def mix(llm: Any, spy: Spy, found: dict[str, Any]) -> None:
    view, waited = inspect(llm), 0

    async def watch() -> None:
        nonlocal waited
        while True:
            waited = max(waited, view.waiting())
            await asyncio.sleep(0.001)

    watching = asyncio.create_task(watch())
    found["mix"] = await asyncio.gather(
        *(ask(llm, f"mix{n}", prompt(n), params(n), **plan(n)) for n in range(COUNT))
    )
    watching.cancel()
    found["waited"] = waited
    found["sent"] = [spy.of(f"mix{n}") for n in range(COUNT)]
    found["usage"] = await llm.usage()
    await reported_idle(llm)
    found["several"] = await asyncio.gather(
        *(ask(llm, f"several{n}", prompt(n), sampled(n), **plan(n)) for n in range(SEVERAL))
    )
    found["several sent"] = [spy.of(f"several{n}") for n in range(SEVERAL)]
    await inspect(llm).check_integrity()


async def sessions(llm: Any, spy: Spy, found: dict[str, Any]) -> None:
    from vllm.engine.protocol import StreamingInput

    from midstream import Capture

    async def one(nth: int) -> dict[str, Any]:
        async def inputs() -> AsyncGenerator[Any, None]:
            for turn in range(3):
                yield StreamingInput(tokens(range(5 + nth + turn, 13 + 2 * nth + turn)))
                await asyncio.sleep(0.1)

        sampling = params(0, max_tokens=3, kind="CUMULATIVE")
        capture = Capture("all", ALL_SITES)
        outputs = [
            one async for one in llm.generate(inputs(), sampling, f"session{nth}", capture=capture)
        ]
        output = outputs[-1]
        return {"rows": taken(output.activations), "receipt": output.receipt.to_dict()}

    await reported_idle(llm)
    found["sessions"] = await asyncio.gather(*(one(nth) for nth in range(4)))
    found["session sent"] = [spy.of(f"session{nth}") for nth in range(4)]
    await inspect(llm).check_integrity()


async def ends(llm: Any, spy: Spy, found: dict[str, Any]) -> None:
    """Calls that end early on either replica; what is for all requests; a process that dies."""
    from midstream import Steer

    long = params(0, max_tokens=200)
    tasks = [
        asyncio.create_task(ask(llm, f"cut{n}", prompt(n), long, **plan(n))) for n in range(12)
    ]
    for task in tasks:
        await asyncio.sleep(0.01)
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    found["cancelled"] = [type(one).__name__ for one in ended]
    await inspect(llm).check_integrity()

    async def abort(nth: int) -> Any:
        outputs: list[Any] = []
        async for output in llm.generate(prompt(nth), long, f"abort{nth}", **plan(2)):
            outputs.append(output)
            if len(outputs) == 3:
                await llm.abort(f"abort{nth}")
        return outputs[-1].outputs[0].finish_reason, len(outputs[-1].probes["after"])

    found["aborted"] = await asyncio.gather(*(abort(nth) for nth in range(4)))
    await inspect(llm).check_integrity()
    llm.vectors.register("named", vector(9))
    llm.steering.set(base=Steer("named", 1, 2.0))
    found["steered"] = await asyncio.gather(
        *(ask(llm, f"steered{n}", prompt(n), params(n), data_parallel_rank=n % 2) for n in range(4))
    )
    found["steered sent"] = [spy.of(f"steered{n}") for n in range(4)]
    llm.steering.clear()
    found["unsteered"] = await ask(llm, "unsteered", prompt(0), params(0))
    await inspect(llm).check_integrity()
    tasks = [
        asyncio.create_task(ask(llm, f"lost{n}", prompt(n), long, **plan(n))) for n in range(4)
    ]
    await asyncio.sleep(0.2)
    first, second = (psutil.Process(one.arena.pid) for one in llm.info.workers)
    first.suspend()  # or it may finish its requests before the other's end is noticed
    second.kill()
    try:
        lost = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    finally:
        first.resume()
    found["lost"] = [type(one).__name__ for one in lost]


async def main(model: str, found: dict[str, Any]) -> None:
    from midstream import AsyncLLM
    from midstream.config.config import Config
    from midstream.transport.sizing import arena_settings

    found["memory"] = arena_settings(Config(), 1).budget
    name_vectors()
    llm = AsyncLLM(model, data_parallel_size=REPLICAS, **SETTINGS)
    try:
        spy = Spy(llm.engine_core)
        await llm.ready()
        found["workers"] = [(one.replica, one.arena.pid) for one in llm.info.workers]
        await mix(llm, spy, found)
        await sessions(llm, spy, found)
        await ends(llm, spy, found)
    finally:
        llm.shutdown()


def single(model: Path, found: dict[str, Any]) -> None:
    from midstream import Capture

    with engine(model, **SETTINGS) as llm:

        def run(prompts: list[Any], sampling: list[Any], plans: list[dict[str, Any]]) -> Any:
            asked = {
                name: [listed(one.get(name)) for one in plans]
                for name in ("capture", "steer", "edits", "probes")
            }
            return llm.generate(prompts, sampling, use_tqdm=False, **asked)

        outputs = run(
            [prompt(n) for n in range(COUNT)],
            [params(n, kind="FINAL_ONLY") for n in range(COUNT)],
            [plan(n) for n in range(COUNT)],
        )
        found["single"] = [
            {"generated": list(one.outputs[0].token_ids), **results(one)} for one in outputs
        ]
        outputs = run(
            [prompt(n) for n in range(SEVERAL)],
            [sampled(n) for n in range(SEVERAL)],
            [plan(n) for n in range(SEVERAL)],
        )
        found["single several"] = [[results(child) for child in one.outputs] for one in outputs]
        # What a session computed on, as one prompt.
        said = [one["rows"]["resid_pre", 0][2].tolist() for one in found["sessions"]]
        outputs = run(
            [tokens(ids) for ids in said],
            [params(0, max_tokens=1, kind="FINAL_ONLY")] * 4,
            [{"capture": Capture("all", ALL_SITES)}] * 4,
        )
        found["single sessions"] = [taken(one.activations) for one in outputs]


if __name__ == "__main__":
    collected: dict[str, Any] = {}
    asyncio.run(main(sys.argv[1], collected))
    single(Path(sys.argv[1]), collected)
    torch.save(collected, sys.argv[2])
