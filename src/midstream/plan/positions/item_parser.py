"""Parser of the items of a position selection, from Python values and JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from midstream.errors import SpecError
from midstream.plan.argument_names import parameters_of
from midstream.plan.positions.items import (
    MAX_IDS,
    MEDIA_KINDS,
    VALUES,
    Between,
    Item,
    Media,
    Role,
    Span,
    Text,
    TokenIds,
    Value,
    Window,
    meets,
    show_item,
)
from midstream.validation import (
    MAX_ITEMS,
    as_number,
    at,
    hint,
    is_int,
    kind,
    listed,
    read_fields,
    read_int,
    read_word,
    show,
)

_LAST = (
    'use "last_prompt", which is −1, for the last token of the prompt, or "last_row" for the '
    "last row of the request, with what it generates"
)
_FIRST = "use 0 for the first token of the request"
_GENERATED = 'use "generated" for the tokens that the model generates'
_PROMPT = 'use "prompt" for the tokens of the prompt'
_THINKING = 'use Between("<think>", "</think>"), or Role("assistant", part="thinking") of a chat'
# Words of other tools, and what to write instead.
_MEANT = {
    **dict.fromkeys(("last", "last_token", "last_tok", "final", "final_token", "end", "-1"), _LAST),
    **dict.fromkeys(("first", "first_token", "bos", "start", "begin", "0"), _FIRST),
    **dict.fromkeys(("decode", "completion", "response", "output", "answer"), _GENERATED),
    **dict.fromkeys(("prefill", "input", "context"), _PROMPT),
    **dict.fromkeys(("thinking", "reasoning", "analysis", "cot"), _THINKING),
}

Made = TypeVar("Made", Span, Window)


def read_items(
    values: list[Any] | tuple[Any, ...], phase: str, words: Sequence[str]
) -> tuple[Item, ...]:
    """Read a list of distinct items, each of which can select a token of the phase."""
    if len(values) > MAX_ITEMS:
        raise SpecError("", f"expected at most {MAX_ITEMS} items, got {len(values)}; use slices")
    items: dict[Item, None] = {}
    ids = 0
    for index, value in enumerate(values):
        with at(f"[{index}]"):
            item = read_item(value, phase, words)
            if item in items:
                raise SpecError("", f"{show_item(item)} is listed twice")
            ids += len(item.ids) if isinstance(item, TokenIds) else 0
            if ids > MAX_IDS:
                raise SpecError("", f"expected at most {MAX_IDS} token ids in total")
            items[item] = None
    return tuple(items)


def read_item(value: object, phase: str, words: Sequence[str]) -> Item:
    """Read one item: one of the words, an int, a span in any form, an item value or its dict."""
    item: Item
    value = as_number(value)
    if isinstance(value, str):
        if value not in words and value in _MEANT:
            raise SpecError(
                "", f"expected one of {listed(words)}, got {show(value)}; {_MEANT[value]}"
            )
        item = read_word(value, words)
    elif is_int(value):
        item = read_int(value)
    elif isinstance(value, VALUES):
        item = value
    elif isinstance(value, slice):
        item = Span(value.start, value.stop, value.step)
    elif isinstance(value, range):
        item = _span_of_range(value)
    elif isinstance(value, Mapping):
        item = _value_of_dict(value)
    else:
        raise SpecError(
            "",
            f"expected one of {listed(words)}, an `int`, a slice, a dict of one of "
            f"{listed(_FORMS)}, or a list of these, got {kind(value)}",
        )
    if not meets(item, phase):
        raise SpecError("", f'{show_item(item)} cannot select a token of phase "{phase}"')
    return item


def _span_of_range(value: range) -> Span:
    if not value:
        raise SpecError("", f"{_show_range(value)} is empty")
    # A range lists its integers, so range(-3, 1) includes −1 and 0; as a slice it would not.
    if value.start < 0 <= value.stop:
        raise SpecError(
            "",
            f"{_show_range(value)} counts from the prompt's end and from its start; list the "
            'positions, or use slice(-n, None) and phase="prompt"',
        )
    return Span(value.start, value.stop, value.step)


def _show_range(value: range) -> str:
    """Return a range for messages."""
    return f"range({show(value.start)}, {show(value.stop)}, {show(value.step)})"


def _value_of_dict(value: Mapping[Any, Any]) -> Value:
    form = next((name for name in _FORMS if name in value), None)
    if form is not None:
        return _FORMS[form](value)
    if not value:
        raise SpecError("", f"expected a dict of one of {listed(_FORMS)}, got an empty one")
    name = next(iter(value))
    if not isinstance(name, str):
        raise SpecError("", f"field names must be `str`, got {kind(name)}")
    raise SpecError(
        "",
        f"expected a dict of one of {listed(_FORMS)}, got field {show(name)}{hint(name, _FORMS)}",
    )


def _read_bounds(
    value: Mapping[Any, Any], name: str, min_parts: int, make: Callable[..., Made]
) -> Made:
    parts = read_fields(value, required=(name,))[name]
    with at(name):
        if not isinstance(parts, (list, tuple)):
            raise SpecError("", f"expected [start, stop, step], got {kind(parts)}")
        if not min_parts <= len(parts) <= 3:
            raise SpecError(
                "", f"expected {min_parts} to 3 numbers, start, stop, step, got {len(parts)}"
            )
    try:
        return make(*parts)
    except SpecError as error:
        place = {"start": "[0]", "stop": "[1]", "step": "[2]", "": ""}
        raise SpecError(name + place[error.path], error.problem) from None


def _tokens(value: Mapping[Any, Any]) -> TokenIds:
    ids = read_fields(value, required=("tokens",))["tokens"]
    with at("tokens"):
        return TokenIds(ids)


def _media(value: Mapping[Any, Any], kind: Any) -> Media:
    index = read_fields(value, required=(kind,))[kind]
    try:
        return Media(index, kind)
    except SpecError as error:
        raise SpecError(kind, error.problem) from None


def _between(value: Mapping[Any, Any]) -> Between:
    marks = read_fields(value, required=("between",))["between"]
    with at("between"):
        if not isinstance(marks, (list, tuple)) or len(marks) != 2:
            raise SpecError("", f"expected [start, end], a mark or null each, got {kind(marks)}")
        return Between(*marks)


def _of_fields(value: Mapping[Any, Any], make: Any) -> Any:
    return make(**read_fields(value, *parameters_of(make)))


_FORMS: dict[str, Callable[[Mapping[Any, Any]], Value]] = {
    "slice": partial(_read_bounds, name="slice", min_parts=1, make=Span),
    "window": partial(_read_bounds, name="window", min_parts=2, make=Window),
    "tokens": _tokens,
    "text": partial(_of_fields, make=Text),
    "role": partial(_of_fields, make=Role),
    "between": _between,
    **{kind: partial(_media, kind=kind) for kind in MEDIA_KINDS},
}
