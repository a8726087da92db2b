"""HTTP errors with the body of an OpenAI error."""

from __future__ import annotations

import json
from typing import Any


def read_error(body: bytes) -> dict[str, Any] | None:
    """Parse the body of an OpenAI error, whose `error` is a dict; None if it is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    is_error = isinstance(value, dict) and isinstance(value.get("error"), dict)
    return value if is_error else None
