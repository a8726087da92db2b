"""Faults that a build must not have, and the tests that find them; see `scripts/broken_builds.py`.

Most are what another tool does, or did: an edit or a capture that is silently wrong. They are in
the files of `planted/`, where each is a few lines:

    ## what must never happen
    where test
    - the code
    + what makes the fault of it
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    """One way to break midstream."""

    never: str  # what must never happen
    # The qualified name of what has the code: of a function, of a class, or of what is assigned in
    # a module (`Arena.release`, `_LIMIT`); `gates:` is a whole module. If several modules have one
    # of that name, it begins with the end of the module's: `gates:read`, `resolve.gates:read`.
    where: str
    test: str  # of pytest, which must fail then
    # Code that occurs once there: an expression, or statements; a header that comes last
    # (`if names:`) stands for itself alone.
    before: str
    after: str  # what makes the fault of it: the same kind of code, or nothing for statements


def read(text: str) -> Iterator[Fault]:
    """Yield the faults of a file."""
    for part in text.split("\n## ")[1:]:
        never, place, *code = part.splitlines()
        before, after = (
            "\n".join(line[2:] for line in code if line.startswith(sign)) for sign in ("- ", "+ ")
        )
        if not before or len(before.splitlines()) + len(after.splitlines()) < len(code):
            raise ValueError(f"no fault: {part}")
        yield Fault(never, *place.split(), before, after)


FAULTS = tuple(
    fault
    for file in sorted(Path(__file__).with_name("planted").glob("*.txt"))
    for fault in read(file.read_text())
)
