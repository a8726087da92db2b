"""Parser of the form of the settings `vectors`, `steering`, `lenses` and `saes`."""

from __future__ import annotations

import json
import os
from typing import Any

from midstream.errors import SpecError
from midstream.plan.operations import Edit
from midstream.plan.vectors.named_vector import Named, read_name
from midstream.plan.vectors.vector import Vector
from midstream.validation import at, read_fields, read_mapping, setting, show

TIER_NAMES = ("base", "prompt", "generated")
# Settings with registered weights, and what their paths are of.
WEIGHTS = {"lenses": "a lens's folder or file", "saes": "an SAE's folder or file"}


def plain_vectors(value: object) -> dict[str, str]:
    """Return the setting `vectors` as {name: path of a file}."""
    return _paths("vectors", value, "a .safetensors, .npz, .gguf or .json file")


def plain_weights(name: str, value: object) -> dict[str, str]:
    """Return the setting `name` of `WEIGHTS` as {name: path of a file or folder}."""
    return _paths(name, value, WEIGHTS[name])


def _paths(of: str, value: object, what: str) -> dict[str, str]:
    paths = {}
    with setting(f"midstream.{of}"):
        for name, path in read_mapping(value, "a dict of files by name").items():
            try:
                read_name(name)
            except SpecError as error:
                raise SpecError("", f"name {show(name)}: {error}") from None
            if not isinstance(path, (str, os.PathLike)) or not (text := os.fspath(path)):
                raise SpecError(name, f"expected the path of {what}, got {show(path)}")
            paths[name] = str(text)
    return paths


@setting("midstream.steering")
def plain_steering(value: object) -> dict[str, Any]:
    """Return the setting `steering` as {tier: JSON}; all in a form of `llm.steering.set`."""
    tiers = read_fields(read_mapping(value, "a dict of tiers"), (), TIER_NAMES)
    for tier, edits in tiers.items():
        with at(tier):
            try:
                tiers[tier] = json.loads(json.dumps(edits, default=_plain))
            except SpecError:
                raise
            except (TypeError, ValueError) as error:
                raise SpecError("", f"expected JSON values: {error}") from None
    return tiers


def _plain(value: object) -> object:
    if isinstance(value, Edit):
        return value.to_dict()
    if isinstance(value, Named):
        return value.emit()
    return Vector.parse(value).emit()
