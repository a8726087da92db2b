"""The body of a request for a fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from midstream.errors import SpecError
from midstream.lab.fit.prompts import naming_fields, read_capture, read_prompts
from midstream.plan.positions.work import check_called
from midstream.plan.readouts.capture import Capture
from midstream.plan.selection import read_site
from midstream.plan.vectors.named_vector import read_name
from midstream.server.body_values import check_fields
from midstream.validation import at, is_int, kind

_REQUIRED = ("positive", "negative")
_OPTIONS: Mapping[str, Any] = {
    "method": "mean",
    "layers": "all",
    "positions": "last_prompt",
    "site": "resid_post",
    "reduce": "",
    "folds": 5,
    "groups": None,
    "seed": 0,
}
_KNOWN = (*_REQUIRED, *_OPTIONS, "name", "model")


@dataclass(frozen=True)
class FitBody:
    """One request for a fit."""

    positive: Sequence[Any]
    negative: Sequence[Any]
    options: Mapping[str, Any]  # of `Directions.fit_async`
    capture: Capture
    name: str | None  # to register the vectors under; None: they are not
    model: str | None  # or an adapter; None: the model


def read_fit(value: object, most: int) -> FitBody:
    """Parse a body: arguments of `Directions.fit`, `name` and `model`; at most `most` prompts."""
    if not isinstance(value, Mapping):
        raise SpecError("", f"expected an object of a fit's arguments, got {kind(value)}")
    check_fields(value, _KNOWN, _REQUIRED)
    positive, negative = (read_prompts(name, value[name]) for name in _REQUIRED)
    if len(positive) + len(negative) > most:
        raise SpecError(
            "positive",
            f"{len(positive)} + {len(negative)} prompts; this server allows {most} (the setting "
            "http.fit_prompts)",
        )
    options = {name: value.get(name, default) for name, default in _OPTIONS.items()}
    for word in ("method", "site", "reduce"):
        if not isinstance(options[word], str):
            raise SpecError(word, f"expected `str`, got {kind(options[word])}")
    with at("site"):
        options["site"] = read_site(options["site"])
    for number in ("folds", "seed"):
        if not is_int(options[number]):
            raise SpecError(number, f"expected `int`, got {kind(options[number])}")
    options["groups"] = _groups(options["groups"])
    with naming_fields():
        capture = read_capture(
            options["layers"], options["site"], options["positions"], options["reduce"]
        )
    with at("positions"):
        positions = capture.positions
        items = len(positions.include) + len(positions.exclude)
        check_called(len(positive) + len(negative), items)
    name, model = value.get("name"), value.get("model")
    if name is not None:
        with at("name"):
            name = read_name(name)
    if model is not None and not isinstance(model, str):
        raise SpecError("model", f"expected the name of a model, got {kind(model)}")
    return FitBody(positive, negative, options, capture, name, model)


def _groups(value: object) -> object:
    """Return keys of pairs as a list, keys of each class as a pair of lists."""
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(keys, list) for keys in value)
    ):
        return tuple(value)
    return value
