"""Alignment of two prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.errors import SpecError
from midstream.lab.sweep.alignment import align_positions, emit_align, read_align

LENGTHS = st.integers(1, 60)


@given(LENGTHS, LENGTHS)
def test_a_suffix_is_equally_far_from_both_ends_and_a_prefix_from_both_beginnings(target, source):
    found = align_positions("suffix", target, source)
    assert len(found) == min(target, source)
    assert all(target - one == source - other for one, other in found.items())
    assert found[target - 1] == source - 1
    assert align_positions("prefix", target, source) == {
        one: one for one in range(min(target, source))
    }


@given(st.data(), LENGTHS, LENGTHS)
def test_a_mapping_is_what_it_says_from_either_end(data, target, source):
    places = data.draw(st.sets(st.integers(0, target - 1), min_size=1))
    pairs = {one: data.draw(st.integers(0, source - 1)) for one in places}
    given = {
        one - data.draw(st.sampled_from([0, target])): other
        - data.draw(st.sampled_from([0, source]))
        for one, other in pairs.items()
    }
    align = read_align(given)
    assert align_positions(align, target, source) == pairs
    assert read_align(emit_align(align)) == align


def test_lengths_that_differ_and_pairs_that_the_prompts_lack_are_refused():
    for pairs in ({4: 0}, {0: 6}, {-5: 0}, {0: -7}, {3: 0, -1: 1}):
        with pytest.raises(SpecError) as error:
            align_positions(read_align(pairs), 4, 6)
        assert error.value.path.startswith("align[")
    with pytest.raises(SpecError, match=r"9 tokens and the source has 12.*suffix") as error:
        align_positions("exact", 9, 12)
    assert error.value.path == "align"


@pytest.mark.parametrize(
    ("value", "path"),
    [("sufix", ""), (3, ""), (None, ""), ({}, ""), ({"a": 1}, "[a]"), ({1.5: 1}, "[1.5]"),
     ({1: "2"}, "[1]"), ({True: 1}, "[True]")],
)  # fmt: skip
def test_malformed_alignments_are_refused_by_their_path(value, path):
    with pytest.raises(SpecError) as error:
        read_align(value)
    assert error.value.path == path
