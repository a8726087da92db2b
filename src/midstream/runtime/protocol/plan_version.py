"""Versions of a running request's plan, each from a position that the engine core picks."""

from __future__ import annotations

from midstream.runtime.protocol.cache_keys import CacheKeys
from midstream.runtime.protocol.codec import Natural, ProtocolMessage


class PlanVersion(ProtocolMessage, frozen=True, array_like=True):
    """A plan that replaces that of a running request from some position on: only edits differ."""

    number: Natural  # at least 1, and unique in the request
    plan: bytes  # the resolved plan; see `plan.resolve.wire`
    keys: CacheKeys  # from position 0 on


class PlanChange(ProtocolMessage, frozen=True, array_like=True):
    """A version of a plan and its first position, from the engine core to the workers."""

    request_id: str
    uid: str
    number: Natural
    position: Natural
    plan: bytes
