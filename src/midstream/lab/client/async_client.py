"""`midstream.AsyncClient`: the asyncio version of `Client`."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from midstream.client import async_client
from midstream.client.outputs import ServedOutput
from midstream.deadlines import all_of
from midstream.lab.client.ask_request import questions
from midstream.lab.client.client import INSTEAD
from midstream.lab.client.fit_request import FitRequest, fit
from midstream.lab.client.sweep_stream import SweepStream, sweep_body
from midstream.lab.fit import Directions
from midstream.lab.sweep import Sweep
from midstream.lab.sweep.async_run import OnCell
from midstream.plan.forms import LayersLike, PositionsLike
from midstream.sites import SiteName
from midstream.validation import suggests


@suggests(INSTEAD)
class AsyncClient(async_client.AsyncClient):
    """Asyncio client of a midstream server; see `midstream.Client`, whose methods it has as
    coroutines.
    """

    async def sweep(
        self,
        prompt: Any,
        source: Any,
        metric: Any,
        *,
        on_cell: OnCell | None = None,
        **options: Any,
    ) -> Sweep:
        """Patch a prompt at each cell of a grid; see `Client.sweep`."""
        stream = SweepStream(sweep_body(prompt, source, metric, options), on_cell)
        async with aclosing(self._events_of(stream.request)) as events:
            async for data in events:
                stream.feed(data)
        return stream.end()

    async def fit(
        self,
        positive: Any,
        negative: Any,
        method: str = "mean",
        layers: LayersLike = "all",
        positions: PositionsLike = "last_prompt",
        site: SiteName = "resid_post",
        *,
        name: str | None = None,
        reduce: str = "",
        folds: int = 5,
        groups: Any = None,
        seed: int = 0,
        model: str | None = None,
    ) -> Directions:
        """Fit a direction at each layer, on the server; see `Client.fit`."""
        request = FitRequest(
            positive, negative, method, layers, positions, site, name, reduce, folds, groups, seed,
            model,
        )  # fmt: skip
        return await self._run(fit(request))

    async def ask(
        self, sources: Any, question: str | list[str], layer: int, **options: Any
    ) -> list[ServedOutput]:
        """Ask the model questions about activations, at the same time; see `Client.ask`."""
        return await all_of(map(self._run, questions(sources, question, layer, options)))
