"""An async engine beside whose own features requests are captured and edited, in a process of its
own:

    python -m system.alongside_async MODEL OUT

What came of it is saved to OUT, for tests to look at.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import torch
from support.alongside import EVERYTHING, PUSH, push
from support.async_calls import refusal
from support.async_run import SETTINGS as USUAL
from support.engine_view import inspect
from support.engines import ALL_SITES, greedy, tokens
from support.output_results import results

from midstream import Between, Capture, Probe, Steer, TokenIds
from midstream.plan import Mass, Positions

LETTERS = list(range(64, 90))
SETTINGS: dict[str, Any] = {
    **USUAL,
    "skip_tokenizer_init": False,
    "block_size": 32,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 6,
    "scheduling_policy": "priority",
    "midstream": {"sites": [*ALL_SITES, "rot_q"], "bank_rows": 24},
}
ASKED = {"capture": EVERYTHING, "steer": push(), "probes": Probe(PUSH, 2, name="p")}
# The token that an edit of a session looks for, among what is fed and what is generated.
LOOKED_FOR = 70


def prompt(nth: int, length: int) -> list[int]:
    draw = torch.Generator().manual_seed(nth)
    return torch.randint(64, 90, (length,), generator=draw).tolist()


def params(max_tokens: int, kind: str = "CUMULATIVE", **more: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind

    return greedy(max_tokens, output_kind=RequestOutputKind[kind], **more)


async def ask(
    llm: Any, name: str, given: Any, sampling: Any, pause: float = 0, **asked: Any
) -> dict[str, Any]:
    """One call, and all that came: the tokens, and the last output's results."""
    generated: list[int] = []
    finished, output = [], None
    async for output in llm.generate(given, sampling, name, **asked):
        known = 0 if sampling.output_kind.name == "DELTA" else len(generated)
        generated += list(output.outputs[0].token_ids)[known:]
        finished.append(output.finished)
        await asyncio.sleep(pause)
    if output is None:
        return {"finished": [], "generated": []}
    return {
        "generated": generated,
        "finished": finished,
        "prompt": list(output.prompt_token_ids),
        "outputs": [{"ids": list(one.token_ids), **results(one)} for one in output.outputs],
        "text": output.outputs[0].text,
        "reason": output.outputs[0].finish_reason,
        **results(output),
    }


def turns_of(generated: Sequence[int], each: Sequence[Any]) -> list[list[int]]:
    """The tokens of each turn of a session, given each turn's sampling params."""
    turns, rest = [], list(generated)
    for sampling in each:
        most = rest[: sampling.max_tokens]
        stops = [nth for nth, token in enumerate(most) if token in (sampling.stop_token_ids or ())]
        assert stops or len(most) == sampling.max_tokens, f"turn {len(turns)} is not whole"
        length = stops[0] + 1 if stops else sampling.max_tokens
        turns.append(rest[:length])
        rest = rest[length:]
    assert not rest, "more was generated than asked for"
    return turns


async def requests(llm: Any, found: dict[str, Any]) -> None:
    given = tokens(prompt(0, 21))
    free = await ask(llm, "free", given, params(24, allowed_token_ids=LETTERS), **ASKED)
    stop = {"stop": [free["text"][9:11]], "allowed_token_ids": LETTERS}
    kinds = ["CUMULATIVE", "DELTA", "FINAL_ONLY"]
    done = await asyncio.gather(
        *(
            ask(llm, f"stop {kind}", given, params(24, kind, **stop), priority=nth, **ASKED)
            for nth, kind in enumerate(kinds)
        )
    )
    found["requests"] = dict(zip(kinds, done, strict=True))
    await inspect(llm).check_integrity()


async def inputs(
    parts: Sequence[list[int]], own: dict[int, Any], wait: Any = None
) -> AsyncGenerator[Any, None]:
    from vllm.engine.protocol import StreamingInput

    for nth, part in enumerate(parts):
        if wait is not None:
            await wait(nth)
        yield StreamingInput(tokens(part), own.get(nth))
    if wait is not None:
        await wait(len(parts))


def parts_of(nth: int) -> list[list[int]]:
    return [prompt(100 + 10 * nth + k, 3 + (7 * nth + 11 * k) % 25) for k in range(1 + nth % 4)]


def session_params(nth: int) -> list[Any]:
    kind = ("CUMULATIVE", "DELTA")[nth % 2]
    # Where a turn ends by a token, a step has run ahead: its row is computed anew.
    ends = {"stop_token_ids": list(range(0, 259, 9))} if nth > 5 else {}
    usual = params(6 + nth % 3 + (14 if ends else 0), kind, **ends)
    own = {1: params(3, kind), 2: params(1, kind)} if nth % 3 == 1 else {}
    return [own.get(turn, usual) for turn in range(len(parts_of(nth)))]


def session_plan(nth: int) -> dict[str, Any]:
    where: list[Any] = [
        "all",
        slice(4, 19, 3),
        TokenIds(LOOKED_FOR),
        Positions([2, slice(9, None)]),
    ]
    asked: dict[str, Any] = {"capture": EVERYTHING, "probes": Probe(PUSH, 2, name="p")}
    if nth % 5 != 4:
        asked["steer"] = push(positions=Between(*marks_of(nth)) if nth > 7 else where[nth % 4])
    return asked


