"""Where rows are kept rides with an engine's settings, and is no part of what is hashed."""

import copy
import json
import pickle
from types import SimpleNamespace

import pytest
from support.sinking import ORIGIN

from midstream.config.config import Config
from midstream.plan.shape import ModelShape
from midstream.runtime.frontend.results import sink_setup as own_sinks
from midstream.runtime.frontend.results.sink_setup import open_sinks
from midstream.runtime.vllm.additional_config import Settings

APART = {
    "controllers": {"a": "package.module:Name"},
    "events": {"jsonl": {"path": "/events.jsonl"}},
    "lenses": {"a": "folder"},
    "saes": {"a": "a"},
    "sinks": {"log": {"level": "debug"}},
    "vectors": {"a": "a.npz"},
    "steering": {"base": "a"},
}
PLAIN = Config.parse(APART).to_dict()


@pytest.mark.parametrize(
    "copied",
    [lambda one: one, copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))],
)
def test_the_sinks_are_there_and_in_no_text_of_the_settings(monkeypatch, copied):
    monkeypatch.setattr(own_sinks, "origin_of", lambda *_: ORIGIN)
    found = copied(Settings(PLAIN))
    assert json.loads(json.dumps(found)) == {k: v for k, v in PLAIN.items() if k not in APART}
    assert (found.vectors, found.steering) == (APART["vectors"], APART["steering"])
    assert (found.controllers, found.events) == (PLAIN["controllers"], PLAIN["events"])
    assert (found.lenses, found.saes) == (APART["lenses"], APART["saes"])
    config = SimpleNamespace(additional_config={"midstream": found})
    sinks = open_sinks(config, None)
    assert sinks.names == ("memory", "log")
    sinks.close()


def test_settings_that_no_front_end_completed_have_none(monkeypatch):
    monkeypatch.setattr(own_sinks, "origin_of", lambda *_: ORIGIN)
    config = SimpleNamespace(additional_config={"midstream": {"sites": ["resid_post"]}})
    assert open_sinks(config, None).names == ("memory",)


def test_sinks_know_the_width_of_each_tap():
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="a/model", revision=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
    )
    shape = ModelShape(4, 8, {("attn_out", 1)}, widths={("attn_out", 1): 12})
    found = own_sinks.origin_of(config, SimpleNamespace(shape=shape, dtype="float32"))
    assert (found.hidden_size, found.widths) == (8, {("attn_out", 1): 12})
    assert [found.width(("attn_out", layer)) for layer in (0, 1)] == [8, 12]
