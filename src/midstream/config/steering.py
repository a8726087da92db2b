"""Parser of the settings `vectors` and `steering`, what an engine is steered with from its start,
and of `lenses` and `saes`.

Only their form is checked here. Files are read, and names and layers looked up, where the engine
starts: see `midstream.runtime.frontend.start_steering`.
"""

from __future__ import annotations

import json
import os
from typing import Any

from midstream.config.reader import check_mapping, check_names
from midstream.errors import ConfigError, SpecError
from midstream.spec.named_vector import Named, read_name
from midstream.spec.operations import Edit
from midstream.spec.vector import Vector

TIER_NAMES = ("base", "prompt", "generated")
_VECTORS, _STEERING = "midstream.vectors", "midstream.steering"
# Settings with registered weights, and what their paths are of.
WEIGHTS = {"lenses": "a lens's folder or file", "saes": "an SAE's folder or file"}


def plain_vectors(value: object) -> dict[str, str]:
    """Return the setting `vectors` as {name: path of a file}.

    Raises:
        ConfigError: another type, or an invalid name or path.
    """
    return _paths(_VECTORS, value, "a .safetensors, .npz, .gguf or .json file")


def plain_weights(setting: str, value: object) -> dict[str, str]:
    """Return a setting of `WEIGHTS` as {name: path of a file or folder}.

    Raises:
        ConfigError: another type, or an invalid name or path.
    """
    return _paths(f"midstream.{setting}", value, WEIGHTS[setting])


def _paths(setting: str, value: object, what: str) -> dict[str, str]:
    found = {}
    for name, path in check_mapping(setting, value, "a dict of files by name").items():
        try:
            read_name(name)
        except SpecError as error:
            raise ConfigError(f"{setting}: name {name!r}: {error}") from None
        if not isinstance(path, (str, os.PathLike)) or not (text := os.fspath(path)):
            raise ConfigError(f"{setting}.{name}: expected the path of {what}, got {path!r}")
        found[name] = str(text)
    return found


def plain_steering(value: object) -> dict[str, Any]:
    """Return the setting `steering` as {tier: JSON values}; each in a form of `llm.steering.set`.

    Raises:
        ConfigError: another type, an unknown tier, or a value without a JSON form.
    """
    given = check_mapping(_STEERING, value, "a dict of tiers")
    check_names(_STEERING, given, TIER_NAMES)
    found = {}
    for tier, edits in given.items():
        try:
            found[tier] = json.loads(json.dumps(edits, default=_plain))
        except SpecError as error:
            raise ConfigError(f"{_STEERING}.{tier}: {error}") from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{_STEERING}.{tier}: expected JSON values: {error}") from None
    return found


def _plain(value: object) -> object:
    """Return the JSON form of an edit, a name or a vector."""
    if isinstance(value, Edit):
        return value.to_dict()
    if isinstance(value, Named):
        return value.emit()
    return Vector.parse(value).emit()