def marks_of(nth: int) -> tuple[list[int], list[int]]:
    """Of the first and of the last input of a session."""
    parts = parts_of(nth)
    return [parts[0][1]], [parts[-1][-1]]


async def sessions(llm: Any, found: dict[str, Any]) -> None:
    async def now(_nth: int) -> None:
        return

    async def soon(_nth: int) -> None:
        await asyncio.sleep(0.02)

    async def late(_nth: int) -> None:
        await asyncio.sleep(0.4)

    def call(nth: int) -> Any:
        first, *others = session_params(nth)
        own = {turn: each for turn, each in enumerate(others, 1) if each is not first}
        stream = inputs(parts_of(nth), own, (now, soon, late)[nth % 3])
        pause = 0.1 if nth in (3, 8) else 0
        return ask(llm, f"session {nth}", stream, first, pause, **session_plan(nth))

    done = await asyncio.gather(
        *(call(nth) for nth in range(12)),
        ask(llm, "between", tokens(prompt(9, 40)), params(20), **ASKED),
    )
    found["sessions"] = list(done[:12])
    found["between"] = done[12]
    await inspect(llm).check_integrity()
    kept = await ask(
        llm,
        "kept",
        inputs(parts_of(3), {}),
        params(4),
        capture=Capture([1], positions="last_row"),
    )
    found["last_row"] = kept
    await inspect(llm).check_integrity()
    await attended(llm, found)


async def attended(llm: Any, found: dict[str, Any]) -> None:
    """A session with a score that is kept with its blocks beside one that never is, and a sum; and
    what it computed on, as one prompt.
    """
    probes = [Probe(PUSH, 2, name="p"), Probe(attention=Mass(slice(1, 4)), layer=1, name="mass")]
    asked = {"probes": probes, "capture": Capture(1, positions=[0], reduce="mean")}
    parts = parts_of(3)
    session = await ask(llm, "attended", inputs(parts, {}), params(4), **asked)
    turns = turns_of(session["generated"], [params(4)] * len(parts))
    rows = [token for part, turn in zip(parts, turns, strict=True) for token in (*part, *turn[:-1])]
    whole = {**tokens(rows), "cache_salt": "alone"}
    expected = await ask(llm, "attended alone", whole, params(1), **asked)
    found["attended"] = session, expected
    await inspect(llm).check_integrity()


async def session_ends(llm: Any, found: dict[str, Any]) -> None:
    ends = found["ends"] = {}

    async def long(nth: int) -> None:
        await asyncio.sleep(0.1 if nth < 2 else 60)

    async def breaks(nth: int) -> None:
        if nth == 1:
            raise ZeroDivisionError("the caller's own")

    ends["none"] = await ask(llm, "none", inputs([], {}), params(4), **ASKED)
    ends["plain"] = await ask(llm, "plain", inputs(parts_of(3), {}), params(4))
    llm.steering.set(base=Steer(PUSH, 1, 2.0, site="resid_mid"))
    ends["steered"] = await ask(llm, "steered", inputs(parts_of(3), {}), params(4))
    llm.steering.clear()
    ends["broken"] = await refusal(
        ask(llm, "broken", inputs(parts_of(3), {}, breaks), params(4), **ASKED)
    )
    given = {"capture": [EVERYTHING, Capture([0], positions="all", phase="generated")]}
    ends["refused"] = await refusal(ask(llm, "no", inputs(parts_of(3), {}), params(4), **given))
    left = asyncio.create_task(ask(llm, "left", inputs(parts_of(3), {}, long), params(4), **ASKED))
    aborted = asyncio.create_task(
        ask(llm, "gone", inputs(parts_of(3), {}, long), params(4), **ASKED)
    )
    await asyncio.sleep(0.5)
    left.cancel()
    await llm.abort("gone")
    ends["aborted"] = (await aborted)["reason"]
    ends["left"] = type((await asyncio.gather(left, return_exceptions=True))[0]).__name__
    await inspect(llm).check_integrity()


async def session_room(llm: Any, found: dict[str, Any]) -> None:
    first = asyncio.create_task(
        ask(llm, "first", tokens(prompt(50, 8)), params(60), steer=_slight(20, 500))
    )
    while not llm.output_processor.request_states:
        await asyncio.sleep(0.01)
    asked = {"capture": EVERYTHING, "steer": [push(), *_slight(14, 900)]}
    second = asyncio.create_task(ask(llm, "second", inputs(parts_of(3), {}), params(5), **asked))
    while not inspect(llm).waiting():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    found["waited"] = not first.done()
    await first
    found["second"] = await second
    await inspect(llm).check_integrity()


def _slight(count: int, first: int) -> list[Steer]:
    return [
        Steer(torch.randn(64, generator=torch.Generator().manual_seed(first + n)), 0, 1e-9)
        for n in range(count)
    ]


async def main(model: str, found: dict[str, Any]) -> None:
    from midstream import AsyncLLM

    llm = AsyncLLM(model, **SETTINGS)
    try:
        await llm.ready()
        for work in (requests, sessions, session_ends, session_room):
            await work(llm, found)
    finally:
        llm.shutdown()


if __name__ == "__main__":
    collected: dict[str, Any] = {}
    asyncio.run(main(sys.argv[1], collected))
    torch.save(collected, sys.argv[2])
