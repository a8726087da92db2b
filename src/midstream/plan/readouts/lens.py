"""`Lens`: which tokens the model's own head would choose from the stream of some layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from midstream.errors import SpecError
from midstream.plan.argument_names import accept_spellings, only_set
from midstream.plan.forms import LayersLike, PhaseLike, PositionsLike
from midstream.plan.positions.positions import Positions
from midstream.plan.readouts.base import Context, ReadOut, ReadOutEngine, check_names, check_tokens
from midstream.plan.resolved import Pattern, ResolvedCapture
from midstream.plan.selection import Layers, Sites
from midstream.plan.sink_target import read_name
from midstream.plan.tap_lookup import find_taps
from midstream.plan.tokens import LOGIT, STREAM, ids_of, known_ids, read_kind, read_tokens
from midstream.validation import at, listed, read_int

LENS = "lens"
MAX_TOP = 1024
MAX_TOKENS = 64
# Layers that the stream has passed at a site of layer i, beyond i.
AFTER = {"resid_pre": 0, "resid_post": 1}


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Lens(ReadOut):
    """Return the tokens that the model's head gives for the stream of chosen layers.

    The stream at a site of a layer goes through the model's own final norm and its own head, scale
    and soft cap included: the logit lens. Of the logits the largest are returned, and those of
    chosen tokens with their ranks. The rows of a `Lens` are in `output.lens`, by name; see
    `midstream.results.readouts.lens.LensRows`.

    The engine must tap the site.

    Attributes:
        top: number of largest logits of each position and layer; 0: those of `tokens` alone.
        tokens: token ids, or texts that are one token each, in the given order.
        kind: "logit", or the name of a registered lens.
        name: key of the result in `output.lens`.
    """

    layers: Layers
    sites: Sites
    positions: Positions
    top: int
    tokens: tuple[int | str, ...]
    kind: str
    name: str
    stream: bool

    key = LENS
    decodes = True

    @accept_spellings
    def __init__(
        self,
        layers: LayersLike = "all",
        top: int = 10,
        tokens: Sequence[int | str] | int | str = (),
        positions: PositionsLike = "all",
        phase: PhaseLike | None = None,
        exclude: PositionsLike | None = None,
        *,
        kind: str = LOGIT,
        site: str = "resid_post",
        name: str = "",
        stream: bool = False,
    ) -> None:
        """Create it; each field accepts any of its forms.

        Args:
            layers: "all": every layer at which the site is tapped; an index, or a list of indices.
            top: 0 to 1024: so many of the largest logits of each position and layer, and their
                token ids. 0 needs `tokens`.
            tokens: up to 64 token ids, or texts such as `" Paris"` that are one token of the model:
                their logits and ranks.
            positions: any form of Positions.
            phase: "prompt" or "generated" restricts the positions to tokens of that phase.
            exclude: positions to exclude.
            kind: "logit", or the name under which a lens was registered: `llm.lenses`. Its map of
                the layer is applied to the stream before the norm.
            site: "resid_post", "resid_mid" or "resid_pre".
            name: key of the result in `output.lens`; default `kind`.
            stream: as in `Capture`.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        self._set_where(layers, site, positions, phase, exclude)
        self._set_stream(stream)
        self._read(read_kind, kind=kind)
        if len(self.sites.names) != 1 or self.sites.names[0] not in STREAM:
            raise SpecError(
                "site", f"a lens reads the stream: expected one of {listed(STREAM)}, got {site!r}"
            )
        self._read(read_top, top=top)
        self._read(partial(read_tokens, most=MAX_TOKENS), tokens=tokens)
        if not (self.top or self.tokens):
            raise SpecError("top", "expected at least 1 where `tokens` are not given")
        with at("name"):
            self._set(name=read_name(name) or self.kind)

    @staticmethod
    def is_form(value: Mapping[str, Any]) -> bool:
        has_layers = "layers" in value or "layer" in value
        return "kind" in value or (has_layers and ("top" in value or "tokens" in value))

    def with_ids(self, id_of: Callable[[str], int]) -> Lens:
        """Return the lens with the ids of its tokens."""
        if not any(isinstance(token, str) for token in self.tokens):
            return self
        return self._changed(tokens=tuple(ids_of(self.tokens, id_of)))

    def bind(self, engine: ReadOutEngine) -> Lens:
        return self.with_ids(engine.token_id)

    def resolve(self, source: int, context: Context) -> list[ResolvedCapture]:
        where, shape = context.select(self.positions), context.shape
        reason = shape.reason((self.key, shape.num_layers - 1))
        if reason is not None:
            raise SpecError("", f"the stream cannot be decoded: {reason}")
        reads = find_taps(self.layers, self.sites, shape, "layers", "site")
        tokens = known_ids(self.tokens)
        size = 2 * self.top + 2 * len(tokens) + 1
        # In the given order, unlike other ranges.
        keys = tuple((token, token + 1) for token in tokens)
        taps = tuple((f"{self.key}.{self.name}", layer) for _, layer in reads)
        pattern = Pattern("lens", size, keys, (), reads, (1,) * len(reads))
        return [ResolvedCapture(taps, where, source, pattern)]

    @classmethod
    def check_together(cls, captures: Sequence[ResolvedCapture]) -> None:
        check_names(captures, "a lens")

    def finish(self, capture: ResolvedCapture, engine: ReadOutEngine) -> ResolvedCapture:
        pattern = capture.pattern
        assert pattern is not None
        if self.kind != LOGIT:
            after = AFTER.get(self.sites.names[0])
            if after is None:
                raise SpecError("site", "a registered lens reads resid_pre or resid_post")
            depths = [layer + after for _, layer in pattern.reads]
            pattern = replace(pattern, maps=engine.lens_maps(self.kind, depths))
        check_tokens(capture, engine)
        if self.top > engine.vocabulary:
            raise SpecError("top", f"the model has {engine.vocabulary} tokens")
        for site, layer in pattern.reads:
            if (site, layer) not in engine.last_stage:
                raise SpecError(
                    "layers",
                    f"{site} of layer {layer} is on another pipeline stage than the final norm and "
                    f"the head; choose layers of the last stage: "
                    f"{sorted(number for name, number in engine.last_stage if name == site)}",
                )
        return replace(capture, pattern=pattern)

    @property
    def weights(self) -> tuple[tuple[str, str], ...]:
        return () if self.kind == LOGIT else (("lens", self.kind),)

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads."""
        return {
            "layers": self.layers.emit(),
            "top": self.top,
            **only_set(tokens=list(self.tokens)),
            **self.positions.to_dict(),
            "kind": self.kind,
            "site": self.sites.names[0],
            **only_set(name="" if self.name == self.kind else self.name, stream=self.stream),
        }


def read_top(value: object) -> int:
    """Return how many of the largest are returned."""
    top = read_int(value)
    if not 0 <= top <= MAX_TOP:
        raise SpecError("", f"expected 0 to {MAX_TOP}, got {top}")
    return top
