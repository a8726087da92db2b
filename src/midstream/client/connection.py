"""Where the clients' server is, and what a failed connection to it says."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from midstream.config.http import ADMIN_HEADER
from midstream.errors import ConfigError
from midstream.validation import show

_API = "/v1"


def connected(
    make: Any,
    base_url: str,
    keys: tuple[str | None, str | None],
    timeout: float | None,
    http: Any,
) -> Any:
    """Return the caller's HTTP client, or a new one with these keys (API's, admin's)."""
    if http is not None:
        _check(http, *keys)
        return http
    api_key, admin_key = keys
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    if admin_key is not None:
        headers[ADMIN_HEADER] = admin_key
    return make(base_url=_server_url(base_url), headers=headers, timeout=timeout)


def _server_url(base_url: str) -> str:
    """Return the URL of a server, of which the API's path, as other clients take it, is no part."""
    url = str(base_url)
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise ConfigError(f"base_url: {show(url)} is no URL: {error}") from None
    if scheme not in ("http", "https"):
        raise ConfigError(
            f"base_url: expected a URL such as http://127.0.0.1:8000, got {show(_shown(url))}; "
            "start with http:// or https://"
        )
    return url.rstrip("/").removesuffix(_API)


def _check(http: Any, *keys: str | None) -> None:
    """Check that a caller's own HTTP client has no keys beside it, and that its URLs are right."""
    if any(key is not None for key in keys):
        raise ConfigError(
            "http: api_key and admin_key are unsupported with it; set the keys in its own headers"
        )
    url = str(getattr(http, "base_url", ""))
    if _server_url(url) != url.rstrip("/"):
        raise ConfigError(f"http: expected a base URL without {_API}, got {_shown(url)}")


@contextmanager
def named_failures(http: Any) -> Iterator[None]:
    """Let failures of connections within the block name the server, and the proxy in between."""
    import httpx

    try:
        yield
    except httpx.TransportError as error:
        url = str(http.base_url)
        if _shown(url) in str(error):
            raise  # by a request within a stream
        through = ""
        if http.trust_env and (proxy := _proxy_of(url)):
            name, address = proxy
            host = urlsplit(url).hostname
            through = (
                f" through the proxy {address}, which the environment's {name} names; to reach the "
                f"server without it, add {host} to NO_PROXY"
            )
        none = isinstance(error, httpx.ConnectError) and not through
        start = "; is a server there? Start one with `midstream serve MODEL`" if none else ""
        raise type(error)(f"{error} ({_shown(url)}{through}){start}") from None


def _proxy_of(url: str) -> tuple[str, str] | None:
    """Return the environment's proxy for a URL: variable, and address without password."""
    parts = urlsplit(url)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    known = urllib.request.getproxies()
    for scheme in (parts.scheme, "all"):
        if known.get(scheme):
            return f"{scheme.upper()}_PROXY", _shown(known[scheme])
    return None


def _shown(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() if parts.netloc else url
