from hypothesis import given
from hypothesis import strategies as st

from midstream.plan.positions.ranges import clip, count, merge, well_formed

REACH = 12

raw_ranges = st.lists(
    st.tuples(st.integers(0, 10), st.none() | st.integers(1, 6)).map(
        lambda each: (each[0], None if each[1] is None else each[0] + each[1])
    ),
    max_size=5,
)


def _members(ranges, length):
    return {
        position
        for start, stop in ranges
        for position in range(start, length if stop is None else min(stop, length))
    }


@given(raw_ranges, st.integers(0, REACH))
def test_merging_clipping_and_counting_agree_with_sets(ranges, length):
    merged = merge(ranges)
    assert _members(merged, length) == _members(ranges, length)
    assert _members(clip(merged, length), length) == _members(ranges, length)
    assert all(start < stop <= length for start, stop in clip(merged, length))
    assert count(merged, length) == len(_members(ranges, length))
    assert well_formed(merged)
    assert merge(merged) == merged


@given(raw_ranges)
def test_ranges_are_well_formed_just_when_merging_changes_nothing(ranges):
    assert well_formed(tuple(ranges)) == (merge(ranges) == tuple(ranges))


def test_empty_touching_unsorted_and_overlong_ranges_are_not_well_formed():
    for ranges in (((3, 3),), ((3, 2),), ((0, 2), (2, 3)), ((4, 5), (0, 1)), ((0, None), (9, 10))):
        assert not well_formed(ranges), ranges
