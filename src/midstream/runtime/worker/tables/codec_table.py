"""Codecs of a worker, each with a number."""

from __future__ import annotations

from torch import Tensor

from midstream.codecs import Codec, Raw, parse_codec


class CodecTable:
    """The codecs that requests have used since the worker started; number 0 is `raw`."""

    def __init__(self, ring: Tensor) -> None:
        """Args:
        ring: [R, H], the staging ring whose rows the codecs encode.
        """
        self._ring = ring
        self._codecs: list[Codec] = [Raw()]
        self._numbers: dict[str, int] = {Raw().spec: 0}

    def number(self, spec: str) -> int:
        """Return the number of a codec.

        Raises:
            SpecError: there is no such codec, or its parameters are invalid.
        """
        number = self._numbers.get(spec)
        if number is None:
            codec = parse_codec(spec)
            # Encoding no rows allocates what the codec needs on the device, before a step needs it.
            codec.encode(self._ring[:0])
            self._codecs.append(codec)
            number = self._numbers[spec] = len(self._codecs) - 1
        return number

    def codec(self, number: int) -> Codec:
        """Return the codec with a number."""
        return self._codecs[number]
