"""The k-th row of an edit goes to the k-th listed position, however the positions are written."""

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from unit.plan.position_strategies import items, prompts, rows_of_item

from midstream.errors import SpecError
from midstream.plan import Gate, ModelShape, Plan, Replace, Steer, Text, TokenIds, Window
from midstream.plan.operations import Reading
from midstream.plan.positions.positions import Positions
from midstream.plan.positions.prompt import Prompt
from midstream.plan.positions.text_map import TextMap
from midstream.plan.resolve.resolve import resolve

SHAPE = ModelShape(4, 2, [("resid_post", layer) for layer in range(4)])
MAX_TOKENS = 4


def rows_at(edit, prompt) -> dict[int, tuple[float, ...]]:
    """The row that each position gets, of an edit at one layer."""
    found = {}
    for one in resolve(Plan.make(edits=edit), SHAPE, prompt, MAX_TOKENS).edits:
        ((start, stop),) = one.where.ranges
        *_, step = one.steps.instructions
        assert step.first == start
        found |= {start + nth: tuple(row.numpy()) for nth, row in enumerate(step.write)}
        assert len(step.write) == stop - start
    return found


def row(nth: int) -> tuple[float, float]:
    return (float(nth + 1), -1.0)


@pytest.mark.parametrize("kind", [Replace, Steer])
def test_each_row_goes_to_the_position_of_its_place_in_the_list(kind):
    text = "abcdefghij"
    prompt = Prompt(10, tuple(range(10)), TextMap(text, tuple(range(10)), tuple(range(1, 11))))
    for positions, listed, phase in (
        ([5, 2], [5, 2], None),
        ([-1, 0, -3], [9, 0, 7], None),
        ([8, 9, 1, 2, 3, 6], [8, 9, 1, 2, 3, 6], None),
        ([range(4, 6), 9, slice(0, 2)], [4, 5, 9, 0, 1], None),
        ([Window(0, 2), 3], [10, 11, 3], None),
        (["last_prompt", 2], [9, 2], None),
        ([Text("ef"), Text("b")], [4, 5, 1], None),
        ([TokenIds([8]), TokenIds([3, 0])], [8, 0, 3], "prompt"),
        (slice(2, 5), [2, 3, 4], None),
    ):
        rows = [row(nth) for nth in range(len(listed))]
        edit = kind(layer=2, positions=positions, phase=phase, rows=rows)
        wanted = dict(zip(listed, rows, strict=True))
        assert rows_at(edit, prompt) == wanted
        assert rows_at(Gate(edit, Reading([1.0, 0.0]), 0.5), prompt) == wanted


# Most lists of items select nothing of a prompt, or the same token twice.
@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(
    st.lists(items(("prompt", "last_prompt"), 9), min_size=1, max_size=4, unique=True),
    st.lists(items(("last_prompt",), 9), max_size=2, unique=True),
    prompts(),
)
def test_rows_follow_the_items_whatever_these_are(include, exclude, prompt):
    """Judged by asking of each item which tokens of the prompt it means."""
    try:
        positions = Positions(include, "prompt", exclude)
    except SpecError:
        assume(False)
    ids = prompt.token_ids
    left_out = set().union(*(rows_of_item(item, prompt, ids) for item in positions.exclude))
    each = [sorted(rows_of_item(item, prompt, ids) - left_out) for item in positions.include]
    listed = [position for part in each for position in part if position < prompt.length]
    assume(len(listed) > 1)
    rows = [row(nth) for nth in range(len(listed))]
    edit = Replace(rows, 1, positions=positions)
    if len(set(listed)) < len(listed):
        with pytest.raises(SpecError):
            rows_at(edit, prompt)
        return
    if not all(rows_of_item(item, prompt, ids) for item in positions.include):
        # An item that selects nothing may be rejected, whatever the rows.
        with suppress(SpecError):
            assert rows_at(edit, prompt) == dict(zip(listed, rows, strict=True))
        return
    assert rows_at(edit, prompt) == dict(zip(listed, rows, strict=True))


def test_a_position_that_is_listed_twice_would_have_two_rows():
    for positions, position in (
        ([2, -8], 2),
        ([slice(1, 4), 3], 3),
        ([0, slice(4, 6), range(5, 6)], 5),
    ):
        edit = Replace([row(nth) for nth in range(4)], 1, positions=positions)
        with pytest.raises(SpecError, match=f"position {position} is listed twice") as caught:
            rows_at(edit, Prompt(10))
        assert caught.value.path == "edits[0].positions", positions


def test_rows_in_the_same_places_are_the_same_edit_to_the_prefix_cache():
    one = Replace([row(0), row(1), row(2)], 1, positions=[5, 2, 3])
    other = Replace([row(1), row(2), row(0)], 1, positions=[2, 3, 5])
    plans = [resolve(Plan.make(edits=edit), SHAPE, Prompt(10), 4) for edit in (one, other)]
    assert plans[0].edits == plans[1].edits


def test_many_positions_in_any_order_are_as_few_runs_as_in_order():
    order = [*range(0, 4000, 2), *range(1, 4000, 2)]
    edit = Replace([row(nth) for nth in range(4000)], 1, positions=order)
    plan = resolve(Plan.make(edits=edit), SHAPE, Prompt(4000), 1)
    assert [one.where.ranges for one in plan.edits] == [((0, 4000),)]
