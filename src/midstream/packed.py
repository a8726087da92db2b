"""Former location of `midstream.results.serialization`, kept for one release."""

from midstream.results.serialization import pack, unpack

__all__ = ["pack", "unpack"]
