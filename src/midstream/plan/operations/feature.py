"""`Feature`: changing features of a sparse autoencoder."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from midstream.errors import SpecError
from midstream.ops.layout import Op
from midstream.plan import forms
from midstream.plan.argument_names import accept_spellings, only_set
from midstream.plan.instructions import Instruction
from midstream.plan.operation import Operation, one_edit, read_norm, read_scalar, rows_by_value
from midstream.plan.sink_target import read_name
from midstream.plan.vectors.algebra import wide
from midstream.plan.vectors.matrix import MAX_RANK, read_rows
from midstream.plan.vectors.named_lookup import FeatureSource, Lookup, SaeName
from midstream.plan.vectors.vector import Vector
from midstream.validation import (
    INT_LIMIT,
    as_list,
    at,
    float32,
    is_int,
    kind,
    listed,
    read_int,
    read_word,
    show,
)

MODES = ("set", "add", "scale", "ablate")
_ABLATE = 'mode "ablate" takes no value; use "set" or "scale"'


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Feature(Operation):
    """Change features of a sparse autoencoder (SAE) and nothing else in h.

    With x = ⟨h, encoder⟩ + bias and act(x) = x where x > threshold, else 0:

    | mode | h ← |
    |---|---|
    | set | h + (value − act(x)) · decoder |
    | add | h + value · decoder |
    | scale | h + (value − 1) · act(x) · decoder |
    | ablate | h − act(x) · decoder |

    Of several features the sum of these changes is added, and all of them read the same h. h is not
    replaced by a reconstruction, so the SAE's error term is kept.

    With threshold 0 this is a ReLU SAE (Cunningham et al. 2023, arXiv:2309.08600; Bricken et al.
    2023), otherwise a JumpReLU SAE (Rajamanoharan et al. 2024, arXiv:2407.14435).

    Attributes:
        encoder: the features' columns of W_enc, n vectors of the hidden size; empty with `sae`.
        decoder: the features' rows of W_dec, likewise.
        mode: one of the above.
        value: [n], feature activations; for "scale" factors. Empty for "ablate".
        bias: [n], the encoder biases, including the folded decoder bias; empty with `sae`.
        threshold: [n], at least 0; empty with `sae`.
        norm: None or "keep".
        sae: name of the registered SAE that the features are of; None: they are by value.
        index: ids of its features, ascending.
    """

    op = "feature"

    encoder: tuple[Vector, ...]
    decoder: tuple[Vector, ...]
    mode: str
    value: tuple[float, ...]
    bias: tuple[float, ...]
    threshold: tuple[float, ...]
    norm: str | None
    sae: str | None
    index: tuple[int, ...]

    @accept_spellings
    def __init__(
        self,
        encoder: forms.RowsLike | None = None,
        decoder: forms.RowsLike | None = None,
        layer: forms.LayersLike | None = None,
        mode: Literal["set", "add", "scale", "ablate"] = "set",
        value: forms.NumberLike | forms.VectorLike | None = None,
        bias: forms.NumberLike | forms.VectorLike | None = None,
        threshold: forms.NumberLike | forms.VectorLike | None = None,
        decoder_bias: forms.VectorLike | None = None,
        site: forms.SitesLike | None = None,
        positions: forms.PositionsLike = "all",
        phase: forms.PhaseLike | None = None,
        exclude: forms.PositionsLike | None = None,
        norm: Literal["keep"] | None = None,
        head: forms.IndicesLike | None = None,
        sae: str | None = None,
        index: forms.FeaturesLike | None = None,
    ) -> None:
        """Create an edit; each field accepts any of its forms.

        Args:
            encoder, decoder: [width], or [n, width] for n features: lists, 2-D arrays or tensors,
                or base64 with `shape`.
            mode: "set", "add", "scale" or "ablate".
            value: one number for all features, or [n]; required unless the mode is "ablate", which
                takes none, or `index` has the values.
            bias: likewise, the features' entries of b_enc; None: 0.
            threshold: likewise, numbers of at least 0, the features' entries of the JumpReLU
                thresholds; None: 0.
            decoder_bias: b_dec, any form of Vector.parse, for an SAE that subtracts it from h
                before encoding: bias − ⟨encoder, decoder_bias⟩ becomes the attribute `bias`.
            layer, site, positions, phase, exclude, head: see Steer. With `sae`, layer and site are
                by default those where the SAE was trained, and there is no `head`.
            norm: None, or "keep": the vector is rescaled to the norm that h had, as in Steer.
            sae: instead of `encoder` and `decoder`, the name under which an SAE was registered:
                `llm.saes`.
            index: with `sae`: the id of a feature, several ids, or {id: value}; in JSON the ids of
                the latter are strings of digits.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("mode"):
            self._set(mode=read_word(mode, MODES))
        if sae is None:
            if index is not None:
                raise SpecError("index", "only with `sae`, the name of a registered SAE")
            self._read_rows(encoder, decoder)
            count = len(self.encoder)
            self._set(sae=None, index=(), value=_read_values(self.mode, value, count))
            self._read_biases(bias, threshold, decoder_bias)
        else:
            self._read(read_sae, sae=sae)
            for name, argument in (
                ("encoder", encoder), ("decoder", decoder), ("bias", bias),
                ("threshold", threshold), ("decoder_bias", decoder_bias), ("head", head),
            ):  # fmt: skip
                if argument is not None:
                    raise SpecError(name, "unsupported with `sae`, which determines it")
            self._set(encoder=(), decoder=(), bias=(), threshold=())
            self._set(**read_changes(index, mode, value))
        self._set(norm=read_norm(norm))
        self._set_place(layer, site, positions, phase, exclude, head)

    def own(self) -> dict[str, Any]:
        change: dict[str, Any] = {"mode": self.mode, "value": short(self.value)}
        norm = only_set(norm=self.norm)
        if self.sae is not None:
            return {"sae": self.sae, "index": list(self.index), **change, **norm}
        rows = {"encoder": self.encoder, "decoder": self.decoder}
        biases = {"bias": short(self.bias), "threshold": short(self.threshold)}
        return {**rows, **change, **biases, **norm}

    def names(self) -> tuple[str, ...]:
        """Return the name of the SAE, if there is one."""
        return () if self.sae is None else (self.sae,)

    def bind(self, lookup: Lookup, num_layers: int | None = None) -> tuple[Feature, ...]:
        """Return the edit with the features of its SAE by value."""
        if self.sae is None:
            return (self,)
        with at("sae"):
            source = lookup(SaeName(self.sae))
            place = place_by_sae(self, source)
        arguments: dict[str, Any] = {**source.weights_of(self.index, self.mode), **place}
        value = list(self.value) or None
        return (
            Feature(
                mode=self.mode,  # type: ignore[arg-type]
                value=value,
                norm=self.norm,  # type: ignore[arg-type]
                positions=self.positions,
                **arguments,
            ),
        )

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        if self.sae is not None:
            raise SpecError("sae", f"the SAE `{self.sae}` is not registered")
        reads = rows_by_value("encoder", self.encoder, width)
        writes = rows_by_value("decoder", self.decoder, width)
        values = self.value or (0.0,) * len(reads)
        changes = zip(reads, writes, values, self.bias, self.threshold, strict=True)
        return one_edit([self._change(*change) for change in changes], self.norm)

    def _change(
        self, read: Vector, write: Vector, value: float, bias: float, threshold: float
    ) -> Instruction:
        if self.mode == "add":
            return Instruction(Op.ADD, write=(write,), a=float32(value))
        return Instruction(
            Op.FEATURE,
            read=read,
            write=(write,),
            a=float32(bias),
            b=float32(threshold),
            c=float32(value - 1) if self.mode == "scale" else -1.0,
            d=float32(value) if self.mode == "set" else 0.0,
        )

    def _read_rows(self, encoder: object, decoder: object) -> None:
        for name, rows in (("encoder", encoder), ("decoder", decoder)):
            with at(name):
                if rows is None:
                    raise SpecError(
                        "", "missing; give `encoder` and `decoder`, or `sae` and `index`"
                    )
                if isinstance(rows, str):
                    known = f"sae={show(rows)}, index=…"
                    raise SpecError("", f"expected vectors, got `str`; a registered SAE is {known}")
                self._set(**{name: read_rows(rows)})
        if len(self.decoder) != len(self.encoder):
            raise SpecError(
                "decoder",
                f"expected {len(self.encoder)} rows, as in `encoder`, got {len(self.decoder)}",
            )

    def _read_biases(self, bias: object, threshold: object, decoder_bias: object) -> None:
        count = len(self.encoder)
        with at("bias"):
            self._set(bias=_read_numbers(0.0 if bias is None else bias, count))
        if decoder_bias is not None:
            with at("decoder_bias"):
                self._set(bias=self._fold_bias(Vector.parse(decoder_bias)))
        with at("threshold"):
            thresholds = _read_numbers(0.0 if threshold is None else threshold, count)
            if min(thresholds) < 0:
                raise SpecError("", f"expected at least 0, got {min(thresholds)!r}")
            self._set(threshold=thresholds)

    def _fold_bias(self, decoder_bias: Vector) -> tuple[float, ...]:
        if decoder_bias.size != self.encoder[0].size:
            raise SpecError(
                "",
                f"expected {self.encoder[0].size} numbers, as in `encoder`, got "
                f"{decoder_bias.size}",
            )
        *rows, shift = wide([*self.encoder, decoder_bias])
        pairs = zip(self.bias, rows, strict=True)
        return tuple(read_scalar(bias - float(row @ shift)) for bias, row in pairs)


