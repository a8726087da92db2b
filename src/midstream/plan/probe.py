"""`Probe`: a score of selected tokens: of their vectors, or of their attention in one layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

from midstream import entries
from midstream.errors import SpecError
from midstream.ops.layout import Flags, Op
from midstream.plan import forms
from midstream.plan.argument_names import accept_spellings
from midstream.plan.classifiers.attention_pool import AttentionPool
from midstream.plan.classifiers.classes import Classes
from midstream.plan.classifiers.hidden import Hidden
from midstream.plan.classifiers.mlp import MLP
from midstream.plan.classifiers.trained import of_sklearn, of_torch
from midstream.plan.control.act import Act, Switch, read_act
from midstream.plan.instructions import Instruction
from midstream.plan.operation import Operation, by_value, read_scalar, rows_by_value
from midstream.plan.positions.positions import Positions
from midstream.plan.positions.row_order import check_row_order
from midstream.plan.probe_files import ProbeFiles
from midstream.plan.probe_files.info import ProbeInfo
from midstream.plan.probe_input import read_readings
from midstream.plan.readouts.attention import Entropy, Mass
from midstream.plan.scores.pools import NO_POOL, read_pool
from midstream.plan.scores.rule import LINKS, PLAIN, ScoreRule
from midstream.plan.vectors.named_lookup import Lookup
from midstream.plan.vectors.named_vector import Named
from midstream.plan.vectors.row_per_layer import check_per_layer
from midstream.plan.vectors.vector import Vector
from midstream.validation import (
    at,
    float32,
    kind,
    read_word,
    show,
)

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
# What reads one layer, by its argument.
_ONE_LAYER = {
    "mlp": "an MLP",
    "classes": "a probe with classes",
    "attention_pool": "an attention probe",
    "attention": "a probe of attention",
}


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Probe(Operation, ProbeFiles):
    """A probe of the selected tokens: one score for each, or one for each class.

    With `direction`, score = ⟨h, direction⟩ + bias at one tap, where h includes all edits at that
    tap. Alain and Bengio 2016 (linear probes, arXiv:1610.01644). With one direction per layer, the
    score is the sum over layers, plus the bias once: a linear probe of the layers' joined vectors.

    With `mlp`, the score is the output of a network with one hidden layer, plus the bias. With
    `classes`, the scores [tokens, classes] are those of several linear outputs. With
    `attention_pool`, the score is that of an attention probe or of MultiMax over the tokens so far,
    plus the bias.

    With `attention`, the score is the mean over `heads` of what the token's query attends to in one
    layer: `Mass(positions)`, the sum of the weights of the keys at these positions, or `Entropy()`,
    that of the weights. See `Attention` for the weights, and for what the engine must tap. Such a
    score is known after the forward pass, so no Gate can read it.

    `link` and then `pool` are computed of these, in float64; the scores are float32.

    With `act`, the completion ends, gets other edits, or has its receipt flagged, when the scores
    meet a condition.

    Attributes:
        direction: a vector of the model's hidden size, or a name; with several layers a tuple of
            one vector per layer; None: see `mlp` and `attention`.
        bias: in units of the score.
        name: key of the scores in the output; 1 to 64 of the characters A–Z a–z 0–9 _ . : -
        attention: what is read of the attention weights; None: see `direction` and `mlp`.
        mlp: the network; None: see `direction` and `attention`.
        classes: the outputs; None: there is one.
        attention_pool: the heads; None: the score of a token is its own.
        hidden: the layer whose units the classes or heads read; None: they read h.
        link: "none"; "sigmoid", 1 / (1 + exp(−score)); or, of classes, "softmax".
        pool: the score that is returned, and read by acts, is of the scores so far: "max" the
            largest, "mean:8" the mean of the last 8, "ema:0.9" a moving average as in `Condition`,
            or "none" the last. The mean of logits is `pool` without `link`.
        act: what is done when the scores meet a condition; None: they are returned only.
        layers: one; with `direction` maybe several.
        sites: one; not read with `attention`.
        info: what is known of it, from a fit or a file; None: nothing. No part of equality, of the
            JSON form or of a request.
    """

    reads_last: ClassVar[bool] = True

    direction: Vector | Named | tuple[Vector, ...] | None
    bias: float
    name: str
    attention: Mass | Entropy | None
    mlp: MLP | None
    classes: Classes | None
    attention_pool: AttentionPool | None
    hidden: Hidden | None
    link: str
    pool: str
    act: Act | None
    info: ProbeInfo | None = field(compare=False)

    @accept_spellings
    def __init__(
        self,
        direction: forms.RowsOrNames | None = None,
        layer: forms.LayersLike | None = None,
        bias: forms.NumberLike = 0.0,
        site: forms.SitesLike | None = None,
        name: str | None = None,
        positions: forms.PositionsLike = "all",
        phase: forms.PhaseLike | None = None,
        exclude: forms.PositionsLike | None = None,
        head: forms.IndicesLike | Literal["all"] | None = None,
        *,
        attention: Mass | Entropy | Mapping[str, Any] | str | None = None,
        mlp: MLP | Mapping[str, Any] | None = None,
        classes: Classes | Mapping[str, Any] | None = None,
        attention_pool: AttentionPool | Mapping[str, Any] | None = None,
        hidden: Hidden | Mapping[str, Any] | None = None,
        link: Literal["none", "sigmoid", "softmax"] = "none",
        pool: str = NO_POOL,
        act: Act | Mapping[str, Any] | None = None,
    ) -> None:
        """Create a probe; each field accepts any of its forms.

        Args:
            direction: any form of Vector.parse, or a name; for several layers a matrix with one row
                per layer, `{layer: vector}`, or a name that is registered for all of them. One of
                this, `mlp`, `classes`, `attention_pool` and `attention` is given.
            layer: an int, or a list; None: that of the name of a vector registered for one tap.
            bias: a number.
            site: a site's name or alias; default "resid_post".
            name: None: "probe".
            positions: any form of Positions.
            phase: "prompt" or "generated" restricts the positions to tokens of that phase.
            exclude: positions to exclude.
            head: the attention head that is read, at a site whose vectors are of heads; the
                direction then has the size of a head. With `attention` the query heads, one or
                more; None or "all": all of the layer.
            attention: `Mass(positions)`, `Entropy()`, or the JSON form of one.
            mlp, classes, attention_pool: `MLP(…)`, `Classes(…)`, `AttentionPool(…)`, or the dict of
                one; it reads one layer.
            hidden: `Hidden(…)`, or its dict, beside `classes` or `attention_pool`.
            link, pool: see the attributes.
            act: `Stop(…)`, `Switch(…)`, `Flag(…)`, or the JSON form of one. The positions are then
                known before the request ends: not "last_row".

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        values, layer = read_readings(
            layer, direction=direction, mlp=mlp, classes=classes, attention_pool=attention_pool,
            attention=attention,
        )  # fmt: skip
        self._set(**values)
        self._read_given(Hidden.parse, hidden=hidden)
        self._read(read_scalar, bias=bias)
        with at("name"):
            self._set(name="probe" if name is None else _read_name(name))
        self._read(partial(read_word, known=LINKS), link=link)
        self._read(read_pool, pool=pool)
        self._read_given(read_act, act=act)
        self._set(info=None)
        _check_outputs(self)
        if self.attention is not None:
            _check_alone(self, site)
            head = None if isinstance(head, str) and head == "all" else head
        self._set_place(layer, site, positions, phase, exclude, head)
        if self.attention is not None:
            # It is read where the layer's queries are, whichever site that is.
            self._set(left=("site",))
        _check_place(self)

    @staticmethod
    def from_sklearn(
        classifier: object,
        layer: forms.LayersLike | None = None,
        site: forms.SitesLike | None = None,
        name: str | None = None,
        positions: forms.PositionsLike = "all",
        phase: forms.PhaseLike | None = None,
        exclude: forms.PositionsLike | None = None,
    ) -> Probe:
        """Return the probe whose scores are the `decision_function` of a classifier.

        Of an `MLPClassifier`, which has none, they are the log odds of its second class. Of more
        than two classes, the scores are those of `Classes`; `replace(link="softmax")` makes those
        of a `LogisticRegression`, `LinearDiscriminantAnalysis` or `MLPClassifier` its
        `predict_proba`.

        Args:
            classifier: a fitted `LogisticRegression`, `LinearDiscriminantAnalysis`,
                `RidgeClassifier` or `LinearSVC`, or the CV form of the first and third; an
                `MLPClassifier` of one hidden layer; or a `Pipeline` of `StandardScaler` and one of
                them. Weights are rounded to float32.
            layer: several if it was fitted on the joined vectors of these layers, in this order;
                with two classes only.
            site, name, positions, phase, exclude: see the constructor.

        Raises:
            SpecError: another classifier, or one that is not fitted.
        """
        with at("classifier"):
            arguments = of_sklearn(classifier, layer)
        place: dict[str, Any] = {"layer": layer, "site": site, "name": name}
        return Probe(**arguments, **place, positions=positions, phase=phase, exclude=exclude)

    @staticmethod
    def from_torch(
        module: object,
        layer: forms.LayersLike | None = None,
        site: forms.SitesLike | None = None,
        name: str | None = None,
        positions: forms.PositionsLike = "all",
        phase: forms.PhaseLike | None = None,
        exclude: forms.PositionsLike | None = None,
    ) -> Probe:
        """Return the probe whose scores are the output of a torch module.

        Args:
            module: an `nn.Linear`, with several outputs the `Classes` of the probe; or an
                `nn.Sequential` of a `Linear`, a `ReLU`, `GELU`, `Tanh` or `SiLU`, and a `Linear`,
                with several outputs `hidden` and `classes`. `Dropout` is skipped. Weights are
                rounded to float32.
            layer, site, name, positions, phase, exclude: see the constructor.

        Raises:
            SpecError: another module.
        """
        with at("module"):
            arguments = of_torch(module)
        place: dict[str, Any] = {"layer": layer, "site": site, "name": name}
        return Probe(**arguments, **place, positions=positions, phase=phase, exclude=exclude)

    @staticmethod
    def fit(
        llm: Any,
        texts: Any,
        labels: Any,
        kind: Any = "logistic",
        layer: forms.LayersLike | None = None,
        **options: Any,
    ) -> Any:
        """Fit a probe to labelled texts: `FittedProbe.fit` of `midstream.lab.fit`, which has all
        arguments, and returns the probe with its scores of held-out texts.
        """
        return entries.method("Probe.fit")(llm, texts, labels, kind, layer, **options)

    def own(self) -> dict[str, Any]:
        return _own(self)

    @property
    def reads(self) -> str:
        """What it reads, for cards."""
        words = [word for word in ("direction", *_ONE_LAYER) if getattr(self, word) is not None]
        return words[0].replace("_", " ")

    @property
    def rule(self) -> ScoreRule:
        """How its scores are made of the numbers that `instructions` store."""
        return _rule(self)

    def __dir__(self) -> list[str]:
        return [*Operation.__dir__(self), "diff", "info", "push_to_hub", "save", "with_info"]

    def with_info(self, info: ProbeInfo | None) -> Probe:
        """Return the probe with what is known of it; None: nothing."""
        with at("info"):
            return self._changed(info=None if info is None else ProbeInfo.parse(info))

    def replace(self, **changes: object) -> Probe:
        # What is known of a probe is of what it computes, not of where.
        probe = Operation.replace(self, **changes)
        is_same = changes.keys() <= {"name", "positions", "phase", "exclude", "act"}
        return probe.with_info(self.info) if is_same else probe

    @property
    def selections(self) -> tuple[Positions, ...]:
        """All positions that it names: its own, and keys of a `Mass`."""
        keys = (self.attention.positions,) if isinstance(self.attention, Mass) else ()
        return (self.positions, *keys)

    def bind(self, lookup: Lookup, num_layers: int | None = None) -> tuple[Probe, ...]:
        """Return the probe with its name replaced by the vector, at one tap."""
        return _bind(self, lookup, num_layers)

    @property
    def is_bound(self) -> bool:
        is_act_bound = not isinstance(self.act, Switch) or self.act.is_bound
        return is_act_bound and not self.names()

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        return _instructions(self, width)


