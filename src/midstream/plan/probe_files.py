"""Files of a probe in a repository of the Hub."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

from midstream.errors import SpecError
from midstream.hub import Card, HubObject
from midstream.validation import at, check_regular, read_json_text

if TYPE_CHECKING:
    from pathlib import Path

_FILE = "probe.json"


class ProbeFiles(HubObject):
    """What `Probe` has as an object of the Hub."""

    __slots__ = ()

    hub_files: ClassVar[tuple[str, ...]] = (_FILE,)

    def to_folder(self: Any, folder: Path) -> None:
        """Write `probe.json`, the JSON form, which `Probe.parse` reads."""
        form = {name: value for name, value in self.to_dict().items() if name != "op"}
        (folder / _FILE).write_text(json.dumps(form, allow_nan=False), "utf-8")

    @classmethod
    def from_folder(cls: Any, folder: Path) -> Any:
        """Read `probe.json`.

        Raises:
            SpecError: there is none, or it is malformed.
        """
        path = folder / _FILE
        with at(str(path)):
            try:
                check_regular(path)
                return cls.parse(read_json_text(path.read_text("utf-8")))
            except (OSError, UnicodeDecodeError) as error:
                raise SpecError("", f"it cannot be read: {error}") from None

    def card(self: Any) -> Card:
        """Return what the card of a repository says."""
        layers = ", ".join(map(str, self.layers.emit()))
        facts = {"Site": ", ".join(self.sites.names), "Layers": layers, "Bias": f"{self.bias:g}"}
        facts["Reads"] = self.reads
        return Card(
            "Probe", facts, use=f'llm.generate(prompt, probes=found)[0].probes["{self.name}"]'
        )
