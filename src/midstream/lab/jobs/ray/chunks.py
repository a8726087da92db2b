"""Messages between a job and its engines: chunks of lines, and their outcomes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from midstream import errors
from midstream.errors import EngineError, MidstreamError, SpecError
from midstream.lab.jobs.local_executor import CapturedLine
from midstream.lab.jobs.records import Failed, Record

Lines = tuple[tuple[str, Record], ...]
"""Prompts, each with its request id in the store."""


@dataclass(frozen=True, slots=True)
class ChunkAttempt:
    """One attempt to capture a chunk."""

    lines: Lines
    number: int = 1  # from 1
    since: str = ""  # lower bound of the names of shards of earlier attempts
    given_up: Mapping[int, str] = field(default_factory=dict)  # reasons, by line


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a chunk."""

    chunk: int
    captured: tuple[CapturedLine, ...] = ()  # rows are durably in the store
    failed: tuple[Failed, ...] = ()
    error: MidstreamError | None = None  # ends the job

    def to_json(self) -> str:
        return json.dumps(
            {
                "chunk": self.chunk,
                "captured": [
                    [captured.line, captured.rows, captured.nbytes] for captured in self.captured
                ],
                "failed": [[failed.line, failed.reason] for failed in self.failed],
                "error": None if self.error is None else pack_error(self.error),
            }
        )

    @staticmethod
    def from_json(text: str) -> Outcome:
        fields = json.loads(text)
        return Outcome(
            fields["chunk"],
            tuple(CapturedLine(*captured) for captured in fields["captured"]),
            tuple(Failed(*failed) for failed in fields["failed"]),
            None if fields["error"] is None else unpack_error(fields["error"]),
        )


def pack_error(error: BaseException) -> list[str]:
    """Encode an exception as class name and arguments; one not of midstream as EngineError."""
    if isinstance(error, SpecError):
        return [type(error).__name__, error.path, error.problem]
    if isinstance(error, MidstreamError):
        return [type(error).__name__, str(error)]
    return [EngineError.__name__, f"{type(error).__name__}: {error}"]


def unpack_error(words: list[str]) -> MidstreamError:
    kind = getattr(errors, words[0])
    error = kind(*words[1:])
    assert isinstance(error, MidstreamError)
    return error
