"""The results of read-outs by their kind, and the attributes that outputs have for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from midstream.results.readouts.attention import AttentionResults
from midstream.results.readouts.features import FeatureResults
from midstream.results.readouts.lens import LensResults
from midstream.results.readouts.logits import LogitRows
from midstream.results.readouts.norms import NormResults
from midstream.results.table_row import to_dict

if TYPE_CHECKING:
    from midstream.plan.resolved import ResolvedCapture
    from midstream.results.activations import Activations


class ReadOutResult(Protocol):
    """What the read-outs of one kind returned for a completion.

    Attributes:
        rows_field: field of events of a stream with the rows so far; empty: there is none.
        about: what it is, for the schema of responses.
        fewer: what to ask for if it is too large for a response.
    """

    rows_field: ClassVar[str]
    about: ClassVar[str]
    json_type: ClassVar[str]
    fewer: ClassVar[str]

    @staticmethod
    def decode(rows: Activations, readouts: Sequence[tuple[ResolvedCapture, Any]]) -> Any:
        """Return what the read-outs, resolved and as given, have among all rows; None: nothing."""

    @property
    def nbytes(self) -> int:
        """Bytes of the JSON form's numbers, before base64."""

    def to_json(self) -> Any:
        """Return the JSON form."""

    @staticmethod
    def from_json(value: Any) -> Any:
        """Read what `to_json` returned."""


# By the attribute of outputs, which is the kind's `key`.
RESULTS: dict[str, type[ReadOutResult]] = {
    "attention": AttentionResults,
    "lens": LensResults,
    "features": FeatureResults,
    "logits": LogitRows,
    "norms": NormResults,
}


@dataclass(slots=True, kw_only=True)
class ChoiceReadOuts:
    """Results of the read-outs of a choice; None if not asked for, or not yet known. `…_rows`: of a
    stream, partial rows of those with `stream`, in the order received.
    """

    attention: AttentionResults | None = None
    attention_rows: list[AttentionResults] = field(default_factory=list)
    logits: LogitRows | None = None
    lens: LensResults | None = None
    lens_rows: list[LensResults] = field(default_factory=list)
    features: FeatureResults | None = None
    feature_rows: list[FeatureResults] = field(default_factory=list)
    norms: NormResults | None = None
    norm_rows: list[NormResults] = field(default_factory=list)
    to_dict = to_dict


class OnlyReadOuts:
    """Results of the read-outs of an output's only choice."""

    __slots__ = ()
    to_dict = to_dict

    @property
    def attention(self) -> AttentionResults | None:
        """Attention weights of the only choice; None with several choices."""
        return cast("AttentionResults | None", self._only("attention"))

    @property
    def logits(self) -> LogitRows | None:
        """Logits of the only choice; None with several choices."""
        return cast("LogitRows | None", self._only("logits"))

    @property
    def lens(self) -> LensResults | None:
        """Tokens of layers of the only choice; None with several choices."""
        return cast("LensResults | None", self._only("lens"))

    @property
    def features(self) -> FeatureResults | None:
        """Active features of SAEs of the only choice; None with several choices."""
        return cast("FeatureResults | None", self._only("features"))

    @property
    def norms(self) -> NormResults | None:
        """Norms of vectors of the only choice; None with several choices."""
        return cast("NormResults | None", self._only("norms"))

    def _only(self, name: str) -> Any:
        raise NotImplementedError


class OutputReadOuts:
    """Types of the attributes of vLLM's outputs; None without such a read-out."""

    attention: AttentionResults
    features: FeatureResults
    lens: LensResults
    logits: LogitRows
    norms: NormResults
    to_dict = to_dict
