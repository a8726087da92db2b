"""`Controller`: what changes the edits of a running request by its probes' scores."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from midstream.errors import SpecError
from midstream.plan.argument_names import FrozenFields, only_set
from midstream.plan.control.act import read_later_edits
from midstream.plan.control.control_laws import Observed, Threshold
from midstream.plan.operations import Edit, bind_edit, expand_edits
from midstream.plan.vectors.named_lookup import Lookup
from midstream.validation import at, kind, listed, read_fields, read_float32, read_word, show

POLICIES = ("keep", "off", "end")
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FORMS = 'the name of a declared controller, or {"threshold": {…}}'

# A scale; or `scale` and `edits` as in `AsyncLLM.update`, or `stop`; None: no change.
Answer = float | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class EditSet:
    """A set of edits that a controller in the engine core may choose; `origins` as in `Plan`."""

    name: str
    edits: tuple[Edit, ...]
    origins: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, init=False)
class Controller(FrozenFields):
    """A `Threshold` or code that is called with a request's new scores, and answers with a scale, a
    factor on the strength of its edits; or with None, for no change.

    - `mode="async"`: Python code beside an engine, which never waits for it. It may also answer
      with `{"scale": …, "edits": […]}` as in `AsyncLLM.update`; or with `{"stop": True}`, which
      ends the completion some tokens later. While it computes, the engine goes on, and scores
      gather for its next call.
    - `mode="sync"`: a `Threshold`, or a controller that was declared at the engine's start, in the
      engine core between two steps: its answer holds from the next position that is not scheduled
      yet. Declared code may also answer with `{"edits": name, "scale": …}`, a name of its `edits`,
      or "" for the request's own; or with `{"stop": True}`, which ends the completion at the last
      token whose score it was given.

    A completion that it ends has the finish reason "stop" and the stop reason "controller:NAME".

    Attributes:
        decide: the function, the `Threshold`, or the name of a declared controller.
        name: its versions in receipts have the source "controller:NAME".
        mode: see above.
        seconds: longest time of one call in `mode="async"`.
        on_error: what happens if a call fails; None: what was declared, or "keep".
        edits: sets of edits that a declared controller may choose.
    """

    decide: Callable[[Observed], Answer] | str
    name: str
    mode: str
    seconds: float
    on_error: str | None
    edits: tuple[EditSet, ...]

    def __init__(
        self,
        decide: Callable[[Observed], Answer] | str,
        *,
        name: str | None = None,
        mode: Literal["async", "sync"] | None = None,
        seconds: float | None = None,
        on_error: Literal["keep", "off", "end"] | None = None,
        edits: Mapping[str, Any] | None = None,
    ) -> None:
        """Create it; several requests may have it.

        Args:
            decide: a function, or an object with `__call__`, which is copied for each request, so
                that it may keep state; a `Threshold`; or the name of a controller of the setting
                `controllers`.
            name: 1 to 64 of the characters A–Z a–z 0–9 _ . -; None: "local", in `mode="sync"`
                "threshold" or the declared name.
            mode: None: "sync" for a declared controller, "async" otherwise.
            seconds: longest time of one call in `mode="async"`, in which None is 1; in
                `mode="sync"` the setting has it.
            on_error: what happens if a call raises, takes longer, or answers anything else. It is
                not called for that request again, and "keep": its edits stay as they are; "off":
                they are turned off; "end": the request ends, with the finish reason "error" in
                `mode="sync"` and ControllerError from `generate` in `mode="async"`. The first two
                are logged, and in the receipt in `mode="sync"`. None: what was declared, or "keep".
            edits: of a declared controller, edits by a name with which it may answer; each an edit
                or its dict, or a list of these. All are checked, and take room on the workers, when
                the request begins.

        Raises:
            SpecError: an argument is malformed; the path is its name.
        """
        is_declared = isinstance(decide, str)
        if not is_declared and not callable(decide):
            raise SpecError("decide", f"expected a function, got {show_any(decide)}")
        with at("mode"):
            modes = ("async", "sync")
            resolved_mode = "sync" if is_declared else "async"
            resolved_mode = resolved_mode if mode is None else read_word(mode, modes)
            if is_declared and resolved_mode == "async":
                raise SpecError("", 'a declared controller runs in mode "sync"')
            if resolved_mode == "sync" and not isinstance(decide, (Threshold, str)):
                raise SpecError(
                    "",
                    'in mode="sync" it runs in the engine core\'s process: give a Threshold, or '
                    'the name of a controller that the engine has by its setting "controllers"',
                )
        default: Any = decide if resolved_mode == "sync" else "local"
        if isinstance(default, Threshold):
            default = default.word
        with at("decide" if is_declared and name is None else "name"):
            chosen = _read_name(default if name is None else name)
        with at("seconds"):
            if seconds is not None and resolved_mode == "sync":
                raise SpecError("", 'of mode="async"; in mode="sync" the setting has the limit')
            limit = read_seconds(1.0 if seconds is None else seconds)
        with at("on_error"):
            policy = None if on_error is None else read_word(on_error, POLICIES)
        if edits is not None and resolved_mode == "async":
            raise SpecError("edits", 'of mode="sync"; in mode="async" it answers with edits')
        if edits and not is_declared:
            raise SpecError(
                "edits", "a Threshold answers with scales; a declared controller chooses edits"
            )
        self._set(decide=decide, name=chosen, mode=resolved_mode, seconds=limit, on_error=policy)
        self._set(edits=_read_sets({} if edits is None else edits))

    @staticmethod
    def parse(value: object) -> Controller:
        """Read a controller of `mode="sync"`, a Threshold, a declared name, or the JSON form."""
        if isinstance(value, Controller):
            if value.mode == "async":
                raise SpecError(
                    "mode", 'mode="async" is for the argument `controller` of generate and chat; '
                    'use a Threshold or a declared controller with mode="sync"'
                )  # fmt: skip
            return value
        if isinstance(value, str):
            return Controller(_read_name(value))
        if isinstance(value, Threshold):
            return Controller(value, mode="sync")
        if not isinstance(value, Mapping):
            raise SpecError("", f"expected {_FORMS}, got {kind(value)}")
        words = (Threshold.word, "declared")
        fields = read_fields(value, (), (*words, "name", "on_error", "edits"))
        chosen = [word for word in words if word in fields]
        if len(chosen) != 1:
            raise SpecError("", f"expected one of {listed(words)}, got {len(chosen)} of them")
        (word,) = chosen
        with at(word):
            asked = fields.pop(word)
            decide: Any = _read_name(asked) if word == "declared" else Threshold.parse(asked)
        return Controller(decide, mode="sync", **fields)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form of a controller of `mode="sync"`, which `parse` reads again."""
        law = self.law
        what = {"declared": self.decide} if law is None else {law.word: law.to_dict()}
        name = "" if self.name == (self.decide if law is None else law.word) else self.name
        edits = {
            edit_set.name: [edit.to_dict() for edit in edit_set.edits] for edit_set in self.edits
        }
        return {**what, **only_set(name=name, on_error=self.on_error, edits=edits)}

    @property
    def law(self) -> Threshold | None:
        """The `Threshold`, which answers with scales; None: it is code, or declared."""
        return self.decide if isinstance(self.decide, Threshold) else None

    def names(self) -> tuple[str, ...]:
        """Return the names of the registered vectors in use, each once."""
        edits = [edit for edit_set in self.edits for edit in edit_set.edits]
        return tuple(dict.fromkeys(name for edit in edits for name in edit.names()))

    @property
    def is_bound(self) -> bool:
        """Whether `bind` would return edits that are the same."""
        return all(edit.is_bound for edit_set in self.edits for edit in edit_set.edits)

    def bind(self, lookup: Lookup, num_layers: int | None = None) -> Controller:
        """Return a copy with names replaced by their registered vectors; see `Plan.bind`."""
        bind = partial(bind_edit, lookup=lookup, num_layers=num_layers)
        edit_sets = []
        for edit_set in self.edits:
            with _within(edit_set.name):
                edits, origins = expand_edits(edit_set.edits, edit_set.origins, bind)
            edit_sets.append(replace(edit_set, edits=edits, origins=origins))
        return self._changed(edits=tuple(edit_sets))