def _instructions(probe: Probe, width: int) -> tuple[Instruction, ...]:
    assert probe.attention is None, "attention is not read by instructions"
    if probe.hidden is not None:
        with at("hidden"):
            return probe.hidden.instructions(width)
    if probe.classes is not None:
        with at("classes"):
            return probe.classes.instructions(width)
    if probe.attention_pool is not None:
        with at("attention_pool"):
            return probe.attention_pool.instructions(width)
    flags, bias = Flags.FRESH | Flags.COUNTED, float32(probe.bias)
    if probe.mlp is not None:
        with at("mlp"):
            units = probe.mlp.units(width)
        return *units, Instruction(Op.PROBE, a=bias, flags=Flags.UNITS | Flags.COUNTED)
    assert probe.direction is not None
    if not isinstance(probe.direction, tuple):
        with at("direction"):
            row = by_value(probe.direction, width)
        return (Instruction(Op.PROBE, row, a=bias, flags=flags),)
    # One for each layer, in the order that is given. The first has the bias.
    rows = rows_by_value("direction", probe.direction, width)
    return tuple(
        Instruction(Op.PROBE, read=row, a=0.0 if index else bias, flags=flags)
        for index, row in enumerate(rows)
    )


def _own(probe: Probe) -> dict[str, Any]:
    arguments: dict[str, Any] = {"direction": probe.direction, "bias": probe.bias}
    if probe.attention is not None:
        arguments = {"attention": probe.attention}
    elif probe.mlp is not None:
        arguments = {"mlp": probe.mlp, "bias": probe.bias}
    elif probe.attention_pool is not None:
        arguments = {"attention_pool": probe.attention_pool, "bias": probe.bias}
    elif probe.classes is not None:
        arguments = {"classes": probe.classes}
    arguments["name"] = probe.name
    unset = {"hidden": None, "link": "none", "pool": NO_POOL, "act": None}
    set_fields = {name: getattr(probe, name) for name in unset}
    return arguments | {n: value for n, value in set_fields.items() if value != unset[n]}


