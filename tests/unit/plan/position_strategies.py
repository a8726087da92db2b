"""Hypothesis strategies for positions and prompts, and what they select, position by position."""

from collections.abc import Sequence

from hypothesis import strategies as st
from support.slow_positions import find_text

from midstream.errors import SpecError
from midstream.plan.positions.items import (
    MEDIA_KINDS,
    Between,
    Item,
    Media,
    Role,
    Span,
    Text,
    TokenIds,
    Window,
)
from midstream.plan.positions.positions import Positions
from midstream.plan.positions.prompt import MediaItem, Message, Prompt
from midstream.plan.positions.ranges import merge
from midstream.plan.positions.text_map import TextMap
from midstream.plan.positions.work import WorkBudget

PHASES = ("all", "prompt", "generated")
CAPTURE_WORDS = ("all", "prompt", "generated", "last_prompt", "last_row")
EDIT_WORDS = ("all", "prompt", "generated", "last_prompt")
EXCLUDE_WORDS = ("prompt", "generated", "last_prompt")

# What each token id spells in the prompts below: whitespace, one within another, nothing at all.
PIECES = ("a", " a", "b", " ", "ab ", "", "\n")
ROLES = ("user", "assistant")


@st.composite
def spans(draw: st.DrawFn, bound: int = 12) -> Span:
    start = draw(st.integers(-bound, bound))
    stop = draw(st.none() | st.integers(-bound, bound))
    try:
        return Span(start, stop, draw(st.integers(1, 5)))
    except SpecError:
        return Span(start)


@st.composite
def windows(draw: st.DrawFn, bound: int = 12) -> Window:
    start = draw(st.integers(-bound, bound))
    stop = draw(st.none() | st.integers(start + 1, bound + 1))
    return Window(start, stop, draw(st.integers(1, 5)))


token_ids = st.lists(st.integers(0, 8), min_size=1, max_size=4, unique=True).map(TokenIds)
which = st.just("all") | st.integers(-3, 2)
texts = st.builds(Text, st.text("ab \n", min_size=1, max_size=3), which)
roles = st.builds(Role, st.sampled_from((*ROLES, "system")), which)
marks = st.text("ab", min_size=1, max_size=3) | st.lists(st.integers(0, 8), min_size=1, max_size=3)
# Not among those of `items`, whose tests have no tokens to look for marks.
marked = st.builds(Between, marks, st.none() | marks)
media = st.builds(Media, which, st.sampled_from(MEDIA_KINDS))


def items(words: Sequence[str], bound: int = 12) -> st.SearchStrategy[Item]:
    return st.one_of(
        st.sampled_from(words),
        st.integers(-bound, bound),
        spans(bound),
        windows(bound),
        token_ids,
        texts,
        roles,
        media,
    )


@st.composite
def positions(draw: st.DrawFn, words: Sequence[str], bound: int = 12) -> Positions:
    """Positions that can be constructed: what cannot be in them is left out."""
    phase = draw(st.sampled_from(PHASES))
    include = [
        item
        for item in draw(st.lists(items(words, bound), min_size=1, max_size=4, unique=True))
        if _is_allowed(item, phase)
    ]
    exclude = [
        item
        for item in draw(st.lists(items(EXCLUDE_WORDS, bound), max_size=3, unique=True))
        if _is_allowed(item, phase)
    ]
    return Positions(include or "all", phase, [] if "last_row" in include else exclude)


def _is_allowed(item: Item, phase: str) -> bool:
    try:
        Positions(item, phase)
    except SpecError:
        return False
    return True


def _ascends(found: Positions) -> bool:
    """Whether captures take it for any prompt: a list of single positions has their order."""
    singles = [item for item in found.include if isinstance(item, int)]
    if len(found.include) == 1 or not all(
        isinstance(item, int) or item in ("last_prompt", "last_row") for item in found.include
    ):
        return True
    of_one_end = len({item < 0 for item in singles}) == 1 and len(singles) == len(found.include)
    return of_one_end and list(singles) == sorted(singles)


capture_positions = positions(CAPTURE_WORDS).filter(_ascends)
edit_positions = positions(EDIT_WORDS)


