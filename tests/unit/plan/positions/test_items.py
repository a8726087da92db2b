import pickle

import numpy as np
from hypothesis import given
from support.refusals import refused_calls
from unit.plan.position_strategies import EDIT_WORDS, items, marked

from midstream.plan.positions.items import (
    Image,
    Media,
    Role,
    Span,
    Text,
    TokenIds,
    Window,
    show_item,
)
from midstream.plan.positions.positions import Positions


def test_spans_and_windows_have_bounds_for_a_prompt():
    assert Span() == Span(0, None, 1) == Span(None, None, None)
    for item, length, bounds in (
        (Span(-3, -1), 10, (7, 9)),
        (Span(-3, 9), 2, (0, 9)),
        (Span(2), 10, (2, None)),
        (Window(-5, 0), 10, (5, 10)),
        (Window(-5, 0), 3, (0, 3)),
        (Window(-5, -4), 3, (0, 0)),
        (Window(0, None), 10, (10, None)),
    ):
        assert item.bounds(length) == bounds, item


def test_token_ids_are_a_set_whatever_their_order_and_type():
    assert TokenIds([3, 1]) == TokenIds((1, 3)) == TokenIds([np.int64(1), 3])
    assert hash(TokenIds([3, 1])) == hash(TokenIds([1, 3]))
    assert TokenIds(3) == TokenIds([3]) == TokenIds(np.int32(3))
    assert all(type(each) is int for each in TokenIds(np.int32(3)).ids)
    assert TokenIds(2**31 - 1).ids == (2**31 - 1,)
    assert len(TokenIds(list(range(4096))).ids) == 4096


@given(items(EDIT_WORDS) | marked)
def test_items_round_trip_and_are_hashable_and_shown(item):
    assert pickle.loads(pickle.dumps(item)) == item
    assert hash(Positions(item).include[0]) == hash(item)
    assert Positions(Positions(item).emit()).include == (item,)
    assert show_item(item)


def test_items_are_shown_short():
    for item, text in (
        (Span(1, 9), "1:9"),
        (Span(-3, None, 2), "-3::2"),
        (Window(-5, 0), "Window(-5, 0)"),
        (Window(0, None, 2), "Window(0, None, 2)"),
        (TokenIds(list(range(4096))), "TokenIds(0, 1, 2, 3, 4, 5, 6, 7, … 4096 in total)"),
        (Role("user", "all"), "Role('user', 'all')"),
        (Image("all"), "Image('all')"),
        (Media(0, "video"), "Media(0, 'video')"),
    ):
        assert str(item) == text
    assert len(str(Text("a" * 60000, 2))) < 90


def test_malformed_items_are_refused():
    refused_calls(
        (lambda: Window(0, -3), "", "is empty: the stop must be above the start"),
        (lambda: Window(None, 3), "start", "expected `int`, got `None`"),
        (lambda: Window(0, True), "stop", "expected `int`, got `bool`"),
        (lambda: Window(0, 3, -1), "step", "at least 1, got -1"),
        (lambda: TokenIds([]), "", "expected 1 to 4096 token ids, got 0"),
        (lambda: TokenIds(list(range(4097))), "", "expected 1 to 4096 token ids, got 4097"),
        (lambda: TokenIds("5"), "", "or a list of them, got `str`"),
        (lambda: TokenIds(True), "", "or a list of them, got `bool`"),
        (lambda: TokenIds([1, 1]), "[1]", "token id 1 is listed twice"),
        (lambda: TokenIds([1, -1]), "[1]", r"expected a token id, 0 to 2\*\*31 - 1, got -1"),
        (lambda: TokenIds(2**31), "", "expected a token id.*got 2147483648"),
        (lambda: Text(""), "text", "expected 1 to 65536 characters, got 0"),
        (lambda: Text("a" * 65537), "text", "expected 1 to 65536 characters, got 65537"),
        (lambda: Text("\ud83d"), "text", "unpaired surrogate"),
        (lambda: Text(b"a"), "text", "expected `str`, got `bytes`"),
        (lambda: Text("a", "first"), "occurrence", "`int` or \"all\", got 'first'"),
        (lambda: Role(""), "role", "expected 1 to 256 characters, got 0"),
        (lambda: Role("user", 1.0), "message", '`int` or "all", got `float`'),
        (lambda: Image("first"), "index", "`int` or \"all\", got 'first'"),
        (lambda: Media(0, "picture"), "kind", "`image`, `audio`, `video`, got 'picture'"),
        (lambda: Positions({"image": "x"}), "image", "`int` or \"all\", got 'x'"),
        (lambda: Positions({"image": 0, "index": 1}), "", "index"),
        (lambda: Positions(Image(0), "generated"), "", "cannot select a token of phase"),
        (lambda: Positions([Image(0), {"image": 0}]), "[1]", "is listed twice"),
    )


def test_an_image_is_one_of_the_media():
    assert Image(-1) == Media(-1, "image") == Positions({"image": -1}).include[0]
    assert Image("all").emit() == {"image": "all"}
    assert Media(2, "audio").emit() == {"audio": 2}
