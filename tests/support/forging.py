"""Plans that the workers receive as invalid bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from midstream.runtime.frontend import base


@contextmanager
def forged(nth: int) -> Iterator[None]:
    """Of the requests with a plan in the block, replace the plan of one, counted from 1."""
    set_payload, count = base.set_payload, 0

    def forge(request: Any, payload: Any) -> None:
        nonlocal count
        if payload is not None:
            count += 1
            if count == nth:
                payload = msgspec.structs.replace(payload, plan=b"junk")
        set_payload(request, payload)

    base.set_payload = forge
    try:
        yield
    finally:
        base.set_payload = set_payload
