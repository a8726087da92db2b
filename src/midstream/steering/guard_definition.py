"""`GuardDefinition`: what a guard reads, of which requests, and what it does."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from midstream.config.event_sinks import check_url
from midstream.drift import Training
from midstream.errors import SpecError
from midstream.plan.argument_names import parameters_of
from midstream.plan.control.act import Condition, Flag, Stop, Switch, read_act, read_later_edits
from midstream.plan.operation import read_scalar
from midstream.plan.operations import Edit
from midstream.plan.plan import Plan
from midstream.plan.positions.items import Span, TokenIds
from midstream.plan.positions.prompt import Prompt
from midstream.plan.probe import Probe
from midstream.plan.resolve.resolve import resolve
from midstream.plan.shape import ModelShape
from midstream.plan.vectors.named_lookup import Lookup
from midstream.steering.edit_forms import Part, bind_part
from midstream.validation import at, check_text, is_int, kind, read_fields, read_word, show

# What a guard does, from the least; `promote` goes along the first three.
LADDER = ("shadow", "flag", "stop")
ACTIONS = (*LADDER, "switch", "webhook")
MESSAGE = "The answer was stopped."
SECONDS, MOST_SECONDS = 5.0, 60.0  # of a webhook
IF_UNAVAILABLE = ("act", "pass")
_PREFIX = "guard:"  # of the names of the guards' probes
_MOST_TEXT = 1000  # characters of a message
_MOST_URL = 2000
_MOST_LISTED = 256  # models or keys of a scope
# Clients leave "." and ".." out of a URL.
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,39}")
_KEY = re.compile(r"[0-9a-f]{16}")
_SHARES = 1 << 32


@dataclass(frozen=True, slots=True)
class Scope:
    """The requests that a guard is for; they meet all that is given.

    Attributes:
        models: names of models or adapters, as in the field `model`; empty: all.
        keys: fingerprints of API keys, see `fingerprint`; empty: all.
        share: of the requests, 0 to 1, chosen by a hash of their ids.
    """

    models: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    share: float = 1.0

    def has(self, guard: str, request_id: str, models: tuple[str, ...], key: str) -> bool:
        """Return whether a request is among them; `models`: the names of its model."""
        if self.models and not set(self.models) & set(models):
            return False
        if self.keys and key not in self.keys:
            return False
        return self.share >= 1.0 or share_of(guard, request_id) < self.share


def share_of(guard: str, request_id: str) -> float:
    """Return a number from 0 to below 1 that a guard's name and the id of a request determine."""
    digest = hashlib.sha256(f"{guard}\n{request_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") / _SHARES


def fingerprint(key: str) -> str:
    """Return the fingerprint of an API key: the first 16 digits of its SHA-256, in hex."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class FirstStage:
    """Another guard whose scores decide whether a guard runs: by a threshold, or its own."""

    guard: str
    above: float | None = None
    below: float | None = None

    def to_dict(self) -> dict[str, object]:
        fields = {"guard": self.guard, "above": self.above, "below": self.below}
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where a guard's events are sent, and the longest time in seconds that one takes."""

    url: str
    seconds: float = SECONDS


