"""What the doctor found, as values: for the table, for JSON, and for the survey."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OK = "ok"
WRONG = "wrong"
LACKING = "lacking"
REFUSED = "refused"
UNBUILT = "cannot be built"
UNCOMPARED = "not compared"
STATUS = {OK: 0, WRONG: 1, REFUSED: 2, UNBUILT: 2, UNCOMPARED: 2}


@dataclass(frozen=True, slots=True)
class SiteFound:
    """One site of one layer.

    Attributes:
        site, layer: where.
        outcome: `ok`; `wrong`; `lacking`, not in this layer; or `not compared`.
        error: the worst relative error of a row; None unless it was compared.
        reason: why it is lacking or was not compared, or what is wrong.
    """

    site: str
    layer: int
    outcome: str
    error: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class OperationFound:
    """One operation, tried at one tap.

    Attributes:
        name: of the operation, `Steer` and so on.
        site, layer: where.
        outcome: `ok`, `wrong`, or `not compared`.
        error: the worst relative error of a row at any site downstream, or of a score.
        reason: what is wrong.
    """

    name: str
    site: str
    layer: int
    outcome: str
    error: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What came of one model.

    Attributes:
        model: as it was given.
        architecture: vLLM's name for it.
        layer_classes: of vLLM's decoder layers, each once.
        copy: what was examined: the model itself, or a copy of how many layers and what width.
        outcome: one of OK, WRONG, REFUSED, UNBUILT, UNCOMPARED.
        reason: of any outcome but OK.
        sites: every site of every layer.
        operations: each that was tried.
        tolerance: what errors were held to.
        versions: of midstream, vLLM, transformers and PyTorch.
    """

    model: str
    architecture: str
    copy: str
    outcome: str
    reason: str = ""
    layer_classes: tuple[str, ...] = ()
    sites: tuple[SiteFound, ...] = ()
    operations: tuple[OperationFound, ...] = ()
    tolerance: float = 0.0
    versions: tuple[tuple[str, str], ...] = ()

    @property
    def status(self) -> int:
        """The command's exit status."""
        return STATUS[self.outcome]

    @property
    def worst(self) -> float | None:
        """The largest relative error of what was compared."""
        errors = [one.error for one in self.sites] + [one.error for one in self.operations]
        return max((error for error in errors if error is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **asdict(self),
            "worst": self.worst,
            "layer_classes": list(self.layer_classes),
            "sites": [asdict(one) for one in self.sites],
            "operations": [asdict(one) for one in self.operations],
            "versions": dict(self.versions),
        }
