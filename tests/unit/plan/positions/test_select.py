import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from support.refusals import refused, refused_calls
from unit.plan.position_strategies import (
    capture_positions,
    prompt_of,
    prompts,
    rows_of,
    rows_of_item,
)

from midstream.errors import SpecError
from midstream.plan.positions.items import Media, Role, Span, Text, TokenIds, Window
from midstream.plan.positions.position_set import Match, Where
from midstream.plan.positions.positions import Positions
from midstream.plan.positions.prompt import Prompt
from midstream.plan.positions.ranges import clip, well_formed
from midstream.plan.positions.select import MAX_RANGES, PromptSelections, select

LAST_SAMPLED = "the last sampled token is never fed back, so it has no activations"

# An id that no selection names, and all those that one may.
UNNAMED = 9
IDS = range(UNNAMED + 1)


def _rows(ranges, length):
    return {row for start, stop in clip(ranges, length) for row in range(start, stop)}


def _is_empty_handed(positions, prompt, max_tokens):
    """Whether nothing can be selected, or an item that names places has none."""
    longest = [*prompt.token_ids, *[UNNAMED] * (max_tokens - 1)]
    if any(
        not isinstance(item, (str, TokenIds)) and not rows_of_item(item, prompt, longest)
        for item in positions.include
    ):
        return True
    # Whether a row is selected depends on its own id alone, and, for "last_row", on the length.
    return not any(
        rows_of(positions, prompt, [*prompt.token_ids, *[token] * generated])
        for token in IDS
        for generated in range(max_tokens)
    )


@given(capture_positions, prompts(), st.data())
@settings(max_examples=rounds(suite=300, nightly=2400))
def test_selecting_is_asking_of_each_row_whether_it_is_meant(positions, prompt, data):
    max_tokens = data.draw(st.integers(1, 8))
    try:
        where = select(positions, prompt, max_tokens)
    except SpecError:
        assert _is_empty_handed(positions, prompt, max_tokens)
        return
    assert not _is_empty_handed(positions, prompt, max_tokens)
    assert len(where.matches) <= 2
    parts = [where.ranges, *(match.ranges for match in where.matches)]
    assert all(map(well_formed, parts))
    assert all(start >= prompt.length for match in where.matches for start, _ in match.ranges)
    assert all(match.ids == tuple(sorted(set(match.ids))) != () for match in where.matches)
    for num_generated in range(1, max_tokens + 1):
        generated = data.draw(st.lists(st.sampled_from(IDS), min_size=8, max_size=8))
        ids = [*prompt.token_ids, *generated[: num_generated - 1]]
        length = len(ids)
        expected = rows_of(positions, prompt, ids)
        assert _rows(where.final(length, ids), length) == expected
        assert expected <= _rows(where.possible, length)
        each = [_rows(part, length) for part in parts]
        assert sum(map(len, each)) == len(set().union(*each))


@given(capture_positions, prompts())
@settings(max_examples=rounds(suite=150, nightly=1200))
def test_without_max_tokens_the_same_is_selected_as_with_a_large_one(positions, prompt):
    endless = positions.phase != "prompt" and any(
        isinstance(item, (Span, Window)) and item.step > 1 and item.stop is None
        for item in (*positions.include, *positions.exclude)
    )
    try:
        expected = select(positions, prompt, 100)
    except SpecError:
        with pytest.raises(SpecError):
            select(positions, prompt, None)
        return
    if endless:
        with pytest.raises(SpecError, match="needs a stop"):
            select(positions, prompt, None)
    else:
        assert select(positions, prompt, None) == expected


@example(Positions("all", exclude=Media("all", "image")), Prompt(3))
@given(capture_positions, prompts())
def test_only_what_needs_the_prompt_depends_on_more_than_its_length(positions, prompt):
    def attempt(known):
        try:
            return select(positions, known, 6)
        except SpecError as error:
            return str(error)

    bare = attempt(Prompt(prompt.length))
    # A prompt may lack the images that are excluded, as the bare one does.
    excludes_media = any(isinstance(item, Media) for item in positions.exclude)
    if positions.needs_prompt:
        assert isinstance(bare, str) or excludes_media
    else:
        assert bare == attempt(prompt)


