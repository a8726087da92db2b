"""`Features`, its JSON form, and what is malformed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from midstream import Features, Lens, Plan, SpecError
from midstream.plan import ModelShape, Prompt
from midstream.plan.readouts import parse_readout
from midstream.plan.resolve.resolve import resolve


@pytest.mark.parametrize(
    "asked",
    [
        Features("a"),
        Features("a", 0, features=[3, 1], stream=True),
        Features("a", 5, [3, 5], "prompt", layer=-1, site="mlp_in", name="b"),
    ],
)
def test_the_json_form_is_read_as_the_same(asked: Features) -> None:
    given = json.loads(json.dumps(asked.to_dict()))
    assert parse_readout(given) == asked
    plan = Plan.parse({"capture": [given, {"layers": [0], "top": 2}]})
    assert [type(one) for one in plan.captures] == [Features, Lens]
    assert plan.without_places().captures[0] == Features.parse({**given, "stream": False})


def test_the_saes_own_place_is_taken_where_none_is_given() -> None:
    assert Features("a").at_tap("mlp_in", 3) == Features("a", layer=3, site="mlp_in")
    assert Features("a", layer=5).at_tap("mlp_in", 3) == Features("a", layer=5, site="mlp_in")
    both = Features("a", layer=5, site="resid_pre")
    assert both.at_tap("mlp_in", 3) is both
    assert both.sites.names == ("resid_pre",)


def test_where_the_model_has_several_streams_no_sae_reads_them() -> None:
    shape = ModelShape(
        2, 4, [("resid_post", 1), ("mlp_in", 1)],
        widths={("resid_post", 1): 12}, heads={("resid_post", 1): 3},
    )  # fmt: skip
    plan = Plan.make([Features("a", layer=1, site="resid_post")])
    with pytest.raises(SpecError, match="an SAE reads one stream, and resid_post has 3"):
        resolve(plan, shape, Prompt(5), 3)
    assert shape.size(("resid_post", 1)).meaning == "the width of resid_post, 3 streams of 4"


@pytest.mark.parametrize(
    ("given", "path", "problem"),
    [
        ({"sae": 3}, "sae", "expected `str`, got `int`"),
        ({"sae": "a b"}, "sae", "characters"),
        ({"sae": ""}, "sae", ""),
        ({"sae": "a", "top": -1}, "top", "0 to 1024"),
        ({"sae": "a", "top": 0}, "top", "at least 1 where `features` are not given"),
        ({"sae": "a", "features": [1, 1]}, "features[1]", "feature 1 is given twice"),
        ({"sae": "a", "features": [-1]}, "features[0]", "ids from 0"),
        ({"sae": "a", "features": "x"}, "features", "expected ids of features"),
        ({"sae": "a", "features": list(range(1025))}, "features", "at most 1024"),
        ({"sae": "a", "site": "z"}, "site", "expected one of"),
        ({"sae": "a", "site": ["mlp_in", "mlp_out"]}, "site", "expected one of"),
        ({"sae": "a", "layer": [1, 2]}, "layer", "expected `int`"),
        ({"sae": "a", "codec": "raw"}, "codec", "unknown"),
        ({"sae": "a", "stream": 1}, "stream", "expected `bool`"),
    ],
)
def test_what_is_malformed_is_refused(given: Any, path: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem) as caught:
        parse_readout(given)
    assert caught.value.path.startswith(path) or path == "codec"


def test_an_sae_itself_is_to_be_registered() -> None:
    class Like:
        def encode(self) -> None: ...

    with pytest.raises(SpecError, match=r"llm\.saes\.register\(name, sae\)"):
        Features(Like())  # type: ignore[arg-type]
