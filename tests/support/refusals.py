"""Tables of what is refused: each value with the path and the words of its error."""

import re
from collections.abc import Callable
from typing import Any

from midstream.errors import SpecError


def refused(
    read: Callable[[Any], object], *cases: tuple[Any, ...], error: type[Exception] = SpecError
) -> None:
    """`read` refuses the value of each case (value, path, words), or (value, words)."""
    for number, (value, *path, words) in enumerate(cases):
        problem: Any = _problem(read, value, error)
        fits = problem is not None and re.search(words, str(problem))
        if not fits or (path and problem.path != path[0]):
            raise AssertionError(f"case {number}, {(value, *path, words)}: {problem!r}")


def refused_calls(*cases: tuple[Any, ...], error: type[Exception] = SpecError) -> None:
    """Each case is a function to call, the path and the words; or without the path."""
    refused(lambda call: call(), *cases, error=error)


def _problem(read: Callable[[Any], object], value: Any, error: type[Exception]) -> Exception | None:
    try:
        read(value)
    except error as problem:
        return problem
    return None
