import numpy as np
from support.refusals import refused

from midstream.plan import Layers, Sites


def test_sites_are_read_from_a_name_or_a_list_and_keep_their_order():
    assert Sites("resid_post").names == ("resid_post",)
    assert Sites(["resid_post", "resid_pre"]).names == ("resid_post", "resid_pre")
    assert tuple(Sites.parse(Sites(("resid_mid",)))) == ("resid_mid",)
    aliases = {"post_block": "resid_post", "post_attn": "resid_mid", "pre_attn": "resid_pre"}
    assert Sites(list(aliases)) == Sites(list(aliases.values()))


def test_what_names_no_sites_is_refused():
    refused(
        Sites,
        ([], "", "at least one site; known: `embed`, `resid_pre`, .*, `resid_post`, `final_norm`"),
        ("resid_pots", "", "unknown site 'resid_pots' .did you mean `resid_post`.*known: `embed`"),
        ("", "", "unknown site ''; known: `embed`, `resid_pre`, .*, `resid_post`, `final_norm`"),
        (["resid_post", "x" * 10_000], "[1]", "unknown site 'x{59}…; known"),
        (["resid_mid", "post_attn"], "[1]", "duplicate site 'post_attn': `resid_mid` is already"),
        (["resid_post", 3], "[1]", "expected the name of a site, `str`, got `int`"),
        ({"resid_post"}, "", "a list of names, got `set`"),
    )


def test_layers_are_all_an_index_or_a_list_of_them():
    for value, indices in (
        ("all", "all"),
        (["all"], "all"),
        (("all",), "all"),
        (3, (3,)),
        (-1, (-1,)),
        (np.int64(3), (3,)),
        ([3, 1, -1], (3, 1, -1)),
        ((0, np.int32(2)), (0, 2)),
        (range(4), (0, 1, 2, 3)),
        (2**31, (2**31,)),
        (range(4096), tuple(range(4096))),
        (range(4, 0, -2), (4, 2)),
        (Layers([1, 2]), (1, 2)),
    ):
        found = Layers.parse(value)
        assert found == Layers(value), value
        assert found.indices == indices
        assert found.indices == "all" or all(type(index) is int for index in found.indices)
        assert Layers.parse(found.emit()) == found


def test_what_names_no_layers_is_refused():
    refused(
        Layers,
        ([], "", "at least one layer"),
        ("last_row", "", "expected \"all\" or layer indices, got 'last_row'"),
        (True, "", 'expected "all", `int` or a list of `int`, got `bool`'),
        ({1, 2}, "", "a list of `int`, got `set`"),
        (np.ones((2, 2)), "", "a list of `int`, got `ndarray`"),
        ([0, True], "[1]", "expected `int`, got `bool`"),
        ([0, np.bool_(True)], "[1]", "expected `int`, got `bool"),
        ([0, [1]], "[1]", "expected `int`, got `list`"),
        ([0, "all"], "[1]", '"all" cannot be combined'),
        ([3, 1, 3], "[2]", "layer 3 is listed twice"),
        (2**31 + 1, "", r"within ±2\*\*31, got 2147483649"),
        ([10**5000], "[0]", "an integer of 16610 bits"),
        (range(10**30), "", "at most 4096 layers"),
        (list(range(4097)), "", "at most 4096 layers"),
    )
