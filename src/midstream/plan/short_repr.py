"""Short text of an operation or capture: the call that makes it, without what is the default."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from itertools import islice
from typing import Any

from midstream.plan.vectors.vector import Vector

# As `to_dict` and `own` have them, beside those of the constructor.
_DEFAULTS: dict[str, Any] = {
    "site": "resid_post",
    "sites": ["resid_post"],
    "positions": ["all"],
    "queries": ["all"],
    "phase": "all",
    "lens": "logit",
}
_MOST = 8
_MOST_VECTORS = 2


def short_repr(cls: type, arguments: Mapping[str, Any]) -> str:
    """Return text such as `Steer(vector=Vector(size=576, norm=3, digest='ab12…'), layer=14)`."""
    defaults = _defaults_of(cls)
    shown = [
        f"{name}={_shown(value)}"
        for name, value in arguments.items()
        if (name in defaults or f"{name}_" in defaults)
        and not _is_default(value, defaults.get(name), _DEFAULTS.get(name))
    ]
    return f"{cls.__name__}({', '.join(shown)})"


@cache
def _defaults_of(cls: type) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters.values()
    return {
        parameter.name: list(parameter.default)
        if isinstance(parameter.default, tuple)
        else parameter.default
        for parameter in parameters
    }


def _is_default(value: object, *defaults: object) -> bool:
    if value is None or (isinstance(value, (tuple, list)) and not value):
        return True
    return any(type(value) is type(default) and value == default for default in defaults)


def _shown(value: object) -> str:
    if isinstance(value, (tuple, list)):
        if len(value) > _MOST_VECTORS and all(isinstance(element, Vector) for element in value):
            return f"[{len(value)} vectors of {value[0].size}]"
        return _limited("[", [_shown(element) for element in value[:_MOST]], "]", len(value))
    if isinstance(value, Mapping):
        parts = [f"{key}: {_shown(element)}" for key, element in islice(value.items(), _MOST)]
        return _limited("{", parts, "}", len(value))
    return repr(value)


def _limited(begin: str, parts: list[str], end: str, count: int) -> str:
    more = f", … {count - len(parts)} more" if count > len(parts) else ""
    return f"{begin}{', '.join(parts)}{more}{end}"
