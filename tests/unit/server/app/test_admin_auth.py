"""Who may change vectors and steering: every setting, key and host."""

import itertools

import pytest

from midstream.config.http import ADMIN_HEADER
from midstream.errors import HttpError
from midstream.server.app import admin_auth
from midstream.server.app.admin_auth import Guard, is_loopback

LOCAL = ("127.0.0.1", "127.8.9.1", "::1", "localhost")
BEYOND = (None, "", "0.0.0.0", "::", "192.168.1.4", "example.org", "localhost.example.org", "1")


def status(guard: Guard, **headers: str) -> int:
    try:
        guard.check({name.replace("_", "-"): value for name, value in headers.items()})
    except HttpError as refusal:
        return refusal.status
    return 200


def test_loopback_is_known_and_all_else_is_beyond_it():
    assert all(map(is_loopback, LOCAL))
    assert not any(map(is_loopback, BEYOND))


@pytest.mark.parametrize(
    ("allowed", "admin_key", "has_key", "host"),
    [*itertools.product((None, True, False), (None, "k"), (False, True), ("127.0.0.1", "0.0.0.0"))],
)
def test_every_setting_key_and_host(allowed, admin_key, has_key, host):
    guard = Guard(allowed=allowed, admin_key=admin_key, has_key=has_key, host=host)
    is_safe = admin_key is not None or has_key or host == "127.0.0.1"
    is_open = is_safe if allowed is None else allowed
    assert guard.is_open == is_open
    nothing = 403 if not is_open else 401 if admin_key else 200
    assert status(guard) == nothing
    right = 200 if is_open else 403
    assert status(guard, **{ADMIN_HEADER: "k"}) == (right if admin_key else nothing)
    assert status(guard, authorization="Bearer k") == (right if admin_key else nothing)


@pytest.mark.parametrize(
    "headers",
    [
        {ADMIN_HEADER: "K"},
        {ADMIN_HEADER: "key "},
        {ADMIN_HEADER: "ke"},
        {ADMIN_HEADER: ""},
        {ADMIN_HEADER: "kéy"},
        {"authorization": "key"},
        {"authorization": "Basic key"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer  key"},
        {"authorization": "Bearer other", ADMIN_HEADER: "other"},
        # The header of its own says what it says.
        {"authorization": "Bearer key", ADMIN_HEADER: "other"},
    ],
)
def test_what_is_not_the_admin_key_is_401(headers):
    guard = Guard(allowed=None, admin_key="key", has_key=True, host=None)
    assert status(guard, **headers) == 401


def test_the_admin_key_may_come_beside_the_servers_own():
    guard = Guard(allowed=None, admin_key="key", has_key=True, host=None)
    assert status(guard, authorization="Bearer servers", **{ADMIN_HEADER: "key"}) == 200


def test_keys_are_compared_by_the_function_that_takes_the_same_time_for_all(monkeypatch):
    compared = []

    def same(one, other):
        compared.append((len(one), len(other)))
        return True

    monkeypatch.setattr(admin_auth.secrets, "compare_digest", same)
    guard = Guard(allowed=None, admin_key="key", has_key=False, host=None)
    for sent in ("", "k", "x" * 1000):
        assert status(guard, **{ADMIN_HEADER: sent}) == 200
    # Digests, which are as long whatever was sent.
    assert compared == [(32, 32)] * 3


def test_the_key_itself_is_not_kept():
    guard = Guard(allowed=None, admin_key="a-secret", has_key=False, host=None)
    assert "a-secret" not in str(vars(guard))


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://127.0.0.1:8000", 200),
        ("http://localhost:3000", 200),
        ("http://[::1]:8000", 200),
        ("https://example.org", 403),
        ("http://127.0.0.1.example.org", 403),
        ("http://localhost@example.org", 403),
        ("null", 403),
        ("", 403),
        ("http://[", 403),
    ],
)
def test_without_a_key_a_page_of_another_place_may_change_nothing(origin, expected):
    guard = Guard(allowed=None, admin_key=None, has_key=False, host="127.0.0.1")
    assert status(guard, origin=origin) == expected
    # Where somebody said that all may change it, a page still may not do it in a client's place.
    for host in ("127.0.0.1", "0.0.0.0"):
        anybody = Guard(allowed=True, admin_key=None, has_key=False, host=host)
        assert status(anybody, origin=origin) == expected
    # With a key, it is no question of where.
    keyed = Guard(allowed=None, admin_key=None, has_key=True, host="127.0.0.1")
    assert status(keyed, origin=origin) == 200
