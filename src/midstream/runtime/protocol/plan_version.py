"""Versions of a request's plan: what it asks for from some position on, while it runs.

Version 0 is the plan that the request was sent with. A version holds from a position that the
engine core picks, which is not scheduled yet, until the next version begins.
"""

from __future__ import annotations

from midstream.runtime.protocol.cache_keys import CacheKeys
from midstream.runtime.protocol.codec import Natural, ProtocolMessage


class PlanVersion(ProtocolMessage, frozen=True, array_like=True):
    """A plan that replaces the one of a running request from some position on.

    Its captures and named probes are those of the request: only edits differ.

    Attributes:
        number: number of the version, at least 1; other versions of the request have others.
        plan: the resolved plan; see `plan.resolve.wire`.
        keys: its prefix-cache keys, from position 0 on.
    """

    number: Natural
    plan: bytes
    keys: CacheKeys


class PlanChange(ProtocolMessage, frozen=True, array_like=True):
    """A version of one request's plan and its first position, from the engine core to the workers.

    Attributes:
        number: number of the version.
    """

    request_id: str
    uid: str
    number: Natural
    position: Natural
    plan: bytes
