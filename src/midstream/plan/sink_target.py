"""Names and metadata under which a sink stores the captured rows of a request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from midstream.errors import SpecError
from midstream.validation import check_text, kind, show

# The built-in sink: captured rows are returned on the request's output.
MEMORY = "memory"
MAX_NAME = 128
MAX_METADATA_BYTES = 65536
# Depth of nested lists and objects. Some encoders of JSON allow no more than 200.
MAX_NESTING = 64

# A name is a single path component: no slash, and neither `.` nor `..`.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Metadata(Mapping[str, object]):
    """Immutable mapping of names to JSON values."""

    __slots__ = ("_text",)

    def __init__(self, value: object = None) -> None:
        """Create it from a mapping of JSON values by name; None: empty."""
        if value is None:
            value = {}
        if isinstance(value, Metadata):
            self._text: str = value.text
            return
        if not isinstance(value, Mapping):
            raise SpecError("", f"expected a dict of JSON values, got {kind(value)}")
        for name in value:
            if not isinstance(name, str):
                raise SpecError("", f"names must be `str`, got {kind(name)}")
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
        _check_values(value, MAX_NESTING)

    @property
    def text(self) -> str:
        """The values as canonical JSON: equal values give equal text."""
        return self._text

    def to_dict(self) -> dict[str, object]:
        """Return a copy of the values as a dict, which the caller may change."""
        values: dict[str, object] = json.loads(self._text)
        return values

    def __getitem__(self, name: str) -> object:
        return self.to_dict()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return len(self.to_dict())

    def __bool__(self) -> bool:
        return self._text != "{}"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Metadata):
            return self.text == other.text
        return isinstance(other, Mapping) and self.to_dict() == dict(other)

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Metadata({self.text})"


def _check_values(value: object, nesting: int) -> None:
    """Check that texts are Unicode, and nesting is not too deep for other encoders of JSON."""
    if isinstance(value, str):
        check_text(value)
    elif isinstance(value, (Mapping, list, tuple)):
        if not nesting:
            raise SpecError("", f"more than {MAX_NESTING} lists and dicts are in each other")
        for element in value:
            _check_values(element, nesting - 1)
        if isinstance(value, Mapping):
            for element in value.values():
                _check_values(element, nesting - 1)


NO_METADATA = Metadata()


def read_name(value: object, may_be_empty: bool = True) -> str:
    """Check a sink's name, a tag or a request id, and return it."""
    if not isinstance(value, str):
        raise SpecError("", f"expected `str`, got {kind(value)}")
    if not value and may_be_empty:
        return value
    if len(value) > MAX_NAME:
        raise SpecError("", f"at most {MAX_NAME} characters, got {len(value)}")
    if not _NAME.fullmatch(value):
        raise SpecError(
            "",
            f"expected 1 to {MAX_NAME} of the characters A-Z a-z 0-9 _ . -, not starting with a "
            f"dot or hyphen, got {show(value)}",
        )
    return value
