"""`Logits`: which logits of some positions to return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from midstream.errors import SpecError
from midstream.plan.argument_names import accept_spellings
from midstream.plan.forms import PhaseLike, PositionsLike
from midstream.plan.positions.positions import Positions
from midstream.plan.positions.row_order import check_row_order
from midstream.plan.readouts.base import Context, ReadOut, ReadOutEngine, check_tokens
from midstream.plan.resolved import LensMap, Pattern, ResolvedCapture
from midstream.plan.selection import Layers, Sites
from midstream.plan.shape import ModelShape
from midstream.plan.tokens import ids_of, known_ids, read_tokens
from midstream.sites import Tap
from midstream.validation import read_int

MAX_TOP = 1024
MAX_TOKENS = 1024
ALL: Literal["all"] = "all"
# What a model lacks whose head does not read the output of its final norm.
HEAD = "head"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Logits(ReadOut):
    """Return logits at some positions, of prompt tokens as of generated ones.

    Those of position p are the ones from which token p + 1 is sampled, as the model's head returns
    them: with its scale and soft cap, before a `Bias` and before penalties, structured output and
    temperature. They are computed on the worker from the output of the final norm, in float32 after
    the head. The result is `output.logits`, see `midstream.results.readouts.logits.LogitRows`.

    The engine must tap `final_norm`; or `resid_post` of the last layer, as every engine does by
    default, whose rows then go through the final norm again: the same but for rounding.

    Attributes:
        top: number of largest logits of each position; 0: those of `tokens`.
        tokens: token ids, or texts that are one token each, in the given order; "all": the whole
            vocabulary.
    """

    layers: Layers
    sites: Sites
    positions: Positions
    top: int
    tokens: tuple[int | str, ...] | Literal["all"]

    key = "logits"

    @accept_spellings
    def __init__(
        self,
        top: int | None = None,
        tokens: Sequence[int | str] | int | str | None = None,
        positions: PositionsLike = "all",
        phase: PhaseLike | None = None,
        exclude: PositionsLike | None = None,
    ) -> None:
        """Create it. Either `top` or `tokens` is given.

        Args:
            top: 1 to 1024: so many of the largest logits of each position, and their token ids.
            tokens: a token id, or a text such as `" Paris"` that is one token of the model; up to
                1024 of them; or "all": the logits of these tokens. "all" is 4 bytes for each token
                of the vocabulary and position; the token of that text is `["all"]`.
            positions: any form of Positions.
            phase: "prompt" or "generated" restricts the positions to tokens of that phase.
            exclude: positions to exclude.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        self._set_where(None, "final_norm", positions, phase, exclude)
        check_row_order(self.positions, None)
        if (top is None) == (tokens is None):
            raise SpecError("", "give either `top` or `tokens`")
        self._read(_read_top, top=top)
        self._read(_read_tokens, tokens=tokens)

    @staticmethod
    def is_form(value: Mapping[str, Any]) -> bool:
        return "top" in value or "tokens" in value

    def with_ids(self, id_of: Callable[[str], int]) -> Logits:
        """Return it with the ids of its tokens."""
        if isinstance(self.tokens, str) or not any(isinstance(token, str) for token in self.tokens):
            return self
        return Logits(tokens=ids_of(self.tokens, id_of), positions=self.positions)

    def bind(self, engine: ReadOutEngine) -> Logits:
        return self.with_ids(engine.token_id)

    def resolve(self, source: int, context: Context) -> list[ResolvedCapture]:
        """The size of rows of the whole vocabulary is 0 until `finish`."""
        where, shape = context.select(self.positions), context.shape
        read = tap_of_logits(shape)
        # The stream goes through the final norm, without a map.
        maps = (LensMap(),) if read[0] == "resid_post" else ()
        pattern = Pattern("logits_all", 0, (), (), (read,), (1,), maps)
        if self.top:
            pattern = replace(pattern, kind="logits_top", size=2 * self.top + 1)
        elif not isinstance(self.tokens, str):
            # In the given order, unlike other ranges.
            tokens = tuple((token, token + 1) for token in known_ids(self.tokens))
            pattern = replace(pattern, kind="logits_of", size=len(tokens) + 1, keys=tokens)
        return [ResolvedCapture(((self.key, read[1]),), where, source, pattern)]

    @classmethod
    def check_together(cls, captures: Sequence[ResolvedCapture]) -> None:
        sources = [capture.source for capture in captures]
        if len(sources) > 1:
            raise SpecError(
                f"capture[{sources[1]}]",
                f"capture[{sources[0]}] returns logits too; ask for one kind of logits in a "
                "request",
            )

    def finish(self, capture: ResolvedCapture, engine: ReadOutEngine) -> ResolvedCapture:
        pattern = capture.pattern
        assert pattern is not None
        check_tokens(capture, engine)
        if self.top > engine.vocabulary:
            raise SpecError("top", f"the model has {engine.vocabulary} tokens")
        if pattern.kind == "logits_all":
            pattern = replace(pattern, size=engine.vocabulary + 1)
        return replace(capture, pattern=pattern)

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads."""
        fields: dict[str, object] = {"top": self.top}
        if not self.top:
            fields = {"tokens": ALL if isinstance(self.tokens, str) else list(self.tokens)}
        return fields | self.positions.to_dict()


def tap_of_logits(shape: ModelShape) -> Tap:
    """Return the tap that logits are made of: `final_norm`, or `resid_post` of the last layer.

    Raises:
        SpecError: the engine has neither, or the model's head reads something else.
    """
    last = shape.num_layers - 1
    why = shape.reason((HEAD, last))
    if why is None and ("final_norm", last) in shape.taps:
        return "final_norm", last
    if why is None and ("resid_post", last) in shape.taps:
        why = shape.reason(("lens", last))
        if why is None:
            return "resid_post", last
    why = why or shape.reason(("final_norm", last))
    why = why or (
        'the engine taps neither final_norm nor resid_post of the last layer; add "final_norm" to '
        'midstream\'s setting `sites`, as in LLM(…, midstream={"sites": ["resid_post", '
        '"final_norm"]})'
    )
    raise SpecError("", f"logits cannot be read: {why}")


def _read_top(value: object) -> int:
    if value is None:
        return 0
    top = read_int(value)
    if not 1 <= top <= MAX_TOP:
        raise SpecError("", f"expected 1 to {MAX_TOP}, got {top}")
    return top


def _read_tokens(value: Any) -> tuple[int | str, ...] | Literal["all"]:
    if value is None:
        return ()
    if isinstance(value, str) and value == ALL:
        return ALL
    tokens = read_tokens(value, MAX_TOKENS)
    if not tokens:
        raise SpecError("", f"expected 1 to {MAX_TOKENS} tokens, got 0")
    return tokens
