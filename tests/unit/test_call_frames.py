"""Calls at the end of one of CPython's chunks of frames."""

import resource
from collections.abc import Callable

import pytest

from midstream.call_frames import with_room_for_calls

CALLS, DEPTHS = 400, range(200)


def leaf(one: int, two: int, three: int) -> int:
    return one + two + three


def calls() -> int:
    """Return the number of pages that many equal calls touch first."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(CALLS):
        leaf(1, 2, 3)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def at(depth: int, function: Callable[[], int]) -> int:
    return at(depth - 1, function) if depth else function()


def test_calls_of_a_wrapped_function_map_no_memory_at_any_depth():
    def inside(depth: int) -> Callable[[], int]:
        return with_room_for_calls(lambda: at(depth, calls))

    # Somewhere in these depths each call maps a chunk of its own.
    assert max(at(depth, calls) for depth in DEPTHS) > CALLS / 2
    # However deep the wrapped function is called, and whatever it calls.
    assert max(at(depth, inside(0)) for depth in DEPTHS) < CALLS / 2
    assert max(at(0, inside(depth)) for depth in range(700)) < CALLS / 2


def test_a_wrapped_function_makes_no_room_inside_another_and_makes_it_again_after_an_error():
    inner = with_room_for_calls(leaf)

    def pages() -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for _ in range(CALLS):
            inner(1, 2, 3)
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    assert with_room_for_calls(pages)() < CALLS / 2
    with pytest.raises(ZeroDivisionError):
        with_room_for_calls(lambda: 1 // 0)()
    assert pages() >= CALLS


def test_a_wrapped_function_returns_and_raises_what_the_function_does():
    @with_room_for_calls
    def divide(one: float, *, by: float) -> float:
        """Doc."""
        return one / by

    assert divide(3, by=2) == 1.5
    assert (divide.__name__, divide.__doc__) == ("divide", "Doc.")
    try:
        divide(1, by=0)
    except ZeroDivisionError:
        return
    raise AssertionError