def _rule(probe: Probe) -> ScoreRule:
    rule, bias = PLAIN, None
    rows: tuple[Vector, ...] = ()
    if probe.classes is not None:
        rule, rows, bias = probe.classes.rule(), probe.classes.weights, probe.classes.bias
    elif probe.attention_pool is not None:
        rule, rows = probe.attention_pool.rule(probe.bias), probe.attention_pool.rows
    if probe.hidden is not None:
        units = probe.hidden.layer(rows, bias)
        rule = replace(rule, columns=units.units, units=units)
    return replace(rule, link=probe.link, pool=probe.pool)


def _check_alone(probe: Probe, site: forms.SitesLike | None) -> None:
    """Check that a probe of attention has nothing that only a direction has."""
    if site is not None:
        raise SpecError("site", "a probe of attention reads a layer, not a site; omit `site`")
    if probe.bias:
        raise SpecError("bias", "a probe of attention has none; omit `bias`")


def _check_place(probe: Probe) -> None:
    if probe.attention is None and len(probe.heads) > 1:
        raise SpecError("head", "a probe reads one head; use one probe per head")
    _check_layers(probe)
    check_row_order(probe.positions, None)
    if probe.act is not None and "last_row" in probe.positions.include:
        raise SpecError(
            probe.positions.path(probe.positions.include.index("last_row")),
            '"last_row" is known only when the request has ended, so a probe there cannot act; '
            'use "last_prompt" or "generated"',
        )
    if len(probe.sites) > 1:
        raise SpecError(
            "site", f"a probe reads one site, got {len(probe.sites)}; use one probe per site"
        )


