"""`ProbeInfo`: what is known of a probe besides what it computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from midstream.errors import SpecError
from midstream.plan.argument_names import read_each
from midstream.validation import (
    at,
    check_text,
    kind,
    read_count,
    read_fields,
    read_float32,
    read_mapping,
    read_word,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from midstream.plan.shape import ModelShape

Scalar = str | int | float | bool | None

METHODS = ("isotonic", "sigmoid")
MAX_TEXT, MAX_NOTES = 1000, 16_000
_MAX_ENTRIES, _MAX_KNOTS, _MAX_CLASSES = 64, 4096, 256


@dataclass(frozen=True, slots=True)
class Calibration:
    """A map of scores to probabilities of the second class.

    Attributes:
        method: "isotonic", linear between knots and constant beyond them; or "sigmoid",
            1 / (1 + exp(a · score + b)), Platt 1999.
        values: (score, probability) of each knot, scores ascending; of "sigmoid" one pair (a, b).
    """

    method: str
    values: tuple[tuple[float, float], ...]

    @staticmethod
    def parse(value: object) -> Calibration:
        """Read one, or its dict."""
        if isinstance(value, Calibration):
            return value
        parts = read_fields(value, required=("method", "values"))
        with at("method"):
            method = read_word(parts["method"], METHODS)
        pairs = read_each("values", _list("values", parts["values"], _MAX_KNOTS), _read_pair)
        if method == "sigmoid" and len(pairs) != 1:
            raise SpecError("values", f"expected one pair (a, b), got {len(pairs)}")
        ascend = all(low[0] < high[0] for low, high in zip(pairs, pairs[1:], strict=False))
        if method == "isotonic" and not (
            pairs and ascend and all(0 <= share <= 1 for _, share in pairs)
        ):
            raise SpecError("values", "expected scores that ascend, with probabilities of 0 to 1")
        return Calibration(method, pairs)

    def __call__(self, scores: Any) -> NDArray[np.float64]:
        """Return the probabilities of scores of any shape."""
        import numpy as np

        known, numbers = np.array(self.values).T, np.asarray(scores, np.float64)
        if self.method == "isotonic":
            probabilities: NDArray[np.float64] = np.interp(numbers, *known)
            return probabilities
        # exp may overflow to infinity, of which the share is 0.
        with np.errstate(over="ignore"):
            share: NDArray[np.float64] = 1 / (1 + np.exp(known[0] * numbers + known[1]))
        return share


@dataclass(frozen=True, slots=True)
class ProbeInfo:
    """What is known of a probe besides what it computes: a file of it has this.

    It changes no score. It is no part of a request, of equality, or of a cache's key.

    Attributes:
        model: the model that it was fitted on: the id of a repository, or the name of a folder; ""
            unknown.
        width, num_layers: of that model; 0 unknown.
        recipe: how it was fitted: names and texts, numbers or None; see `FittedProbe`.
        scaler: of the rows before the fit, which the weights contain; "" none.
        threshold: the score from which a text counts as the second class; None: not chosen.
        data_hash: SHA-256 of what it was fitted on, in hex; "" unknown.
        scores: numbers on texts that it was not fitted on, by name, such as "auc".
        classes: their names, in the order of the labels; empty: unknown.
        calibration: of scores to probabilities; None: not calibrated.
        notes: any text.

    Raises:
        SpecError: a field is malformed, or too long.
    """

    model: str = ""
    width: int = 0
    num_layers: int = 0
    recipe: Mapping[str, Scalar] = field(default_factory=dict)
    scaler: str = ""
    threshold: float | None = None
    data_hash: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    calibration: Calibration | None = None
    notes: str = ""

    def __post_init__(self) -> None:
        for name, read in _READERS.items():
            with at(name):
                object.__setattr__(self, name, read(getattr(self, name)))

    @staticmethod
    def parse(value: object) -> ProbeInfo:
        """Read one, or its dict."""
        if isinstance(value, ProbeInfo):
            return value
        names = tuple(own.name for own in fields(ProbeInfo))
        return ProbeInfo(**read_fields(value, (), names))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, which `parse` reads."""
        return asdict(self)

    def check(self, model: str, shape: ModelShape) -> None:
        """Check that a model may be the one that the probe was fitted on.

        Args:
            model: its name or folder; "" unknown.
            shape: its dimensions.

        Raises:
            SpecError: its width, number of layers or name is another; the message has both.
        """
        mine = (self.width, self.num_layers)
        theirs = (shape.hidden_size, shape.num_layers)
        differs = any(known and known != size for known, size in zip(mine, theirs, strict=True))
        ours, name = model_name(self.model), model_name(model)
        last = [text.rpartition("/")[2].casefold() for text in (ours, name)]
        if not differs and (not all(last) or last[0] == last[1]):
            return
        raise SpecError(
            "",
            f"the probe was fitted on {ours or 'a model'} ({_size(*mine)}), and the engine runs "
            f"{name or 'another model'} ({_size(*theirs)})"
            + ("" if differs else "; if it may read that, use probe.with_info(None)"),
        )


