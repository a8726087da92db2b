"""Settings: read strictly, refused by name, and the same after a trip through JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused

from midstream import sites
from midstream.config.config import STAMP, Config, from_additional_config, from_environment
from midstream.errors import ConfigError

counts = st.integers(16, 10**9)
configs = st.builds(
    lambda names, layers, **counted: Config.parse({"sites": names, "layers": layers, **counted}),
    st.lists(st.sampled_from(sites.NAMES), min_size=1, unique=True),
    st.just("all") | st.lists(st.integers(-40, 40), min_size=1),
    bank_rows=counts,
    programs=counts,
    max_edits=counts,
    edits_per_site=counts,
    probes=counts,
    token_ids=counts,
    staging_bytes=st.none() | st.integers(1, 2**40),
)


@given(configs)
def test_settings_survive_a_trip_through_json(config):
    assert Config.parse(json.loads(json.dumps(config.to_dict()))) == config


def test_an_empty_dict_means_the_defaults():
    assert Config.parse({}) == Config()
    assert Config().sites == ("resid_post",)
    assert Config().layers == "all"


def test_the_plain_form_carries_the_version_so_that_graphs_of_another_are_not_reused():
    assert Config().to_dict()["stamp"] == STAMP
    assert set(STAMP) == {"version", "op_schema"}


def test_the_plain_form_is_the_callers_to_change():
    plain = Config().to_dict()
    plain["stamp"]["version"] = "changed"
    plain["sites"].append("changed")
    assert Config().to_dict()["stamp"]["version"] != "changed"


def test_sites_are_canonical_and_in_the_order_of_the_forward():
    for settings, found in (
        ("post_block", ("resid_post",)),
        (["resid_post", "pre_attn"], ("resid_pre", "resid_post")),
        (("resid_mid",), ("resid_mid",)),
    ):
        assert Config.parse({"sites": settings}).sites == found, settings


@pytest.mark.parametrize("value", ["all", ["all"], ("all",)])
def test_all_layers_may_be_written_as_a_word_or_a_list_of_it(value):
    assert Config.parse({"layers": value}).layers == "all"


def test_what_is_wrong_is_refused_by_name():
    for settings, message in (
        (
            {"site": ["resid_post"]},
            "midstream: unknown field 'site' (did you mean `sites`?); known: `sites`, ",
        ),
        (
            {"bank_row": 20},
            "midstream: unknown field 'bank_row' (did you mean `bank_rows`?); known: `sites`, ",
        ),
        (
            {"zzz": 1},
            "midstream: unknown field 'zzz'; known: `sites`, `layers`, `bank_rows`, `programs`",
        ),
        ({"return": "both"}, "midstream.return: expected one of `gathered`, `sharded`, got 'both'"),
        ({"return": True}, "midstream.return: expected one of `gathered`, `sharded`, got `bool`"),
        (
            {"return_": "sharded"},
            "midstream: unknown field 'return_' (did you mean `return`?); known: `sites`, ",
        ),
        ({"check_ranks": 1}, "midstream.check_ranks: expected `bool`, got 1"),
        (
            {"probe": 1},
            "midstream: unknown field 'probe' (did you mean `probes`?); known: `sites`, ",
        ),
        (
            {"token_id": 1},
            "midstream: unknown field 'token_id' (did you mean `token_ids`?); known: `sites`, ",
        ),
        ({1: 2}, "midstream: field names must be `str`, got `int`"),
        ({"bank_rows": "20"}, "midstream.bank_rows: expected `int`, got '20'"),
        ({"bank_rows": 20.0}, "midstream.bank_rows: expected `int`, got 20.0"),
        ({"bank_rows": True}, "midstream.bank_rows: expected `int`, got True"),
        ({"bank_rows": None}, "midstream.bank_rows: expected `int`, got None"),
        ({"programs": 3}, "midstream.programs: expected `int` >= 4, got 3"),
        ({"bank_rows": 0}, "midstream.bank_rows: expected `int` >= 1, got 0"),
        ({"max_edits": -1}, "midstream.max_edits: expected `int` >= 1, got -1"),
        ({"edits_per_site": 0}, "midstream.edits_per_site: expected `int` >= 1, got 0"),
        ({"probes": 0}, "midstream.probes: expected `int` >= 1, got 0"),
        ({"token_ids": 0}, "midstream.token_ids: expected `int` >= 1, got 0"),
        ({"probes": 1.5}, "midstream.probes: expected `int`, got 1.5"),
        ({"token_ids": False}, "midstream.token_ids: expected `int`, got False"),
        ({"staging_bytes": 0}, "midstream.staging_bytes: expected `int` >= 1, got 0"),
        ({"staging_bytes": "1G"}, "midstream.staging_bytes: expected `int | null`, got '1G'"),
        ({"sites": []}, "midstream.sites: expected one or more site names, got []"),
        ({"sites": {"resid_post": 1}}, "midstream.sites: expected one or more site names"),
        (
            {"sites": ["resid"]},
            "midstream.sites: unknown site 'resid'; known: `embed`, `resid_pre`",
        ),
        ({"sites": [3]}, "midstream.sites: unknown site 3"),
        ({"sites": ["resid_post", "post_block"]}, "midstream.sites: resid_post is listed twice"),
        ({"layers": []}, 'midstream.layers: expected "all" or a list of indices, got []'),
        ({"layers": "first"}, 'midstream.layers: expected "all" or a list of indices'),
        ({"layers": 3}, 'midstream.layers: expected "all" or a list of indices, got 3'),
        ({"layers": [1, "2"]}, "midstream.layers[1]: expected `int`, got `str`"),
        ({"layers": [True]}, "midstream.layers[0]: expected `int`, got `bool`"),
        ({"layers": ["all", 1]}, "midstream.layers[0]: expected `int`, got `str`"),
    ):
        with pytest.raises(ConfigError) as caught:
            Config.parse(given)
        assert str(caught.value).startswith(message), given


@pytest.mark.parametrize("value", [None, True, 1, "resid_post", ["resid_post"]])
def test_settings_that_are_no_dict_are_refused_with_what_would_be_right(value):
    with pytest.raises(ConfigError, match=r"expected a dict of settings, got"):
        Config.parse(value)


def test_the_least_of_everything_is_allowed():
    least = {"bank_rows": 1, "programs": 4, "max_edits": 1, "edits_per_site": 1, "probes": 1}
    found = Config.parse({**least, "token_ids": 1, "staging_bytes": 1})
    assert found == Config(**least, token_ids=1, staging_bytes=1)


def test_a_config_made_directly_is_checked_like_a_dict():
    with pytest.raises(ConfigError, match="programs: expected `int` >= 4"):
        Config.parse(Config(programs=2))
    assert Config.parse(Config(sites="resid_post")) == Config()
    assert Config.parse(Config(sites=["post_attn"], layers=[1])) == Config(("resid_mid",), (1,))


def test_settings_stamped_by_another_version_are_refused():
    for stamp in (
        {**STAMP, "version": "0.0.0"},
        {**STAMP, "op_schema": 0},
        {},
        None,
        "0.1.0",
    ):
        with pytest.raises(ConfigError, match="stamp: this process runs midstream .*same version"):
            Config.parse({"stamp": stamp})


def test_the_callers_dict_is_left_alone():
    given = {"stamp": dict(STAMP), "sites": ["post_block"], "layers": [2, 1]}
    before = json.dumps(given)
    Config.parse(given)
    assert json.dumps(given) == before


# ---------------------------------------------------------------- layers


def test_layers_are_resolved_in_order():
    for layers, found in (
        ("all", (0, 1, 2, 3)),
        ([3, 0], (0, 3)),
        ([-1], (3,)),
        ([-4, 1], (0, 1)),
    ):
        assert Config.parse({"layers": layers}).resolve_layers(4) == found, layers


@pytest.mark.parametrize("layer", [4, -5, 100])
def test_a_layer_that_the_model_lacks_is_refused(layer):
    with pytest.raises(ConfigError, match=f"layers: {layer} is out of range: .*4 layers, 0 to 3"):
        Config.parse({"layers": [1, layer]}).resolve_layers(4)


@pytest.mark.parametrize("layers", [[2, 2], [3, -1]])
def test_a_layer_named_twice_is_refused_however_it_is_written(layers):
    with pytest.raises(ConfigError, match="layers: layer . is listed twice"):
        Config.parse({"layers": layers}).resolve_layers(4)


# ---------------------------------------------------------------- where they come from


@pytest.mark.parametrize("text", [None, "", "  ", "0", " 0 "])
def test_the_environment_variable_unset_empty_or_0_means_not_enabled(monkeypatch, text):
    monkeypatch.delenv("MIDSTREAM", raising=False)
    if text is not None:
        monkeypatch.setenv("MIDSTREAM", text)
    assert from_environment() is None


@pytest.mark.parametrize("text", ["1", " 1\n", "{}"])
def test_the_environment_variable_1_means_the_defaults(monkeypatch, text):
    monkeypatch.setenv("MIDSTREAM", text)
    assert from_environment() == Config()


def test_the_environment_variable_may_hold_settings_as_json(monkeypatch):
    monkeypatch.setenv("MIDSTREAM", '{"sites": ["post_attn"], "layers": [1, -1]}')
    assert from_environment() == Config(sites=("resid_mid",), layers=(1, -1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("yes", r"MIDSTREAM: expected 0, 1 or a JSON object of settings, got 'yes'"),
        ("{'sites': []}", r"MIDSTREAM: expected 0, 1 or a JSON object"),
        ('{"layers": [1], "layers": [2]}', r"got .*: duplicate JSON field 'layers'"),
        ("true", r"expected a dict of settings, got True"),
        ("2", r"expected a dict of settings, got 2"),
        ("null", r"expected a dict of settings, got None"),
        ('["resid_post"]', r"expected a dict of settings, got \["),
        ('{"site": 1}', r"midstream: unknown field 'site' \(did you mean `sites`"),
    ],
)
def test_a_malformed_environment_variable_is_refused(monkeypatch, text, message):
    monkeypatch.setenv("MIDSTREAM", text)
    with pytest.raises(ConfigError, match=message):
        from_environment()


def test_additional_config_without_midstreams_key_means_not_enabled():
    for additional in (
        None,
        {},
        {"other": {"layers": [1]}},
        {"midstream": None},
        {"midstream": False},
        object(),
    ):
        assert from_additional_config(additional) is None, additional


def test_additional_config_with_midstreams_key_is_read_beside_other_plugins():
    assert from_additional_config({"other": 1, "midstream": {}}) == Config()
    assert from_additional_config({"midstream": {"layers": [2]}}).layers == (2,)
    assert from_additional_config({"midstream": Config(layers=(2,))}).layers == (2,)


@pytest.mark.parametrize("value", [True, 0, 1, "on"])
def test_additional_config_with_something_else_is_refused(value):
    with pytest.raises(ConfigError, match="expected a dict of settings"):
        from_additional_config({"midstream": value})


# ---------------------------------------------------------------- sinks


def test_sinks_are_kept_in_their_plain_form_and_survive_json():
    config = Config.parse({"sinks": ["log", "npz:root=/tmp/x"]})
    assert config.sinks == {"log": {}, "npz": {"root": "/tmp/x"}}
    assert Config.parse(json.loads(json.dumps(config.to_dict()))) == config
    assert Config().sinks == {}
    plain = config.to_dict()
    plain["sinks"]["npz"]["root"] = "changed"
    assert config.sinks["npz"]["root"] == "/tmp/x"


@pytest.mark.parametrize("value", [None, 0, "", "npz:root", {"npz": 1}, {"a/b": {}}])
def test_sinks_that_are_none_are_refused_by_name(value):
    with pytest.raises(ConfigError, match=r"^midstream\.sinks"):
        Config.parse({"sinks": value})


def test_a_setting_that_is_a_word_of_pythons_survives_a_dict():
    config = Config(return_="sharded")
    assert config.to_dict()["return"] == "sharded"
    assert Config.parse(config.to_dict()) == config == Config.parse({"return": "sharded"})
    assert Config.parse(config) == config


def test_places_of_reconstructions_have_canonical_names():
    found = Config.parse({"reconstruct": {"post_block:3": 64, "mlp_in:0": 8}})
    assert found.reconstruct == {"resid_post:3": 64, "mlp_in:0": 8}
    assert found.reconstructed == {("resid_post", 3): 64, ("mlp_in", 0): 8}
    assert Config.parse(json.loads(json.dumps(found.to_dict()))) == found


def test_places_that_are_none_are_refused_by_name():
    refused(
        lambda value: Config.parse({"reconstruct": value}),
        (["resid_post:3"], "reconstruct: expected a dict of numbers of features"),
        ({"resid_post": 3}, "such as resid_post:12, .* got 'resid_post'"),
        ({"z:3": 3}, "such as resid_post:12"),
        ({"resid_post:-1": 3}, "a layer from 0, got 'resid_post:-1'"),
        ({3: 3}, "got 3"),
        ({"resid_post:3": 0}, "reconstruct.resid_post:3: expected at least 1"),
        (
            {"resid_post:3": 64, "post_block:3": 8},
            "resid_post:3 is listed twice, .* 'post_bl",
        ),
        ({"resid_post:3": 8, "resid_post:03": 64}, "resid_post:3 is listed twice"),
        error=ConfigError,
    )
