"""`Logits` as a part of a plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from midstream import Logits, Plan, SpecError
from midstream.spec import ModelShape, Prompt
from midstream.spec.attention import parse_capture
from midstream.spec.resolve.logits import HEAD, with_vocabulary
from midstream.spec.resolve.resolve import resolve
from midstream.spec.resolve.wire import from_bytes, to_bytes

SHAPE = ModelShape(2, 4, [("final_norm", 1), ("resid_post", 0)])


def config() -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: 40),
    )


@pytest.mark.parametrize(
    "one",
    [
        Logits(3),
        Logits(tokens=[9, 2]),
        Logits(tokens="all", positions="last_prompt"),
        Logits(1, positions=[0, 2], phase="prompt", exclude="last_prompt"),
    ],
)
def test_it_is_read_back_from_its_json_form(one: Logits) -> None:
    assert parse_capture(one.to_dict()) == one == Logits.parse(one)
    plan = Plan.make(capture=one)
    assert Plan.parse(plan.to_json()) == plan
    resolved = with_vocabulary(resolve(plan, SHAPE, Prompt(6), 3), config())
    assert from_bytes(to_bytes(resolved)) == resolved


def test_its_forms_are_alike() -> None:
    assert Logits(tokens=7) == Logits(tokens=[7]) == Logits(tokens=np.array([7]))
    assert Logits(tokens=range(2)) == Logits(tokens=(0, 1)) != Logits(tokens=(1, 0))
    assert Logits(3).without_place() == Logits(3)


@pytest.mark.parametrize(
    ("make", "path", "problem"),
    [
        (lambda: Logits(), "", "give either `top` or `tokens`"),
        (lambda: Logits(3, [2]), "", "give either `top` or `tokens`"),
        (lambda: Logits(0), "top", "expected 1 to 1024, got 0"),
        (lambda: Logits(1025), "top", "expected 1 to 1024, got 1025"),
        (lambda: Logits(tokens=[]), "tokens", "expected 1 to 1024 tokens, got 0"),
        (lambda: Logits(tokens="some"), "tokens", "expected token ids or \"all\", got 'some'"),
        (lambda: Logits(tokens=[1, -2]), "tokens[1]", "expected token ids from 0, got -2"),
        (lambda: Logits(tokens=[1, 1]), "tokens[1]", "token 1 is given twice"),
        (lambda: Logits(tokens={1: 2}), "tokens", "expected token ids"),
        (lambda: Logits(2, stream=True), "stream", "unknown argument of Logits"),
        (lambda: parse_capture({"top": 2, "sites": ["z"]}), "", "unknown field 'sites'"),
    ],
)
def test_what_is_malformed_is_refused(make: Any, path: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem) as caught:
        make()
    assert caught.value.path == path


def test_a_model_whose_head_reads_something_else_than_the_norm_refuses() -> None:
    shape = ModelShape(2, 4, SHAPE.taps, {(HEAD, 1): "M gives its head x / 2"})
    with pytest.raises(SpecError, match="logits cannot be read: M gives its head x / 2"):
        resolve(Plan.make(capture=Logits(2)), shape, Prompt(6), 3)
