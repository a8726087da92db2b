"""Reduced rows in a completion: what the receipt says of them, and what the caller gets."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from midstream import Capture
from midstream.plan import ModelShape, Plan, Prompt
from midstream.plan.resolve.resolve import resolve
from midstream.results.activations import Activations
from midstream.results.receipt import Receipt
from midstream.runtime.frontend.results.readouts import with_reduced
from midstream.runtime.frontend.results.receipts import EndedCompletion, make_receipt
from midstream.runtime.protocol.segments import APPLIED_0

SHAPE = ModelShape(2, 4, [("resid_post", 0), ("resid_post", 1), ("resid_pre", 1)])
PLAN = resolve(
    Plan.make(capture=[Capture(1, reduce="mean", positions="prompt"), Capture(0)]),
    SHAPE,
    Prompt(9),
    3,
)
TAP = ("mean.resid_post", 1)
LENGTH = 11


def rows(counted: int | None) -> Activations:
    """A mean of so many rows; None: it did not come. And all rows of another layer."""
    count = torch.tensor([counted or 0], dtype=torch.int32).view(torch.float32)
    mean = torch.cat([count, torch.arange(4.0)])[None]
    here = 0 if counted is None else 1
    return Activations(
        {TAP: mean[:here], ("resid_post", 0): torch.ones(LENGTH, 4)},
        {TAP: torch.tensor([8])[:here], ("resid_post", 0): torch.arange(LENGTH)},
        list(range(LENGTH)),
        2,
    )


def receipt(counted: int | None, dropped: int = 0) -> Receipt:
    place = SimpleNamespace(stage=0, tensor_rank=0, tensor_ranks=1, replica=0, place="0")
    states = np.full(LENGTH, APPLIED_0, np.uint16)
    part: Any = SimpleNamespace(
        problem="", dropped=dropped, worker=place, states=states, versions=(), weights=()
    )
    completion = SimpleNamespace(finish_reason="length", stop_reason=None, token_ids=[1, 2, 3])
    return make_receipt(
        "r", PLAN, EndedCompletion(completion, [part], list(range(LENGTH)), None), rows(counted)
    )


def test_the_rows_that_were_reduced_are_counted():
    found = receipt(9)
    assert found.status == "ok"
    assert [(one.site, one.expected, one.actual) for one in found.captured] == [
        ("resid_post", 11, 11),
        ("mean.resid_post", 9, 9),
    ]


@pytest.mark.parametrize(("counted", "dropped"), [(5, 0), (5, 4), (10, 0), (10, 1), (None, 0)])
def test_a_row_of_other_rows_than_were_selected_is_reported(counted, dropped):
    (problem,) = receipt(counted, dropped).problems
    wanted = f"mean.resid_post of layer 1: {counted or 0} rows came, expected 9"
    assert problem == wanted


def test_a_reduced_row_that_was_dropped_is_one_row():
    found = receipt(None, dropped=1)
    assert (found.status, found.dropped, found.problems) == ("partial", 1, ())


def test_the_caller_gets_it_by_its_site_and_layer():
    every = rows(9)
    whole = Activations(
        {("resid_post", 0): torch.ones(LENGTH, 4)}, {("resid_post", 0): torch.arange(LENGTH)}, []
    )
    found = with_reduced(whole, every, PLAN)
    assert found is not None
    assert list(found) == [("resid_post", 0), ("resid_post", 1)]
    assert found["resid_post", 1].tolist() == [[0, 1, 2, 3]]
    assert found.positions_of("resid_post", 1).tolist() == [8]
    assert found["resid_post", 0].shape == (LENGTH, 4)
