"""Vectors by tap, in every form that they are written in."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused

from midstream.errors import SpecError
from midstream.plan import Vector
from midstream.sites import BY_NAME, ENDS, NAMES, canonical
from midstream.steering.parse import LAYER_WORDS, read_key, read_placed

V, W = [1.0, 2.0], [3.0, -4.0]


def found(value):
    return {(one.site, one.layer): (one.vector, one.scale) for one in read_placed(value)}


def test_every_form_says_the_same():
    for value in (
        {15: V, -1: W},
        {"15": V, "-1": W},
        {np.int64(15): V, -1: W},
        {"resid_post": {15: V, -1: W}},
        {"post_block": {"15": V, -1: W}},
        {("resid_post", 15): V, ("post_block", -1): W},
        {"resid_post.15": V, "layer:-1": W},
        {15: V, "resid_post": {-1: W}},
    ):
        assert found(value) == {
            ("resid_post", 15): (Vector.parse(V), 1.0),
            ("resid_post", -1): (Vector.parse(W), 1.0),
        }


def test_a_vector_may_have_a_scale_and_any_form():
    given = {"pre_attn": {3: {"vector": np.asarray(V), "scale": 2}, 4: Vector.parse(W).emit()}}
    assert found(given) == {
        ("resid_pre", 3): (Vector.parse(V), 2.0),
        ("resid_pre", 4): (Vector.parse(W), 1.0),
    }


def test_they_come_in_the_order_written_with_the_path_to_each():
    given = {"post_block": {9: V}, 2: V, ("resid_mid", 1): V, "mlp_out.0": V}
    assert [one.path for one in read_placed(given)] == [
        '["post_block"][9]',
        "[2]",
        '[("resid_mid", 1)]',
        '["mlp_out.0"]',
    ]


def test_what_is_wrong_is_named_with_its_path():
    refused(
        read_placed,
        (V, "", "expected {layer: vector}"),
        ({}, "", "the dict is empty"),
        ({"post_blok": {1: V}}, '["post_blok"]', "did you mean `post_block`"),
        ({("nowhere", 1): V}, '[("nowhere", 1)]', "unknown site"),
        ({"resid_pre": V}, '["resid_pre"]', "specify the layer"),
        ({"resid_pre": {"vector": V}}, '["resid_pre"]', "specify the layer"),
        ({"vector": V}, '["vector"]', "needs a layer"),
        ({True: V}, "[`bool`]", "expected a layer index"),
        ({"resid_pre": {"all": V}}, '["resid_pre"]["all"]', "layer index"),
        ({"resid_pre": {"resid_pre.1": V}}, '["resid_pre"]["resid_pre.1"]', "ind"),
        ({15: V, "resid_post": {15: V}}, '["resid_post"][15]', "a second vector"),
        (
            {"pre_attn": {1: V}, "resid_pre": {1: V}},
            '["resid_pre"][1]',
            r"after \[\"pre_attn\"\]\[1\]",
        ),
        ({15: [1.0, "x"]}, "[15][1]", "expected a number"),
        ({"pre_attn": {15: {"vector": [float("nan")]}}}, '["pre_attn"][15].vector[0]', "finite"),
        ({15: {"vector": V, "scale": "2"}}, "[15].scale", "expected a number"),
        ({15: {"vector": V, "sacle": 2}}, "[15]", "did you mean `scale`"),
        ({("resid_pre", 1, 2): V}, "[`tuple`]", r"key \(site, layer\)"),
        *(
            (value, r'has no layer; register a single .*site="(embed|final_n)')
            for value in ({"embed": {0: [1]}}, {("final_norm", 3): [1]}, {"final_norm.3": [1]})
        ),
    )


@given(
    place=st.sampled_from([None, *(name for name in BY_NAME if name not in ENDS), *LAYER_WORDS]),
    sep=st.sampled_from(".:"),
    layer=st.integers(-999_999, 999_999),
)
def test_a_key_is_read_back_as_it_was_made(place, sep, layer):
    key = str(layer) if place is None else f"{place}{sep}{layer}"
    assert read_key(key) == (canonical(place or "resid_post") or "resid_post", layer)


@given(key=st.text(max_size=20) | st.from_regex(r"[a-z_]{0,12}[.: /]?-?[0-9]{0,8}", fullmatch=True))
def test_a_key_names_a_tap_or_is_refused(key):
    try:
        site, layer = read_key(key)
    except SpecError:
        return
    assert site in NAMES
    assert key.isascii()
    assert str(layer) in key


def test_a_key_that_names_no_tap_is_refused_with_the_grammar():
    keys = ["", "vector", "model.layers.3.weight", "resid_post.", "resid_post.01", "h.01", "-0"]
    keys += ["resid_post 3", "resid_post.3.positions", "٣", " 3", "3\n", "1" * 7]
    words = r"is not a tap; expected `15`, `resid_post\.15`"
    refused(read_key, *((key, words) for key in keys))
