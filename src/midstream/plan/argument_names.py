"""Constructors' arguments: other spellings of them, their names, and the fields read of them."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from midstream.errors import SpecError
from midstream.validation import at, hint, kind, listed, read_fields, show

# Each is accepted where the constructor has the other.
_WORDS = ("layer", "site", "head")
_PAIRS = [pair for word in _WORDS for pair in ((f"{word}s", word), (word, f"{word}s"))]

# Arguments of other tools, and what they may be called here.
_MEANT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("alpha", "coef", "coeff", "coefficient"), ("scale", "strength")),
    **dict.fromkeys(("multiplier", "strength"), ("scale", "factor")),
    "scale": ("strength", "factor"),
    **dict.fromkeys(("hook", "hook_name", "hook_point", "module"), ("site", "sites")),
    **dict.fromkeys(("layer_idx", "layer_ids", "layer_indices"), ("layer", "layers")),
    "target_layers": ("layer", "layers"),
    **dict.fromkeys(("norm_match", "normalize"), ("norm",)),
    **dict.fromkeys(("pos", "position", "position_indices", "token_positions"), ("positions",)),
    "tokens": ("positions",),
    "dtype": ("codec",),
    **dict.fromkeys(("to", "save_to", "path"), ("sink",)),
    "prefill": ("prompt",),
    "decode": ("generated",),
}

# The argument of `generate` for the parts of a plan that a module of `midstream.plan` has.
_ARGUMENTS = {"readouts": "capture", "operations": "edits", "probe": "probes"}
# Methods of plans' parts that are of use to a caller.
_FORMS = ("parse", "replace", "to_dict")

Made = TypeVar("Made", bound=Callable[..., Any])
F = TypeVar("F", bound="FrozenFields")
S = TypeVar("S")
T = TypeVar("T")


class FrozenFields:
    """An immutable value whose constructor reads its fields in any of their forms."""

    __slots__ = ()

    def _set(self, **fields: object) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _read(self, read: Callable[[Any], object], /, **arguments: object) -> None:
        """Set fields to what `read` returns for their arguments; errors have the field's path."""
        for name, value in arguments.items():
            with at(name):
                object.__setattr__(self, name, read(value))

    def _read_given(self, read: Callable[[Any], object], /, **arguments: object) -> None:
        """Set fields like `_read`; None stays None."""
        self._read(lambda value: None if value is None else read(value), **arguments)

    def _changed(self: F, **fields: object) -> F:
        """Return a copy with other values of some fields, which are not read again."""
        clone = copy.copy(self)
        FrozenFields._set(clone, **fields)
        return clone


def shown_names(part: Any) -> list[str]:
    """Return the names of a plan's part for `dir`: what it was made of, its forms, Python's own."""
    known = {name for names in parameters_of(part.__class__) for name in names}
    shown = {*known, *(f"{word}s" for word in _WORDS), *_FORMS}
    return [name for name in object.__dir__(part) if name in shown or name.startswith("__")]


def only_set(**fields: object) -> dict[str, object]:
    """Return the fields of a JSON form that are set: not None, False or empty."""
    unset: tuple[object, ...] = (None, "", [], {})
    return {name: part for name, part in fields.items() if part is not False and part not in unset}


def read_each(name: str, values: Iterable[S], read: Callable[[S], T]) -> tuple[T, ...]:
    """Return what `read` returns for each value of a list; errors have its index in the path."""
    read_values = []
    for index, value in enumerate(values):
        with at(f"{name}[{index}]"):
            read_values.append(read(value))
    return tuple(read_values)


def other_argument(value: object) -> str:
    """Return where a part of a plan belongs that stands in another's argument, for messages."""
    if hasattr(value, "as_edit"):
        return '; a direction makes its own: .probe("name"), .steer(1.0), .ablate()'
    place = type(value).__module__.removeprefix("midstream.plan.").partition(".")[0]
    return f"; give it as {_ARGUMENTS[place]}=…" if place in _ARGUMENTS else ""


def one_spelling(arguments: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Return arguments with the constructor's spelling of layer(s), site(s) and head(s)."""
    renamed = dict(arguments)
    for theirs, ours in _PAIRS:
        if theirs in renamed and theirs not in known and ours in known:
            if ours in renamed:
                raise SpecError(theirs, f"`{ours}` is given too; give one of them")
            renamed[ours] = renamed.pop(theirs)
    return renamed


def read_named(
    fields: Mapping[str, Any], required: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, Any]:
    """Read the fields of a dict form, in the spellings that its constructor accepts."""
    known = (*required, *optional)
    renamed = one_spelling(fields, known)
    for name in renamed:
        meant = _meant(name, known)
        if meant:
            raise SpecError(
                "", f"unknown field {show(name)} (did you mean `{meant}`?); known: {listed(known)}"
            )
    return read_fields(renamed, required, optional)


@functools.cache
def parameters_of(cls: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the constructor's required and optional arguments."""
    parameters = inspect.signature(cls).parameters.values()
    required = tuple(own.name for own in parameters if own.default is own.empty)
    return required, tuple(own.name for own in parameters if own.name not in required)


def read_form(form: type[F], value: object) -> F:
    """Read an object of a class, or a dict of its arguments."""
    if isinstance(value, form):
        return value
    if not isinstance(value, Mapping):
        raise SpecError("", f"expected {form.__name__}(…), or its dict, got {kind(value)}")
    names = parameters_of(cast("Any", form))
    return form(**read_fields(value, *names))


def accept_spellings(init: Made) -> Made:
    """Decorate a constructor or method: other spellings of its arguments are accepted, or are
    SpecErrors.
    """
    known = tuple(inspect.signature(init).parameters)[1:]
    known_names = frozenset(known)
    method = "" if init.__name__ == "__init__" else f".{init.__name__}"

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.keys() <= known_names:
            positional = dict.fromkeys(known[: len(args)])
            named = one_spelling({**positional, **kwargs}, known)
            for name in named:
                if name not in known:
                    raise _unknown(f"{type(self).__name__}{method}", name, known)
            kwargs = {name: value for name, value in named.items() if name not in positional}
        return init(self, *args, **kwargs)

    return cast(Made, checked)


def _meant(name: str, known: Sequence[str]) -> str | None:
    """Return the known name for another tool's one; None: it is known itself, or none is meant."""
    others = () if name in known else _MEANT.get(name, ())
    return next((other for other in others if other in known), None)


def _unknown(owner: str, name: str, known: Sequence[str]) -> SpecError:
    meant = _meant(name, known)
    shown = f" (did you mean `{meant}`?)" if meant else hint(name, known)
    return SpecError(name, f"unknown argument of {owner}{shown}; known: {listed(known)}")
