"""Parser of codec names with parameters: `raw`, `cast:dtype=float16`, `topk8:k=64`, …"""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import fields
from typing import Any

from midstream.codecs.base import Codec
from midstream.codecs.cast import Cast
from midstream.codecs.full8 import Full8
from midstream.codecs.per_dim import Full8PerDim
from midstream.codecs.raw import Raw
from midstream.codecs.rp8 import Rp8
from midstream.codecs.topk8 import Topk8
from midstream.errors import SpecError, UnsupportedError
from midstream.validation import at, hint, kind, listed, show

_Known = Raw | Cast | Full8 | Rp8 | Topk8
_CLASSES: dict[str, type[_Known]] = {
    "raw": Raw,
    "cast": Cast,
    "full8": Full8,
    "rp8": Rp8,
    "topk8": Topk8,
}
_FORMS = listed(("raw", "cast:dtype=bfloat16", "full8", "rp8:k=512,seed=0", "topk8:k=64"))
_NUMBER = re.compile(r"0|[1-9][0-9]{0,19}")


def parse_codec(text: object) -> Codec:
    """Return the codec of a text; a codec object is returned unchanged.

    Omitted parameters have their defaults: `rp8` is `rp8:k=512,seed=0`. `full8:per=row` is `full8`.

    Args:
        text: a name, optionally with a colon and parameters: `topk8:k=64`.

    Raises:
        SpecError: an unknown codec or parameter, or a parameter out of range. The path is
            `codec`, or `codec.k` for parameter k.
        UnsupportedError: the machine is not little-endian.
    """
    if sys.byteorder != "little":
        raise UnsupportedError("codec: codecs require a little-endian machine")
    if isinstance(text, str):
        return _parse(text)
    if isinstance(text, _Known):
        return text
    raise SpecError("codec", f"expected one of {_FORMS}, got {kind(text)}")


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> Codec:
    with at("codec"):
        if text == Full8PerDim().spec:
            raise SpecError(
                "",
                f"{text} needs all rows of a completion, and rows are encoded as they are "
                f'captured; use full8, or capture raw and `Activations.save(path, codec="{text}")`',
            )
        if text == "full8:per=row":
            return Full8()
        name, colon, parameters = text.partition(":")
        if name not in _CLASSES:
            raise SpecError("", f"expected one of {_FORMS}, got {show(text)}{hint(name, _CLASSES)}")
        cls = _CLASSES[name]
        known = tuple(field.name for field in fields(cls))
        return cls(**_parameters(name, known, parameters)) if colon else cls()


def _parameters(codec: str, known: tuple[str, ...], text: str) -> dict[str, Any]:
    """Read parameters such as `k=512,seed=0`; `known` are the codec's parameters."""
    parameters: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in known:
            takes = listed(known) if known else "no parameters"
            raise SpecError("", f"`{codec}` takes {takes}, got {show(part)}{hint(name, known)}")
        if name in parameters:
            raise SpecError(name, "duplicate parameter")
        if name == "dtype":
            parameters[name] = value
            continue
        if not _NUMBER.fullmatch(value):
            raise SpecError(name, f"expected a decimal number, got {show(value)}")
        parameters[name] = int(value)
    return parameters
