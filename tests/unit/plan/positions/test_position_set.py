import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from midstream.errors import SpecError
from midstream.plan.positions.position_set import Match, Where
from midstream.plan.positions.ranges import merge

IDS = (7, 7, 7, 5, 6, 5, 8)


def test_a_set_is_cut_at_the_requests_end_and_matches_tokens_by_their_ids():
    span, by_id = ((0, 2), (5, None)), (Match(((3, 5), (6, None)), (5, 8)),)
    rest = (Match(((3, None),), (5, 8), others=True),)
    for where, length, ranges in (
        (Where(span), 7, ((0, 2), (5, 7))),
        (Where(span), 4, ((0, 2),)),
        (Where((), by_id), 7, ((3, 4), (6, 7))),
        (Where((), by_id), 6, ((3, 4),)),
        (Where(((0, 1),), rest), 7, ((0, 1), (4, 5))),
        (Where((), last_from=4), 7, ((6, 7),)),
        (Where((), last_from=4), 5, ((4, 5),)),
        (Where((), last_from=4), 4, ()),
    ):
        assert where.final(length, IDS) == ranges
    assert Where(((0, None),)).final(7, ()) == ((0, 7),)


def test_what_is_possible_is_the_union_of_all_parts():
    where = Where(((0, 1), (4, 5)), (Match(((5, 6),), (1,)), Match(((8, 9),), (2,))), 10)
    assert where.possible == ((0, 1), (4, 6), (8, 9), (10, None))
    assert where.num_ranges == 4


_RANGES = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 5)).map(lambda one: (one[0], sum(one))), min_size=1
).map(merge)


@example(((0, 2), (5, 9)), False, 3, 12)
@given(_RANGES, st.booleans(), st.integers(1, 20), st.integers(1, 30))
def test_the_first_positions_are_the_lowest_ones(ranges, is_open, most, length):
    if is_open:
        ranges = (*ranges[:-1], (ranges[-1][0], None))
    every = [
        place for start, stop in Where(ranges).final(length, ()) for place in range(start, stop)
    ]
    kept = Where(ranges).first(most).final(length, ())
    assert [place for start, stop in kept for place in range(start, stop)] == every[:most]


def test_the_first_positions_are_known_although_later_ones_are_not():
    later = (Match(((8, None),), (5,)),)
    assert Where(((0, 4),), later, last_from=9).first(3) == Where(((0, 3),))
    assert Where(((0, 4),), later).first(4) == Where(((0, 4),))
    for where in (Where(((0, 4),), later), Where(((0, None),), (), last_from=2), Where((), later)):
        with pytest.raises(SpecError, match="depends on what is generated"):
            where.first(5)
