"""`Logits` as a part of a plan."""

from typing import Any

import numpy as np
from support.readings import finished_plan
from support.refusals import refused, refused_calls

from midstream import Logits
from midstream.plan import ModelShape, Plan, Prompt
from midstream.plan.readouts import parse_readout
from midstream.plan.readouts.logits import HEAD
from midstream.plan.resolve.resolve import resolve

SHAPE = ModelShape(2, 4, [("final_norm", 1), ("resid_post", 0)])
HEADLESS = ModelShape(2, 4, SHAPE.taps, {(HEAD, 1): "M gives its head x / 2"})


def resolved(plan: Plan, shape: ModelShape = SHAPE) -> Any:
    return resolve(plan, shape, Prompt(6), 3)


def test_texts_of_tokens_are_taken_as_by_lens_and_steer() -> None:
    ids = {" b": 9, "all": 4, " a": 2}
    for one in (Logits(tokens=[" b", 7, "all", " a"], phase="prompt"), Logits(tokens=" b")):
        words = "expected a token id here, got a text"
        refused(resolved, (Plan.make(capture=one), "capture[0].tokens[0]", words))
    bound = Logits(tokens=[" b", 7, "all", " a"], phase="prompt").with_ids(ids.__getitem__)
    assert bound == Logits(tokens=[9, 7, 4, 2], phase="prompt")
    assert Logits(tokens="all").with_ids(ids.__getitem__).tokens == "all"


def test_its_resolved_form_has_its_tokens_in_the_given_order() -> None:
    plan = Plan.make(capture=Logits(tokens=[9, 2, 3]))
    pattern = finished_plan(plan, SHAPE).captures[0].pattern
    assert pattern is not None
    assert pattern.keys == ((9, 10), (2, 3), (3, 4))


def test_its_forms_are_alike() -> None:
    assert Logits(tokens=7) == Logits(tokens=[7]) == Logits(tokens=np.array([7]))
    assert Logits(tokens=range(2)) == Logits(tokens=(0, 1)) != Logits(tokens=(1, 0))
    assert Logits(3).without_place() == Logits(3)


def test_what_is_malformed_is_refused() -> None:
    refused_calls(
        (lambda: Logits(), "", "give either `top` or `tokens`"),
        (lambda: Logits(3, [2]), "", "give either `top` or `tokens`"),
        (lambda: Logits(0), "top", "expected 1 to 1024, got 0"),
        (lambda: Logits(1025), "top", "expected 1 to 1024, got 1025"),
        (lambda: Logits(tokens=[]), "tokens", "expected 1 to 1024 tokens, got 0"),
        (lambda: Logits(tokens=[" a", " a"]), "tokens[1]", "token ' a' is given twice"),
        (lambda: Logits(tokens=[""]), "tokens[0]", "expected a token's text, got an empty one"),
        (lambda: Logits(tokens=range(1025)), "tokens", "expected at most 1024 tokens, got 1025"),
        (lambda: Logits(tokens=[1, -2]), "tokens[1]", "expected token ids from 0, got -2"),
        (lambda: Logits(tokens=[1, 1]), "tokens[1]", "token 1 is given twice"),
        (lambda: Logits(tokens={1: 2}), "tokens", "expected token ids"),
        (lambda: Logits(2, stream=True), "stream", "unknown argument of Logits"),
        (lambda: parse_readout({"top": 2, "sites": ["z"]}), "", "unknown field 'sites'"),
        (
            lambda: Logits(tokens=[2, " a"]).with_ids({" a": 2}.__getitem__),
            "tokens[1]",
            "' a' is token 2, which 2 is already",
        ),
        (
            lambda: finished_plan(Plan.make(capture=Logits(tokens=[2, 40])), SHAPE),
            "capture[0].tokens[1]",
            "no token 40: the model has 40, 0 to 39",
        ),
        (
            lambda: resolved(Plan.make(capture=Logits(2)), HEADLESS),
            "logits cannot be read: M gives its head x / 2",
        ),
    )
