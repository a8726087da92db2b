from hypothesis import given
from hypothesis import strategies as st

from midstream.plan.positions.range_set import complement, intersect, least, overlay, subtract
from midstream.plan.positions.ranges import merge, well_formed

LENGTH = 20

sets = st.lists(
    st.tuples(st.integers(0, 10), st.none() | st.integers(1, 6)).map(
        lambda each: (each[0], None if each[1] is None else each[0] + each[1])
    ),
    max_size=5,
).map(merge)


def _members(ranges):
    return {
        position
        for start, stop in ranges
        for position in range(start, LENGTH if stop is None else stop)
    }


@given(sets, sets)
def test_the_algebra_of_ranges_is_that_of_sets(one, other):
    for found, expected in [
        (intersect(one, other), _members(one) & _members(other)),
        (subtract(one, other), _members(one) - _members(other)),
        (complement(one), set(range(LENGTH)) - _members(one)),
    ]:
        assert well_formed(found)
        assert _members(found) == expected


@given(st.lists(sets, max_size=4))
def test_an_overlay_says_for_every_position_which_sets_hold_it(parts):
    pieces = list(overlay(parts))
    bounds = [(start, stop) for start, stop, _ in pieces]
    # One after the other, from 0 on without end.
    assert bounds[0][0] == 0
    assert [stop for _, stop in bounds] == [*(start for start, _ in bounds[1:]), None]
    for start, stop, here in pieces:
        assert stop is None or start < stop
        for position in range(start, LENGTH if stop is None else stop):
            assert here == tuple(
                nth for nth, ranges in enumerate(parts) if position in _members(ranges)
            )


@given(sets, sets)
def test_endless_sets_stay_endless(one, other):
    def endless(ranges):
        return bool(ranges) and ranges[-1][1] is None

    assert endless(intersect(one, other)) == (endless(one) and endless(other))
    assert endless(subtract(one, other)) == (endless(one) and not endless(other))
    assert complement(complement(one)) == one


def test_an_end_is_least_if_it_is_one():
    assert (least(3, 5), least(None, 5), least(5, None), least(None, None)) == (3, 5, 5, None)
