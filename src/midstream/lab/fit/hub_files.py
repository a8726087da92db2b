"""Files of directions in a repository of the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from midstream.console import format_ranges
from midstream.hub import Card, HubObject
from midstream.lab.fit.direction_set import HEADINGS

_FILE = "directions.safetensors"


class DirectionsFiles(HubObject):
    """What `Directions` have as an object of the Hub."""

    __slots__ = ()

    hub_files: ClassVar = (_FILE,)

    def to_folder(self: Any, folder: Path) -> None:
        """Write `directions.safetensors`, see `save`."""
        self.save(folder / _FILE)

    @classmethod
    def from_folder(cls: Any, folder: Path) -> Any:
        """Read `directions.safetensors`, see `load`."""
        return cls.load(folder / _FILE)

    def card(self: Any) -> Card:
        """Return what the card of a repository says: site, layers, method and scores."""
        facts: dict[str, object] = {"Site": self.site, "Layers": format_ranges(self.layers)}
        facts["Width"] = self.vectors.shape[1]
        facts |= {"Method": self.method or "unknown", "Folds": self.num_folds or "none"}
        scores = [HEADINGS, *self._cells()] if self.scores else ()
        layer = self.best_layer if self.scores else self.layers[0]
        return Card(
            "Directions", facts, scores, f"llm.generate(prompt, edits=1.0 * found[{layer}])"
        )
