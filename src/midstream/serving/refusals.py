"""HTTP errors with the body of an OpenAI error."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from midstream.errors import ReceiptError, SpecError


def read_error(body: bytes) -> dict[str, Any] | None:
    """Parse the body of an OpenAI error, whose `error` is a dict; None if it is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    is_error = isinstance(value, dict) and isinstance(value.get("error"), dict)
    return value if is_error else None


class Refusal(Exception):
    """An HTTP error response.

    Attributes:
        status: HTTP status.
        message: what is wrong, and what would be right.
        param: path of the invalid field; None if no field is invalid.
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    @staticmethod
    def of(error: Exception) -> Refusal:
        """Convert one of midstream's exceptions; other exceptions are raised again."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, SpecError):
            return Refusal(400, str(error), error.path or None)
        if isinstance(error, ReceiptError):
            return Refusal(500, str(error))
        raise error

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON values, in the form of vLLM's errors."""
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
        """The body as JSON text."""
        return json.dumps(self.body).encode()