@dataclass(frozen=True, slots=True)
class GuardDefinition:
    """A guard without name and version.

    Attributes:
        probe: what it scores, without an act; None: it has no score, and acts whenever `when` lets
            it run.
        condition: when it acts; None: see `probe`.
        action: one of `ACTIONS`.
        edits: the edits of "switch".
        webhook: is called whenever it acts; None: nothing is.
        scope: the requests that it is for.
        when: its first stage; None: it runs with the request.
        if_unavailable: what happens if its second request fails or takes too long, of a guard with
            `when` and a probe: "act", as if the condition were met, or "pass".
        message: is added to the text of an answer that it stops.
        visible: whether clients that ask see that it acted, and its name in a `stop_reason`.
        text: whether its log events have the end of the generated text.
        training: how many completions of the probe's training had which pooled score, for the
            metric of drift; None: there is none.
    """

    probe: Probe | None
    condition: Condition | None
    action: str = "shadow"
    edits: tuple[Edit, ...] = ()
    webhook: Webhook | None = None
    scope: Scope = field(default_factory=Scope)
    when: FirstStage | None = None
    if_unavailable: str = IF_UNAVAILABLE[0]
    message: str = MESSAGE
    visible: bool = False
    text: bool = False
    training: Training | None = None

    def to_dict(self, full: bool = True) -> dict[str, object]:
        """Return the JSON form, which `read_definition` reads; unless `full` without vectors."""
        form: dict[str, object] = {"action": self.action}
        if self.probe is not None:
            form["probe"] = self.probe.to_dict() if full else _about(self.probe)
        if self.condition is not None:
            (fields,) = self.condition.emit().values()
            form |= fields
        if self.action == Switch.word:
            form["edits"] = [edit.to_dict() if full else {"op": edit.op} for edit in self.edits]
        if self.webhook is not None:
            form["webhook"] = {"url": self.webhook.url, "seconds": self.webhook.seconds}
        scope: dict[str, object] = {
            "models": list(self.scope.models), "keys": list(self.scope.keys),
        }  # fmt: skip
        scope = {name: value for name, value in scope.items() if value}
        if self.scope.share < 1.0:
            scope["share"] = self.scope.share
        if scope:
            form["scope"] = scope
        if self.when is not None:
            form["when"] = self.when.to_dict()
        if self.if_unavailable != IF_UNAVAILABLE[0]:
            form["if_unavailable"] = self.if_unavailable
        if self.message != MESSAGE:
            form["message"] = self.message
        if self.training is not None:
            form["training"] = self.training.to_dict()
        shown = {"visible": self.visible, "text": self.text}
        return form | {name: True for name, value in shown.items() if value}

    @property
    def content(self) -> str:
        """The JSON form as text, which is the same for equal definitions."""
        return json.dumps(self.to_dict(), sort_keys=True, allow_nan=False)

    def bound(self, lookup: Lookup, shape: ModelShape) -> GuardDefinition:
        """Return it with names replaced by what is registered, checked against the model."""
        if self.probe is None:
            return self
        with at("probe"):
            (probe,) = self.probe.bind(lookup, shape.num_layers)
            everywhere = probe.replace(positions="all", phase=None, exclude=None)
            _resolve("probes[0]", everywhere, shape)
        edits = tuple(
            bound
            for index, edit in enumerate(self.edits)
            for bound in bind_part(Part(f"edits[{index}]", edit), lookup, shape)
        )
        return replace(self, probe=probe, edits=edits)

    def checked_bound(self) -> GuardDefinition:
        """Return it, if it has all vectors by value; else SpecError."""
        parts = (*self.edits, *(() if self.probe is None else (self.probe,)))
        for part in parts:
            if not part.is_bound:
                raise SpecError("", f"expected vectors by value, got the names {part.names()}")
        return self

    def acting_probe(self, name: str, version: int) -> Probe | None:
        """Return the probe that a request gets; None: it runs when the request has ended."""
        if self.probe is None or self.when is not None:
            return None
        return self._named(probe_name(name, version), is_acting=True)

    def later_probe(self, name: str, version: int) -> Probe | None:
        """Return the probe that reads an ended request; None: see `acting_probe`."""
        if self.probe is None or self.when is None:
            return None
        return self._named(probe_name(name, version), is_acting=False)

    def _named(self, name: str, is_acting: bool) -> Probe:
        assert self.probe is not None
        assert self.condition is not None
        if not is_acting:
            return self.probe.replace(name=name, act=None)
        (fields,) = self.condition.emit().values()
        edits = {"edits": self.edits} if self.action == Switch.word else {}
        # A flag is what spans of traces show.
        word = self.action if self.action in (Stop.word, Switch.word) else Flag.word
        return self.probe.replace(name=name, act=read_act({word: {**fields, **edits}}))


def probe_name(name: str, version: int) -> str:
    return f"{_PREFIX}{name}:{version}"


def is_probe_of_guard(name: str) -> bool:
    return name.startswith(_PREFIX)


def read_guard_name(value: object) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        got = show(value) if isinstance(value, str) else kind(value)
        form = "1 to 40 of the characters A-Z a-z 0-9 _ . -, the first no dot"
        raise SpecError("", f"expected {form}, got {got}")
    return str(value)


