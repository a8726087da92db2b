"""The exceptions that midstream raises.

MidstreamError
├── SpecError (ValueError)          a request is malformed or impossible
│   ├── NothingSelectedError        its positions do not exist in the prompt
│   ├── ExistsError                 its rows' id is that of another request
│   └── NoRoomError                 it needs more capacity than the running requests leave
├── CodecError (ValueError)         bytes or rows are invalid for a codec
├── ConfigError (ValueError)        a setting of midstream is invalid
├── StoreError (ValueError)         a store cannot be read or written
├── UnsupportedError (ValueError)   this vLLM, model or engine setting is unsupported
│   └── SeamError                   vLLM's internals differ from those midstream was built on
├── TapError (RuntimeError)         a tap did not run exactly once per forward pass
├── ReceiptError (RuntimeError)     a request's results differ from its plan
├── RankError (RuntimeError)        two workers received or did different things
├── BusyError (RuntimeError)        the engine has no capacity for a request now
├── ControllerError (RuntimeError)  a controller of a request failed, and ends it
├── FetchError (RuntimeError)       the workers do not have a request's captured rows
├── MessageError (RuntimeError)     a message between midstream's processes is malformed
├── ServerError (ValueError)        a server rejected a client's request, or failed to serve it
├── ModelError (RuntimeError)       a model could not be created
├── MissingExtraError (ImportError)  a package of an optional part is not installed
├── NotAskedError (AttributeError)   an output lacks a result that was not asked for
└── EngineError (RuntimeError)      a remote engine cannot start, or fails repeatedly

HttpError                           an HTTP error response; never leaves the server
ReceiptWarning (UserWarning)        instead of ReceiptError, if `on_mismatch` is "warn"
ScaleWarning (UserWarning)          an edit adds a vector far larger than the residual stream
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from typing import Any


class MidstreamError(Exception):
    """Base class of midstream's exceptions."""


class SpecError(MidstreamError, ValueError):
    """A request is malformed, or this engine cannot do what it requests.

    Args:
        path: path of the invalid field, such as `edits[2].layer` or `capture[0].positions[1]`;
            empty for the whole value.
        problem: what was expected, what was found, and what would be right.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path
        self.problem = problem

    def under(self, prefix: str) -> SpecError:
        """Return the same error for the value that contains this one at `prefix`."""
        if not self.path:
            path = prefix
        elif self.path.startswith("["):
            path = prefix + self.path
        else:
            path = f"{prefix}.{self.path}"
        return type(self)(path, self.problem)

    def __reduce__(self) -> tuple[type[SpecError], tuple[str, str]]:
        return (type(self), (self.path, self.problem))


class NothingSelectedError(SpecError):
    """The requested positions select no token of the prompt."""


class ExistsError(SpecError):
    """Rows are stored already, or will be, under the id that a request gives its own."""


class NoRoomError(SpecError):
    """A request needs more capacity than the running requests leave."""


class CodecError(MidstreamError, ValueError):
    """Bytes that a codec cannot have written, or rows that it cannot encode."""


class ConfigError(MidstreamError, ValueError):
    """A setting of midstream is invalid; the message names it."""


class StoreError(MidstreamError, ValueError):
    """A store, or one of its shards, cannot be read or written; the message names the file."""


class UnsupportedError(MidstreamError, ValueError):
    """This vLLM version, model or engine setting is unsupported."""


class SeamError(UnsupportedError):
    """vLLM's internals differ from those that midstream was built on."""


class TapError(MidstreamError, RuntimeError):
    """A tap did not run exactly once in a forward pass, so results would be wrong."""


class RankError(MidstreamError, RuntimeError):
    """Two workers received or did different things; detected with the setting `check_ranks`."""


