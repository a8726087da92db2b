"""Settings: read strictly, refused by name, and the same after a trip through JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused

from midstream import sites
from midstream.config.config import STAMP, Config, from_additional_config, from_environment
from midstream.errors import ConfigError
from midstream.runtime.vllm.additional_config import with_midstream

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


def test_what_is_wrong_is_refused_by_name():
    refused(
        Config.parse,
        (
            {"site": ["resid_post"]},
            r"unknown field 'site' \(did you mean `sites`\?\); known: `sites`, ",
        ),
        ({"zzz": 1}, "unknown field 'zzz'; known: `sites`, `layers`, `bank_rows`, `programs`"),
        ({"return": "both"}, "return: expected one of `gathered`, `sharded`, got 'both'"),
        ({"return": True}, "return: expected one of `gathered`, `sharded`, got `bool`"),
        ({"return_": "sharded"}, r"unknown field 'return_' \(did you mean `return`\?"),
        ({"check_ranks": 1}, "check_ranks: expected `bool`, got 1"),
        ({1: 2}, "field names must be `str`, got `int`"),
        ({"bank_rows": "20"}, "bank_rows: expected `int`, got '20'"),
        ({"bank_rows": True}, "bank_rows: expected `int`, got True"),
        ({"programs": 3}, "programs: expected `int` >= 4, got 3"),
        ({"bank_rows": 0}, "bank_rows: expected `int` >= 1, got 0"),
        ({"max_edits": -1}, "max_edits: expected `int` >= 1, got -1"),
        ({"edits_per_site": 0}, "edits_per_site: expected `int` >= 1, got 0"),
        ({"probes": 0}, "probes: expected `int` >= 1, got 0"),
        ({"token_ids": 0}, "token_ids: expected `int` >= 1, got 0"),
        ({"staging_bytes": 0}, "staging_bytes: expected `int` >= 1, got 0"),
        ({"staging_bytes": "1G"}, "staging_bytes: expected `int | null`, got '1G'"),
        ({"sites": []}, r"sites: expected one or more site names, got \[\]"),
        ({"sites": {"resid_post": 1}}, "sites: expected one or more site names"),
        (
            {"sites": ["resid"]},
            "sites: unknown site 'resid' .did you mean `resid_post`.*known: `embed`, `resid_pre`",
        ),
        ({"sites": [3]}, "sites: unknown site 3"),
        ({"sites": ["resid_post", "post_block"]}, "sites: resid_post is listed twice"),
        ({"layers": []}, r'layers: expected "all" or a list of indices, got \[\]'),
        ({"layers": 3}, 'layers: expected "all" or a list of indices, got 3'),
        ({"layers": [1, "2"]}, r"layers\[1\]: expected `int`, got `str`"),
        ({"layers": ["all", 1]}, r"layers\[0\]: expected `int`, got `str`"),
        *(({"sinks": value}, r"^midstream\.sinks") for value in (None, 0, "npz:root", {"a/b": {}})),
        *(
            ({"stamp": stamp}, "stamp: this process runs midstream .*same version")
            for stamp in ({**STAMP, "version": "0.0.0"}, {**STAMP, "op_schema": 0}, {}, None)
        ),
        *((value, "expected a dict of settings, got") for value in (None, True, 1, ["resid_post"])),
        error=ConfigError,
    )


def test_the_least_of_everything_is_allowed():
    least = {"bank_rows": 1, "programs": 4, "max_edits": 1, "edits_per_site": 1, "probes": 1}
    found = Config.parse({**least, "token_ids": 1, "staging_bytes": 1})
    assert found == Config(**least, token_ids=1, staging_bytes=1)


def test_a_config_made_directly_is_checked_like_a_dict():
    with pytest.raises(ConfigError, match="programs: expected `int` >= 4"):
        Config.parse(Config(programs=2))
    assert Config.parse(Config(sites="resid_post")) == Config()
    assert Config.parse(Config(sites=["post_attn"], layers=[1])) == Config(("resid_mid",), (1,))


def test_the_callers_dict_is_left_alone():
    given = {"stamp": dict(STAMP), "sites": ["post_block"], "layers": [2, 1]}
    before = json.dumps(given)
    Config.parse(given)
    assert json.dumps(given) == before


def test_layers_are_resolved_in_order():
    for layers, found in (
        ("all", (0, 1, 2, 3)),
        (["all"], (0, 1, 2, 3)),
        ([3, 0], (0, 3)),
        ([-4, 1], (0, 1)),
    ):
        assert Config.parse({"layers": layers}).resolve_layers(4) == found, layers
    refused(
        lambda layers: Config.parse({"layers": layers}).resolve_layers(4),
        ([1, 4], "layers: 4 is out of range: .*4 layers, 0 to 3"),
        ([1, -5], "layers: -5 is out of range"),
        ([2, 2], "layers: layer . is listed twice"),
        ([3, -1], "layers: layer . is listed twice"),
        error=ConfigError,
    )


def test_the_environment_variable_is_0_1_or_settings_as_json(monkeypatch):
    def read(text):
        monkeypatch.setenv("MIDSTREAM", text)
        return from_environment()

    for text, config in (
        *((text, None) for text in ("", "  ", "0", " 0 ")),
        *((text, Config()) for text in ("1", " 1\n", "{}")),
        ('{"sites": ["post_attn"], "layers": [1, -1]}', Config(("resid_mid",), (1, -1))),
    ):
        assert read(text) == config, text
    refused(
        read,
        ("yes", r"MIDSTREAM: expected 0, 1 or a JSON object of settings, got 'yes'"),
        ("{'sites': []}", r"MIDSTREAM: expected 0, 1 or a JSON object"),
        ('{"layers": [1], "layers": [2]}', r"got .*: duplicate JSON field 'layers'"),
        ("null", r"expected a dict of settings, got None"),
        ('["resid_post"]', r"expected a dict of settings, got \["),
        ('{"site": 1}', r"midstream: unknown field 'site' \(did you mean `sites`"),
        error=ConfigError,
    )
    monkeypatch.delenv("MIDSTREAM")
    assert from_environment() is None


def test_additional_config_without_midstreams_key_means_not_enabled():
    others = {"other": {"layers": [1]}}
    for additional in (None, {}, others, {"midstream": None}, {"midstream": False}, object()):
        assert from_additional_config(additional) is None, additional


def test_additional_config_with_midstreams_key_is_read_beside_other_plugins():
    assert from_additional_config({"other": 1, "midstream": {}}) == Config()
    assert from_additional_config({"midstream": {"layers": [2]}}).layers == (2,)
    assert from_additional_config({"midstream": Config(layers=(2,))}).layers == (2,)
    refused(
        lambda value: from_additional_config({"midstream": value}),
        *((value, "expected a dict of settings") for value in (True, 0, "on")),
        error=ConfigError,
    )


def test_sinks_are_kept_in_their_plain_form_and_survive_json():
    config = Config.parse({"sinks": ["log", "npz:root=/tmp/x"]})
    assert config.sinks == {"log": {}, "npz": {"root": "/tmp/x"}}
    assert Config.parse(json.loads(json.dumps(config.to_dict()))) == config
    assert Config().sinks == {}
    plain = config.to_dict()
    plain["sinks"]["npz"]["root"] = "changed"
    assert config.sinks["npz"]["root"] == "/tmp/x"


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
        ({"resid_post:3": 64, "post_block:3": 8}, "resid_post:3 is listed twice, .* 'post_bl"),
        ({"resid_post:3": 8, "resid_post:03": 64}, "resid_post:3 is listed twice"),
        error=ConfigError,
    )


def test_enable_steering_taps_the_three_sites_of_the_stream():
    enabled = with_midstream(None, None, True)["midstream"]
    assert list(enabled["sites"]) == ["resid_pre", "resid_mid", "resid_post"]
