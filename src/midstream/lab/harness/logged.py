"""What an evaluation's log keeps of a plan and of its results: no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from midstream.client.protocol import PLAN
from midstream.client.request_body import extra_body
from midstream.config.config import KEY
from midstream.errors import SpecError
from midstream.validation import at, read_fields

# Longest text, and most values of a list, that a log gets of results other than probe scores and
# receipts.
MOST = 1024
_RETURNS = ("handle", "none")


def joined_field(first: Mapping[str, Any], second: object) -> dict[str, Any] | None:
    """Return the field `midstream` of a request, or None: the model's own arguments `first`,
    replaced one by one by `second`, the field of the call's configuration.
    """
    with at(KEY):
        call = {} if second is None else read_fields(
            second, required=(), optional=(*PLAN, "activations")
        )  # fmt: skip
    arguments = {name: value for name, value in {**first, **call}.items() if value is not None}
    if not arguments:
        return None
    returned = arguments.get("activations", "handle")
    if returned not in _RETURNS:
        raise SpecError(
            f"{KEY}.activations",
            f"expected one of {', '.join(_RETURNS)}, got {str(returned)[:80]!r}: rows in the "
            "answer would be in the log",
        )
    with at(KEY):
        field: dict[str, Any] = extra_body(**arguments)[KEY]
    if _has_numbers(field):
        raise SpecError(
            KEY,
            "it has a vector by value, which would be in the log with every call; register the "
            'vector on the server, and use its name: {"vector": {"name": "happy"}}',
        )
    return field


def logged_results(answer: Mapping[str, Any]) -> Any:
    """Return what a log keeps of the field `midstream` of an answer; long lists become their
    length.
    """
    if answer.get(KEY) is not None:
        return _logged(answer[KEY])
    fields = [choice.get(KEY) for choice in answer.get("choices") or ()]
    return [field and _logged(field) for field in fields] if any(fields) else None


def _logged(field: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value if name in ("receipt", "probes") else _short(value)
        for name, value in field.items()
    }


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= MOST else f"<{len(value)} characters omitted>"
    if isinstance(value, list):
        if len(value) > MOST:
            return f"<{len(value)} values omitted>"
        return [_short(part) for part in value]
    if isinstance(value, Mapping):
        return {name: _short(part) for name, part in value.items()}
    return value


def _has_numbers(value: Any) -> bool:
    """Return whether the JSON form of a plan has a vector, a matrix or rows."""
    if isinstance(value, Mapping):
        return "f32" in value or any(map(_has_numbers, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_has_numbers, value))
