"""`Reconstruct`: a vector replaced by what a sparse autoencoder reconstructs of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from midstream.errors import SpecError
from midstream.ops.layout import Flags, Op
from midstream.ops.sae import layout
from midstream.plan import forms
from midstream.plan.argument_names import accept_spellings, only_set
from midstream.plan.instructions import Instruction
from midstream.plan.operation import Operation, one_edit, read_norm
from midstream.plan.operations.feature import place_by_sae, read_changes, read_sae, short
from midstream.plan.selection import WIDE
from midstream.plan.vectors.named_lookup import Lookup, SaeCode, SaeName
from midstream.plan.vectors.vector import Vector
from midstream.validation import at, kind, listed

# Where a transcoder reads, and where it writes.
READS, WRITES = "mlp_in", "mlp_out"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Reconstruct(Operation):
    """Replace h by the reconstruction of a sparse autoencoder (SAE), maybe with changed features.

    With a the activations of all features of h, and a′ the same after the changes:

    | error | h ← |
    |---|---|
    | False | decode(a′) |
    | True | h + decode(a′) − decode(a): the SAE's error term stays |

    Of a transcoder h is what enters an MLP, and what leaves it is replaced.

    Attributes:
        sae: name of the registered SAE.
        index: ids of the features that are changed, ascending.
        mode: "set", "add", "scale" or "ablate", as in `Feature`.
        value: [n], activations; for "scale" factors. Empty for "ablate" and without `index`.
        error: whether the error term stays.
        norm: None or "keep".
        code: the SAE on the workers; None: the edit is not bound.
    """

    op = "reconstruct"

    sae: str
    index: tuple[int, ...]
    mode: str
    value: tuple[float, ...]
    error: bool
    norm: str | None
    code: SaeCode | None

    @accept_spellings
    def __init__(
        self,
        sae: str,
        index: forms.FeaturesLike | None = None,
        mode: Literal["set", "add", "scale", "ablate"] = "set",
        value: forms.NumberLike | forms.VectorLike | None = None,
        error: bool = False,
        layer: forms.LayersLike | None = None,
        site: forms.SitesLike | None = None,
        positions: forms.PositionsLike = "all",
        phase: forms.PhaseLike | None = None,
        exclude: forms.PositionsLike | None = None,
        norm: Literal["keep"] | None = None,
    ) -> None:
        """Create an edit; each field accepts any of its forms.

        Args:
            sae: the name under which the SAE was registered: `llm.saes`.
            index: the id of a feature, several ids, or {id: value}: the features that are changed;
                in JSON the ids of the latter are strings of digits. None: no feature is changed.
            mode: "set", "add", "scale" or "ablate": activation ← value, activation + value,
                value · activation, or 0.
            value: one number for all features, or [n], unless `index` has the values.
            error: whether the SAE's error term stays. Only with `index`: nothing would change.
            layer, site: by default those where the SAE was trained. Of a transcoder, what it reads.
            positions, phase, exclude: see Steer.
            norm: None, or "keep": the vector is rescaled to the norm that h had, as in Steer.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("sae"):
            self._set(sae=read_sae(sae), code=None)
        if not isinstance(error, bool):
            raise SpecError("error", f"expected `bool`, got {kind(error)}")
        self._set(error=error)
        if index is None:
            if error:
                raise SpecError("error", "without `index` nothing would change; omit one of them")
            for name, argument in (("mode", None if mode == "set" else mode), ("value", value)):
                if argument is not None:
                    raise SpecError(name, "only with `index`, the features that are changed")
            self._set(index=(), mode=mode, value=())
        else:
            self._set(**read_changes(index, mode, value))
        self._set(norm=read_norm(norm))
        self._set_place(layer, site, positions, phase, exclude)
        for name in () if "site" in self.left else self.sites.names:
            if name not in WIDE:
                raise SpecError("site", f"expected one of {listed(WIDE)}, got `{name}`")

    def own(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {"sae": self.sae}
        if self.index:
            arguments |= {"index": list(self.index), "mode": self.mode, "value": short(self.value)}
        return {**arguments, "error": self.error, **only_set(norm=self.norm)}

    def names(self) -> tuple[str, ...]:
        """Return the name of the SAE, if the edit is not bound."""
        return () if self.code is not None else (self.sae,)

    def replace(self, **changes: object) -> Reconstruct:
        """Return a copy with some of the constructor's arguments changed."""
        edit = Operation.replace(self, **changes)
        object.__setattr__(edit, "code", self.code)
        return edit

    def bind(self, lookup: Lookup, num_layers: int | None = None) -> tuple[Reconstruct, ...]:
        """Return the edit with the place of its SAE in the workers' memory."""
        if self.code is not None:
            return (self,)
        with at("sae"):
            source = lookup(SaeName(self.sae))
            code = source.reconstructs()
            place = place_by_sae(self, source)
        for feature in self.index:
            if feature >= code.features:
                raise SpecError("index", f"expected 0 to {code.features - 1}, got {feature}")
        edit = Reconstruct(**{**self.own(), **place, "positions": self.positions})
        if code.transcodes:
            if edit.sites.names != (READS,):
                raise SpecError("site", f"a transcoder reads {READS}, got {listed(edit.sites)}")
            edit = edit.replace(site=WRITES)
        object.__setattr__(edit, "code", code)
        return (edit,)

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        instructions = [Instruction(Op.RECONSTRUCT, a=1.0, b=0.0 if self.error else 1.0)]
        if not self._bound().transcodes:
            instructions.insert(0, self._code(width))
        return one_edit(instructions, self.norm)

    def reads_elsewhere(self, width: int) -> tuple[str, Instruction] | None:
        """Return a transcoder's site that it reads and its step there; None: it is none."""
        if not self._bound().transcodes:
            return None
        return READS, self._code(width).with_flags(Flags.COUNTED)

    def _code(self, width: int) -> Instruction:
        code = self._bound()
        numbers: list[float] = [0.0] * layout.DESCRIPTION
        numbers[layout.HIGH], numbers[layout.LOW] = layout.split_place(code.place)
        numbers[layout.ERROR] = float(self.error)
        numbers[layout.CHANGES] = float(len(self.index))
        numbers[layout.WIDEST] = float(code.features)
        for index in range(layout.DIGEST_NUMBERS):
            numbers[layout.DIGEST + index] = float(int(code.digest[4 * index : 4 * index + 4], 16))
        for feature, value in zip(self.index, self.value or (0.0,) * len(self.index), strict=True):
            factor, shift = {
                "set": (0.0, value),
                "add": (1.0, value),
                "scale": (value, 0.0),
                "ablate": (0.0, 0.0),
            }[self.mode]
            numbers += [float(feature), factor, shift]
        numbers += [0.0] * (-len(numbers) % width)
        return Instruction(Op.CODE, read=Vector.parse(numbers), flags=Flags.FRESH)

    def _bound(self) -> SaeCode:
        if self.code is None:
            raise SpecError("sae", f"the SAE `{self.sae}` is not registered")
        return self.code
