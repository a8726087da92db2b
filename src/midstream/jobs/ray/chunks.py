"""What goes between a job and its engines: chunks of lines there, and back what became of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from midstream import errors
from midstream.errors import EngineError, MidstreamError, SpecError
from midstream.jobs.local_executor import Captured
from midstream.jobs.records import Failed, Record

Lines = tuple[tuple[str, Record], ...]
"""Prompts, each with the id under which its rows are stored."""


@dataclass(frozen=True, slots=True)
class ChunkAttempt:
    """A chunk, as an engine gets it.

    Attributes:
        lines: its prompts.
        attempt: the how manieth try it is, from 1.
        since: before every shard that an earlier try may have written, by name.
        given_up: of its lines those that are not to be run again, and why.
    """

    lines: Lines
    attempt: int = 1
    since: str = ""
    given_up: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a chunk.

    Attributes:
        chunk: its number.
        captured: lines whose rows are in the store for good.
        failed: lines of which there are no rows.
        error: why the job cannot go on; None: it can.
    """

    chunk: int
    captured: tuple[Captured, ...] = ()
    failed: tuple[Failed, ...] = ()
    error: MidstreamError | None = None

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps(
            {
                "chunk": self.chunk,
                "captured": [[each.line, each.rows, each.nbytes] for each in self.captured],
                "failed": [[each.line, each.reason] for each in self.failed],
                "error": None if self.error is None else pack_error(self.error),
            }
        )

    @staticmethod
    def from_json(text: str) -> Outcome:
        """What `to_json` gave."""
        found = json.loads(text)
        return Outcome(
            found["chunk"],
            tuple(Captured(*each) for each in found["captured"]),
            tuple(Failed(*each) for each in found["failed"]),
            None if found["error"] is None else unpack_error(found["error"]),
        )


def pack_error(error: BaseException) -> list[str]:
    """An exception in words: its kind and what it says; of a SpecError the path as well. What is
    none of midstream's own is an EngineError.
    """
    if isinstance(error, SpecError):
        return [type(error).__name__, error.path, error.problem]
    if isinstance(error, MidstreamError):
        return [type(error).__name__, str(error)]
    return [EngineError.__name__, f"{type(error).__name__}: {error}"]


def unpack_error(words: list[str]) -> MidstreamError:
    """The exception that `pack_error` has put in words."""
    kind = getattr(errors, words[0])
    error = kind(*words[1:])
    assert isinstance(error, MidstreamError)
    return error
