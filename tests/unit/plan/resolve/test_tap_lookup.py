"""Layers and sites as written, into taps in the order of a forward pass."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused

from midstream.config.config import Config
from midstream.errors import SpecError
from midstream.plan import Layers, ModelShape, Sites
from midstream.plan.tap_lookup import check_tapped, find_layer, find_taps
from midstream.sites import IN_LAYERS, NAMES, order

EVERY = [(site, layer) for layer in range(4) for site in NAMES]
SHAPE = ModelShape(4, 3, EVERY)
SOME = ModelShape(
    4,
    3,
    [("resid_post", 0), ("resid_post", 2), ("mlp_out", 3)],
    {("mlp_in", layer): "no norm there" for layer in range(4)} | {("resid_post", 3): "none"},
)


@given(
    st.lists(st.integers(-4, 3), min_size=1, max_size=4, unique_by=lambda layer: layer % 4),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True),
)
def test_each_site_of_each_layer_is_found_once_and_those_without_layers_too(layers, sites):
    found = find_taps(Layers.parse(layers), Sites.parse(sites), SHAPE, "layers", "sites")
    ends = {
        (site, layer)
        for site, layer in (("embed", 0), ("final_norm", 3), ("logits", 3))
        if site in sites
    }
    others = [site for site in sites if site in IN_LAYERS]
    assert set(found) == {*itertools.product(others, {layer % 4 for layer in layers}), *ends}
    assert list(found) == sorted(found, key=order)
    assert len(found) == len(layers) * len(others) + len(ends)


def test_a_site_without_a_layer_that_is_not_tapped_is_refused_by_its_name():
    shape = ModelShape(4, 3, [("resid_post", 1)], {("embed", 0): "it adds positions"})
    for layers in ("all", [1]):
        refused(
            lambda site, layers=layers: find_taps(
                Layers(layers), Sites(["resid_post", site]), shape, "layers", "sites"
            ),
            ("embed", "sites[1]", "embed cannot be tapped: it adds positions"),
            ("final_norm", "sites[1]", "final_norm is not tapped; start the engine with"),
        )


def test_all_layers_are_those_at_which_the_site_is_tapped():
    every = Layers.parse("all")
    assert find_taps(every, Sites.parse("resid_post"), SOME, "layer", "site") == (
        ("resid_post", 0),
        ("resid_post", 2),
    )
    both = find_taps(every, Sites.parse(["mlp_out", "resid_post"]), SOME, "layer", "site")
    assert both == (("resid_post", 0), ("resid_post", 2), ("mlp_out", 3))


def test_what_is_not_tapped_is_refused_with_the_settings_that_tap_it():
    default = ModelShape(4, 3, [("resid_post", layer) for layer in range(4)])
    few = ModelShape(9, 3, [(site, layer) for site in ("z", "mlp_out") for layer in (2, 5)])
    for shape, layers, sites, settings, options in (
        (default, 1, "mlp_out", {"sites": ["mlp_out", "resid_post"]}, "--sites mlp_out,resid_post"),
        (default, "all", ["z", "q"], {"sites": ["q", "z", "resid_post"]}, "--sites q,z,resid_post"),
        (default, 1, "embed", {"sites": ["embed", "resid_post"]}, "--sites embed,resid_post"),
        (few, [5, 3], "z", {"layers": [2, 3, 5]}, "--layers 2,3,5"),
        (few, 3, "q", {"layers": [2, 3, 5], "sites": ["q", "z", "mlp_out"]}, "--layers 2,3,5 --si"),
        (SOME, 1, "resid_post", {"layers": "all"}, "--layers all"),
    ):
        with pytest.raises(SpecError) as caught:
            find_taps(Layers.parse(layers), Sites.parse(sites), shape, "l", "s")
        remedy = f"LLM(…, midstream={json.dumps(settings)}), or a server with {options}"
        assert remedy in str(caught.value)
        Config.parse(settings)


def test_what_is_not_there_is_refused_under_the_field_that_asked():
    refused(
        lambda asked: find_taps(Layers.parse(asked[0]), Sites.parse(asked[1]), SOME, "l", "s"),
        (([1], "resid_post"), "l", "resid_post at layer 1 is not tapped; start the engine with"),
        (([0, 1], "resid_post"), "l[1]", "resid_post at layer 1 is not tapped"),
        (([3], "resid_post"), "l", "resid_post at layer 3 cannot be tapped: none"),
        (([0], ["resid_post", "resid_pre"]), "s[1]", "resid_pre at layer 0 is not tapped"),
        (([0], "resid_pre"), "s", "resid_pre at layer 0 is not tapped"),
        (([0], "mlp_in"), "l", "mlp_in at layer 0 cannot be tapped: no norm there"),
        (("all", "mlp_in"), "s", "mlp_in cannot be tapped at any layer: no norm there"),
        (("all", ["resid_post", "resid_pre"]), "s[1]", "resid_pre at any layer is not tapped"),
        (([0, 4], "resid_post"), "l[1]", r"layer 4 is out of range: .* 4 layers, expected 0 to 3"),
        (([-5], "resid_post"), "l", r"out of range: .* \(or −4 to −1\)"),
        (
            ([2, -2], "resid_post"),
            "l[1]",
            "layer -2 is the same as layer 2: the model has 4 layers",
        ),
    )


@given(st.integers(-9, 9))
def test_a_layer_is_counted_from_either_end_or_refused(index):
    if -4 <= index < 4:
        assert find_layer(index, SHAPE) == list(range(4))[index]
    else:
        with pytest.raises(SpecError, match="out of range"):
            find_layer(index, SHAPE)


def test_a_single_tap_is_checked_under_the_field_that_could_be_changed():
    check_tapped(("resid_post", 2), SOME, "site", "layer")
    refused(
        lambda tap: check_tapped(tap, SOME, "site", "layer"),
        (("resid_post", 1), "layer", ""),
        (("resid_mid", 1), "site", ""),
    )
