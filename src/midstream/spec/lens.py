"""`Lens`: which tokens the model's own head would choose from the stream of some layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from midstream.errors import SpecError
from midstream.spec.argument_names import accept_spellings, read_named
from midstream.spec.capture import Capture
from midstream.spec.forms import LayersLike, PhaseLike, PositionsLike
from midstream.spec.sink_target import read_name
from midstream.spec.tokens import ids_of, read_tokens
from midstream.validation import at, kind, listed, read_int

MAX_TOP = 1024
MAX_TOKENS = 64
LOGIT: Literal["logit"] = "logit"
# The sites that have the stream itself.
SITES = ("resid_pre", "resid_mid", "resid_post")
_FIELDS = (
    "layers", "top", "tokens", "positions", "phase", "exclude", "kind", "site", "name", "stream",
)  # fmt: skip


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Lens(Capture):
    """Return the tokens that the model's head gives for the stream of chosen layers.

    The stream at a site of a layer goes through the model's own final norm and its own head, scale
    and soft cap included: the logit lens. Of the logits the largest are returned, and those of
    chosen tokens with their ranks. The rows of a `Lens` are in `output.lens`, by name; see
    `midstream.results.lens.LensRows`.

    The engine must tap the site.

    Attributes:
        top: number of largest logits of each position and layer; 0: those of `tokens` alone.
        tokens: token ids, or texts that are one token each, in the given order.
        kind: "logit", or the name of a registered lens.
        name: key of the result in `output.lens`.
    """

    top: int
    tokens: tuple[int | str, ...]
    kind: str
    name: str

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
        Capture.__init__(self, layers, site, positions, phase, exclude, stream=stream)
        with at("kind"):
            object.__setattr__(self, "kind", read_kind(kind))
        if len(self.sites.names) != 1 or self.sites.names[0] not in SITES:
            raise SpecError(
                "site", f"a lens reads the stream: expected one of {listed(SITES)}, got {site!r}"
            )
        with at("top"):
            object.__setattr__(self, "top", read_top(top))
        with at("tokens"):
            object.__setattr__(self, "tokens", read_tokens(tokens, MAX_TOKENS))
        if not (self.top or self.tokens):
            raise SpecError("top", "expected at least 1 where `tokens` are not given")
        with at("name"):
            object.__setattr__(self, "name", read_name(name) or self.kind)

    @staticmethod
    def parse(value: object) -> Lens:
        """Read a Lens, or a dict of the constructor's arguments.

        Raises:
            SpecError: a field is unknown or malformed.
        """
        if isinstance(value, Lens):
            return value
        assert isinstance(value, Mapping)
        return Lens(**read_named(value, (), _FIELDS))

    def with_ids(self, id_of: Callable[[str], int]) -> Lens:
        """Return the lens with the ids of its tokens.

        Args:
            id_of: returns the id of a token's text.

        Raises:
            SpecError: a text is not one token, or two are the same.
        """
        if not any(isinstance(token, str) for token in self.tokens):
            return self
        return self._copy(ids_of(self.tokens, id_of), self.stream)

    def without_place(self) -> Capture:
        """Return a copy without `stream`."""
        return self._copy(self.tokens, False) if self.stream else self

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads."""
        fields: dict[str, object] = {"layers": self.layers.emit(), "top": self.top}
        if self.tokens:
            fields["tokens"] = list(self.tokens)
        fields |= self.positions.to_dict()
        fields["kind"] = self.kind
        fields["site"] = self.sites.names[0]
        if self.name != self.kind:
            fields["name"] = self.name
        if self.stream:
            fields["stream"] = True
        return fields

    def _copy(self, tokens: Sequence[int | str], stream: bool) -> Lens:
        return Lens(
            self.layers,
            self.top,
            tokens,
            self.positions,
            kind=self.kind,
            site=self.sites.names[0],
            name=self.name,
            stream=stream,
        )


def is_lens(value: Mapping[str, Any]) -> bool:
    """Return whether a dict is the form of a `Lens`, among those of captures."""
    has_layers = "layers" in value or "layer" in value
    return "kind" in value or (has_layers and ("top" in value or "tokens" in value))


def read_kind(value: object) -> str:
    """Read "logit", or the name of a registered lens."""
    if not isinstance(value, str):
        problem = f"expected `str`, got {kind(value)}"
        if hasattr(value, "matrices"):
            problem += "; register it, and give its name: llm.lenses.register(name, lens)"
        raise SpecError("", problem)
    return read_name(value, may_be_empty=False)


def read_top(value: object) -> int:
    """Return how many of the largest are returned."""
    top = read_int(value)
    if not 0 <= top <= MAX_TOP:
        raise SpecError("", f"expected 0 to {MAX_TOP}, got {top}")
    return top
