"""Guards: how incoherent an answer may be for its strength to count."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.errors import SpecError
from midstream.validation import at, read_float32, read_int


@dataclass(frozen=True)
class MaxPerplexity:
    """Answers at most `ratio` times as perplexing to the unsteered model as its own answers.

    An answer that repeats itself has a low perplexity: read the answers too.

    Attributes:
        ratio: 1 or more.
    """

    ratio: float

    def __post_init__(self) -> None:
        """Raises SpecError if the ratio is below 1."""
        with at("ratio"):
            if read_float32(self.ratio) < 1:
                raise SpecError("", f"expected at least 1, got {self.ratio}")


@dataclass(frozen=True)
class MaxKL:
    """A steered model whose next tokens are close to the unsteered model's.

    The mean of KL(steered ‖ unsteered) over the first tokens of the steered answers, in nats: both
    models read the same prompt and the same steered answer so far, and the sum is over the whole
    vocabulary. The engine must tap what `Logits` reads.

    Attributes:
        nats: the largest mean.
        tokens: number of first tokens of each answer, 1 to 64.
    """

    nats: float
    tokens: int = 4

    def __post_init__(self) -> None:
        """Raises SpecError if a field is out of range."""
        with at("nats"):
            if read_float32(self.nats) < 0:
                raise SpecError("", f"expected 0 or more, got {self.nats}")
        with at("tokens"):
            if not 1 <= read_int(self.tokens) <= 64:
                raise SpecError("", f"expected 1 to 64, got {self.tokens}")


Guard = MaxPerplexity | MaxKL
