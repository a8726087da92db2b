"""Every exception that midstream raises.

MidstreamError
├── SpecError (ValueError)          a request asks for something malformed or impossible
│   ├── NothingSelectedError        … for positions that its prompt does not have
│   └── NoRoomError                 … for more than there is room for beside what runs
├── CodecError (ValueError)         bytes are not what a codec writes
├── ConfigError (ValueError)        a setting of midstream itself is wrong
├── StoreError (ValueError)         a store cannot be read or written as asked
├── UnsupportedError (ValueError)   this vLLM, model or engine setting cannot be served rightly
│   └── SeamError                   vLLM's own interfaces are not the ones midstream was built on
├── TapError (RuntimeError)         a tap did not fire, or fired twice: results would be wrong
├── ReceiptError (RuntimeError)     what was done for a request is not what it asked for
├── RankError (RuntimeError)        two workers were told, or did, different things
├── FetchError (RuntimeError)       the workers no longer hold what a request captured
└── EngineError (RuntimeError)      an engine elsewhere cannot start, or breaks again and again

ReceiptWarning (UserWarning)        instead of ReceiptError, where the setting `on_mismatch` says so
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any


class MidstreamError(Exception):
    """Base of all of midstream's own exceptions."""


class SpecError(MidstreamError, ValueError):
    """A request asks for something malformed, or that this engine cannot do.

    Args:
        path: the field that is wrong, as one would write it to reach it:
            `edits[2].layer`, `capture[0].positions[1]`. Empty for the whole value.
        problem: what was expected and what was found, and what would be right.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path
        self.problem = problem

    def under(self, prefix: str) -> SpecError:
        """The same error seen from the value that holds this one at `prefix`."""
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
    """The positions that are asked for are none of this prompt's."""


class NoRoomError(SpecError):
    """What is asked for does not fit beside what the running requests use."""


class CodecError(MidstreamError, ValueError):
    """Bytes are not rows that their codec can have written, or rows are none that it can write."""


class ConfigError(MidstreamError, ValueError):
    """A setting of midstream itself is wrong; the message names it."""


class StoreError(MidstreamError, ValueError):
    """A store, or a shard of it, cannot be read or written as asked; the message says where."""


class UnsupportedError(MidstreamError, ValueError):
    """This vLLM, model or engine setting cannot be served rightly, so it is not served."""


class SeamError(UnsupportedError):
    """vLLM's interfaces differ from those that midstream was built on."""


class TapError(MidstreamError, RuntimeError):
    """A tap did not fire in a forward pass, or fired more than once."""


class RankError(MidstreamError, RuntimeError):
    """Two workers were told, or did, different things; looked for with `check_ranks`."""


class ReceiptError(MidstreamError, RuntimeError):
    """What was done for one or more requests differs from what they asked for.

    Args:
        message: what differs, request by request.
        outputs: all outputs of the call, in the order of its prompts, those of requests for which
            all is well too; empty where the call had none to give. Each one's `receipt` says how
            it fared.
    """

    def __init__(self, message: str, outputs: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


class ReceiptWarning(UserWarning):
    """What was done for a request differs from what it asked for; its receipt says `error`."""


class FetchError(MidstreamError, RuntimeError):
    """The workers do not hold what a request captured."""


class EngineError(MidstreamError, RuntimeError):
    """An engine that works for this process in another one, or elsewhere, cannot start, or breaks
    again and again. What it raised was of a kind that this process need not have, and is in words.
    """


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


class ModelError(MidstreamError, RuntimeError):
    """A model could not be made; the message says why, and what to do about it."""


class HttpError(Exception):
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
    def of(error: Exception) -> HttpError:
        """Convert one of midstream's exceptions; other exceptions are raised again."""
        if isinstance(error, HttpError):
            return error
        if isinstance(error, SpecError):
            return HttpError(400, str(error), error.path or None)
        if isinstance(error, ReceiptError):
            return HttpError(500, str(error))
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