def _bind(probe: Probe, lookup: Lookup, num_layers: int | None) -> tuple[Probe, ...]:
    # super() fails in the class: `slots=True` replaces it.
    probes = Operation.bind(probe, lookup, num_layers)
    if len(probes) > 1:
        probes = (_joined(probe, probes),)
    if isinstance(probe.act, Switch) and not probe.act.is_bound:
        with at("act.switch"):
            act = probe.act.bind(lookup, num_layers)
        return tuple(bound.replace(act=act) for bound in probes)
    return probes


def _check_outputs(probe: Probe) -> None:
    """Check that the hidden layer, the bias, the link and the act fit the outputs."""
    act, classes = probe.act, probe.classes
    if probe.hidden is not None:
        if classes is None and probe.attention_pool is None:
            raise SpecError("hidden", "give it beside `classes` or `attention_pool`, or use `mlp`")
        if classes is not None:
            with at("classes.weights"):
                probe.hidden.check_rows(classes.weights)
        if probe.attention_pool is not None:
            with at("attention_pool.value"):
                probe.hidden.check_rows(probe.attention_pool.value)
    if classes is not None and probe.bias:
        raise SpecError("bias", "each class has its own: give them in `classes`, omit `bias`")
    if classes is None and probe.link == "softmax":
        raise SpecError("link", '"softmax" is of several outputs; give `classes`, or use "sigmoid"')
    if act is None:
        return
    with at(f"act.{act.word}.output"):
        if classes is None and act.output is not None:
            raise SpecError("", "the probe has one output; omit `output`")
        if classes is not None:
            if act.output is None:
                raise SpecError("", "missing: the class whose scores it reads, a name or an index")
            classes.index_of(act.output)


