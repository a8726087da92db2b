"""`Lens` as a part of a plan."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.readings import finished_plan
from support.refusals import refused, refused_calls

from midstream import Lens
from midstream.errors import SpecError
from midstream.plan import ModelShape, Plan, Prompt, ResolvedPlan
from midstream.plan.readouts import parse_readout
from midstream.plan.readouts.lens import LENS
from midstream.plan.resolve.resolve import resolve
from midstream.plan.resolve.wire import from_bytes, to_bytes
from midstream.plan.resolved import LensMap

SHAPE = ModelShape(3, 4, [("resid_post", 0), ("resid_post", 1), ("resid_post", 2)])


def test_its_resolved_form_is_read_back_with_its_tokens_in_order() -> None:
    given = Plan.make(capture=Lens(top=2, tokens=[9, 2, 3]))
    plan = resolve(given, SHAPE, Prompt(6), 3)
    assert finished_plan(given, SHAPE) == plan
    (capture,) = plan.captures
    assert capture.taps == (("lens.logit", 0), ("lens.logit", 1), ("lens.logit", 2))
    assert capture.pattern is not None
    assert [token for token, _ in capture.pattern.keys] == [9, 2, 3]
    assert capture.pattern.size == 11


def test_a_registered_lens_has_a_map_for_each_layer() -> None:
    (capture,) = resolve(Plan.make(capture=Lens([0, 2], kind="mine")), SHAPE, Prompt(6), 3).captures
    assert capture.taps == (("lens.mine", 0), ("lens.mine", 2))
    assert capture.pattern is not None
    maps = (LensMap(0, 16, True), LensMap(40))
    plan = ResolvedPlan(6, (), (replace(capture, pattern=replace(capture.pattern, maps=maps)),))
    assert from_bytes(to_bytes(plan)) == plan
    bad = replace(capture, pattern=replace(capture.pattern, maps=maps[:1]))
    with pytest.raises(SpecError, match="expected the maps of 2 taps"):
        from_bytes(to_bytes(replace(plan, captures=(bad,))))


def test_its_forms_are_alike() -> None:
    assert Lens(tokens=7) == Lens(tokens=[7]) != Lens(tokens="7") == Lens(tokens=["7"])
    assert Lens(0, stream=True).without_place() == Lens(0) == Lens(layer=0)
    assert parse_readout({"layer": 3, "top": 2}) == Lens(3, 2)
    assert parse_readout({"kind": "logit"}) == Lens()
    ids = {" a": 5, " b": 6}
    assert Lens(0, tokens=[" b", 1, " a"]).with_ids(ids.__getitem__) == Lens(0, tokens=[6, 1, 5])


def test_what_is_malformed_is_refused() -> None:
    refused_calls(
        (lambda: Lens(top=0), "top", "at least 1 where `tokens` are not given"),
        (lambda: Lens(top=1025), "top", "expected 0 to 1024, got 1025"),
        (lambda: Lens(tokens=range(65)), "tokens", "at most 64 tokens, got 65"),
        (lambda: Lens(tokens=[1, -2]), "tokens[1]", "expected token ids from 0, got -2"),
        (lambda: Lens(tokens=[1, 1]), "tokens[1]", "token 1 is given twice"),
        (lambda: Lens(tokens=[""]), "tokens[0]", "expected a token's text"),
        (lambda: Lens(tokens={1: 2}), "tokens", "expected token ids"),
        (lambda: Lens(site="mlp_out"), "site", "a lens reads the stream"),
        (lambda: Lens(kind="a b"), "kind", "characters"),
        (lambda: Lens(kind=SimpleNamespace(matrices={})), "kind", "register it, and give its name"),
        (lambda: Lens(name="a b"), "name", "characters"),
        (lambda: Lens(codec="full8"), "codec", "unknown argument of Lens"),
        (lambda: parse_readout({"kind": "logit", "sink": "a"}), "", "unknown field 'sink'"),
        (
            lambda: Lens(tokens=[1, " a"]).with_ids({" a": 1}.__getitem__),
            "tokens[1]",
            "' a' is token 1, which 1 is already",
        ),
    )
    without_head = ModelShape(3, 4, SHAPE.taps, {(LENS, 2): "it has no head"})
    refused(
        lambda capture: resolve(Plan.make(capture=capture), without_head, Prompt(6), 3),
        (Lens(0), "the stream cannot be decoded: it has no head"),
    )
    several = [Lens(0), Lens(1, 2, [1, 40], name="a")]
    refused(
        lambda capture: finished_plan(Plan.make(capture=capture), SHAPE),
        (several, "capture[1].tokens[1]", "no token 40: the model has 40, 0 to 39"),
        (Lens(0, 41), "capture[0].top", "the model has 40 tokens"),
    )
