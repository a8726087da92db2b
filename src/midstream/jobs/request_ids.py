"""The ids of a data set's requests: the same in each run, and others for other prompts or terms."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import numpy as np

from midstream.errors import StoreError
from midstream.jobs.job import Job
from midstream.jobs.records import Record
from midstream.jobs.sources import Source
from midstream.store import Store, StoredRequest
from midstream.validation import show

# The line's number, so that ids sort as lines do, and 64 bits of a hash.
_ID = re.compile(r"(\d{9,18})-([0-9a-f]{16})")
_LINE = np.dtype([("line", np.int64), ("digest", np.uint64)])
# What the store's metadata of a request has of the job, besides what every request has.
LINE = "line"
TERMS = "terms"


class Identity:
    """Makes a job's ids."""

    def __init__(self, job: Job) -> None:
        terms = json.dumps(job.terms, sort_keys=True, default=str)
        self._start = hashlib.sha256(terms.encode())

    def digest(self, record: Record) -> int:
        """A number of 64 bits for a prompt and the job's terms."""
        whole = self._start.copy()
        text = record.prompt if isinstance(record.prompt, str) else _plain(record.prompt)
        # A text and the same text as JSON are two prompts.
        whole.update(type(record.prompt).__name__.encode() + b"\n" + text.encode())
        return int.from_bytes(whole.digest()[:8], "big")

    def id(self, record: Record) -> str:
        """The request's id."""
        return f"{record.line:09d}-{self.digest(record):016x}"


class CompletedLines:
    """Which lines a store has. Takes sixteen bytes a line."""

    def __init__(self, job: Job, store: Store | None) -> None:
        """Args:
        job: what is asked for now.
        store: what there is; None: nothing.

        Raises:
            StoreError: it has something else than lines that were captured on these terms.
        """
        self._root = "" if store is None else store.root
        self._identity = Identity(job)
        requests = () if store is None else store.requests
        if requests:
            _check_terms(job, requests[0])
        found = np.fromiter(map(self._read, requests), _LINE, len(requests))
        # A line that was stored twice counts once.
        self._lines, first = np.unique(found["line"], return_index=True)
        self._digests = found["digest"][first]

    def __len__(self) -> int:
        return len(self._lines)

    def has(self, record: Record) -> bool:
        """Whether a line is there.

        Raises:
            StoreError: it is, but of another prompt.
        """
        place = int(np.searchsorted(self._lines, record.line))
        if place == len(self._lines) or self._lines[place] != record.line:
            return False
        if int(self._digests[place]) != self._identity.digest(record):
            raise StoreError(
                f"{self._root}: line {record.line} was captured with another prompt, or on other "
                "terms: this is not the data that is in there; name another directory"
            )
        return True

    def check(self, source: Source) -> None:
        """Holds all that is there against the data, before anything is added to it.

        Raises:
            StoreError: as `has`; or the data has not all of these lines.
        """
        left = len(self)
        lines = iter(source)
        while left:
            record = next(lines, None)
            if record is None:
                raise StoreError(
                    f"{self._root}: {left} lines are there that this data has not, or has no "
                    "prompt in any more; name another directory"
                )
            left -= isinstance(record, Record) and self.has(record)

    def _read(self, request: StoredRequest) -> tuple[int, int]:
        match = _ID.fullmatch(request.request)
        if match is None:
            raise StoreError(
                f"{self._root}: request {show(request.request)} is no line of a data set; name "
                "another directory"
            )
        return int(match[1]), int(match[2], 16)


def _check_terms(job: Job, one: StoredRequest) -> None:
    """Names the first of the terms that differs."""
    there = one.metadata.get(TERMS)
    if not isinstance(there, dict):
        raise StoreError(
            f"{one.shard}: request {show(one.request)} is no line of a data set; name another "
            "directory"
        )
    ours: dict[str, Any] = json.loads(json.dumps(job.terms, default=str))
    for name in sorted({*ours, *there}):
        if ours.get(name) != there.get(name):
            raise StoreError(
                f"{job.out}: it was captured with {name} {_shown(there.get(name))}, and this asks "
                f"for {_shown(ours.get(name))}; ask for the same, or name another directory"
            )


def _plain(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)


def _shown(value: object) -> str:
    return "nothing" if value is None else json.dumps(value)
