"""Results of a server, in the form of the offline API."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from midstream.config.config import KEY
from midstream.errors import ServerError
from midstream.plan.captured_rows import CapturedRows
from midstream.results.activations import Activations
from midstream.results.arrays import array_of
from midstream.results.printed_output import results_of, shown_text
from midstream.results.probe_scores import Probes
from midstream.results.readouts import RESULTS, ChoiceReadOuts, OnlyReadOuts
from midstream.results.receipt import CaptureResult, Receipt
from midstream.results.serialization import unpack

_MORE = ("capture_results", "captured", "guards")
_PRINTED = ("activations", "probes", "receipt", *_MORE)


@dataclass(slots=True)
class ServedCompletion(ChoiceReadOuts):
    """One choice of a response.

    Attributes:
        index: index of the choice.
        text: generated text; of a stream, the text so far.
        finish_reason: the server's reason, once the choice has ended; else None.
        activations: captured rows; None if nothing was captured, not yet known, or kept on the
            server.
        probes: probe scores; of a stream, the scores so far. None if there are none.
        receipt: the receipt; None until the choice has ended, or if the request had no plan.
        capture_results: results of sinks by name; None if no rows went to a sink.
        rows: of a stream, partial rows of captures with `stream`, in the order received.
        guards: what the server's guards did, of a request with `midstream={"guards": True}`; None:
            it did not ask, or the choice has not ended.
        captured: rows that the server keeps for edits of later requests; None if it keeps none.
    """

    index: int
    text: str = ""
    finish_reason: str | None = None
    activations: Activations | None = None
    probes: Probes | None = None
    receipt: Receipt | None = None
    capture_results: Mapping[str, CaptureResult] | None = None
    rows: list[Activations] = field(default_factory=list)
    captured: CapturedRows | None = None
    guards: list[dict[str, Any]] | None = None

    def __repr__(self) -> str:
        end = f"; {self.finish_reason}" if self.finish_reason else ""
        lines = [f"ServedCompletion({self.index})", f"text: {shown_text(self.text)}{end}"]
        results = {name: getattr(self, name) for name in (*_PRINTED, *RESULTS)}
        lines += results_of(results)
        lines += [f"{name}: {results[name]!r}" for name in _MORE if results[name]]
        return "\n  ".join(lines)


@dataclass(slots=True)
class ServedOutput(OnlyReadOuts):
    """One response.

    Attributes:
        request_id: the server's request id.
        outputs: choices by index. Of a Response that called the model several times, the calls in
            their order; the first has its text.
        raw: JSON of the response; of a stream, of the latest event.
    """

    request_id: str = ""
    outputs: list[ServedCompletion] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Text of the first choice; empty if there are no choices."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def activations(self) -> Activations | None:
        """Activations of the only choice; None with several choices."""
        activations: Activations | None = self._only("activations")
        return activations

    @property
    def probes(self) -> Probes | None:
        """Probe scores of the only choice; None with several choices."""
        probes: Probes | None = self._only("probes")
        return probes

    @property
    def receipt(self) -> Receipt | None:
        """Receipt of the only choice; None with several choices."""
        receipt: Receipt | None = self._only("receipt")
        return receipt

    def __repr__(self) -> str:
        lines = [line for choice in self.outputs for line in repr(choice).splitlines()]
        if len(self.outputs) == 1:
            lines = [line.removeprefix("  ") for line in lines[1:]]
        return "\n  ".join([f"ServedOutput(request {self.request_id})", *lines])

    def _only(self, name: str) -> Any:
        return getattr(self.outputs[0], name) if len(self.outputs) == 1 else None


_CAPTURE_PATH = re.compile("/v1/midstream/activations/[A-Za-z0-9_-]{1,64}")


class Reader:
    """Accumulates the responses or stream events of one request."""

    def __init__(self) -> None:
        self.output = ServedOutput()
        self._scores: dict[int, _Scores] = {}

    def handles(self, value: Mapping[str, Any]) -> list[str]:
        """Return the URLs of rows that are cached on the server."""
        fields = [*_calls(value), *(choice.get(KEY) for choice in value.get("choices") or ())]
        urls = [
            result["activations"]["url"]
            for result in fields
            if result and "url" in (result.get("activations") or {})
        ]
        for url in urls:
            # The request to this URL includes the client's keys: never send them elsewhere.
            if not _CAPTURE_PATH.fullmatch(url):
                raise ServerError(
                    500, f"the server sent an invalid handle: rows are at {url[:200]!r}"
                )
        return urls

    def read(self, value: dict[str, Any], fetched: Mapping[str, bytes]) -> ServedOutput:
        """Add a response or event, with contents of handles by URL; return the output so far."""
        self.output.raw = value
        self.output.request_id = value.get("id", self.output.request_id)
        for choice in value.get("choices") or ():
            completion = self._choice(choice["index"])
            completion.text += _text(choice)
            completion.finish_reason = choice.get("finish_reason") or completion.finish_reason
            self._add_results(completion, choice.get(KEY), fetched)
        if value.get("object") == "response":
            self._choice(0).text = "".join(
                part["text"]
                for item in value.get("output") or ()
                if item.get("type") == "message"
                for part in item.get("content") or ()
                if part.get("type") == "output_text"
            )
        for index, results in enumerate(_calls(value)):
            self._add_results(self._choice(index), results, fetched)
        return self.output

    def _choice(self, index: int) -> ServedCompletion:
        while len(self.output.outputs) <= index:
            self.output.outputs.append(ServedCompletion(len(self.output.outputs)))
        return self.output.outputs[index]

    def _add_results(
        self,
        completion: ServedCompletion,
        results: Mapping[str, Any] | None,
        fetched: Mapping[str, bytes],
    ) -> None:
        if not results:
            return
        if "receipt" in results:
            completion.receipt = Receipt.from_dict(results["receipt"])
        if "guards" in results:
            completion.guards = list(results["guards"])
        if "probes" in results:
            # Each event has new scores only.
            known = self._scores.setdefault(completion.index, _Scores())
            for name, new in results["probes"].items():
                known.add(name, new)
            completion.probes = known.probes()
        if "captures" in results:
            completion.capture_results = {
                sink: CaptureResult(result["status"], result["reason"], tuple(result["paths"]))
                for sink, result in results["captures"].items()
            }
        for rows in results.get("rows", ()):
            completion.rows.append(unpack(base64.b64decode(rows["base64"])))
        for name, kind in RESULTS.items():
            parts = results.get(kind.rows_field, ()) if kind.rows_field else ()
            if parts:
                getattr(completion, kind.rows_field).extend(map(kind.from_json, parts))
            if name in results:
                setattr(completion, name, kind.from_json(results[name]))
        rows = results.get("activations")
        if rows is not None:
            if "base64" in rows:
                completion.activations = unpack(base64.b64decode(rows["base64"]))
            elif rows["url"] in fetched:
                completion.activations = unpack(fetched[rows["url"]])
            else:
                completion.captured = CapturedRows(rows["id"])


class _Scores:
    """Scores of one choice so far. Each is read once: a stream has an event for each token."""

    def __init__(self) -> None:
        self._scores: dict[str, _Numbers] = {}
        self._positions: dict[str, _Numbers] = {}
        self._outputs: dict[str, tuple[str, ...]] = {}
        self._tokens = _Numbers("int64")

    def add(self, name: str, new: Mapping[str, Any]) -> None:
        outputs = new.get("outputs", ())
        if outputs:
            self._outputs[name] = tuple(outputs)
        scores = self._scores.setdefault(name, _Numbers("float32", len(outputs)))
        # NaN and infinities are sent as strings, which float() parses.
        scores.append([_score(score) for score in new["scores"]])
        self._positions.setdefault(name, _Numbers("int64")).append(new["positions"])
        if new["positions"]:
            self._tokens.set(new["positions"], new["token_ids"])

    def probes(self) -> Probes:
        return Probes(
            {name: scores.copy() for name, scores in self._scores.items()},
            {name: positions.copy() for name, positions in self._positions.items()},
            self._tokens.copy(),
            self._outputs,
        )


def _score(value: Any) -> Any:
    return [float(output) for output in value] if isinstance(value, list) else float(value)


class _Numbers:
    """Numbers, or rows of them, that grow at their end."""

    def __init__(self, dtype: str, width: int = 0) -> None:
        self._dtype = dtype
        self._data = np.zeros((16, width) if width else 16, dtype)
        self._count = 0

    def append(self, values: Sequence[Any]) -> None:
        start = self._count
        self._grow(start + len(values))
        if values:
            self._data[start : self._count] = values

    def set(self, places: Sequence[int], values: Sequence[int]) -> None:
        """Set the numbers at some places; those between are 0."""
        self._grow(1 + max(places))
        self._data[list(places)] = values

    def copy(self) -> Any:
        """Return the numbers as a tensor of their own."""
        return array_of(self._data[: self._count].copy(), self._dtype)

    def _grow(self, count: int) -> None:
        if count > len(self._data):
            shape = count, *self._data.shape[1:]
            self._data = np.concatenate([self._data, np.zeros(shape, self._dtype)])
        self._count = max(self._count, count)


def _calls(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the results at the top level of a response: of each call of the model."""
    results_field = value.get(KEY)
    if results_field is None:
        return []
    return list(results_field["turns"]) if "turns" in results_field else [results_field]


def _text(choice: Mapping[str, Any]) -> str:
    """Return the text of a completion, of a chat message, or of a stream delta."""
    if "text" in choice:
        return choice["text"] or ""
    message = choice.get("message") or choice.get("delta") or {}
    return message.get("content") or ""
