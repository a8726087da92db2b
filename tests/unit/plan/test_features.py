"""`Features`, its JSON form, and what is malformed."""

import pytest
from support.refusals import refused

from midstream import Features
from midstream.errors import SpecError
from midstream.plan import ModelShape, Plan, Prompt
from midstream.plan.readouts import parse_readout
from midstream.plan.resolve.resolve import resolve


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


def test_what_is_malformed_is_refused() -> None:
    refused(
        lambda given: parse_readout({"sae": "a", **given}),
        ({"sae": "a b"}, "sae", "characters"),
        ({"top": -1}, "top", "0 to 1024"),
        ({"top": 0}, "top", "at least 1 where `features` are not given"),
        ({"features": [1, 1]}, "features[1]", "feature 1 is given twice"),
        ({"features": [-1]}, "features[0]", "ids from 0"),
        ({"features": "x"}, "features", "expected ids of features"),
        ({"features": list(range(1025))}, "features", "at most 1024"),
        ({"site": "z"}, "site", "expected one of"),
        ({"site": ["mlp_in", "mlp_out"]}, "site", "expected one of"),
        ({"codec": "raw"}, "", "unknown field 'codec'"),
    )


def test_an_sae_itself_is_to_be_registered() -> None:
    class Like:
        def encode(self) -> None: ...

    with pytest.raises(SpecError, match=r"llm\.saes\.register\(name, sae\)"):
        Features(Like())  # type: ignore[arg-type]