def prompt_of(
    ids: Sequence[int], messages: Sequence[Message] | None = (), media: Sequence[MediaItem] = ()
) -> Prompt:
    """A prompt of tokens of PIECES."""
    starts, stops, text = [], [], ""
    for token in ids:
        starts.append(len(text))
        text += PIECES[token]
        stops.append(len(text))
    known = None if messages is None else tuple(messages)
    return Prompt(
        len(ids), tuple(ids), TextMap(text, tuple(starts), tuple(stops)), known, tuple(media)
    )


@st.composite
def prompts(draw: st.DrawFn, longest: int = 8) -> Prompt:
    ids = draw(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=longest))
    # Messages follow one another: each pair of cuts is one.
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    pairs = zip(cuts[::2], cuts[1::2], strict=False)
    messages = [
        Message(draw(st.sampled_from(ROLES)), index, *pair) for index, pair in enumerate(pairs)
    ]
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6, unique=True)))
    items = []
    for start, stop in zip(cuts[::2], cuts[1::2], strict=False):
        held = draw(st.sets(st.integers(start, stop - 1)))
        ranges = merge((place, place + 1) for place in held)
        items.append(MediaItem(draw(st.sampled_from(MEDIA_KINDS[:2])), start, stop, ranges))
    return prompt_of(ids, messages, items)


def found_texts(known: TextMap, wanted: str) -> list[tuple[int, int]]:
    """The token range of each occurrence of a text, as its index has them."""
    numbers = known.index.find(wanted, WorkBudget())
    return [
        tokens for number in numbers for tokens in known.index.ranges(number[None], len(wanted))
    ]


def rows_of_item(item: Item, prompt: Prompt, ids: Sequence[int]) -> set[int]:
    """The rows of one item, by asking of each row whether it is meant.

    Args:
        ids: the token at each row, the prompt's first.
    """
    length, num_rows = prompt.length, len(ids)
    rows = range(num_rows)
    if isinstance(item, Span):
        bounds = [
            bound if bound is None or bound >= 0 else max(0, length + bound)
            for bound in (item.start, item.stop)
        ]
        return set(rows[slice(*bounds, item.step)])
    if isinstance(item, Window):
        first = max(0, length + item.start)
        return {
            row
            for row in rows
            if row >= first
            and (row - first) % item.step == 0
            and (item.stop is None or row - length < item.stop)
        }
    if isinstance(item, TokenIds):
        return {row for row in rows if ids[row] in item.ids}
    if isinstance(item, Text):
        found = [set(range(*span)) for span in find_text(prompt.text_map, item.text)]
        return _chosen(found, item.occurrence)
    if isinstance(item, Role):
        mine = [message for message in prompt.messages if message.role == item.role]
        return _chosen([set(range(each.start, each.stop)) for each in mine], item.message)
    if isinstance(item, Media):
        held = [
            {row for row in rows if any(start <= row < stop for start, stop in found.ranges)}
            for found in prompt.media
            if found.kind == item.kind
        ]
        return _chosen(held, item.index)
    wanted = {
        "all": lambda row: True,
        "prompt": lambda row: row < length,
        "generated": lambda row: row >= length,
        "last_prompt": lambda row: row == length - 1,
        "last_row": lambda row: row == num_rows - 1,
    }
    if isinstance(item, str):
        return {row for row in rows if wanted[item](row)}
    return {row for row in rows if row == item or row - length == item < 0}


def _chosen(found: list[set[int]], index: int | str) -> set[int]:
    if index == "all":
        return set().union(*found)
    return found[index] if -len(found) <= index < len(found) else set()


def rows_of(wanted: Positions, prompt: Prompt, ids: Sequence[int]) -> set[int]:
    """The rows that are meant, of a request with these tokens at its rows."""
    chosen = set().union(*(rows_of_item(item, prompt, ids) for item in wanted.include))
    left_out = set().union(*(rows_of_item(item, prompt, ids) for item in wanted.exclude))
    return {
        row
        for row in chosen - left_out
        if wanted.phase == "all" or (row < prompt.length) == (wanted.phase == "prompt")
    }
