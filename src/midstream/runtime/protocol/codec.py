"""Messages as plain values, which vLLM's own transport carries between processes."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from midstream.errors import MessageError, SpecError
from midstream.validation import read_message


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the messages between midstream's processes. Fields are read strictly."""


M = TypeVar("M", bound=msgspec.Struct)


def pack(message: msgspec.Struct) -> Any:
    """Return a message as dicts, lists, str, bytes and numbers. Bytes are not copied."""
    return msgspec.to_builtins(message, builtin_types=(bytes,))


def unpack(kind: type[M], value: object) -> M:
    """Read a message from the values that `pack` returned.

    Args:
        kind: class of the message, or a union of tagged classes.
        value: plain values; lists may have become tuples.

    Raises:
        MessageError: `value` is not such a message.
    """
    try:
        return read_message(
            lambda given: msgspec.convert(given, kind, builtin_types=(bytes,)), value
        )
    except SpecError as error:
        name = getattr(kind, "__name__", "request")
        raise MessageError(
            f"a process of midstream sent a malformed {name}: {error}; all processes of an "
            "engine must run the same version of midstream"
        ) from None
