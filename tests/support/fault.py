"""One way to break midstream on purpose, and the test that must find it."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One way to break midstream.

    Attributes:
        never: what must never happen.
        file: below src/midstream.
        old, new: the text there, which occurs once, and what makes the fault of it.
        test: of pytest, which must fail then.
    """

    never: str
    file: str
    old: str
    new: str
    test: str
