"""Messages as plain values, which vLLM's own transport sends between processes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from midstream.errors import MessageError, SpecError
from midstream.validation import read_message

Natural = Annotated[int, msgspec.Meta(ge=0)]
# Positions as (first, length) runs, ascending.
Runs = list[tuple[Natural, Annotated[int, msgspec.Meta(ge=1)]]]


class ProtocolMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Base of messages between midstream's processes: read strictly, never garbage-collected."""


def pack(message: msgspec.Struct) -> Any:
    """Return a message as dicts, lists, str, bytes and numbers. Bytes are not copied."""
    return msgspec.to_builtins(message, builtin_types=(bytes,))


def unpack(kind: Any, value: object, name: str) -> Any:
    """Read a message of a class, or a union of tagged ones, from the values of `pack`."""
    try:
        # Without `builtin_types` a str would be taken for base64.
        return read_message(lambda raw: msgspec.convert(raw, kind, builtin_types=(bytes,)), value)
    except SpecError as error:
        raise _malformed(name, error) from None


def encode(messages: object) -> bytes:
    """Return messages as bytes, for many small ones: processes in between only copy them."""
    return msgspec.msgpack.encode(messages)


def decode(kind: Any, data: bytes, name: str) -> Any:
    """Read what `encode` returned; see `unpack`."""
    try:
        return read_message(lambda packed: msgspec.msgpack.decode(packed, type=kind), data)
    except SpecError as error:
        raise _malformed(name, error) from None


def _malformed(name: str, error: Exception) -> MessageError:
    return MessageError(
        f"malformed {name}: {error}; all processes of an engine must run one version of midstream"
    )
