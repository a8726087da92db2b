"""What a request carries from the front door to the engine core and the workers, in its
`extra_args`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from midstream.config.config import KEY
from midstream.errors import SpecError
from midstream.runtime.protocol.cache_keys import CacheKeys


class RequestPayload(NamedTuple):
    """What a request carries from the front door onwards.

    Attributes:
        uid: names the request for midstream, whatever ids vLLM makes of it.
        plan: `ResolvedPlan.to_bytes()`.
        keys: its place in the prefix cache.
    """

    uid: str
    plan: bytes
    keys: CacheKeys

    def pack(self) -> list[object]:
        """Plain values that msgpack carries unchanged."""
        return [self.uid, self.plan, self.keys.pack()]


def payload_of(sampling_params: Any) -> RequestPayload | None:
    """What the front door put into a request's `extra_args`; None when it asks for nothing.

    Raises:
        SpecError: it did not come through the front door.
    """
    riding = _riding(sampling_params)
    if riding is None:
        return None
    uid, plan, packed = riding
    try:
        return RequestPayload(uid, bytes(plan), CacheKeys.unpack(packed))
    except ValueError:
        raise _refused() from None


def uid_of(sampling_params: Any) -> str | None:
    """As `payload_of`, of the uid alone."""
    riding = _riding(sampling_params)
    return None if riding is None else riding[0]


def _riding(sampling_params: Any) -> tuple[str, Any, Any] | None:
    extra_args = getattr(sampling_params, "extra_args", None)
    value = extra_args.get(KEY) if extra_args else None
    if value is None:
        return None
    if isinstance(value, (list, tuple)) and len(value) == 3:
        uid, plan, packed = value
        if isinstance(uid, str) and isinstance(plan, (bytes, bytearray, memoryview)):
            return uid, plan, packed
    raise _refused()


def _refused() -> SpecError:
    return SpecError(
        f"extra_args[{KEY!r}]",
        "reached a worker without having been checked: the front end that took the request in "
        "does not have midstream loaded",
    )