def ten(include, phase="all", max_tokens=5):
    """What is selected of ten tokens of a prompt, and of those generated."""
    return select(Positions(include, phase), Prompt(10), max_tokens)


def test_ten_prompt_tokens_and_at_most_five_generated():
    for include, phase, ranges, last_from in (
        ("all", "all", ((0, None),), None),
        ("all", "prompt", ((0, 10),), None),
        ("generated", "all", ((10, None),), None),
        ("last_prompt", "all", ((9, 10),), None),
        (-10, "all", ((0, 1),), None),
        (13, "all", ((13, 14),), None),
        ("last_row", "generated", (), 10),
        (["last_row", "generated"], "generated", ((10, None),), None),
        (["last_row", "generated"], "all", ((10, None),), 9),
        (slice(-3, None), "prompt", ((7, 10),), None),
        (slice(-30, -8), "all", ((0, 2),), None),
        (slice(8, 1000), "all", ((8, 1000),), None),
        (slice(0, None, 4), "all", ((0, 1), (4, 5), (8, 9), (12, 13)), None),
        (slice(0, None, 4), "generated", ((12, 13),), None),
        ([0, 1, 2, 7], "all", ((0, 3), (7, 8)), None),
        (Window(0, 10), "all", ((10, 20),), None),
        (Window(-2, 2), "generated", ((10, 12),), None),
        (Window(-99, -8), "all", ((0, 2),), None),
        (Window(-4, None, 3), "all", ((6, 7), (9, 10), (12, 13)), None),
    ):
        assert ten(include, phase) == Where(ranges, (), last_from), (include, phase)
    assert ten(9, max_tokens=1) == Where(((9, 10),))
    assert ten(["prompt", "generated"], max_tokens=1).final(10, ()) == ((0, 10),)


# Token ids 0 "a", 1 " a", 2 "b", 3 " ".
FOUR = prompt_of([0, 2, 0, 1])


def test_token_ids_and_what_is_left_out():
    for positions, where in (
        (Positions(TokenIds(0)), Where(((0, 1), (2, 3)), (Match(((4, None),), (0,)),))),
        (Positions(TokenIds(7), "generated"), Where((), (Match(((4, None),), (7,)),))),
        (Positions([TokenIds(0), "generated"]), Where(((0, 1), (2, 3), (4, None)))),
        (
            Positions("all", exclude=TokenIds(0)),
            Where(((1, 2), (3, 4)), (Match(((4, None),), (0,), others=True),)),
        ),
        (
            Positions([TokenIds([0, 5, 6]), Window(0, 2)], exclude=[TokenIds([2, 6]), 7]),
            Where(
                ((0, 1), (2, 3)),
                (Match(((4, 6),), (2, 6), others=True), Match(((6, 7), (8, None)), (0, 5))),
            ),
        ),
        (Positions(TokenIds([0, 2]), "prompt", TokenIds(2)), Where(((0, 1), (2, 3)))),
        (Positions("all", exclude=[slice(50, 60), Text("zz"), 99]), Where(((0, None),))),
        (Positions("prompt", exclude=Role("user")), Where(((0, 4),))),
    ):
        assert select(positions, FOUR, 9) == where, positions
    removed = "nothing is selected.*and `exclude` removes all"
    refused(
        lambda positions: select(positions, FOUR, 9),
        (Positions(TokenIds(0), exclude=[TokenIds(0), TokenIds(1)]), removed),
        (Positions(["prompt", "generated"], exclude=["prompt", "generated"]), removed),
        (Positions("prompt", exclude=TokenIds([0, 1, 2])), removed),
    )


def test_where_nothing_is_generated_no_token_is_left_to_be_matched():
    assert select(Positions(TokenIds(0)), FOUR, 1) == Where(((0, 1), (2, 3)))
    with pytest.raises(SpecError, match=f"none of the token ids occurs; {LAST_SAMPLED}"):
        select(Positions(TokenIds(7)), FOUR, 1)


def test_what_is_asked_for_does_not_depend_on_max_tokens():
    for include in ("all", "generated", slice(3, None), slice(3, 200), Window(0, 300)):
        expected = select(Positions(include), Prompt(10), 500)
        assert select(Positions(include), Prompt(10), 5) == expected