def _check_layers(probe: Probe) -> None:
    if isinstance(probe.direction, tuple):
        check_per_layer("direction", len(probe.direction), probe.layers)
        return
    layers = probe.layers.indices
    several = layers == "all" or len(layers) > 1
    if not several or "layer" in probe.left or not probe.sites.in_layers:
        return
    if probe.direction is None:
        what = next(what for word, what in _ONE_LAYER.items() if getattr(probe, word) is not None)
        shown = '"all"' if layers == "all" else f"{len(layers)} layers"
        raise SpecError("layer", f"{what} reads one layer, got {shown}; use one probe for each")
    if layers == "all":
        raise SpecError("layer", 'expected layers, got "all"; list those that the probe reads')
    if isinstance(probe.direction, Vector):
        raise SpecError(
            "direction",
            f"expected one row per layer, [{len(layers)}, width], got one vector; the score is "
            "the sum over layers",
        )


def _joined(probe: Probe, probes: tuple[Probe, ...]) -> Probe:
    """Return the probe of several layers with the vectors of a name at these."""
    sites = {part.sites for part in probes}
    if "layer" in probe.left or len(sites) > 1:
        raise SpecError(
            "layer",
            f"`{probe.names()[0]}` is registered for {len(probes)} taps, of which a probe reads "
            "one, or those of one site in the layers that it lists; give `layer` and `site`",
        )
    rows = tuple(part.direction for part in probes)
    layers = [part.layers.indices[0] for part in probes]
    return probe.replace(direction=rows, layer=layers, site=probes[0].sites)


def _read_name(value: object) -> str:
    if not isinstance(value, str):
        raise SpecError("", f"expected a name, `str`, got {kind(value)}")
    if not _NAME.fullmatch(value):
        raise SpecError(
            "", f"expected 1 to 64 of the characters A-Z a-z 0-9 _ . : -, got {show(value)}"
        )
    return str(value)  # of a subclass, such as NumPy's, which messages cannot have
