"""The setting `controllers`."""

from support.refusals import refused

from midstream.config.config import Config
from midstream.config.controllers import DeclaredController, read_controllers
from midstream.errors import ConfigError


def test_a_path_or_a_dict_is_a_controller_and_survives_the_settings():
    given = {
        "a": "package.module:Name",
        "b": {"path": "module:Outer.Inner", "scales": [0.5, 2], "seconds": 3, "on_error": "off"},
    }
    config = Config.parse({"controllers": given})
    expected = {
        "a": DeclaredController("package.module:Name"),
        "b": DeclaredController("module:Outer.Inner", (0.5, 2.0), 3.0, "off"),
    }
    assert read_controllers(config.controllers) == expected
    assert read_controllers(Config.parse(config.to_dict()).controllers) == expected


def test_what_is_malformed_is_named():
    refused(
        lambda given: Config.parse({"controllers": given}),
        ([], "controllers: expected a dict"),
        ({"a b": "m:n"}, "name 'a b'"),
        ({"a": "module.name"}, 'a.path: expected "package.module:Name"'),
        ({"a": {"scales": [1]}}, "a: missing field `path`"),
        ({"a": {"path": "m:n", "mode": "sync"}}, "a: unknown field 'mode'; known: `path`"),
        ({"a": {"path": "m:n", "scales": ["x"]}}, "a.scales: expected a number"),
        ({"a": {"path": "m:n", "scales": [1.0] * 65}}, "a.scales: expected a list of at most 64"),
        ({"a": {"path": "m:n", "seconds": 0}}, "a.seconds: .*more than 0 seconds"),
        ({"a": {"path": "m:n", "on_error": "stop"}}, "a.on_error: .*`keep`, `off`"),
        error=ConfigError,
    )
