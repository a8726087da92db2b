"""One way to break midstream on purpose, and the test that must find it."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One way to break midstream.

    Attributes:
        never: what must never happen.
        where: the qualified name of what has the code: of a function, of a class, or of what is
            assigned in a module (`Arena.release`, `_LIMIT`). If several modules have one of that
            name, it begins with the end of the module's name: `gates:read`, `resolve.gates:read`.
            `gates:` is the whole module.
        before: code that occurs once there: an expression, statements, or statements of which the
            last is a header (`if names:`), which stands for itself alone.
        after: what makes the fault of it: the same kind of code, or nothing in place of statements.
        test: of pytest, which must fail then.
    """

    never: str
    where: str
    before: str
    after: str
    test: str
