"""Failures of single requests, from a worker to the engine core in the output of a step."""

from __future__ import annotations

from typing import Any

from midstream.runtime.protocol.codec import Natural, ProtocolMessage
from midstream.runtime.vllm.attributes import FAILURES


class Failure(ProtocolMessage, frozen=True):
    """What went wrong with a request."""

    position: Natural  # first one that may be without its edits, or not finite
    reason: str
    ends: bool = True  # the request. If not, its KV is shared with no other


def failures_of(output: Any) -> dict[str, Failure]:
    """Return the failures that a worker attached to a ModelRunnerOutput, by vLLM's request id."""
    return FAILURES.get(output) or {}
