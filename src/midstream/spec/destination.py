"""Where the rows of a capture go: a sink, and under which names it keeps them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from midstream.errors import SpecError
from midstream.spec.fields import kind, show

# The sink that is always there: rows come back on the request's own output.
MEMORY = "memory"
MAX_NAME = 128
MAX_METADATA_BYTES = 65536

# A name is one part of a path and nothing else: no slash, and neither `.` nor `..`.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Metadata(Mapping[str, object]):
    """JSON values under names, which cannot change."""

    __slots__ = ("_text",)

    def __init__(self, value: object = None) -> None:
        """Args:
        value: a mapping of JSON values by name; None: nothing.

        Raises:
            SpecError: it is none, or larger than 64 KiB as JSON.
        """
        if value is None:
            value = {}
        if isinstance(value, Metadata):
            self._text: str = value.text
            return
        if not isinstance(value, Mapping):
            raise SpecError("", f"expected a dict of JSON values, got {kind(value)}")
        for name in value:
            if not isinstance(name, str):
                raise SpecError("", f"names are `str`, got {kind(name)}")
        try:
            self._text = json.dumps(
                dict(value), allow_nan=False, sort_keys=True, separators=(",", ":")
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise SpecError("", f"expected JSON values: {error}") from None
        if len(self._text) > MAX_METADATA_BYTES:
            raise SpecError(
                "", f"at most {MAX_METADATA_BYTES} bytes as JSON, got {len(self._text)}"
            )

    @property
    def text(self) -> str:
        """All of it as JSON, the same text for the same values."""
        return self._text

    def to_dict(self) -> dict[str, object]:
        """The values, which are the caller's to change."""
        found: dict[str, object] = json.loads(self._text)
        return found

    def __getitem__(self, name: str) -> object:
        return self.to_dict()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return len(self.to_dict())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Metadata):
            return self.text == other.text
        return isinstance(other, Mapping) and self.to_dict() == dict(other)

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Metadata({self.text})"


NO_METADATA = Metadata()


def read_name(value: object, may_be_empty: bool = True) -> str:
    """A sink's name, a tag or an id: 1 to 128 of `A-Z a-z 0-9 _ . -`, the first no dot or hyphen.

    Raises:
        SpecError: anything else.
    """
    if not isinstance(value, str):
        raise SpecError("", f"expected `str`, got {kind(value)}")
    if not value and may_be_empty:
        return value
    if len(value) > MAX_NAME:
        raise SpecError("", f"at most {MAX_NAME} characters, got {len(value)}")
    if not _NAME.fullmatch(value):
        raise SpecError(
            "",
            f"expected 1 to {MAX_NAME} of A-Z a-z 0-9 _ . -, the first no dot or hyphen, "
            f"got {show(value)}",
        )
    return value