# Fields of a condition in JSON, and the arguments that they are.
_ARGUMENTS = {name.rstrip("_"): name for name in sum(parameters_of(Condition), ())}
_FIELDS = (
    "probe", *_ARGUMENTS, "action", "edits", "webhook", "scope", "when", "if_unavailable",
    "message", "visible", "text", "training",
)  # fmt: skip


def read_definition(value: object) -> GuardDefinition:
    """Parse the JSON form: `probe`, a Probe, its dict or a registered name; its threshold, `above`
    or `below` with `for` and `pool`, unless the probe's act has one; and what else
    `GuardDefinition` has.

    Raises:
        SpecError: a field is malformed, or two contradict each other.
    """
    if isinstance(value, GuardDefinition):
        return value
    fields = {
        name: part for name, part in read_fields(value, (), _FIELDS).items() if part is not None
    }
    with at("action"):
        action = read_word(fields.get("action", LADDER[0]), ACTIONS)
    when = _read_when(fields["when"]) if "when" in fields else None
    probe, condition = _read_probe(fields)
    if probe is None and (when is None or action == "switch"):
        raise SpecError("probe", "missing: a guard reads a probe; only one with `when` needs none")
    if when is not None and action == "switch":
        raise SpecError("when", "a guard with a first stage runs when the answer is complete, and "
                        "cannot switch edits; use flag, stop or webhook")  # fmt: skip
    if when is not None and probe is not None and probe.positions.include != ("all",):
        raise SpecError(
            "probe.positions",
            "a guard with a first stage reads all tokens, or those of a `phase`; omit them",
        )
    if when is not None and probe is not None and not all(map(_stays, probe.positions.exclude)):
        raise SpecError(
            "probe.exclude",
            "a guard with a first stage reads the answer as part of a prompt: give positions from "
            "the beginning, such as 0, or token ids",
        )
    edits: tuple[Edit, ...] = ()
    if ("edits" in fields) != (action == "switch"):
        missing = action == "switch"
        raise SpecError(
            "edits",
            'missing: "switch" has the edits to switch to' if missing
            else f'only the action "switch" has edits, not {show(action)}',
        )  # fmt: skip
    if condition is not None and action == "switch":
        edits = read_later_edits(fields["edits"])
        for index, edit in enumerate(edits):
            if edit.positions.has_marks:
                raise SpecError(
                    f"edits[{index}].positions",
                    "a request is searched for marks (Between) from its beginning on, for its own "
                    "edits; give the edit other positions",
                )
    webhook = _read_webhook(fields["webhook"]) if "webhook" in fields else None
    if action == "webhook" and webhook is None:
        raise SpecError("webhook", 'missing: give {"url": "https://…"}')
    message = fields.get("message", MESSAGE)
    if not isinstance(message, str) or not 1 <= len(message) <= _MOST_TEXT:
        raise SpecError("message", f"expected a text of 1 to {_MOST_TEXT} characters")
    with at("message"):
        check_text(message)
    if_unavailable = _read_if_unavailable(fields, when is not None and probe is not None)
    return GuardDefinition(
        probe, condition, action, edits, webhook, _read_scope(fields.get("scope", {})), when,
        if_unavailable, message, _read_flag(fields, "visible"), _read_flag(fields, "text"),
        _read_training(fields.get("training"), probe),
    )  # fmt: skip


def _stays(item: object) -> bool:
    """Return whether an item selects the same tokens when the answer is part of the prompt."""
    if isinstance(item, Span):
        return item.start >= 0 and (item.stop is None or item.stop >= 0)
    return isinstance(item, TokenIds) or (is_int(item) and int(item) >= 0)


def _read_probe(fields: Mapping[str, Any]) -> tuple[Probe | None, Condition | None]:
    threshold = {name: fields[name] for name in _ARGUMENTS if name in fields}
    if "probe" not in fields:
        if threshold:
            raise SpecError(next(iter(threshold)), "only a guard with a probe has a threshold")
        return None, None
    value = fields["probe"]
    with at("probe"):
        if isinstance(value, Mapping) and value.get("op") == "probe":
            value = {name: part for name, part in value.items() if name != "op"}
        probe = Probe(value) if isinstance(value, str) else Probe.parse(value)
        if isinstance(probe.act, Switch):
            raise SpecError("act", 'give the edits to the guard: "action": "switch", "edits": […]')
    act = probe.act
    if act is not None and threshold:
        raise SpecError("probe.act", "the guard has a threshold too; give one of them")
    if act is not None:
        (threshold,) = act.emit().values()
    condition = Flag(**{_ARGUMENTS[name]: value for name, value in threshold.items()})
    # A guard that only flags may be promoted: a probe that cannot act is rejected now.
    return probe.replace(act=condition).replace(act=None), condition