class ReceiptError(MidstreamError, RuntimeError):
    """Results of one or more requests differ from their plans.

    Args:
        message: the differences, request by request.
        outputs: all outputs of the call in the order of its prompts, including those without
            differences; empty if the call has none. Each output's `receipt` has its status.
    """

    def __init__(self, message: str, outputs: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


class NotAskedError(MidstreamError, AttributeError):
    """An output lacks a result that its request did not ask for; the message says how to ask."""


class BusyError(MidstreamError, RuntimeError):
    """The engine has no capacity for a request now, and may not let it wait, or not longer.

    Attributes:
        retry_after: seconds after which another attempt may succeed.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type[BusyError], tuple[str, int]]:
        return (type(self), (str(self), self.retry_after))


class ReceiptWarning(UserWarning):
    """Results of a request differ from its plan; its receipt has the status `error`."""


class ScaleWarning(UserWarning):
    """An edit adds a vector that is far larger than the residual stream of most models."""


class ControllerError(MidstreamError, RuntimeError):
    """A controller failed, and its requests are to end then; see `Controller`."""


class FetchError(MidstreamError, RuntimeError):
    """The workers do not have the rows that a request captured."""


class MessageError(MidstreamError, RuntimeError):
    """A message between midstream's processes is malformed; they may run different versions."""


class EngineError(MidstreamError, RuntimeError):
    """A remote engine cannot start, or fails repeatedly.

    The message has the original error as text, because its class may not exist in this process.
    """


class ServerError(MidstreamError, ValueError):
    """A server rejected a request, failed to serve it, or sent an invalid response.

    Attributes:
        status: HTTP status.
        param: path of the invalid field, if the server names one; else None.
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.param = param

    @staticmethod
    def of(status: int, body: Any) -> ServerError:
        """Create from the body of a response, parsed JSON or text."""
        error = body.get("error", body) if isinstance(body, dict) else body
        if isinstance(error, dict):
            return ServerError(status, str(error.get("message", error)), error.get("param"))
        return ServerError(status, str(error)[:1000])


class ModelError(MidstreamError, RuntimeError):
    """A model could not be created; the message gives the reason and a remedy."""


# The extra that brings a package that a plain install lacks.
_EXTRA_OF = {
    "adlfs": "cloud",
    "confluent_kafka": "kafka",
    "fastapi": "vllm",
    "gcsfs": "cloud",
    "gguf": "fit",
    "jinja2": "vllm",
    "matplotlib": "plot",
    "nixl": "nixl",
    "pandas": "sweep",
    "prometheus_client": "vllm",
    "psutil": "vllm",
    "pyarrow": "arrow",
    "pydantic": "vllm",
    "ray": "ray",
    "s3fs": "cloud",
    "scipy": "fit",
    "sklearn": "fit",
    "starlette": "vllm",
    "tokenizers": "vllm",
    "torch": "vllm",
    "transformer_lens": "transformer-lens",
    "transformers": "vllm",
    "vllm": "vllm",
    "xarray": "sweep",
}


class MissingExtraError(MidstreamError, ModuleNotFoundError):
    """A package of an optional part is not installed; the message names the part's extra."""

    @staticmethod
    def of(error: ModuleNotFoundError, needed_by: str) -> ModuleNotFoundError:
        """Return the error to raise in place of Python's; that one if no extra has the package."""
        package = (error.name or "").partition(".")[0]
        extra = _EXTRA_OF.get(package)
        if isinstance(error, MissingExtraError) or extra is None:
            return error
        on_cpu = '; without a GPU: pip install "midstream[cpu]"' if extra == "vllm" else ""
        return MissingExtraError(
            f'{needed_by} needs the package {package}: pip install "midstream[{extra}]"{on_cpu}',
            name=error.name,
        )

    @staticmethod
    def require(package: str, needed_by: str) -> None:
        """Raise MissingExtraError if a package is not installed, without importing it."""
        from importlib.util import find_spec

        if find_spec(package) is None:
            missing = ModuleNotFoundError(f"No module named {package!r}", name=package)
            raise MissingExtraError.of(missing, needed_by)


_MESSAGE, _PARAM = 4000, 400  # characters of a client's mistake in an answer, at most


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}…"


class HttpError(Exception):
    """An HTTP error response."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds after which another attempt may succeed
        self.status = status
        self.message = message
        self.param = param  # path of the invalid field

    @staticmethod
    def of(error: Exception) -> HttpError:
        """Convert one of midstream's exceptions; other exceptions are raised again."""
        if isinstance(error, HttpError):
            return error
        if isinstance(error, SpecError):
            status = 409 if isinstance(error, ExistsError) else 400
            # Both may repeat a name that the client sent, which may be as long as a body.
            return HttpError(status, _cut(str(error), _MESSAGE), _cut(error.path, _PARAM) or None)
        if isinstance(error, ReceiptError):
            is_full = os.strerror(errno.ENOSPC) in str(error)
            return HttpError(507 if is_full else 500, str(error))
        if isinstance(error, BusyError):
            return HttpError(503, str(error), retry_after=error.retry_after)
        raise error

    @property
    def body(self) -> dict[str, Any]:
        from http import HTTPStatus

        return {
            "error": {
                "message": self.message,
                "type": HTTPStatus(self.status).phrase,
                "param": self.param,
                "code": self.status,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}

    @property
    def content(self) -> bytes:
        return json.dumps(self.body).encode()
