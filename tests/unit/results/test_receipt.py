"""Receipts say what was asked and what was done, to people and to programs."""

import json
import pickle
from dataclasses import fields, replace

import pytest

from midstream.errors import ReceiptError
from midstream.results.receipt import Captured, Edited, Nonfinite, Probed, Receipt, Selected

RECEIPT = Receipt(
    request_id="7",
    prompt_tokens=5,
    generated_tokens=3,
    captured=(Captured("resid_pre", 0, 7, 7), Captured("resid_post", 1, 2, 2)),
    edited=Edited(expected=10, applied=9, tokens=7),
)
FULL = Receipt(
    request_id="9",
    prompt_tokens=5,
    generated_tokens=3,
    captured=(Captured("resid_post", 1, 2, 2),),
    edited=None,
    probed=(Probed("refusal", "resid_mid", 4, 3, 3), Probed("<other>", "resid_pre", 0, 1, 0)),
    selected=(
        Selected("capture[0]", ((0, 2),), left_out=7),
        Selected("edits[0]", ((0, 1), (3, 6))),
        Selected("probes[0]", ()),
    ),
)
BROKEN = Receipt(
    request_id="8<b>",
    prompt_tokens=5,
    generated_tokens=3,
    captured=(Captured("resid_post", 1, 7, 6),),
    edited=None,
    problems=("first <problem>", "second"),
)


def test_a_receipt_is_ok_or_an_error_that_names_the_request_and_every_problem():
    assert (RECEIPT.status, BROKEN.status) == ("ok", "error")
    RECEIPT.check()
    with pytest.raises(ReceiptError, match=r"^request 8<b>: first <problem>; second$"):
        BROKEN.check()


def test_its_text_counts_what_was_asked_for_and_nothing_else():
    head = "5 prompt and 3 generated tokens"
    for receipt, lines in (
        (
            RECEIPT,
            ["  captured 9 of 9 rows, at 2 sites of layers", "  edited 7 tokens: 9 of 10 edits"],
        ),
        (
            FULL,
            [
                "  captured 2 of 2 rows, at 1 sites of layers",
                "  probe refusal: 3 of 3 scores",
                "  probe <other>: 0 of 1 scores",
                "  capture[0]: positions 0–1; 7 more were left out",
                "  edits[0]: positions 0, 3–5",
                "  probes[0]: positions none",
            ],
        ),
        (Receipt("7", 5, 3, (), None), []),
        (BROKEN, ["  captured 6 of 7 rows, at 1 sites of layers", "  first <problem>", "  second"]),
    ):
        first = f"request {receipt.request_id}: {receipt.status}; {head}"
        assert str(receipt).splitlines() == [first, *lines]


def test_its_html_is_escaped():
    shown = BROKEN._repr_html_()
    assert (shown[:5], shown[-6:]) == ("<pre>", "</pre>")
    assert "8&lt;b&gt;" in shown
    assert "&lt;problem&gt;" in shown
    assert "&lt;other&gt;" in FULL._repr_html_()


def test_its_plain_form_is_json_with_every_field():
    plain = json.loads(json.dumps(RECEIPT.to_dict()))
    assert plain == {
        "status": "ok",
        "request_id": "7",
        "prompt_tokens": 5,
        "generated_tokens": 3,
        "captured": [
            {"site": "resid_pre", "layer": 0, "expected": 7, "actual": 7},
            {"site": "resid_post", "layer": 1, "expected": 2, "actual": 2},
        ],
        "edited": {"expected": 10, "applied": 9, "tokens": 7, "cached": 0, "doses": []},
        "probed": [],
        "selected": [],
        "dropped": 0,
        "problems": [],
        "kept": [],
        "nonfinite": None,
        "coming_from": {},
        "versions": [],
        "weight_versions": [],
        "called": [],
        "actions": [],
    }
    assert set(plain) == {"status", *(one.name for one in fields(RECEIPT))}
    full = json.loads(json.dumps(FULL.to_dict()))
    assert full["probed"][0] == {
        "name": "refusal", "site": "resid_mid", "layer": 4, "expected": 3, "actual": 3
    }  # fmt: skip
    assert full["selected"] == [
        {"what": "capture[0]", "positions": [[0, 2]], "left_out": 7},
        {"what": "edits[0]", "positions": [[0, 1], [3, 6]]},
        {"what": "probes[0]", "positions": []},
    ]
    assert full == FULL.to_dict()
    assert BROKEN.to_dict()["edited"] is None
    assert BROKEN.to_dict()["problems"] == ["first <problem>", "second"]


def test_values_that_are_not_finite_make_it_partial_and_are_read_back():
    found = replace(RECEIPT, nonfinite=Nonfinite(positions=3, first=4))
    assert found.status == "partial"
    assert "3 positions are not finite; the first is 4" in str(found)
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["nonfinite"] == {"positions": 3, "first": 4}
    assert Receipt.from_dict(plain) == found
    del plain["nonfinite"]  # from an older server
    assert Receipt.from_dict(plain).nonfinite is None


def test_receipts_are_values():
    assert pickle.loads(pickle.dumps(RECEIPT)) == RECEIPT
    assert pickle.loads(pickle.dumps(FULL)) == FULL
    assert len({RECEIPT, pickle.loads(pickle.dumps(RECEIPT)), BROKEN}) == 2
    with pytest.raises(AttributeError):
        RECEIPT.problems = ()