def read_seconds(value: object) -> float:
    seconds = read_float32(value)
    if seconds <= 0:
        raise SpecError("", f"expected more than 0 seconds, got {seconds:g}")
    return seconds


def read_answer(answer: object) -> dict[str, Any]:
    """Read an answer; return what it has of `scale`, `edits` and `stop`. Edits are not read."""
    if answer is None:
        return {}
    if not isinstance(answer, Mapping):
        return {"scale": read_float32(answer)}
    fields = dict(answer)
    known = ({"stop"}, {"edits"}, {"scale"}, {"edits", "scale"})
    if set(fields) not in known or fields.get("stop", True) is not True:
        raise SpecError(
            "",
            'expected a scale, {"edits": …, "scale": …} or {"stop": True}, got '
            f"{show(str(fields))}",
        )
    return fields


def show_any(value: object) -> str:
    """Return a value for a message: numbers and short text as they are, of others the kind."""
    return show(value) if isinstance(value, (str, int, float)) else kind(value)


def _read_name(value: object) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise SpecError(
            "", f"expected 1 to 64 of the characters A-Z a-z 0-9 _ . -, got {show_any(value)}"
        )
    return value


def _read_sets(value: object) -> tuple[EditSet, ...]:
    if not isinstance(value, Mapping):
        raise SpecError("edits", f"expected a dict of edits by name, got {kind(value)}")
    edit_sets = []
    for name, edits in value.items():
        with at("edits"):
            chosen = _read_name(name)
        with _within(chosen):
            edit_sets.append(EditSet(chosen, read_later_edits(edits)))
    return tuple(edit_sets)


@contextmanager
def _within(name: str) -> Iterator[None]:
    """Give errors of a set of edits, whose paths begin with `edits`, its name."""
    try:
        yield
    except SpecError as error:
        rest = error.path.removeprefix("edits")
        raise SpecError(f"edits.{name}{rest}", error.problem) from None
