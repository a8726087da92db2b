"""What a server answered, as the offline API has it."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from midstream.config.config import KEY
from midstream.errors import ServerError
from midstream.results.activations import Activations
from midstream.results.probe_scores import Probes
from midstream.results.receipt import CaptureResult, Receipt
from midstream.results.serialization import unpack


@dataclass(slots=True)
class ServedCompletion:
    """One choice.

    Attributes:
        index: which.
        text: what was generated; of a stream, so far.
        finish_reason: the server's, once it has ended.
        activations, probes, receipt, capture_results: as `midstream.LLM.generate` puts them on a
            completion; None where nothing was asked for or nothing is known yet.
        rows: of a stream, captured rows in the order in which they came, from captures with
            `stream`.
    """

    index: int
    text: str = ""
    finish_reason: str | None = None
    activations: Activations | None = None
    probes: Probes | None = None
    receipt: Receipt | None = None
    capture_results: Mapping[str, CaptureResult] | None = None
    rows: list[Activations] = field(default_factory=list)


@dataclass(slots=True)
class ServedOutput:
    """One answer.

    Attributes:
        request_id: the server's.
        outputs: its choices, by index.
        raw: the answer's JSON; of a stream, the latest event's.
    """

    request_id: str = ""
    outputs: list[ServedCompletion] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Of the only choice, or of the first."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def activations(self) -> Activations | None:
        """Of the only choice; None where there are several."""
        found: Activations | None = self._only("activations")
        return found

    @property
    def probes(self) -> Probes | None:
        """As `activations`."""
        found: Probes | None = self._only("probes")
        return found

    @property
    def receipt(self) -> Receipt | None:
        """As `activations`."""
        found: Receipt | None = self._only("receipt")
        return found

    def _only(self, name: str) -> Any:
        return getattr(self.outputs[0], name) if len(self.outputs) == 1 else None


_HELD = re.compile("/v1/midstream/activations/[A-Za-z0-9_-]{1,64}")


class Reader:
    """Reads answers; of one request."""

    def __init__(self) -> None:
        self.output = ServedOutput()
        self._scores: dict[tuple[int, str], dict[str, list[Any]]] = {}

    def handles(self, value: Mapping[str, Any]) -> list[str]:
        """Where the rows are that an answer does not have itself.

        Raises:
            ServerError: they are said to be elsewhere than on the server.
        """
        told = [value.get(KEY), *(choice.get(KEY) for choice in value.get("choices") or ())]
        urls = [
            one["activations"]["url"]
            for one in told
            if one and "url" in (one.get("activations") or {})
        ]
        for url in urls:
            # Keys go where it leads.
            if not _HELD.fullmatch(url):
                raise ServerError(500, f"the server says that rows are at {url[:200]!r}")
        return urls

    def read(self, value: dict[str, Any], fetched: Mapping[str, bytes]) -> ServedOutput:
        """Takes in an answer, or an event of a stream.

        Args:
            value: its JSON.
            fetched: what is at those of its handles that were followed.
        """
        self.output.raw = value
        self.output.request_id = value.get("id", self.output.request_id)
        for choice in value.get("choices") or ():
            one = self._choice(choice["index"])
            one.text += _text(choice)
            one.finish_reason = choice.get("finish_reason") or one.finish_reason
            self._take(one, choice.get(KEY), fetched)
        if value.get("object") == "response":
            self._choice(0).text = _text_of_response(value)
        if value.get(KEY) is not None:
            self._take(self._choice(0), value[KEY], fetched)
        return self.output

    def _choice(self, index: int) -> ServedCompletion:
        while len(self.output.outputs) <= index:
            self.output.outputs.append(ServedCompletion(len(self.output.outputs)))
        return self.output.outputs[index]

    def _take(
        self, one: ServedCompletion, told: Mapping[str, Any] | None, fetched: Mapping[str, bytes]
    ) -> None:
        if not told:
            return
        if "receipt" in told:
            one.receipt = Receipt.from_dict(told["receipt"])
        if "probes" in told:
            one.probes = self._probes(one.index, told["probes"])
        if "captures" in told:
            one.capture_results = {
                sink: CaptureResult(each["status"], each["reason"], tuple(each["paths"]))
                for sink, each in told["captures"].items()
            }
        for rows in told.get("rows", ()):
            one.rows.append(unpack(base64.b64decode(rows["base64"])))
        rows = told.get("activations")
        if rows is not None:
            if "base64" in rows:
                one.activations = unpack(base64.b64decode(rows["base64"]))
            elif rows["url"] in fetched:
                one.activations = unpack(fetched[rows["url"]])

    def _probes(self, index: int, told: Mapping[str, Any]) -> Probes:
        """All scores so far: those that an answer has are new."""
        for name, new in told.items():
            known = self._scores.setdefault(
                (index, name), {"scores": [], "positions": [], "token_ids": []}
            )
            for what, values in known.items():
                values += new[what]
        mine = {name: known for (nth, name), known in self._scores.items() if nth == index}
        length = max(
            (1 + max(known["positions"], default=-1) for known in mine.values()), default=0
        )
        tokens = torch.zeros(length, dtype=torch.int64)
        for known in mine.values():
            tokens[known["positions"]] = torch.tensor(known["token_ids"], dtype=torch.int64)
        return Probes(
            {
                # Names of what JSON has no numbers for are read as such.
                name: torch.tensor([float(score) for score in known["scores"]])
                for name, known in mine.items()
            },
            {
                name: torch.tensor(known["positions"], dtype=torch.int64)
                for name, known in mine.items()
            },
            tokens,
        )


def _text_of_response(value: Mapping[str, Any]) -> str:
    """Of an answer of `/v1/responses`, which has no choices."""
    return "".join(
        part["text"]
        for item in value.get("output") or ()
        if item.get("type") == "message"
        for part in item.get("content") or ()
        if part.get("type") == "output_text"
    )


def _text(choice: Mapping[str, Any]) -> str:
    """Of a completion, a chat's message, or what is new of it."""
    if "text" in choice:
        return choice["text"] or ""
    message = choice.get("message") or choice.get("delta") or {}
    return message.get("content") or ""
