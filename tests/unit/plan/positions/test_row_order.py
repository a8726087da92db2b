"""Lists of single positions have the order of the rows that they return, and their number."""

import itertools

import pytest

from midstream import Attention, Capture, Features, Lens, Logits, Probe, Steer
from midstream.errors import SpecError
from midstream.plan import ModelShape, Plan, Prompt, Text, TopKeys, Window
from midstream.plan.positions.text_map import TextMap
from midstream.plan.resolve.resolve import resolve

V = [1.0, 2.0]
TAPS = [(site, layer) for site in ("resid_post", "rot_q", "final_norm") for layer in range(2)]
SHAPE = ModelShape(2, 2, TAPS, heads={("rot_q", 0): 1, ("rot_q", 1): 1})
READERS = {
    "Capture": lambda at: Capture(1, positions=at),
    "norms": lambda at: Capture(1, positions=at, reduce="norm"),
    "Attention": lambda at: Attention(1, queries=at, reduce=TopKeys(2)),
    "Lens": lambda at: Lens(1, positions=at),
    "Logits": lambda at: Logits(2, positions=at),
    "Features": lambda at: Features("s", positions=at, layer=1, site="resid_post"),
    "Probe": lambda at: Probe(V, 1, positions=at),
}


def asked(name: str, positions: object, length: int = 10) -> None:
    """Make a request of one reader, and resolve it for a prompt of so many tokens."""
    reader = READERS[name](positions)
    plan = Plan.make(**{"probes" if name == "Probe" else "capture": reader})
    text = TextMap("x" * length, tuple(range(length)), tuple(range(1, length + 1)))
    resolve(plan, SHAPE, Prompt(length, tuple(range(length)), text), 4)


def test_a_list_that_rows_would_not_follow_is_rejected():
    for name in READERS:
        for positions, length, index, problem in (
            ([5, 2], 10, 1, "position 2 is before 5, which is listed first"),
            ([0, -1, -2], 10, 2, "position -2 is before -1"),
            (["last_prompt", -2], 10, 1, "position -2 is before 'last_prompt'"),
            (["last_prompt", -1], 10, 1, "position -1 is the same as 'last_prompt'"),
            ([3, -1], 3, 1, "position -1 is before 3"),
            ([3, -1], 4, 1, "position -1 is the same as 3, which is listed too"),
            ([0, -1], 1, 1, "position -1 is the same as 0"),
            ([11, -1], 10, 1, "position -1 is before 11"),
        ):
            with pytest.raises(SpecError, match=problem) as caught:
                asked(name, positions, length)
            field = "queries" if name == "Attention" else "positions"
            assert caught.value.path.endswith(f"{field}[{index}]")


def test_lists_that_ascend_and_unions_of_other_items_are_kept():
    lists = (
        [2, 5], [0, -1], [-3, -1, 11], [3, "last_prompt"], 4, "all", range(2, 5),
        [Text("x", 5), Text("x", 1)], [slice(4, 6), 1], [Window(0, 2), 1], ["generated", "prompt"],
        [slice(0, 4), 3],
    )  # fmt: skip
    for name, positions in itertools.product(READERS, lists):
        asked(name, positions)


@pytest.mark.parametrize("name", ["Capture", "Probe"])
def test_the_last_row_may_be_that_of_the_prompts_end_and_comes_last(name):
    asked(name, ["last_prompt", "last_row"])
    with pytest.raises(SpecError, match="position 0 is before 'last_row'"):
        asked(name, ["last_row", 0])


def test_lists_without_a_row_each_may_be_in_any_order():
    for positions in ([5, 2], [3, -7], ["last_prompt", 9, 1]):
        Capture(1, positions=positions, reduce="mean")
        resolve(Plan.make(Capture(1, positions=positions, reduce="mean")), SHAPE, Prompt(10), 4)
        resolve(Plan.make(edits=Steer(V, 1, positions=positions)), SHAPE, Prompt(10), 4)


def test_a_capture_of_every_request_stops_no_short_prompt():
    """It is the server's, and a client cannot change it."""
    watched = Capture(1, positions=[0, -1])
    plan = resolve(None, SHAPE, Prompt(1), 4, (), (watched,))
    assert plan.captures[0].where.ranges == ((0, 1),)
