"""The allocator of ranges against a plain bitmap."""

from hypothesis import given
from hypothesis import strategies as st

from midstream.runtime.worker.tables.range_pool import RangeAllocator


class Bitmap:
    """First fit, searched cell by cell."""

    def __init__(self, size):
        self.taken = [False] * size

    def acquire(self, length):
        for start in range(len(self.taken) - length + 1):
            if not any(self.taken[start : start + length]):
                self.taken[start : start + length] = [True] * length
                return start
        return None

    def release(self, start, length):
        assert all(self.taken[start : start + length])
        self.taken[start : start + length] = [False] * length

    def runs(self):
        """The maximal free ranges."""
        found, start = [], None
        for place, taken in enumerate([*self.taken, True]):
            if taken and start is not None:
                found.append((start, place))
                start = None
            elif not taken and start is None:
                start = place
        return found


steps = st.lists(
    st.tuples(st.just("acquire"), st.integers(0, 9))
    | st.tuples(st.just("release"), st.integers(0, 30)),
    max_size=80,
)


@given(size=st.integers(0, 40), steps=steps)
def test_it_hands_out_what_a_bitmap_would_and_joins_what_comes_back(size, steps):
    ranges, bitmap = RangeAllocator(size), Bitmap(size)
    held = []
    for step, number in steps:
        if step == "acquire":
            start = ranges.acquire(number)
            assert start == bitmap.acquire(number)
            if start is not None:
                held.append((start, number))
        elif held:
            start, length = held.pop(number % len(held))
            ranges.release(start, length)
            bitmap.release(start, length)
        assert ranges._free == bitmap.runs()
        assert ranges.free == bitmap.taken.count(False)
    for start, length in held:
        ranges.release(start, length)
    assert ranges.free == size
    assert ranges.acquire(size) == 0
