"""Parser of the form of the setting `controllers`; `load` imports its code as the engine starts."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from midstream.errors import ConfigError, SpecError
from midstream.plan.control.control_laws import MOST_SCALES
from midstream.plan.control.controller import NAME, POLICIES, read_seconds
from midstream.validation import (
    at,
    read_fields,
    read_float32,
    read_mapping,
    read_word,
    setting,
    show,
)

_SETTING = "midstream.controllers"
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class DeclaredController:
    """A controller of the setting."""

    # "package.module:Name" of a class, of which each request has an object, or a function
    path: str
    scales: tuple[float, ...] = ()  # every one that it may answer, besides 0 and 1
    seconds: float = _SECONDS  # longest time that a step waits for it
    on_error: str = "keep"  # policy, unless a request has another


@setting(_SETTING)
def read_controllers(value: object) -> dict[str, DeclaredController]:
    controllers = {}
    for name, declared in read_mapping(value, "a dict of controllers by name").items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise SpecError(
                "", f"name {name!r}: expected 1 to 64 of the characters A-Z a-z 0-9 _ . -"
            )
        with at(name):
            controllers[name] = _read(declared)
    return controllers


def plain_controllers(value: object) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "path": controller.path,
            "scales": list(controller.scales),
            "seconds": controller.seconds,
            "on_error": controller.on_error,
        }
        for name, controller in read_controllers(value).items()
    }


def load(name: str, declared: DeclaredController) -> Callable[[], Callable[..., Any]]:
    """Import the code of a controller, and return a function that makes one for a request."""
    module, _, path = declared.path.partition(":")
    try:
        code: Any = importlib.import_module(module)
        for part in path.split("."):
            code = getattr(code, part)
    except Exception as error:  # whatever its module raises
        raise ConfigError(
            f"{_SETTING}.{name}: {declared.path} cannot be imported: {error!r}"
        ) from error
    if not callable(code):
        raise ConfigError(f"{_SETTING}.{name}: {declared.path} is neither a class nor a function")
    if isinstance(code, type):
        return code
    return lambda: code


def _read(declared: object) -> DeclaredController:
    if isinstance(declared, str):
        declared = {"path": declared}
    fields = read_mapping(declared, '"package.module:Name" or a dict')
    fields = read_fields(fields, ("path",), ("scales", "seconds", "on_error"))
    if not isinstance(fields["path"], str) or not _PATH.fullmatch(fields["path"]):
        raise SpecError("path", f'expected "package.module:Name", got {show(fields["path"])}')
    scales = fields.get("scales", ())
    if not isinstance(scales, (list, tuple)) or len(scales) > MOST_SCALES:
        raise SpecError("scales", f"expected a list of at most {MOST_SCALES} numbers")
    with at("scales"):
        scales = tuple(read_float32(scale) for scale in scales)
    with at("seconds"):
        seconds = read_seconds(fields.get("seconds", _SECONDS))
    with at("on_error"):
        on_error = read_word(fields.get("on_error", "keep"), POLICIES)
    return DeclaredController(fields["path"], scales, seconds, on_error)
