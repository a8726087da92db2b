"""The strict reader of settings: one value at a time, with errors that name the setting."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from midstream.errors import ConfigError


def check_mapping(path: str, value: object, expected: str) -> Mapping[str, Any]:
    """Return a dict of settings unchanged.

    Args:
        path: place of the value, for errors.
        expected: what would be right, for errors.

    Raises:
        ConfigError: the value is not a mapping.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: expected {expected}, got `{type(value).__name__}` {value!r}")
    return value


def check_names(path: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Check that every given setting exists.

    Raises:
        ConfigError: an unknown setting; the message names a similar one, or all of them.
    """
    names = sorted(known)
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
            raise ConfigError(f"{path}.{name}: no such setting; {hint}")


def read_count(path: str, value: object, at_least: int = 1) -> int:
    """Return an integer of at least `at_least`; a bool is not an integer.

    Raises:
        ConfigError: another type, or a smaller number.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{path}: expected `int`, got `{type(value).__name__}` {value!r}")
    if value < at_least:
        raise ConfigError(f"{path}: expected at least {at_least}, got {value}")
    return value


def read_bool(path: str, value: object) -> bool:
    """Return True or False.

    Raises:
        ConfigError: another type.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{path}: expected true or false, got {value!r}")
    return value


def read_choice(path: str, value: object, choices: tuple[str, ...]) -> str:
    """Return one of some words.

    Raises:
        ConfigError: another value.
    """
    if value not in choices:
        raise ConfigError(f"{path}: expected one of {', '.join(choices)}, got {value!r}")
    return str(value)
