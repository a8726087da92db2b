"""One sweep of a server: its events, in the order in which they become known."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from starlette.types import Scope

from midstream.deadlines import end_tasks
from midstream.errors import HttpError, MidstreamError
from midstream.http.sse import Event
from midstream.lab.server.sweep_body import SweepBody
from midstream.lab.sweep import Sweep
from midstream.lab.sweep.cells import SweepCell
from midstream.lab.sweep.job import SweepJob
from midstream.lab.sweep.result import number_to_json
from midstream.lab.sweep.source import PromptSource
from midstream.runtime.frontend.request.heavy_work import in_thread
from midstream.runtime.frontend.request.prompt.tokenized import is_chat
from midstream.server import audit_log
from midstream.server.server import Server, rows_for
from midstream.server.sweep_pace import runs_at_once

_PROBLEMS = 100  # most problems of receipts in an answer
_LONG_PROBLEM = 500  # most characters of a problem that is vLLM's


@dataclass
class ServedSweep:
    """One sweep."""

    server: Server
    prepared: Any
    lora_request: Any
    client: str
    id: str = field(default_factory=lambda: f"sweep-{uuid.uuid4().hex}")
    cells: int = 0  # number whose value is known
    sweep: Sweep | None = None  # once it is known as a whole

    @staticmethod
    async def prepare(
        server: Server, scope: Scope, body: SweepBody, lora_request: Any
    ) -> ServedSweep:
        llm, request = server.llm, body.request
        source = request.source.prompt if isinstance(request.source, PromptSource) else None
        template = dict(body.template)
        if is_chat(body.prompt) or is_chat(source):
            template = {**server.template, **template}

        def prepared() -> Any:
            limits = server.settings
            with rows_for(server, scope) as open_rows:
                return llm.prepare_sweep(
                    body.prompt,
                    request,
                    template,
                    open_rows=open_rows,
                    most_cells=limits.sweep_cells,
                )

        prepared_sweep = await in_thread(prepared)
        return ServedSweep(server, prepared_sweep, lora_request, server.client_of(scope))

    async def events(self) -> AsyncGenerator[list[Event], None]:
        """Carry it out, yielding events as they become known; closing it early ends all runs."""
        known: asyncio.Queue[Event | None] = asyncio.Queue()
        began, status = time.monotonic(), "aborted"
        work = asyncio.ensure_future(self._work(known))
        work.add_done_callback(lambda _: known.put_nowait(None))
        try:
            is_over = False
            while not is_over:
                batch = [await known.get()]
                while not known.empty():
                    batch.append(known.get_nowait())
                is_over = batch[-1] is None
                if events := [event for event in batch if event is not None]:
                    yield events
            status = "error"
            self.sweep = work.result()
            status = "ok"
            yield [event_of("result", await in_thread(self._result, self.sweep))]
        finally:
            await end_tasks((work,))
            self.server.metrics.count_sweep(status, self.cells)
            seconds = round(time.monotonic() - began, 3)
            audit_log.log_event(
                "sweep.ended",
                id=self.id,
                client=self.client,
                status=status,
                cells=self.cells,
                seconds=seconds,
            )

    async def _work(self, known: asyncio.Queue[Event | None]) -> Sweep:
        server, llm = self.server, self.server.llm
        scheduler = llm.vllm_config.scheduler_config
        by_priority = scheduler.policy == "priority"
        length, limits = self.prepared.job.length, server.settings
        epoch = llm.steering.epoch

        def on_start(job: SweepJob) -> None:
            known.put_nowait(event_of("start", self._start(job)))

        def on_cell(cell: SweepCell, value: float) -> None:
            self.cells += 1
            told = {"index": list(cell.index), "value": number_to_json(value)}
            known.put_nowait(event_of("cell", told))

        sweep: Sweep = await llm.run_sweep(
            self.prepared,
            {"lora_request": self.lora_request},
            on_start=on_start,
            on_cell=on_cell,
            turn=partial(server.sweeps.turn, llm.traffic, by_priority),
            at_once=runs_at_once(
                llm.traffic().seats, scheduler.max_num_batched_tokens, length, by_priority
            ),
            most_bytes=min(limits.client_bytes, limits.held_bytes),
        )
        if llm.steering.epoch != epoch:
            raise HttpError(
                409,
                "the server-wide steering was changed during the sweep, so its cells differ in it; "
                "repeat it",
            )
        return sweep

    def _start(self, job: SweepJob) -> dict[str, Any]:
        sweep = job.result().to_json()
        names = ("dims", "coords", "metric", "clean", "corrupt", "tokens")
        return {
            "id": self.id,
            **{name: sweep[name] for name in names},
            "positions": [list(positions) for positions in job.grid.places],
            "cells": len(job.grid.cells),
        }

    def _result(self, sweep: Sweep) -> dict[str, Any]:
        value = whole(sweep)
        names = ("noise_floor", "receipts", "prompt_tokens", "cached_tokens")
        return {name: value[name] for name in names}


def event_of(name: str, value: Mapping[str, Any]) -> Event:
    """Return an event, whose data have its name as `type`."""
    return Event(name.encode(), json.dumps({"type": name, **value}, allow_nan=False).encode())


def whole(sweep: Sweep) -> dict[str, Any]:
    """Return a sweep as JSON values, with the sums of its receipts."""
    receipts = sweep.receipts.without_every()
    sums = asdict(receipts.sums)
    sums["problems"] = sums["problems"][:_PROBLEMS]
    return {**replace(sweep, receipts=receipts).to_json(), "receipts": sums}


def error_of(error: Exception) -> HttpError:
    """Return the answer to a mistake of the client; other exceptions are raised again."""
    if isinstance(error, ValueError) and not isinstance(error, MidstreamError):
        return HttpError(400, str(error)[:_LONG_PROBLEM])
    return HttpError.of(error)
