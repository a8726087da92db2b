"""The worst allowed bodies of eight clients leave other clients their answers."""

import asyncio
import base64
import gc
import importlib.util
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from support.listening import Listening
from support.long_lists import edits, texts
from support.resolving_engine import ResolvingEngine

from midstream.compat.packed_arrays import MAX_NUMBERS

# Processor time of one turn of the event loop, in seconds. On a quiet machine it is below 0.05.
MOST_HELD = 0.5
CLIENTS = 8
V = [1.0, 2.0, 2.0]
PROMPT = "the cat con " * 500  # several thousand tokens


def completion(prompt: Any = PROMPT, **field: Any) -> dict[str, Any]:
    return {"prompt": prompt, "midstream": field}


def captures(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"layers": [nth % 32], "positions": [nth], **more} for nth in range(count)]


def compressed() -> dict[str, Any]:
    """As many numbers as compressed arrays may have together, in some kB."""
    if importlib.util.find_spec("zstandard") is None:
        return completion(capture={"layers": [1]})
    import zstandard

    size = MAX_NUMBERS // 16
    data = zstandard.ZstdCompressor().compress(np.ones(size, np.float32).tobytes())
    array = {"data": base64.b64encode(data).decode(), "shape": [1, size], "compression": "zstd"}
    vectors = [{"activations": array, "layer_indices": [nth]} for nth in range(16)]
    return {"prompt": "a", "apply_steering_vectors": vectors}


def worst() -> list[dict[str, Any]]:
    """Bodies that are allowed, or refused as late as any: what each costs most."""
    several = [
        {"layers": [1], "positions": [nth], "exclude": [*texts(300), {"text": f"x{nth}"}]}
        for nth in range(60)
    ]
    by_length = [{"text": "a" * n} for n in range(1, 40)]
    probes = [
        {"direction": V, "layer": nth % 32, "name": f"p{nth}", "positions": [nth]}
        for nth in range(1000)
    ]
    prompts = ["the cat con " * 40 + str(nth) for nth in range(10)]
    messages = [{"role": "user", "content": f"word {nth % 7} <x>"} for nth in range(400)]
    roles = {"layers": [1], "positions": [{"role": "user", "message": "all"}]}
    return [
        completion(capture={"layers": [1], "exclude": texts(4000)}),
        completion("the cat con " * 40, capture=several),
        completion("a" * 6000, capture={"layers": [1], "exclude": by_length}),
        completion(edits=edits(1000)),
        completion(capture=captures(500, layers="all")),
        completion(probes=probes),
        completion(prompts, capture=captures(20, exclude=texts(300))),
        completion("a", edits=[{"op": "steer", "vector": [0.5] * 260_000}]),
        {"messages": messages, "midstream": {"capture": roles}},
        compressed(),
    ]


@contextmanager
def longest_turn() -> Iterator[list[float]]:
    """Measure the processor time of the longest callback of any event loop."""
    longest, run = [0.0], asyncio.events.Handle._run

    def timed(handle: Any) -> None:
        began = time.thread_time()
        run(handle)
        longest[0] = max(longest[0], time.thread_time() - began)

    asyncio.events.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield longest
    finally:
        asyncio.events.Handle._run = run  # type: ignore[method-assign]


@pytest.fixture
def settled() -> Iterator[Listening]:
    """A server that has done what it does once: it imports parts of vLLM for its first plan. What
    exists then is left out of collections of garbage, as by vLLM's server when it is ready.
    """
    with Listening(engine=ResolvingEngine(), loop="asyncio") as listening:
        body = completion("a", edits=edits(1))
        httpx.post(f"{listening.url}/v1/completions", json=body, timeout=60).raise_for_status()
        gc.collect()
        gc.freeze()
        yield listening
        gc.unfreeze()


def test_the_event_loop_turns_while_eight_clients_send_the_worst_bodies(settled: Listening):
    bodies = [json.dumps(body).encode() for body in worst()]
    statuses: list[int] = []
    kind = {"content-type": "application/json"}

    def work(nth: int) -> None:
        with httpx.Client(base_url=settled.url, timeout=600) as client:
            for body in bodies[nth::CLIENTS]:
                path = "/v1/chat/completions" if b'"messages"' in body else "/v1/completions"
                statuses.append(client.post(path, content=body, headers=kind).status_code)

    threads = [threading.Thread(target=work, args=(nth,)) for nth in range(CLIENTS)]
    with longest_turn() as longest:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert longest[0] < MOST_HELD
    assert len(statuses) == len(bodies) > CLIENTS
    assert max(statuses) < 500
    assert not settled.site.engine.front._needs
