"""A sweep that a server carries out, from its events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from midstream.client.protocol import HttpRequest, Stream
from midstream.errors import ServerError, SpecError
from midstream.lab.sweep import Sweep, SweepRequest
from midstream.lab.sweep.async_run import OnCell
from midstream.lab.sweep.cells import SweepCell
from midstream.lab.sweep.result import FORMAT

SWEEP = "/v1/midstream/sweep"
TEMPLATE = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


def sweep_body(
    prompt: Any, source: Any, metric: Any, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the JSON body of a request for a sweep; see `Client.sweep`."""
    others = {
        name: arguments[name] for name in ("model", *TEMPLATE) if arguments.get(name) is not None
    }
    fields = {name: value for name, value in arguments.items() if name not in ("model", *TEMPLATE)}
    return {"prompt": prompt, **SweepRequest(source, metric, **fields).to_dict(), **others}


class SweepStream:
    """A sweep in progress."""

    def __init__(self, body: Mapping[str, Any], on_cell: OnCell | None) -> None:
        """Prepare the request; `on_cell` is called with each cell and its value."""
        self.request = HttpRequest("POST", SWEEP, dict(body))
        self._on_cell = on_cell
        self._stream = Stream()
        self._start: dict[str, Any] = {}
        self._result: dict[str, Any] = {}
        self._values = np.zeros(0, np.float64)

    def feed(self, data: str) -> None:
        value = self._stream.read(data)
        try:
            update = None if value is None else self._read(value)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(500, f"the server sent an invalid event: {error!r}") from None
        if update is not None and self._on_cell is not None:
            self._on_cell(*update)

    def end(self) -> Sweep:
        """Return the sweep, once its response is complete."""
        self._stream.end()
        if not (self._start and self._result):
            raise ServerError(500, "the server sent no sweep; is midstream enabled there?")
        names = ("dims", "coords", "metric", "clean", "corrupt", "tokens")
        parts = ("noise_floor", "receipts", "prompt_tokens", "cached_tokens")
        try:
            return Sweep.from_json(
                {
                    "format": FORMAT,
                    "values": self._values,
                    **{name: self._start[name] for name in names},
                    **{name: self._result[name] for name in parts},
                }
            )
        except (KeyError, SpecError) as error:
            raise ServerError(500, f"the server sent an invalid sweep: {error}") from None

    def _read(self, value: Mapping[str, Any]) -> tuple[SweepCell, float] | None:
        """Read an event; return the cell that it is of, with its value."""
        kind = value["type"]
        if kind == "start":
            self._start = dict(value)
            shape = [len(value["coords"][name]) for name in value["dims"]]
            self._values = np.full(shape, np.nan, np.float64)
        elif kind == "cell":
            number = np.nan if value["value"] is None else float(value["value"])
            cell = self._cell(tuple(map(int, value["index"])))
            self._values[cell.index] = number
            return cell, number
        elif kind == "result":
            self._result = dict(value)
        return None

    def _cell(self, index: tuple[int, ...]) -> SweepCell:
        coords, dims = self._start["coords"], self._start["dims"]
        at = dict(zip(dims, index, strict=True))
        labels = {name: coords[name][place] for name, place in at.items()}
        places = tuple(self._start["positions"][at["position"]])
        tap = (labels["site"], labels["layer"])
        return SweepCell(index, tap, places, labels.get("head"), labels.get("feature"))
