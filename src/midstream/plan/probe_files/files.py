"""Files of a probe: one of its own, or in a repository of the Hub."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from midstream.errors import SpecError
from midstream.hub import Card, HubObject
from midstream.plan.probe_files import archive
from midstream.plan.probe_files.difference import ProbeDiff, compare
from midstream.validation import at, check_regular, kind, read_json_text

if TYPE_CHECKING:
    from pathlib import Path

P = TypeVar("P", bound="ProbeFiles")

# The second is of releases up to 0.1: the JSON form alone.
_FILE, _OLD_FILE = "probe.safetensors", "probe.json"


class ProbeFiles(HubObject):
    """What `Probe` has as a file, and as an object of the Hub."""

    __slots__ = ()

    hub_files: ClassVar[tuple[str, ...]] = (_FILE, _OLD_FILE)

    def save(self: Any, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, which `load` reads: float32 tensors, and in the header, as
        JSON, the other fields and `info`.

        Args:
            path: ends in .safetensors; a file that exists is replaced.

        Raises:
            SpecError: another suffix, a probe with names of vectors, or more than 256 MiB, of which
                the header 1 MiB.
            OSError: the file cannot be written.
        """
        if not self.is_bound:
            named = ", ".join(self.names()) or "a vector of `act`"
            raise SpecError(
                "probe", f"{named} is a name that an engine knows; a file has the vector: give it"
            )
        form = {name: value for name, value in self.to_dict().items() if name != "op"}
        archive.write(form, self.info, path)

    @classmethod
    def load(cls: type[P], path: str | os.PathLike[str], llm: Any = None) -> P:
        """Read what `save` wrote. Nothing of the file is executed.

        Args:
            path: the file.
            llm: the engine that will run it; None: the model is checked by the first request.

        Raises:
            SpecError: the file is missing, damaged, too long or of another kind; or the probe is of
                another model than that of `llm`, or another width.
        """
        probe_class: Any = cls
        try:
            form, info = archive.read(path)
            with at("probe"):
                probe: P = probe_class.parse(form).with_info(info)
        except SpecError as error:
            raise SpecError("path", f"{os.fspath(path)}: {error}") from None
        if llm is not None and info is not None:
            config = getattr(llm, "model_config", None)
            if config is None or not hasattr(llm, "info"):
                raise SpecError("llm", f"expected an LLM, got {kind(llm)}")
            info.check(str(config.model), llm.info.shape)
        return probe

    def diff(self, other: ProbeFiles) -> ProbeDiff:
        """Return which fields differ from another probe's, with cosines of the vectors."""
        if not isinstance(other, ProbeFiles):
            raise SpecError("other", f"expected a Probe, got {kind(other)}")
        return compare(self, other)

    def to_folder(self: Any, folder: Path) -> None:
        """Write `probe.safetensors`, see `save`."""
        self.save(folder / _FILE)

    @classmethod
    def from_folder(cls: Any, folder: Path) -> Any:
        """Read `probe.safetensors`, or else the `probe.json` of earlier releases.

        Raises:
            SpecError: there is neither, or it is malformed.
        """
        path = folder / _OLD_FILE
        if (folder / _FILE).exists() or not path.exists():
            return cls.load(folder / _FILE)
        with at(str(path)):
            try:
                check_regular(path)
                return cls.parse(read_json_text(path.read_text("utf-8")))
            except (OSError, UnicodeDecodeError) as error:
                raise SpecError("", f"it cannot be read: {error}") from None

    def card(self: Any) -> Card:
        """Return what the card of a repository says: with `info` also the held-out scores."""
        layers = ", ".join(map(str, self.layers.emit()))
        facts = {"Site": ", ".join(self.sites.names), "Layers": layers, "Bias": f"{self.bias:g}"}
        facts["Reads"] = self.reads
        scores: list[tuple[str, str]] = []
        if self.info is not None:
            facts |= {f"Recipe: {name}": str(part) for name, part in self.info.recipe.items()}
            facts["Training data"] = self.info.data_hash or "unknown"
            if self.info.threshold is not None:
                facts["Threshold"] = f"{self.info.threshold:g}"
            scores = [(name, f"{score:.4g}") for name, score in self.info.scores.items()]
        return Card(
            "Probe",
            facts,
            [("score", "value"), *scores] if scores else (),
            use=f'llm.generate(prompt, probes=found)[0].probes["{self.name}"]',
        )
