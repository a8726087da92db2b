"""Short forms: what each stands for, wherever a capture, an edit or vectors are expected."""

from __future__ import annotations

import json

import numpy as np
import torch
from support.refusals import refused
from vllm import SamplingParams as VllmSamplingParams

from midstream import Ablate, Capture, Gate, Named, Plan, SamplingParams, Steer, Switch
from midstream.api.arguments import CallArguments, PromptArguments
from midstream.client.protocol import tiers_of, upload_of
from midstream.client.request_body import extra_body
from midstream.lab.fit import Direction, Directions
from midstream.plan.shape import ModelShape
from midstream.steering import VectorRegistry
from midstream.steering.tiers import Steering

SHAPE = ModelShape(4, 3, [("resid_post", layer) for layer in range(4)])
V = np.arange(1.0, 4.0, dtype="f4")
D = Direction(V, 2)
DS = Directions(np.stack([V, 2 * V]), (1, 2))
EVERY = {1: V, 2: 2 * V}
# (what is given, the same in full)
CAPTURES = [
    (True, Capture("all")),
    ("all", Capture("all")),
    (1, Capture(1)),
    (-1, Capture(-1)),
    ([1, 2], Capture([1, 2])),
    ((1, 2), Capture([1, 2])),
    (range(1, 3), Capture([1, 2])),
    (np.array([1, 2]), Capture([1, 2])),
    (torch.tensor([1, 2]), Capture([1, 2])),
    ("blocks.2.hook_resid_pre", Capture(2, "resid_pre")),
    (["resid_post.1", "resid_post.2"], Capture([1, 2])),
    ("final_norm", Capture(sites="final_norm")),
]
EDITS = [
    (D, Steer(V, 2)),
    (2.0 * D, Steer(V, 2, 2.0)),
    (D * np.float32(0.5), Steer(V, 2, 0.5)),
    (np.float64(0.5) * D, Steer(V, 2, 0.5)),
    (torch.tensor(0.5) * D, Steer(V, 2, 0.5)),
    (-1 * D, Steer(V, 2, -1.0)),
    (-D, Steer(V, 2, -1.0)),
    (DS, Steer(EVERY)),
    (0.5 * DS, Steer(EVERY, scale=0.5)),
    (-DS, Steer(EVERY, scale=-1.0)),
    (np.float64(2) * DS, Steer(EVERY, scale=2.0)),
    ((V, 2), Steer(V, 2)),
    ((V.tolist(), -1), Steer(V, -1)),
    ((torch.from_numpy(V), np.int64(2)), Steer(V, 2)),
]


def json_form(value):
    try:
        return json.dumps(value)
    except TypeError:
        return None


def test_a_short_capture_is_the_capture_that_it_stands_for():
    for given, full in CAPTURES:
        assert Plan.make(given) == Plan((full,)), given
        for arguments in CallArguments(capture=given).per_prompt(3):
            assert arguments.plan() == Plan((full,)), given
        (first, second) = CallArguments(capture=[given, None]).per_prompt(2)
        assert first.plan() == Plan((full,)), given
        assert second.plan() is None
        form = SamplingParams(capture=given).extra_args["midstream"]
        assert Plan.parse(dict(form)) == Plan((full,)), given
        assert Plan.parse({"capture": extra_body(capture=given)["midstream"]["capture"]}) == Plan(
            (full,)
        )
        if json_form(given) is not None:
            assert Plan.parse(f'{{"capture": {json_form(given)}}}') == Plan((full,)), given
    assert Plan.make(False) is None
    assert isinstance(SamplingParams(capture=False), VllmSamplingParams)
    (first, second) = CallArguments(capture=[True, False]).per_prompt(2)
    assert (first.plan(), second.plan()) == (Plan((Capture("all"),)), None)
    (first, second) = CallArguments(capture=[[1, 2], "all"]).per_prompt(2)
    assert (first.plan(), second.plan()) == (Plan((Capture([1, 2]),)), Plan((Capture("all"),)))


def test_a_short_edit_is_the_edit_that_it_stands_for_wherever_edits_are_given():
    steering = Steering(VectorRegistry(SHAPE))
    for given, full in EDITS:
        assert Plan.make(edits=given) == Plan.make(edits=[given]) == Plan(edits=(full,)), given
        for name in ("steer", "edits"):
            for value in (given, [given], [[given], [given]], [given, None]):
                plans = [each.plan() for each in CallArguments(**{name: value}).per_prompt(2)]
                count = 1 if isinstance(value, list) and value[-1] is None else 2
                assert plans[:count] == [Plan(edits=(full,))] * count, (given, value)
        assert PromptArguments(steer=given, edits=given).plan() == Plan(edits=(full, full))
        assert Switch(given, above=1.0).edits == (full,)
        if not isinstance(full.vector, tuple):
            assert Gate(given, V) == Gate(full, V)
            assert tiers_of({"base": given}) == tiers_of({"base": full})
        wanted = steering.set(base=full).base
        for value in (given, [given]):
            assert steering.set(base=value).base == wanted, given


def test_directions_and_edits_are_registered_under_a_name():
    for given, full in (
        (D, {("resid_post", 2): V}),
        (DS, {("resid_post", 1): V, ("resid_post", 2): 2 * V}),
        (-0.5 * D, {"edits": [Steer(V, 2, -0.5)]}),
        (Ablate(V, 2), {"edits": [Ablate(V, 2)]}),
    ):
        registry = VectorRegistry(SHAPE)
        digest = registry.register("a", full).digest
        assert registry.register("b", given).digest == digest
        assert registry.register("c", upload_of(given)).digest == digest


def test_a_form_that_can_be_read_two_ways_is_refused():
    refused(
        lambda edits: Plan.make(edits=edits),
        (("happy", 2), r"\('happy', 2\) can be read two ways: write Steer\('happy', layer=2\) or"),
        ((Named("happy"), 2.5), r"can be read two ways"),
        (D.vector, "expected an edit, or a dict with `op`, got `ndarray`; write for example"),
    )
    refused(
        lambda given: CallArguments(edits=given).per_prompt(2),
        ([(V, 1), (V, 2)], "a flat list of 2 edits for 2 prompts can be read two ways"),
    )
    refused(lambda scale: D * scale, ("two", "^scale: expected a number"))