def _read_if_unavailable(fields: Mapping[str, Any], has_second_request: bool) -> str:
    with at("if_unavailable"):
        if "if_unavailable" in fields and not has_second_request:
            raise SpecError("", "only a guard with `when` and a probe has a second request")
        return read_word(fields.get("if_unavailable", IF_UNAVAILABLE[0]), IF_UNAVAILABLE)


def _read_training(value: object, probe: Probe | None) -> Training | None:
    if value is None:
        return None
    with at("training"):
        if probe is None:
            raise SpecError("", "only a guard with a probe has scores; omit it")
        return Training.parse(value)


def _read_scope(value: object) -> Scope:
    with at("scope"):
        fields = read_fields(value, (), ("models", "keys", "share"))
        models = _read_texts("models", fields.get("models"))
        keys = _read_texts("keys", fields.get("keys"))
        for index, key in enumerate(keys):
            if not _KEY.fullmatch(key):
                raise SpecError(
                    f"keys[{index}]",
                    "expected the fingerprint of an API key, the first 16 hex digits of its "
                    "SHA-256, not the key",
                )
        with at("share"):
            share = read_scalar(fields.get("share", 1.0))
            if not 0.0 < share <= 1.0:
                raise SpecError("", f"expected more than 0 and at most 1, got {share:g}")
    return Scope(models, keys, share)


def _read_texts(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not 0 < len(texts) <= _MOST_LISTED:
        raise SpecError(name, f"expected a list of 1 to {_MOST_LISTED} texts, got {kind(value)}")
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not 0 < len(text) <= _MOST_TEXT:
            raise SpecError(f"{name}[{index}]", f"expected a text, got {kind(text)}")
    return tuple(dict.fromkeys(texts))


def _read_when(value: object) -> FirstStage:
    with at("when"):
        fields = read_fields(value, ("guard",), ("above", "below"))
        with at("guard"):
            guard = read_guard_name(fields.pop("guard"))
        if len(fields) > 1:
            raise SpecError("above", "give `above` or `below`")
        for name, number in fields.items():
            with at(name):
                fields[name] = read_scalar(number)
    return FirstStage(guard, **fields)


def _read_webhook(value: object) -> Webhook:
    with at("webhook"):
        fields = read_fields(
            {"url": value} if isinstance(value, str) else value, ("url",), ("seconds",)
        )
        url = fields["url"]
        with at("url"):
            if not isinstance(url, str) or len(url) > _MOST_URL:
                raise SpecError("", f"expected a URL of at most {_MOST_URL} characters")
            check_text(url)
            check_url(url, False, show(url))
        with at("seconds"):
            seconds = read_scalar(fields.get("seconds", SECONDS))
            if not 0 < seconds <= MOST_SECONDS:
                raise SpecError("", f"expected more than 0 and at most {MOST_SECONDS:g}")
    return Webhook(url, seconds)


def _read_flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise SpecError(name, f"expected true or false, got {kind(value)}")
    return value


def _about(probe: Probe) -> dict[str, object]:
    """Return what a probe reads, without its numbers, and a digest of them."""
    form = probe.to_dict()
    digest = hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()
    known = (
        "layer",
        "layers",
        "site",
        "sites",
        "positions",
        "phase",
        "exclude",
        "head",
        "attention",
    )
    about = {name: form[name] for name in known if name in form}
    if probe.classes is not None:
        about["classes"] = list(probe.classes.names)
    return {**about, "digest": digest}


def _resolve(part: str, probe: Probe, shape: ModelShape) -> None:
    try:
        resolve(Plan(probes=(probe,)), shape, Prompt(1), None)
    except SpecError as error:
        raise SpecError(error.path.removeprefix(part).removeprefix("."), error.problem) from None
