from __future__ import annotations

import numpy as np
import pytest

from midstream.errors import SpecError
from midstream.spec import Positions, Steer, Vector

FULL = {
    "op": "steer",
    "vector": {"f32": "AACAPwAAAEA="},
    "layer": -2,
    "scale": 0.5,
    "site": "resid_pre",
    "positions": ["prompt", {"slice": [4, None, 1]}],
    "phase": "all",
}


def test_a_steer_has_its_fields_in_canonical_form():
    steer = Steer([1, 2], np.int64(3), scale=np.float32(2), site="post_attn", phase="generated")
    assert steer.vector == Vector.parse([1, 2])
    assert (steer.layer, steer.scale, steer.site) == (3, 2.0, "resid_mid")
    assert (type(steer.layer), type(steer.scale)) == (int, float)
    assert steer.positions == Positions("all", "generated")
    assert Steer([1], 0) == Steer([1], 0, 1, "resid_post", "all", "all")


def test_a_dict_is_the_arguments_and_what_is_emitted_has_every_field():
    assert Steer.parse(FULL).to_dict() == FULL
    assert Steer.parse({"vector": [1, 2], "layer": 1}).to_dict() == {
        "op": "steer",
        "vector": {"f32": "AACAPwAAAEA="},
        "layer": 1,
        "scale": 1.0,
        "site": "resid_post",
        "positions": ["all"],
        "phase": "all",
    }
    steer = Steer([1], 0)
    assert Steer.parse(steer) is steer


def test_parsing_leaves_the_dict_as_it_was():
    value = dict(FULL)
    Steer.parse(value)
    assert value == FULL


def test_equal_scales_are_emitted_alike():
    assert str(Steer([1], 0, scale=-0.0).scale) == "0.0"


@pytest.mark.parametrize(
    ("change", "path", "problem"),
    [
        ({"op": "ablate"}, "op", "expected one of `steer`, got 'ablate'"),
        ({"op": None}, "op", "expected one of `steer`, got `None`"),
        ({"vector": [1, None]}, "vector[1]", "expected a number, got `None`"),
        ({"vector": {"f32": "A"}}, "vector.f32", "expected base64"),
        ({"layer": "all"}, "layer", "expected `int`, got `str`"),
        ({"layer": [3]}, "layer", "expected `int`, got `list`"),
        ({"layer": True}, "layer", "expected `int`, got `bool`"),
        ({"layer": 2**40}, "layer", r"within ±2\*\*31"),
        ({"scale": "2"}, "scale", "expected a number, got `str`"),
        ({"scale": True}, "scale", "expected a number, got `bool`"),
        ({"scale": float("nan")}, "scale", "finite number, got nan"),
        ({"scale": -1e39}, "scale", r"-1e\+39 overflows float32"),
        ({"scale": 10**400}, "scale", "overflows float32"),
        ({"site": "resid"}, "site", "unknown site 'resid'"),
        ({"site": ["resid_post"]}, "site", "expected the name of a site, `str`, got `list`"),
        ({"positions": "last"}, "positions", '"last" is known only when generation has ended'),
        ({"positions": [0, "last"]}, "positions[1]", '"last" is known only when'),
        ({"phase": "generated"}, "positions[0]", "'prompt' never has a token"),
        ({"layers": 3}, "", "unknown field 'layers' .did you mean `layer`"),
        ({"strength": 3}, "", "unknown field 'strength'; known: `vector`, `layer`, `op`, `scale`"),
    ],
)
def test_a_malformed_field_is_refused_by_its_path(change, path, problem):
    with pytest.raises(SpecError, match=problem) as caught:
        Steer.parse({**FULL, **change})
    assert caught.value.path == path


@pytest.mark.parametrize("name", ["vector", "layer"])
def test_a_missing_field_is_named(name):
    value = {key: each for key, each in FULL.items() if key != name}
    with pytest.raises(SpecError, match=f"missing field `{name}`"):
        Steer.parse(value)
