"""The settings `vectors` and `steering`: plain JSON, refused by name."""

import json
from pathlib import Path

import torch
from support.refusals import refused

from midstream import Scale, Steer
from midstream.config.config import Config
from midstream.config.steering import TIER_NAMES
from midstream.errors import ConfigError
from midstream.plan import Named
from midstream.steering.edit_forms import TIERS, read_tier


def test_the_tiers_are_those_of_the_steering():
    assert tuple(TIERS) == TIER_NAMES


def test_paths_of_files_become_text():
    for path in ("happy.npz", Path("happy.npz")):
        found = Config.parse({"vectors": {"a/b": path}})
        assert found.vectors == {"a/b": "happy.npz"}
        assert Config.parse(json.loads(json.dumps(found.to_dict()))) == found


def test_every_form_of_a_tier_means_the_same_after_a_trip_through_json():
    for value in (
        "happy",
        ("happy", 2.0),
        Named("happy", 2.0),
        Steer([1.0, 2.0], 1, 0.5),
        [Scale(2.0, 1), "happy"],
        {15: torch.tensor([1.0, 2.0])},
        {"post_block": {15: {"vector": [1.0, 2.0], "scale": 2.0}}},
    ):
        found = Config.parse({"steering": {"base": value}})
        again = Config.parse(json.loads(json.dumps(found.to_dict())))
        assert again == found, value
        edits = [part.edit for part in read_tier(again.steering["base"], None)]
        assert edits == [part.edit for part in read_tier(value, None)]


def test_another_value_is_refused_and_the_setting_named():
    refused(
        Config.parse,
        ({"vectors": ["a.npz"]}, r"midstream.vectors: expected a dict of files by name"),
        ({"vectors": {"a b": "a.npz"}}, r"midstream.vectors: name 'a b': expected 1 to 128"),
        ({"vectors": {"a": ""}}, r"midstream.vectors.a: expected the path of a \.safetensors"),
        ({"vectors": {"a": [1.0]}}, r"midstream.vectors.a: expected the path of a .*\[1.0\]"),
        ({"lenses": {"a": 3}}, r"midstream.lenses.a: expected the path of a lens's folder or file"),
        ({"saes": ["a"]}, r"midstream.saes: expected a dict of files by name"),
        ({"vector": {}}, r"midstream: unknown field 'vector' \(did you mean `vectors`\?"),
        ({"steering": "happy"}, r"midstream.steering: expected a dict of tiers"),
        ({"steering": {"all": "a"}}, r"midstream.steering: unknown field 'all'; known: `base`"),
        ({"steering": {"base": {1: object()}}}, r"midstream.steering.base: expected .*object"),
        error=ConfigError,
    )
