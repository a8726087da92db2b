"""Hypothesis strategies for what this package reads, and reference answers by enumeration."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from midstream.errors import SpecError
from midstream.sites import NAMES
from midstream.spec import Capture, Plan, Positions, Span, Steer, Vector

PHASES = ("all", "prompt", "generated")

json_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["all", "prompt", "last", "steer", "resid_post", "slice", "AACAPw=="])
)
field_names = st.sampled_from(
    ["capture", "edits", "layers", "sites", "positions", "phase", "vector", "layer", "scale"]
    + ["site", "op", "slice", "f32"]
) | st.text(max_size=4)
json_values = st.recursive(
    json_scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(field_names, inner, max_size=4),
    max_leaves=12,
)


@st.composite
def spans(draw: st.DrawFn, bound: int = 12) -> Span:
    start = draw(st.integers(-bound, bound))
    stop = draw(st.none() | st.integers(-bound, bound))
    try:
        return Span(start, stop, draw(st.integers(1, 5)))
    except SpecError:
        return Span(start)


@st.composite
def positions(draw: st.DrawFn, words: tuple[str, ...], bound: int = 12) -> Positions:
    """Positions that can be constructed: items that cannot be in the phase are left out."""
    phase = draw(st.sampled_from(PHASES))
    items = st.sampled_from(words) | st.integers(-bound, bound) | spans(bound)
    allowed = []
    for item in draw(st.lists(items, min_size=1, max_size=4, unique=True)):
        try:
            Positions(item, phase)
        except SpecError:
            continue
        allowed.append(item)
    return Positions(allowed or "all", phase)


capture_positions = positions(("all", "prompt", "generated", "last_prompt", "last"))
steer_positions = positions(("all", "prompt", "generated", "last_prompt"))

vectors = st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3
)
layers = st.just("all") | st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)
captures = st.builds(
    Capture,
    layers=layers,
    sites=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
    positions=capture_positions,
)
steers = st.builds(
    Steer,
    vector=vectors.map(Vector.parse),
    layer=st.integers(-4, 3),
    scale=st.floats(width=32, allow_nan=False, allow_infinity=False),
    site=st.sampled_from(NAMES),
    positions=steer_positions,
)
plans = st.builds(
    Plan,
    captures=st.lists(captures, min_size=1, max_size=3, unique=True).map(tuple),
    edits=st.lists(steers, max_size=3).map(tuple),
) | st.builds(Plan, edits=st.lists(steers, min_size=1, max_size=3).map(tuple))


@st.composite
def spoilt(draw: st.DrawFn, value: Any) -> Any:
    """`value`, of lists and dicts, with something in it replaced, removed or added."""
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        index = draw(st.integers(0, len(value) - 1))
        return [*value[:index], draw(spoilt(value[index])), *value[index + 1 :]]
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        name = draw(st.sampled_from(sorted(value)))
        match draw(st.integers(0, 5)):
            case 0:
                return {key: each for key, each in value.items() if key != name}
            case 1:
                return {**value, draw(field_names): draw(json_values)}
            case _:
                return {**value, name: draw(spoilt(value[name]))}
    return draw(json_values)


def rows_of_item(item: str | int | Span, prompt_len: int, num_rows: int) -> set[int]:
    """The rows of one item, by asking of each row whether it is meant."""
    if isinstance(item, Span):
        bounds = [
            bound if bound is None or bound >= 0 else max(0, prompt_len + bound)
            for bound in (item.start, item.stop)
        ]
        return set(list(range(num_rows))[slice(*bounds, item.step)])
    wanted = {
        "all": lambda row: True,
        "prompt": lambda row: row < prompt_len,
        "generated": lambda row: row >= prompt_len,
        "last_prompt": lambda row: row == prompt_len - 1,
        "last": lambda row: row == num_rows - 1,
    }
    if isinstance(item, str):
        return {row for row in range(num_rows) if wanted[item](row)}
    return {row for row in range(num_rows) if row == item or row - prompt_len == item < 0}


def rows_of(wanted: Positions, prompt_len: int, num_generated: int) -> set[int]:
    """The rows that are meant, of a request that ended with so many generated tokens."""
    num_rows = prompt_len + num_generated - 1
    chosen = set().union(*(rows_of_item(item, prompt_len, num_rows) for item in wanted.include))
    return {
        row
        for row in chosen
        if wanted.phase == "all" or (row < prompt_len) == (wanted.phase == "prompt")
    }
