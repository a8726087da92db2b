"""What a client is told if another API server process does not answer as it should."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from midstream.errors import HttpError, ServerError

_RETRY_SECONDS = 2
_NO_LISTENER = (errno.ECONNREFUSED, errno.ENOENT)
_NO_QUEUE = (errno.EAGAIN, errno.ENOTCONN)  # its queue of connections is full
_NO_MEMORY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_SHOWN = 200
_OTHER = "another API server process of this server"


@contextmanager
def peer_errors(seconds: float) -> Iterator[None]:
    """Convert what httpx raises while a process is asked, of which a part may take `seconds`."""
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise failure_of(error, seconds) from error


def failure_of(error: Exception, seconds: float) -> HttpError:
    """Return the answer to a client in place of another process's, which had `seconds` for it."""
    number, text = _os_error(error)
    if number in _NO_MEMORY:
        return HttpError(507, f"this process cannot ask {_OTHER}: {text}")
    if isinstance(error, (httpx.LocalProtocolError, httpx.UnsupportedProtocol, httpx.InvalidURL)):
        return HttpError(400, f"the request cannot be sent on to {_OTHER}: {str(error)[:_SHOWN]}")
    if isinstance(error, httpx.TimeoutException):
        return HttpError(
            504,
            f"{_OTHER} runs, but did not answer within {seconds:g} s; it may carry the request out "
            "nevertheless",
        )
    if number in _NO_QUEUE:
        return _later(503, "accepts no connection now")
    if isinstance(error, httpx.ConnectError):
        if number in _NO_LISTENER:
            return _later(503, "does not answer: it has ended")
        return HttpError(500, f"{_OTHER} cannot be reached: {text or str(error)[:_SHOWN]}")
    return _later(502, "ended the connection in the middle of its answer")


def rejection(answer: httpx.Response, what: str = "") -> HttpError:
    """Return the answer to a client whose request another process rejected."""
    try:
        error = ServerError.of(answer.status_code, answer.json())
    except ValueError:
        error = ServerError.of(answer.status_code, answer.text)
    problem = str(error).partition(": ")[2]
    retry = answer.headers.get("retry-after", "")
    return HttpError(
        answer.status_code,
        f"{_OTHER} answered: {problem}{what}",
        error.param,
        int(retry) if retry.isdecimal() else None,
    )


def _later(status: int, problem: str) -> HttpError:
    return HttpError(status, f"{_OTHER} {problem}; try again later", retry_after=_RETRY_SECONDS)


def _os_error(error: BaseException | None) -> tuple[int | None, str]:
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno, error.strerror or str(error)
        error = error.__cause__ or error.__context__
    return None, ""
