"""Request ids of a dataset capture, which depend on line, prompt and settings only."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import numpy as np

from midstream.errors import StoreError
from midstream.lab.jobs.job import Job
from midstream.lab.jobs.prompt_tokens import PromptTokens
from midstream.lab.jobs.records import Record
from midstream.lab.jobs.sources import Source
from midstream.store import Store, StoredRequest
from midstream.validation import show

# The line number, so that ids sort as lines do, and 64 bits of a hash.
_ID = re.compile(r"(\d{9,18})-([0-9a-f]{16})")
_LINE = np.dtype([("line", np.int64), ("digest", np.uint64)])
# Fields that a job adds to a request's metadata in the store.
LINE = "line"
TERMS = "terms"


class Identity:
    """Computes the request ids of a job."""

    def __init__(self, job: Job) -> None:
        terms = json.dumps(job.terms, sort_keys=True, default=str)
        self._start = hashlib.sha256(terms.encode())

    def digest(self, record: Record) -> int:
        """Return a 64-bit hash of a prompt and the job's terms."""
        whole = self._start.copy()
        text = record.prompt
        if isinstance(text, PromptTokens):
            # Not the text, which may be kept or not.
            tokens = text.token_ids, text.positions, text.parts.to_metadata()
            text = json.dumps(tokens, sort_keys=True)
        elif not isinstance(text, str):
            text = json.dumps(text, sort_keys=True, default=str)
        # The type is included: a text and a conversation with the same JSON are different prompts.
        whole.update(type(record.prompt).__name__.encode() + b"\n" + text.encode())
        return int.from_bytes(whole.digest()[:8], "big")

    def id(self, record: Record) -> str:
        return f"{record.line:09d}-{self.digest(record):016x}"


class CompletedLines:
    """Lines that a store already contains. Takes 16 bytes of memory per line."""

    def __init__(self, job: Job, store: Store | None) -> None:
        """Read the request ids of a store; None: an empty one."""
        self._root = "" if store is None else store.root
        self._identity = Identity(job)
        requests = () if store is None else store.requests
        if requests:
            _check_terms(job, requests[0])
        lines = np.fromiter(map(self._read, requests), _LINE, len(requests))
        # A line that is stored twice counts once.
        self._lines, first = np.unique(lines["line"], return_index=True)
        self._digests = lines["digest"][first]

    def __len__(self) -> int:
        return len(self._lines)

    def has(self, record: Record) -> bool:
        place = int(np.searchsorted(self._lines, record.line))
        if place == len(self._lines) or self._lines[place] != record.line:
            return False
        if int(self._digests[place]) != self._identity.digest(record):
            raise StoreError(
                f"{self._root}: line {record.line} was captured with another prompt or other "
                "settings: the store has different data; choose another directory"
            )
        return True

    def check(self, source: Source) -> None:
        """Compare all stored lines with the data, before anything is added."""
        remaining = len(self)
        lines = iter(source)
        while remaining:
            record = next(lines, None)
            if record is None:
                raise StoreError(
                    f"{self._root}: {remaining} stored lines are not in this data or have no "
                    "prompt there; choose another directory"
                )
            remaining -= isinstance(record, Record) and self.has(record)

    def _read(self, request: StoredRequest) -> tuple[int, int]:
        match = _ID.fullmatch(request.request)
        if match is None:
            raise StoreError(
                f"{self._root}: request {show(request.request)} is not a line of a dataset "
                "capture; choose another directory"
            )
        return int(match[1]), int(match[2], 16)


def _check_terms(job: Job, req: StoredRequest) -> None:
    stored = req.metadata.get(TERMS)
    if not isinstance(stored, dict):
        raise StoreError(
            f"{req.shard}: request {show(req.request)} is not a line of a dataset capture; choose "
            "another directory"
        )
    ours: dict[str, Any] = json.loads(json.dumps(job.terms, default=str))
    for name in sorted({*ours, *stored}):
        if ours.get(name) != stored.get(name):
            raise StoreError(
                f"{job.out}: it was captured with {name} {_shown(stored.get(name))}, but this job "
                f"has {_shown(ours.get(name))}; use the same setting or another directory"
            )


def _shown(value: object) -> str:
    return "nothing" if value is None else json.dumps(value)
