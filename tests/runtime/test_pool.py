"""A pool against one that knows nothing of places."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.nightly import rounds
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.runtime.pool import Pool

# The length of a thing is part of what it is.
LENGTHS = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 8}


@settings(max_examples=rounds(suite=150, nightly=1200))
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(sorted(LENGTHS))), max_size=40))
def test_what_is_held_is_apart_and_stays_in_place_until_its_last_user_has_gone(steps):
    pool = Pool(12)
    users: Counter[str] = Counter()
    starts: dict[str, int] = {}
    for takes, key in steps:
        length = LENGTHS[key]
        if takes:
            found = pool.acquire(key, length)
            if found is None:
                assert key not in starts
                taken = {
                    place for each in starts for place in range(starts[each], _stop(starts, each))
                }
                gaps = "".join("x" if place in taken else " " for place in range(12)).split("x")
                assert max(map(len, gaps)) < length, "there was a gap that is long enough"
                continue
            start, is_new = found
            assert is_new == (key not in starts)
            assert starts.setdefault(key, start) == start
            users[key] += 1
        elif users[key]:
            pool.release(key)
            users[key] -= 1
            if not users[key]:
                del starts[key]
        places = [place for each in starts for place in range(starts[each], _stop(starts, each))]
        assert len(places) == len(set(places)) == pool.used
        assert all(0 <= place < pool.size for place in places)
    for key in list(users.elements()):
        pool.release(key)
    assert pool.used == 0
    assert pool.acquire("everything", 12) == (0, True)


def _stop(starts: dict[str, int], key: str) -> int:
    return starts[key] + LENGTHS[key]


def test_what_is_released_more_often_than_acquired_is_an_error():
    pool = Pool(4)
    pool.acquire("a", 1)
    pool.release("a")
    with pytest.raises(KeyError):
        pool.release("a")


def test_an_empty_pool_has_room_for_nothing():
    pool = Pool(0)
    assert pool.acquire("a", 1) is None
    assert pool.size == pool.used == 0
