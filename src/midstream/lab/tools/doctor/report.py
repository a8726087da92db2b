"""Result types of the doctor, used by the table, the JSON output and the survey."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OK = "ok"
WRONG = "wrong"
LACKING = "lacking"
REFUSED = "refused"
UNBUILT = "cannot be built"
UNCOMPARED = "not compared"
INCOMPARABLE = "not comparable"
STATUS = {OK: 0, WRONG: 1, REFUSED: 2, UNBUILT: 2, UNCOMPARED: 2, INCOMPARABLE: 2}


@dataclass(frozen=True, slots=True)
class SiteFound:
    """Result for one site of one layer.

    Attributes:
        outcome: `ok`; `wrong`; `lacking` (the layer does not have the site); or `not compared`.
        error: largest relative error of a row; None if it was not compared.
        reason: why the site is lacking or was not compared, or what is wrong.
    """

    site: str
    layer: int
    outcome: str
    error: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class OperationFound:
    """Result for one operation at one tap.

    Attributes:
        name: name of the operation, for example `Steer`.
        outcome: `ok`, `wrong`, or `not compared`.
        error: largest relative error of a row at any compared tap, or of the probe's scores; None
            if it was not compared.
        reason: what is wrong, or why it was not compared.
    """

    name: str
    site: str
    layer: int
    outcome: str
    error: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Result of one examination.

    Attributes:
        model: folder or name, as given.
        architecture: class of vLLM that was loaded.
        compared_with: the reference; empty if nothing was compared.
        images: how an image was in the prompts; empty if none was.
        layer_classes: classes of vLLM's decoder layers, each once.
        copy: description of the examined model: the model itself, or a copy with its width.
        outcome: one of OK, WRONG, REFUSED, UNBUILT, UNCOMPARED, INCOMPARABLE.
        reason: reason of the outcome; for OK a note, or empty.
        sites: one result for every site of every layer.
        versions: (package, version) of midstream, vLLM, transformers and PyTorch.
    """

    model: str
    architecture: str
    copy: str
    outcome: str
    reason: str = ""
    compared_with: str = ""
    images: str = ""
    layer_classes: tuple[str, ...] = ()
    sites: tuple[SiteFound, ...] = ()
    operations: tuple[OperationFound, ...] = ()
    tolerance: float = 0.0
    versions: tuple[tuple[str, str], ...] = ()

    @property
    def status(self) -> int:
        """Exit status of the command."""
        return STATUS[self.outcome]

    @property
    def worst(self) -> float | None:
        """Largest relative error; None if nothing was compared."""
        errors = [site.error for site in self.sites] + [
            operation.error for operation in self.operations
        ]
        return max((error for error in errors if error is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            **asdict(self),
            "worst": self.worst,
            "layer_classes": list(self.layer_classes),
            "sites": [asdict(site) for site in self.sites],
            "operations": [asdict(operation) for operation in self.operations],
            "versions": dict(self.versions),
        }
