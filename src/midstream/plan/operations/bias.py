"""`Bias`: numbers that are added to the logits of some tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from midstream.errors import SpecError
from midstream.ops.layout import Op
from midstream.plan.argument_names import accept_spellings
from midstream.plan.forms import NumberLike, PhaseLike, PositionsLike
from midstream.plan.heads import mask_of
from midstream.plan.instructions import Instruction
from midstream.plan.operation import Operation, one_edit, read_scalar
from midstream.plan.positions.positions import Positions
from midstream.validation import INT_LIMIT, at, is_int, kind, show

MAX_TOKENS = 1024
# The positions from which a token is sampled, by phase.
_SAMPLED: dict[str, PositionsLike] = {
    "all": ("last_prompt", "generated"),
    "prompt": "last_prompt",
    "generated": "generated",
}


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Bias(Operation):
    """Add numbers to the logits of some tokens: logits[id] ← logits[id] + value.

    The logits of position p are those from which token p + 1 is sampled. They are edited as the
    model returns them, after its own scale and soft cap, and before penalties, structured output,
    temperature and the log probabilities that vLLM returns. Only positions from which a token is
    sampled have logits: the prompt's last one, and the generated ones.

    Attributes:
        tokens: (token id, value) pairs, ascending by id.
    """

    op = "bias"

    tokens: tuple[tuple[int, float], ...]

    @accept_spellings
    def __init__(
        self,
        tokens: Mapping[int, NumberLike] | Mapping[str, NumberLike],
        positions: PositionsLike | None = None,
        phase: PhaseLike | None = None,
        exclude: PositionsLike | None = None,
    ) -> None:
        """Create an edit; each field accepts any of its forms.

        Args:
            tokens: {token id: number to add}, at most 1024; in JSON the ids are strings of digits.
            positions: any form of Positions; None: all from which a token is sampled.
            phase, exclude: see Steer.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        self._read(_read_tokens, tokens=tokens)
        if positions is None:
            # A phase that is none is refused below.
            positions = _SAMPLED.get(str(phase or "all"), "all")
        self._set_place(None, "logits", positions, phase, exclude)

    def own(self) -> dict[str, Any]:
        return {"tokens": {str(token): value for token, value in self.tokens}}

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads; there is no site."""
        fields = Operation.to_dict(self)
        del fields["site"]
        return fields

    def replace(self, **changes: object) -> Bias:
        """Return a copy with some of the constructor's arguments changed."""
        # The default positions follow the phase, which may be changed.
        place = {} if self.is_of_all else {"positions": self.positions}
        arguments: dict[str, Any] = {**self.own(), **place, **changes}
        return Bias(**arguments)

    @property
    def is_of_all(self) -> bool:
        """Whether its positions are the default ones: all from which a token is sampled."""
        return self.positions == Positions(_SAMPLED["all"])

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        """Return an ADD of 1 to the token's first switch; for values see `ResolvedBias`."""
        return one_edit([Instruction(Op.ADD, write=(mask_of((0,), width),), a=1.0)])


def _read_tokens(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise SpecError("", f"expected {{token id: number}}, got {kind(value)}")
    if not 1 <= len(value) <= MAX_TOKENS:
        raise SpecError("", f"expected 1 to {MAX_TOKENS} tokens, got {len(value)}")
    biases: dict[int, float] = {}
    for key, number in value.items():
        is_text = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        token = int(key) if is_text else key
        if not is_int(token) or not 0 <= int(token) <= INT_LIMIT:
            raise SpecError("", f"expected token ids from 0, got {show(key)}")
        if int(token) in biases:
            raise SpecError("", f"token {int(token)} is given twice")
        with at(f"[{int(token)}]"):
            biases[int(token)] = read_scalar(number)
    return tuple(sorted(biases.items()))
