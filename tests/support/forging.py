"""Plans that the workers receive as invalid bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from midstream.runtime.frontend import base


@contextmanager
def forged(nth: int) -> Iterator[None]:
    """Of the requests with a plan in the block, replace the plan of one, counted from 1."""
    set_payload, seen = base.set_payload, list[str]()

    def forge(request: Any, payload: Any) -> None:
        if payload is not None:
            # The payload of a request may be set again.
            if payload.uid not in seen:
                seen.append(payload.uid)
            if seen.index(payload.uid) + 1 == nth:
                payload = msgspec.structs.replace(payload, plan=b"junk")
        set_payload(request, payload)

    base.set_payload = forge
    try:
        yield
    finally:
        base.set_payload = set_payload
