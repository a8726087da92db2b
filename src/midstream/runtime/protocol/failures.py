"""Failures of single requests, from a worker to the engine core in the output of a step."""

from __future__ import annotations

from typing import Any

from midstream.runtime.protocol.codec import Natural, ProtocolMessage
from midstream.runtime.vllm.attributes import FAILURES


class Failure(ProtocolMessage, frozen=True):
    """Why a request cannot continue.

    Attributes:
        position: first position that was, or may have been, computed without its edits.
        reason: what went wrong.
    """

    position: Natural
    reason: str


def failures_of(output: Any) -> dict[str, Failure]:
    """Return the failures that a worker attached to a ModelRunnerOutput, by vLLM's request id."""
    return FAILURES.get(output) or {}
