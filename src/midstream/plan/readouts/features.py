"""`Features`: which features of a sparse autoencoder are active."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from midstream.errors import SpecError
from midstream.plan.argument_names import accept_spellings, only_set
from midstream.plan.forms import PhaseLike, PositionsLike
from midstream.plan.positions.positions import Positions
from midstream.plan.readouts.base import Context, ReadOut, ReadOutEngine, check_names
from midstream.plan.readouts.lens import read_top
from midstream.plan.resolved import Pattern, ResolvedCapture
from midstream.plan.selection import WIDE, Layers, Sites
from midstream.plan.sink_target import read_name
from midstream.plan.tap_lookup import find_taps
from midstream.validation import INT_LIMIT, as_list, at, is_int, kind, listed, read_int

MAX_FEATURES = 1024


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Features(ReadOut):
    """Return the active features of a registered sparse autoencoder (SAE).

    The vectors at the SAE's site and layer are encoded on the worker, after the step, and only the
    most active features leave it. They are in `output.features`, by name; see
    `midstream.results.readouts.features.FeatureRows`.

    The engine must tap the site.

    Attributes:
        sae: the name under which the SAE was registered: `llm.saes`.
        top: number of the most active features of each position; 0: those of `features` alone.
        features: ids of chosen features, in the given order.
        layer, site: where the vectors are read; None: where the SAE was trained.
        name: key of the result in `output.features`.
    """

    layers: Layers
    sites: Sites
    positions: Positions
    sae: str
    top: int
    features: tuple[int, ...]
    layer: int | None
    site: str | None
    name: str
    stream: bool

    key = "features"
    decodes = True

    @accept_spellings
    def __init__(
        self,
        sae: str,
        top: int = 32,
        positions: PositionsLike = "all",
        phase: PhaseLike | None = None,
        exclude: PositionsLike | None = None,
        *,
        features: Sequence[int] | int = (),
        layer: int | None = None,
        site: str | None = None,
        name: str = "",
        stream: bool = False,
    ) -> None:
        """Create it; each field accepts any of its forms.

        Args:
            sae: the name under which the SAE was registered: `llm.saes`.
            top: 0 to 1024: so many of the most active features of each position. 0 needs
                `features`.
            positions: any form of Positions.
            phase: "prompt" or "generated" restricts the positions to tokens of that phase.
            exclude: positions to exclude.
            features: up to 1024 ids of features, whose activations are returned at each position.
            layer: index of a layer; None: that of the SAE's hook point.
            site: a site of the model's width; None: that of the SAE's hook point.
            name: key of the result in `output.features`; default `sae`.
            stream: as in `Capture`.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        self._read_given(read_int, layer=layer)
        sites = "resid_post" if site is None else site
        layers: Any = "all" if self.layer is None else [self.layer]
        self._set_where(layers, sites, positions, phase, exclude)
        self._set_stream(stream)
        if len(self.sites.names) != 1 or self.sites.names[0] not in WIDE:
            raise SpecError("site", f"expected one of {listed(WIDE)}, got {site!r}")
        self._set(site=None if site is None else self.sites.names[0])
        self._read(_read_sae, sae=sae)
        self._read(read_top, top=top)
        self._read(_read_features, features=features)
        if not (self.top or self.features):
            raise SpecError("top", "expected at least 1 where `features` are not given")
        with at("name"):
            self._set(name=read_name(name) or self.sae)

    @staticmethod
    def is_form(value: Mapping[str, Any]) -> bool:
        return "sae" in value

    def at_tap(self, site: str, layer: int) -> Features:
        """Return it with the site and layer of its SAE, where these are not given."""
        if self.layer is not None and self.site is not None:
            return self
        return Features(
            self.sae,
            self.top,
            self.positions,
            features=self.features,
            layer=layer if self.layer is None else self.layer,
            site=self.site or site,
            name=self.name,
            stream=self.stream,
        )

    def bind(self, engine: ReadOutEngine) -> Features:
        tap = engine.sae_tap(self.sae)
        return self if tap is None else self.at_tap(*tap)

    def resolve(self, source: int, context: Context) -> list[ResolvedCapture]:
        """Its pattern gets an encoder by `finish`."""
        where = context.select(self.positions)
        if self.layer is None or self.site is None:
            missing = "layer" if self.layer is None else "site"
            raise SpecError(missing, "the SAE has no hook point; give both `layer` and `site`")
        (read,) = find_taps(self.layers, self.sites, context.shape, "layer", "site")
        streams = context.shape.num_heads(read)
        if streams:
            raise SpecError("site", f"an SAE reads one stream, and {read[0]} has {streams}")
        keys = tuple((feature, feature + 1) for feature in self.features)
        size = 2 * self.top + len(keys) + 1
        pattern = Pattern("features", size, keys, (), (read,), (1,))
        return [ResolvedCapture(((f"{self.key}.{self.name}", read[1]),), where, source, pattern)]

    @classmethod
    def check_together(cls, captures: Sequence[ResolvedCapture]) -> None:
        check_names(captures, "a `Features`")

    def finish(self, capture: ResolvedCapture, engine: ReadOutEngine) -> ResolvedCapture:
        assert capture.pattern is not None
        encoder = engine.sae_encoder(self.sae)
        count = encoder.features
        if self.top > count:
            raise SpecError("top", f"the SAE {self.sae!r} has {count} features")
        for index, feature in enumerate(self.features):
            if feature >= count:
                raise SpecError(
                    f"features[{index}]",
                    f"there is no feature {feature}: the SAE {self.sae!r} has {count}, 0 to "
                    f"{count - 1}",
                )
        return replace(capture, pattern=replace(capture.pattern, encoder=encoder))

    @property
    def weights(self) -> tuple[tuple[str, str], ...]:
        return (("sae", self.sae),)

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads."""
        name = "" if self.name == self.sae else self.name
        return {
            "sae": self.sae,
            "top": self.top,
            **only_set(features=list(self.features)),
            **self.positions.to_dict(),
            **only_set(layer=self.layer, site=self.site, name=name, stream=self.stream),
        }


def _read_sae(value: object) -> str:
    if not isinstance(value, str):
        problem = f"expected `str`, got {kind(value)}"
        if hasattr(value, "encode"):
            problem += "; register it, and give its name: llm.saes.register(name, sae)"
        raise SpecError("", problem)
    return read_name(value, may_be_empty=False)


def _read_features(value: Any) -> tuple[int, ...]:
    values = [value] if is_int(value) else as_list(value)
    if not isinstance(values, (list, tuple, range)):
        raise SpecError("", f"expected ids of features, got {kind(value)}")
    if len(values) > MAX_FEATURES:
        raise SpecError("", f"expected at most {MAX_FEATURES} features, got {len(values)}")
    features: dict[int, None] = {}
    for index, feature_id in enumerate(values):
        with at(f"[{index}]"):
            feature = read_int(feature_id)
            if not 0 <= feature <= INT_LIMIT:
                raise SpecError("", f"expected ids from 0, got {feature}")
            if feature in features:
                raise SpecError("", f"feature {feature} is given twice")
            features[feature] = None
    return tuple(features)
