"""The worst allowed bodies of eight clients leave other clients their answers."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from support.resolving_engine import ResolvingEngine
from support.zygote import python_path
from unit.server.test_connections import Listening

# Processor time of one turn of the event loop, in seconds. On a quiet machine it is below 0.05.
MOST_HELD = 0.5


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


def _settle(url: str) -> None:
    field = {"edits": [{"op": "scale", "factor": 2.0, "layer": 1}]}
    body = {"prompt": "a", "midstream": field}
    httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
    gc.collect()
    gc.freeze()


def load(seconds: float, *names: str) -> tuple[dict[str, Any], float]:
    """Return what eight clients and `/health` saw, and the longest turn of the event loop."""
    with Listening(engine=ResolvingEngine(), loop="asyncio") as listening:
        listening.site.app.add_api_route("/health", lambda: {}, methods=["GET"])
        _settle(listening.url)
        command = [sys.executable, "-m", "unit.server.heavy_load", listening.url, str(seconds), "8"]
        with longest_turn() as longest:
            done = subprocess.run(
                [*command, *names],
                env={**os.environ, "PYTHONPATH": python_path()},
                capture_output=True,
                text=True,
                check=False,
            )
        assert done.returncode == 0, done.stderr[-2000:]
        gc.unfreeze()
        assert not listening.site.engine.front._needs
    return json.loads(done.stdout), longest[0]


def test_the_event_loop_turns_while_eight_clients_send_the_worst_bodies():
    found, held = load(2.0)
    assert held < MOST_HELD
    statuses = [status for every in found["statuses"].values() for status in every]
    assert len(statuses) >= 8
    assert max(statuses) < 500


@pytest.mark.nightly
def test_health_is_answered_within_half_a_second_meanwhile():
    found, _ = load(20.0)
    assert found["longest"] < 0.5