def test_a_span_with_a_step_needs_an_end_only_where_there_is_none():
    endless = "the span 0::2 needs a stop.*max_tokens is not set"
    refused(
        lambda positions: select(positions, Prompt(4), None),
        (Positions([0, slice(None, None, 2)]), "positions[1]", endless),
        (Positions("all", exclude=[1, Window(0, None, 2)]), "exclude[1]", "needs a stop"),
    )
    for positions in (Positions(slice(0, 5, 2)), Positions(slice(None, None, 2), "prompt")):
        assert select(positions, Prompt(4), None)


def test_what_selects_nothing_is_refused_and_explained():
    generated = f'only tokens of phase "generated".*; {LAST_SAMPLED}'
    refused_calls(
        (lambda: ten(14), "positions", f"14 is out of range.*from -10 to 13; {LAST_SAMPLED}"),
        (lambda: ten(15), "positions", "has 10 tokens and max_tokens is 5.*from -10 to 13$"),
        (lambda: ten([0, -11]), "positions[1]", "-11 is out of range.*from -10 to 13$"),
        (lambda: ten(-11, "all", None), "positions", "10 tokens, so positions go from -10 up"),
        (lambda: ten(slice(14, None)), "positions", "the span 14: selects nothing"),
        (lambda: ten([0, slice(50, 60)]), "positions[1]", "the span 50:60 selects nothing"),
        (lambda: ten(slice(-3, 7)), "positions", "the span -3:7 selects nothing"),
        (lambda: ten(slice(0, -10)), "positions", "the span 0:-10 selects nothing"),
        (lambda: ten(Window(-20, -10)), "positions", r"Window\(-20, -10\) selects nothing"),
        (lambda: ten(Window(0, 4), "all", 1), "positions", f"selects nothing.*{LAST_SAMPLED}"),
        (lambda: ten("generated", "all", 1), "positions", f"max_tokens is 1; {LAST_SAMPLED}"),
        (lambda: ten("all", "generated", 1), "positions", generated),
        (lambda: ten("last_row", "generated", 1), "positions", generated),
        (lambda: ten([3, slice(2, 9)], "generated"), "positions", 'only tokens of phase "gener'),
        (lambda: ten(slice(10, 12), "prompt"), "positions", 'only tokens of phase "prompt"'),
        (lambda: ten(slice(0, 2**31, 2), "all", None), "positions", "1073741824 separate.*65536"),
        (lambda: ten(TokenIds(1)), "positions", 'no token ids.*phase="generated"'),
        (lambda: ten([0, Text("a")]), "positions[1]", "no text to search"),
        (lambda: ten(Role("user")), "positions", r"chat messages; use chat\(\) instead"),
    )
    refused(
        lambda exclude: select(Positions("all", exclude=exclude), Prompt(10), 5),
        ([0, Role("user")], "exclude[1]", "use chat"),
    )


def test_more_ranges_than_a_plan_has_room_for_are_refused():
    ids = tuple(number % 2 for number in range(2 * MAX_RANGES + 2))
    with pytest.raises(SpecError, match="65537 separate ranges.*limit of 65536"):
        select(Positions(TokenIds(0), "prompt"), Prompt(len(ids), ids), 5)
    where = select(Positions(TokenIds(0), "prompt"), Prompt(len(ids) - 2, ids[2:]), 5)
    assert where.num_ranges == MAX_RANGES


def test_ranges_of_spans_with_a_step_are_counted_over_all_selections_of_a_plan():
    selections = PromptSelections(Prompt(40_000), 1)
    halves = [Span(0, 40_000, 2), Span(1, 40_000, 2)]
    for nth in range(6):
        assert selections.select(Positions(halves, "all", [nth])).num_ranges <= 2
        selections.select(Positions(halves, "all", [nth]))  # located once
    problem = "match 280000 tokens and ranges before overlaps are merged, and the budget is 262144"
    with pytest.raises(SpecError, match=problem) as caught:
        selections.select(Positions(halves, "all", [7]))
    assert caught.value.path == "positions[1]"
