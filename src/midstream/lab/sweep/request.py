"""`SweepRequest`: what a sweep asks for, checked and immutable, without its prompt."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from midstream.errors import SpecError
from midstream.lab.sweep.alignment import Align, counts_from_end, emit_align, read_align
from midstream.lab.sweep.metrics import Metric, MetricFunction, read_metric
from midstream.lab.sweep.source import NumberSource, RowsSource, Source, read_source
from midstream.plan.argument_names import accept_spellings, read_named
from midstream.plan.forms import IndicesLike, LayersLike, NumberLike, PositionsLike, SitesLike
from midstream.plan.heads import read_indices, read_ordered_indices
from midstream.plan.operation import read_scalar
from midstream.plan.operations.feature import read_sae
from midstream.plan.positions.positions import Positions
from midstream.plan.readouts.logits import tap_of_logits
from midstream.plan.selection import Layers, read_taps
from midstream.plan.shape import ModelShape
from midstream.plan.vectors.vector import Vector
from midstream.sites import ENDS, Tap
from midstream.validation import MAX_ITEMS, as_list, at, is_int, kind, read_int, show

MAX_REPEATS = 1000
MAX_GROUPS = 1024
_GROUP_NAME = 200  # characters

# The fields that a request may lack.
OPTIONS = (
    "layers", "sites", "positions", "exclude", "groups", "heads", "sae", "features", "align",
    "alpha", "mask", "repeats",
)  # fmt: skip


@dataclass(frozen=True, init=False)
class SweepRequest:
    """A grid of patches of one prompt: each cell replaces the vectors at one site and layer, at one
    position or group of positions, of all heads or of one, or one feature of an SAE in them, and a
    metric of the run is returned.

    Attributes:
        source: what the vectors are replaced by.
        metric: a Metric, or a function of an output.
        layers, sites: the site and layer of the cells.
        positions: the positions, one for each cell.
        groups: positions that are patched together, by name; (): each of `positions` alone.
        heads: "all" or attention heads, one for each cell; None: whole vectors.
        sae: name of the registered SAE whose features are patched; None: vectors are.
        features: ids of its features, one for each cell; (): vectors are patched.
        left: those of "layers" and "sites" that were omitted, and are then the SAE's.
        align: which source position a position is patched from.
        alpha: h ← (1 − alpha) · h + alpha · source.
        dims: the components that are replaced, those of a head with `heads`; (): all.
        weights: a factor of alpha for each component; None: 1.
        mask_size: number of components of a mask of truth values; None: it was another one.
        repeats: number of unpatched runs among the cells.
    """

    source: Source
    metric: Metric | MetricFunction
    layers: Layers
    sites: tuple[str, ...]
    positions: Positions
    groups: tuple[tuple[str, Positions], ...]
    heads: tuple[int, ...] | Literal["all"] | None
    sae: str | None
    features: tuple[int, ...]
    left: tuple[str, ...]
    align: Align
    alpha: float
    dims: tuple[int, ...]
    weights: Vector | None
    repeats: int
    mask_size: int | None = field(compare=False)

    @accept_spellings
    def __init__(
        self,
        source: Any,
        metric: Metric | MetricFunction | Mapping[str, Any] | str,
        layers: LayersLike | None = None,
        sites: SitesLike | None = None,
        positions: PositionsLike | None = None,
        exclude: PositionsLike | None = None,
        groups: Mapping[str, PositionsLike] | None = None,
        heads: IndicesLike | Literal["all"] | None = None,
        sae: str | None = None,
        features: IndicesLike | None = None,
        align: Any = "exact",
        alpha: NumberLike = 1.0,
        mask: Any = None,
        repeats: int = 3,
    ) -> None:
        """Create it; each field accepts any of its forms. See `LLM.sweep` for the arguments.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("source"):
            self._set(source=read_source(source))
        with at("metric"):
            self._set(metric=metric if _is_function(metric) else read_metric(metric))
        omitted = tuple(
            name for name, value in (("layers", layers), ("sites", sites)) if value is None
        )
        chosen_layers, chosen = read_taps(
            "all" if layers is None else layers,
            "resid_post" if sites is None else sites,
            "layers",
            "sites",
        )
        assert chosen_layers is not None
        assert chosen is not None
        for name in chosen.names:
            if name in ENDS:
                raise SpecError(
                    "sites", f"{name} has no layer, so it has no place in a grid of layers"
                )
            if name == "logits":
                raise SpecError("sites", "logits are edited by Bias alone; use another site")
        self._set(layers=chosen_layers, sites=chosen.names)
        self._read_positions(positions, exclude, groups)
        self._set(heads=_read_heads(heads), sae=None, features=(), left=())
        if sae is not None or features is not None:
            name, ids = _read_features(sae, features, {"heads": heads, "mask": mask})
            self._set(sae=name, features=ids, left=omitted)
        elif isinstance(self.source, NumberSource):
            raise SpecError(
                "source",
                f"{self.source.value:g} is an activation, for `features` of an SAE; vectors are "
                "patched with 0, rows, or those of a prompt",
            )
        with at("align"):
            self._set(align=read_align(align))
            _check_end(self.source, self.align)
        with at("alpha"):
            self._set(alpha=read_scalar(alpha))
        with at("mask"):
            dims, weights, size = _read_mask(mask)
            self._set(dims=dims, weights=weights, mask_size=size)
        with at("repeats"):
            count = read_int(repeats)
            if not 0 <= count <= MAX_REPEATS:
                raise SpecError("", f"expected 0 to {MAX_REPEATS}, got {count}")
            self._set(repeats=count)

    @property
    def reads_all(self) -> bool:
        """Whether the metric reads the logits of all tokens."""
        return isinstance(self.metric, Metric) and self.metric.reads_all

    def check_readable(self, shape: ModelShape) -> None:
        """Check that an engine can return what the metric reads.

        Raises:
            SpecError: it cannot.
        """
        if self.reads_all:
            try:
                tap_of_logits(shape)
            except SpecError as error:
                raise SpecError("metric", f"KL reads the logits of all tokens: {error}") from None

    def at_tap(self, tap: Tap | None) -> SweepRequest:
        """Return a copy whose omitted layers and sites are those of an SAE.

        Args:
            tap: where the SAE was trained; None: it does not say.

        Raises:
            SpecError: it does not say.
        """
        if not self.left:
            return self
        if tap is None:
            raise SpecError(
                self.left[0], "the SAE has no hook point; give both `layers` and `sites`"
            )
        request = copy.copy(self)
        layers, chosen = read_taps(tap[1], tap[0], "layers", "sites")
        assert layers is not None
        assert chosen is not None
        if "layers" in self.left:
            object.__setattr__(request, "layers", layers)
        if "sites" in self.left:
            object.__setattr__(request, "sites", chosen.names)
        object.__setattr__(request, "left", ())
        return request

    def _read_positions(
        self, positions: object, exclude: object, groups: Mapping[str, PositionsLike] | None
    ) -> None:
        for name, value in (("positions", positions), ("exclude", exclude)):
            if groups is not None and value is not None:
                raise SpecError(name, "`groups` has the positions; omit one of the two")
        selected = Positions.within("prompt" if positions is None else positions, None, exclude)
        with at("positions"):
            _check_prompt_only(selected)
        self._set(positions=selected, groups=())
        if groups is None:
            return
        with at("groups"):
            if not isinstance(groups, Mapping):
                raise SpecError("", f"expected positions by name, a dict, got {kind(groups)}")
            if not 1 <= len(groups) <= MAX_GROUPS:
                raise SpecError("", f"expected 1 to {MAX_GROUPS} groups, got {len(groups)}")
            named: list[tuple[str, Positions]] = []
            for name, group in groups.items():
                if not isinstance(name, str) or not 1 <= len(name) <= _GROUP_NAME:
                    raise SpecError(
                        "", f"names of groups have 1 to {_GROUP_NAME} characters, got {name!r:.60}"
                    )
                with at(name):
                    chosen = Positions.parse(group)
                    _check_prompt_only(chosen)
                    if chosen.exclude:
                        raise SpecError("", "`exclude` is unsupported in groups; list positions")
                    named.append((name, chosen))
            self._set(groups=tuple(named))

    @staticmethod
    def parse(value: object) -> SweepRequest:
        """Read a SweepRequest, or a dict of its arguments, of JSON values.

        Raises:
            SpecError: a field is unknown, missing or malformed.
        """
        if isinstance(value, SweepRequest):
            return value
        if not isinstance(value, Mapping):
            raise SpecError("", f"expected a dict of a sweep's arguments, got {kind(value)}")
        arguments = read_named(value, ("source", "metric"), OPTIONS)
        if _is_function(arguments["metric"]):
            raise SpecError("metric", "a function has no JSON form")
        return SweepRequest(**arguments)

    def with_metric(self, metric: Metric) -> SweepRequest:
        """Return a copy with another metric."""
        request = copy.copy(self)
        object.__setattr__(request, "metric", metric)
        return request

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads, without fields that have their default.

        Raises:
            SpecError: the metric is a function.
        """
        if not isinstance(self.metric, Metric):
            raise SpecError("metric", "a function has no JSON form")
        fields: dict[str, object] = {
            "source": self.source.emit(),
            "metric": self.metric.emit(),
            "layers": self.layers.emit(),
            "sites": list(self.sites),
        }
        for name in self.left:
            del fields[name]
        if self.sae is not None:
            fields |= {"sae": self.sae, "features": list(self.features)}
        if self.groups:
            fields["groups"] = {name: positions.emit() for name, positions in self.groups}
        else:
            fields["positions"] = self.positions.emit()
            if self.positions.exclude:
                fields["exclude"] = self.positions.emit_exclude()
        if self.heads is not None:
            fields["heads"] = self.heads if isinstance(self.heads, str) else list(self.heads)
        if self.align != "exact":
            fields["align"] = emit_align(self.align)
        fields["alpha"] = self.alpha
        if self.dims:
            fields["mask"] = list(self.dims)
        elif self.weights is not None:
            fields["mask"] = self.weights.emit()
        fields["repeats"] = self.repeats
        return fields

    def _set(self, **fields: object) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)


def _check_end(source: Source, align: Align) -> None:
    """Check that it is known where the source prompt ends, if positions are counted from there."""
    if isinstance(source, RowsSource) and not source.has_end and counts_from_end(align):
        raise SpecError(
            "",
            "positions are counted from the end of the source prompt, and activations alone do not "
            "say where that is; give the output that has them, or positions from the beginning",
        )


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, Metric)


def _check_prompt_only(positions: Positions) -> None:
    for index, item in enumerate(positions.include):
        path = "" if len(positions.include) == 1 else f"[{index}]"
        if item in ("generated", "last_row"):
            raise SpecError(path, f'a sweep patches the prompt; "{item}" is not in it')
    if positions.phase == "generated":
        raise SpecError("", 'a sweep patches the prompt; the phase is "generated"')


def _read_features(
    sae: object, features: object, others: Mapping[str, object]
) -> tuple[str, tuple[int, ...]]:
    """Return the name of an SAE, and ids of its features; `others` must be omitted."""
    if features is None:
        raise SpecError("features", "missing: the ids of features, one cell for each")
    if sae is None:
        raise SpecError("sae", "missing: the name of the SAE that `features` are of")
    for name, value in others.items():
        if value is not None:
            raise SpecError(name, "a cell patches one of `features`; omit one of the two")
    with at("sae"):
        sae_name = read_sae(sae)
    return sae_name, read_ordered_indices(features, "features")


def _read_heads(value: object) -> tuple[int, ...] | Literal["all"] | None:
    if value is None:
        return None
    if isinstance(value, str):
        if value != "all":
            raise SpecError("heads", f'expected "all" or indices of heads, got {show(value)}')
        return "all"
    return read_ordered_indices(value, "heads")


def _read_mask(value: Any) -> tuple[tuple[int, ...], Vector | None, int | None]:
    """Return the components of a mask, or its weights; and the number of its truth values."""
    if value is None:
        return (), None, None
    dtype = str(getattr(value, "dtype", ""))
    if dtype.endswith("bool"):
        truth = np.asarray(as_list(value))
        if truth.ndim != 1:
            raise SpecError("", f"expected one dimension, got shape {list(truth.shape)}")
        return read_indices(np.flatnonzero(truth).tolist(), ""), None, truth.size
    listed = as_list(value) if dtype else value
    items: Any = [listed] if is_int(listed) else listed
    if isinstance(items, (list, tuple, range)) and items and all(map(is_int, items)):
        return read_indices(items, ""), None, None
    if isinstance(items, (list, tuple)) and not 1 <= len(items) <= MAX_ITEMS * 16:
        raise SpecError("", f"expected indices or weights of components, got {len(items)}")
    return (), Vector.parse(value), None