def place_by_sae(edit: Operation, source: FeatureSource) -> dict[str, Any]:
    """Return the layer and site of an edit: where they were omitted, those of its SAE."""
    place: dict[str, Any] = {"layer": edit.layers, "site": edit.sites}
    if not edit.left:
        return place
    if source.tap is None:
        raise SpecError("", "the SAE has no hook point; give both `layer` and `site`")
    return place | {name: source.tap[name == "layer"] for name in edit.left}


def read_changes(index: object, mode: object, value: object) -> dict[str, Any]:
    """Read which features of an SAE are changed, and how: index, mode and value of a `Feature`."""
    with at("mode"):
        word = read_word(mode, MODES)
    with at("index"):
        ids, values = read_index(index)
    if values is None:
        values = _read_values(word, value, len(ids))
    elif word == "ablate":
        raise SpecError("index", _ABLATE)
    elif value is not None:
        raise SpecError("value", "`index` has the values")
    order = sorted(range(len(ids)), key=ids.__getitem__)
    return {
        "mode": word,
        "index": tuple(ids[place] for place in order),
        "value": tuple(values[place] for place in order) if values else (),
    }


def _read_values(mode: str, value: object, count: int) -> tuple[float, ...]:
    with at("value"):
        if mode == "ablate":
            if value is not None:
                raise SpecError("", _ABLATE)
            return ()
        if value is None:
            others = listed(mode for mode in MODES if mode != "ablate")
            raise SpecError("", f"missing: modes {others} require a value")
        return _read_numbers(value, count)