def model_name(model: str) -> str:
    """Return the id of a model's repository, or the last part of a folder's path."""
    parts = [part for part in model.replace(os.sep, "/").split("/") if part]
    for part in parts:
        if part.startswith("models--"):  # a folder of the Hub's cache
            return part.removeprefix("models--").replace("--", "/")
    is_id = len(parts) <= 2 and not model.startswith(("/", ".", "~")) and not os.path.isdir(model)
    return "/".join(parts if is_id else parts[-1:])


def check_models(probes: Iterable[Any], model: str, shape: ModelShape) -> None:
    """Check the model of each probe that says of which it is; see `ProbeInfo.check`."""
    for index, probe in enumerate(probes):
        if probe.info is not None:
            with at(f"probes[{index}]"):
                probe.info.check(model, shape)


def _size(width: int, num_layers: int) -> str:
    return f"width {width or 'unknown'}, {num_layers or 'unknown'} layers"


def _read_pair(value: object) -> tuple[float, float]:
    first, second = map(read_float32, _list("", value, 2, 2))
    return first, second


def _list(path: str, value: object, most: int, least: int = 0) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)) or not least <= len(value) <= most:
        got = f"{len(value)}" if isinstance(value, (list, tuple)) else kind(value)
        raise SpecError(path, f"expected a list of {least or 'at most'} {most} values, got {got}")
    return value


def _read_text(value: object, most: int = MAX_TEXT) -> str:
    if not isinstance(value, str):
        raise SpecError("", f"expected `str`, got {kind(value)}")
    if len(value) > most:
        raise SpecError("", f"expected at most {most} characters, got {len(value)}")
    check_text(value)
    return str(value)


def _read_entries(value: object, read: Callable[[Any], Any]) -> dict[str, Any]:
    entries = read_mapping(value, "a dict by name")
    if len(entries) > _MAX_ENTRIES:
        raise SpecError("", f"expected at most {_MAX_ENTRIES} entries, got {len(entries)}")
    read_entries = {}
    for name, own in entries.items():
        with at(f"[{_read_text(name)!r}]"):
            read_entries[name] = read(own)
    return read_entries


def _read_scalar(value: object) -> Scalar:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _read_text(value)
    number = read_float32(value)
    return int(number) if isinstance(value, int) else number


def _read_classes(value: object) -> tuple[str, ...]:
    return read_each("", _list("", value, _MAX_CLASSES), _read_text)


_READERS: dict[str, Callable[[Any], object]] = {
    "model": _read_text,
    "width": partial(read_count, least=0),
    "num_layers": partial(read_count, least=0),
    "recipe": partial(_read_entries, read=_read_scalar),
    "scaler": _read_text,
    "threshold": lambda value: None if value is None else read_float32(value),
    "data_hash": _read_text,
    "scores": partial(_read_entries, read=read_float32),
    "classes": _read_classes,
    "calibration": lambda value: None if value is None else Calibration.parse(value),
    "notes": partial(_read_text, most=MAX_NOTES),
}
