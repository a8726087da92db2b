"""One edit or probe at one tap of this rank, as programs are made of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from midstream.spec import Instruction


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """The instructions of one edit or probe at one tap, compared and hashed by content.

    Attributes:
        tap: index of the tap.
        steps: the instructions, in order.
        digest: of the steps; see `midstream.spec.resolved.digest_steps`.
        ids: token ids to which the edit applies; empty: whatever the id.
        others: it applies to all ids but these.
    """

    tap: int
    steps: tuple[Instruction, ...]
    digest: str
    ids: tuple[int, ...] = ()
    others: bool = False
    _key: tuple[object, ...] = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        key = (self.tap, self.digest, self.ids, self.others)
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash(key))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Edit) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    @property
    def counted(self) -> int:
        """What the device adds to its tally when the edit is carried out."""
        return sum(step.counted for step in self.steps)
