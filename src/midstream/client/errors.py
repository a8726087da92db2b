"""What a server refused."""

from __future__ import annotations

from typing import Any

from midstream.errors import MidstreamError


class ServerError(MidstreamError, ValueError):
    """A server refused a request, or could not serve it.

    Attributes:
        status: of HTTP.
        param: the field that is wrong, where the server names one.
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.param = param

    @staticmethod
    def of(status: int, body: Any) -> ServerError:
        """Of an answer's body, whatever it is."""
        error = body.get("error", body) if isinstance(body, dict) else body
        if isinstance(error, dict):
            return ServerError(status, str(error.get("message", error)), error.get("param"))
        return ServerError(status, str(error)[:1000])
