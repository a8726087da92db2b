"""The setting `http`, read strictly."""

from support.refusals import refused

from midstream.config.http import HttpSettings, admin_key, plain_http, read_http
from midstream.errors import ConfigError


def test_left_out_or_true_it_has_its_defaults_and_false_is_nothing():
    assert read_http(None) == read_http(True) == read_http({}) == HttpSettings()
    assert read_http(False) is None


def test_what_is_given_is_set_and_comes_back_from_its_plain_form():
    found = read_http({"admin": False, "held_seconds": 5})
    assert (found.admin, found.held_seconds, found.inline_bytes) == (False, 5, 16 << 20)
    assert read_http(plain_http(found)) == found
    assert plain_http(None) is False


def test_what_is_wrong_is_refused_by_name():
    refused(
        read_http,
        (3, "expected true, false or a dict"),
        ({"held_second": 5}, r"did you mean `held_seconds`\?"),
        ({"zzz": 5}, "known: `admin`"),
        ({3: 5}, "field names must be `str`"),
        ({"admin": 1}, r"admin: expected `bool \| null`, got 1"),
        ({"held_seconds": 0}, "held_seconds: expected `int` >= 1"),
        ({"held_seconds": True}, "expected `int`"),
        ({"held_seconds": None}, "expected `int`"),
        error=ConfigError,
    )


def test_an_empty_key_is_none(monkeypatch):
    monkeypatch.delenv("MIDSTREAM_ADMIN_KEY", raising=False)
    assert admin_key() is None
    monkeypatch.setenv("MIDSTREAM_ADMIN_KEY", "")
    assert admin_key() is None
    monkeypatch.setenv("MIDSTREAM_ADMIN_KEY", "k")
    assert admin_key() == "k"
