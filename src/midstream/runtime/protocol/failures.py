"""Failures of single requests, from a worker to the engine core in the output of a step."""

from __future__ import annotations

from typing import Any

from midstream.runtime.protocol.codec import Natural, ProtocolMessage
from midstream.runtime.vllm.attributes import FAILURES


class Failure(ProtocolMessage, frozen=True):
    """What went wrong with a request.

    Attributes:
        position: first position that was, or may have been, computed without its edits, or with
            values that are not finite.
        ends: whether the request ends. If not, its KV is shared with no other request.
    """

    position: Natural
    reason: str
    ends: bool = True


def failures_of(output: Any) -> dict[str, Failure]:
    """Return the failures that a worker attached to a ModelRunnerOutput, by vLLM's request id."""
    return FAILURES.get(output) or {}
