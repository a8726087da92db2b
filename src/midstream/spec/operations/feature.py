"""`Feature`: changing one feature of a sparse autoencoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from midstream.errors import SpecError
from midstream.ops.layout import Op
from midstream.spec.algebra import float32, wide
from midstream.spec.argument_names import accept_spellings
from midstream.spec.forms import (
    IndicesLike,
    LayersLike,
    NumberLike,
    PhaseLike,
    PositionsLike,
    SitesLike,
    VectorLike,
)
from midstream.spec.instructions import Instruction
from midstream.spec.operation import (
    Operation,
    by_value,
    one_edit,
    read_norm,
    read_scalar,
    with_norm,
)
from midstream.spec.vector import Vector
from midstream.validation import at, listed, read_word

MODES = ("set", "add", "scale", "ablate")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Feature(Operation):
    """Change one feature of a sparse autoencoder (SAE) and nothing else in h.

    With x = ⟨h, encoder⟩ + bias and act(x) = x where x > threshold, else 0:

    | mode | h ← |
    |---|---|
    | set | h + (value − act(x)) · decoder |
    | add | h + value · decoder |
    | scale | h + (value − 1) · act(x) · decoder |
    | ablate | h − act(x) · decoder |

    h is not replaced by a reconstruction, so the SAE's error term is kept.

    With threshold 0 this is a ReLU SAE (Cunningham et al. 2023, arXiv:2309.08600; Bricken et al.
    2023), otherwise a JumpReLU SAE (Rajamanoharan et al. 2024, arXiv:2407.14435).

    Attributes:
        encoder: the feature's column of W_enc, [hidden size].
        decoder: the feature's row of W_dec, [hidden size].
        mode: one of the above.
        value: a feature activation; for "scale" a factor. None for "ablate".
        bias: the encoder bias, including the folded decoder bias.
        threshold: at least 0.
        norm: None or "keep".
    """

    op = "feature"

    encoder: Vector
    decoder: Vector
    mode: str
    value: float | None
    bias: float
    threshold: float
    norm: str | None

    @accept_spellings
    def __init__(
        self,
        encoder: VectorLike,
        decoder: VectorLike,
        layer: LayersLike | None = None,
        mode: Literal["set", "add", "scale", "ablate"] = "set",
        value: NumberLike | None = None,
        bias: NumberLike = 0.0,
        threshold: NumberLike | None = None,
        decoder_bias: VectorLike | None = None,
        site: SitesLike | None = None,
        positions: PositionsLike = "all",
        phase: PhaseLike | None = None,
        exclude: PositionsLike | None = None,
        norm: Literal["keep"] | None = None,
        head: IndicesLike | None = None,
    ) -> None:
        """Create an edit; each field accepts any of its forms.

        Args:
            encoder, decoder: any form of Vector.parse.
            mode: "set", "add", "scale" or "ablate".
            value: a number; required unless the mode is "ablate", which takes none.
            bias: a number, the feature's entry of b_enc.
            threshold: a number of at least 0, the feature's entry of the JumpReLU thresholds;
                None: 0.
            decoder_bias: b_dec, any form of Vector.parse, for an SAE that subtracts it from h
                before encoding: bias − ⟨encoder, decoder_bias⟩ becomes the attribute `bias`.
            layer, site, positions, phase, exclude, head: see Steer.
            norm: None, or "keep": the vector is rescaled to the norm that h had, as in Steer.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        for name, vector in (("encoder", encoder), ("decoder", decoder)):
            with at(name):
                self._set(**{name: Vector.parse(vector)})
        with at("mode"):
            self._set(mode=read_word(mode, MODES))
        with at("value"):
            self._set(value=self._read_value(value))
        with at("bias"):
            self._set(bias=read_scalar(bias))
        if decoder_bias is not None:
            with at("decoder_bias"):
                self._set(bias=self._fold_bias(Vector.parse(decoder_bias)))
        with at("threshold"):
            self._set(threshold=0.0 if threshold is None else read_scalar(threshold))
            if self.threshold < 0:
                raise SpecError("", f"expected at least 0, got {self.threshold!r}")
        self._set(norm=read_norm(norm))
        self._set_place(layer, site, positions, phase, exclude, head)

    def own(self) -> dict[str, Any]:
        found = {
            "encoder": self.encoder,
            "decoder": self.decoder,
            "mode": self.mode,
            "value": self.value,
            "bias": self.bias,
            "threshold": self.threshold,
        }
        return with_norm(found, self.norm)

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        with at("encoder"):
            read = by_value(self.encoder, width)
        with at("decoder"):
            write = (by_value(self.decoder, width),)
        value = 0.0 if self.value is None else self.value
        if self.mode == "add":
            return one_edit([Instruction(Op.ADD, write=write, a=float32(value))], self.norm)
        return one_edit(
            [
                Instruction(
                    Op.FEATURE,
                    read=read,
                    write=write,
                    a=float32(self.bias),
                    b=float32(self.threshold),
                    c=float32(value - 1) if self.mode == "scale" else -1.0,
                    d=float32(value) if self.mode == "set" else 0.0,
                )
            ],
            self.norm,
        )

    def _read_value(self, value: object) -> float | None:
        if self.mode == "ablate":
            if value is not None:
                raise SpecError("", 'mode "ablate" takes no value; use "set" or "scale"')
            return None
        if value is None:
            others = listed(mode for mode in MODES if mode != "ablate")
            raise SpecError("", f"missing: modes {others} require a value")
        return read_scalar(value)

    def _fold_bias(self, decoder_bias: Vector) -> float:
        if decoder_bias.size != self.encoder.size:
            raise SpecError(
                "",
                f"expected {self.encoder.size} numbers, as in `encoder`, got {decoder_bias.size}",
            )
        encoder, shift = wide([self.encoder, decoder_bias])
        return read_scalar(self.bias - float(encoder @ shift))
