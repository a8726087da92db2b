"""Room for the frames of Python calls."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Values of the frame that makes the room: 256 KiB. CPython gives it a chunk of twice that size, of
# which memory is only taken where it is written; the other half is for the calls inside.
_VALUES = 1 << 15
# Whether this thread runs a function in such a frame.
_ROOM = threading.local()


def with_room_for_calls(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that does the same, and has room for the frames of all calls in it. CPython
    keeps frames in chunks of 16 KiB; at the end of one, where a forward pass launches its kernels,
    each call makes two system calls, which take longer than the call. A loop over steps maps the
    room once.
    """

    def in_room(*args: P.args, **kwargs: P.kwargs) -> T:
        _ROOM.is_made = True
        try:
            return function(*args, **kwargs)
        finally:
            _ROOM.is_made = False

    in_room.__code__ = in_room.__code__.replace(co_stacksize=_VALUES)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if getattr(_ROOM, "is_made", False):
            return function(*args, **kwargs)
        return in_room(*args, **kwargs)

    return run
