"""What a server refuses, as its clients see it: a status, and the body of an OpenAI error."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from midstream.errors import ReceiptError, SpecError


def read_error(body: bytes) -> dict[str, Any] | None:
    """An OpenAI error's JSON, whose `error` is a dict; None: it is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    is_error = isinstance(value, dict) and isinstance(value.get("error"), dict)
    return value if is_error else None


class Refusal(Exception):
    """A request that is refused.

    Attributes:
        status: of HTTP.
        message: why, and what would be right.
        param: the field that is wrong; None: none is.
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    @staticmethod
    def of(error: Exception) -> Refusal:
        """What an error of midstream's own is to a client."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, SpecError):
            return Refusal(400, str(error), error.path or None)
        if isinstance(error, ReceiptError):
            return Refusal(500, str(error))
        raise error

    @property
    def body(self) -> dict[str, Any]:
        """As vLLM's own errors have it."""
        return {
            "error": {
                "message": self.message,
                "type": HTTPStatus(self.status).phrase,
                "param": self.param,
                "code": self.status,
            }
        }

    @property
    def content(self) -> bytes:
        """The body as text."""
        return json.dumps(self.body).encode()
