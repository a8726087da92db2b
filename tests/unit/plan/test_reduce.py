"""`Capture(reduce=…)` as a part of a plan."""

from typing import Any

import pytest
from support.refusals import refused

from midstream import Attention, Capture
from midstream.errors import SpecError
from midstream.plan import ModelShape, Plan, Prompt
from midstream.plan.readouts import parse_readout
from midstream.plan.readouts.reduced import num_sums, with_split_rows
from midstream.plan.resolve.resolve import resolve
from midstream.runtime.protocol.segments import WHOLE, cut

TAPS = [(site, layer) for layer in range(2) for site in ("resid_pre", "z", "resid_post")]
SHAPE = ModelShape(2, 4, TAPS, widths={("z", 0): 6, ("z", 1): 6})


def resolved(capture: Any) -> Any:
    return resolve(Plan.make(capture=capture), SHAPE, Prompt(9), 3)


def test_a_dict_of_attention_is_still_one() -> None:
    one = Attention(1, reduce="entropy")
    assert parse_readout(one.to_dict()) == one
    median = {"layers": [1], "reduce": "median"}
    refused(
        parse_readout,
        (median, "unknown reduction 'median'"),
        ({**median, "sites": "resid_post"}, "one of mean, max, norm, moments, device, got"),
    )


def test_what_reduced_rows_cannot_have_is_refused() -> None:
    words = 'with reduce="norm" there is only'
    refused(
        lambda given: Capture(0, reduce="norm", **given),
        ({"codec": "full8"}, "codec", words),
        ({"sink": "store"}, "sink", words),
        ({"stream": True}, "stream", words),
        ({"heads": 1}, "heads", words),
        ({"max_rows": 5}, "max_rows", "only every selected row"),
    )


def test_the_last_selected_position_returns_the_row_and_the_others_are_counted() -> None:
    found = resolved(Capture("all", ["resid_post", "z"], [1, 2, 6], reduce="moments"))
    wide, narrow = sorted(found.captures, key=lambda one: -one.pattern.size)
    assert narrow.taps == (("moments.resid_post", 0), ("moments.resid_post", 1))
    assert narrow.pattern.size == 1 + 2 * 4
    assert wide.taps == (("moments.z", 0), ("moments.z", 1))
    assert wide.pattern.size == 1 + 2 * 6
    pieces = cut(found, {tap: nth for nth, tap in enumerate(TAPS)}, WHOLE)
    shown = [(p.start, p.stop, [read.is_row for read in p.patterns]) for p in pieces if p.patterns]
    assert shown == [(1, 3, [False] * 4), (6, 7, [True] * 4)]
    assert all(not piece.taps for piece in pieces)
    # Two streams, and twelve numbers; first rows, sums and squares.
    assert num_sums(found, SHAPE) == 3 * (2 + 3)
    assert set(found.expected_rows(11, ()).values()) == {3}
    assert found.reduced == set(found.taps)


def test_vectors_that_ranks_have_in_parts_are_reduced_in_parts() -> None:
    parts = {("z", 0): 2, ("z", 1): 2}
    found = with_split_rows(
        resolved(Capture("all", ["resid_post", "z"], "prompt", reduce="mean")), parts
    )
    sizes = {one.taps[0][0]: (one.pattern.size, one.pattern.counts) for one in found.captures}
    assert sizes == {"mean.resid_post": (5, (1, 1)), "mean.z": (4, (2, 2))}
    assert found.pattern_widths["mean.z", 0] == 8
    with pytest.raises(SpecError, match="z is split over the ranks .* a norm needs all of it"):
        with_split_rows(resolved(Capture("all", ["resid_post", "z"], reduce="norm")), parts)


def test_rows_after_the_prompt_are_counted_by_no_one() -> None:
    for positions in ("all", "generated", "last_row", slice(2, None), slice(0, 10)):
        refused(
            lambda place: resolved(Capture(0, positions=place, reduce="max")),
            (positions, "capture[0].positions", "of tokens of the prompt, 9 here"),
        )
        (norm,) = resolved(Capture(0, positions=positions, reduce="norm")).captures
        assert norm.returned == norm.where.possible