def read_index(value: object) -> tuple[tuple[int, ...], tuple[float, ...] | None]:
    """Read ids of features, and their values if it has these: an id, several, or {id: value}."""
    if value is None:
        raise SpecError("", "missing; give the id of a feature, several ids, or {id: value}")
    features = [value] if is_int(value) else as_list(value)
    if not isinstance(features, (list, tuple, range, Mapping)):
        raise SpecError(
            "", f"expected the id of a feature, ids, or {{id: value}}, got {kind(value)}"
        )
    if not 1 <= len(features) <= MAX_RANK:
        raise SpecError("", f"expected 1 to {MAX_RANK} features, got {len(features)}")
    has_values, values_by_id = isinstance(features, Mapping), dict[int, float]()
    for index, key in enumerate(features):
        place = f"[{index}]"
        if isinstance(features, Mapping):
            place = f"[{show(key) if isinstance(key, (str, int)) else kind(key)}]"
        with nullcontext() if is_int(value) else at(place):
            is_text = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10
            feature = int(key) if has_values and is_text else read_int(key)
            if not 0 <= feature <= INT_LIMIT:
                raise SpecError("", f"expected ids from 0, got {feature}")
            if feature in values_by_id:
                raise SpecError("", f"feature {feature} is given twice")
            values_by_id[feature] = (
                read_scalar(features[key]) if isinstance(features, Mapping) else 0.0
            )
    return tuple(values_by_id), tuple(values_by_id.values()) if has_values else None


def read_sae(value: object) -> str:
    if not isinstance(value, str):
        problem = f"expected the name of a registered SAE, `str`, got {kind(value)}"
        if hasattr(value, "features"):
            problem += "; of an SAE object, use sae.features({id: value})"
        raise SpecError("", problem)
    return read_name(value, may_be_empty=False)


def _read_numbers(value: object, count: int) -> tuple[float, ...]:
    """Read one number for all features, or one for each."""
    if isinstance(value, (list, tuple, Mapping, Vector)) or len(getattr(value, "shape", ())):
        vector = Vector.parse(value)
        if vector.size != count:
            raise SpecError(
                "", f"expected {count} numbers, one for each feature, got {vector.size}"
            )
        return tuple(read_scalar(number) for number in vector.numpy().tolist())
    return (read_scalar(value),) * count


def short(values: tuple[float, ...]) -> Any:
    """Return the JSON form of numbers: equal ones are one number; None: there is none."""
    if not values:
        return None
    return values[0] if len(set(values)) == 1 else list(values)
