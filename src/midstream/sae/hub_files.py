"""Files of an SAE in a repository of the Hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from midstream.hub import Card, HubObject, download
from midstream.sae.files import HUB_FILES, save_sae

if TYPE_CHECKING:
    from typing_extensions import Self


class SaeFiles(HubObject):
    """What `SAE` has as an object of the Hub."""

    __slots__ = ()

    hub_files: ClassVar[tuple[str, ...]] = HUB_FILES

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str | os.PathLike[str],
        sae_id: str = "",
        *,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> Self:
        """Load an SAE of the Hugging Face Hub; see `load` for the formats.

        Args:
            repo_id: "owner/name" of a repository; or a release that the package `sae_lens` knows,
                such as "gemma-scope-2b-pt-res-canonical"; or a local folder.
            sae_id: the folder within the repository, such as "layers.10", or circuit-tracer's
                file, such as "layer_3.safetensors"; or the SAE's id in the release. Empty: the
                repository itself.
            revision, token: see `Directions.from_pretrained`.

        Raises:
            SpecError: there is no such SAE, or it cannot be read; see `load`.
            MissingExtraError: a release is given, and `sae_lens` is not installed.
        """
        made: Any = cls
        name = os.fspath(repo_id)
        if os.path.isdir(name):
            sae: Self = made.load(Path(name, sae_id))
        elif "/" not in name:
            sae = made.load(name, sae_id)
        else:
            files = [os.path.join(sae_id, file) for file in cls.hub_files]
            if sae_id.endswith(".safetensors"):
                files = [sae_id, os.path.join(os.path.dirname(sae_id), "config.yaml")]
            sae = made.load(download(name, files, "model", revision, token) / sae_id)
        return sae

    def to_folder(self: Any, folder: Path) -> None:
        """Write `cfg.json` and `sae_weights.safetensors` into a folder, as SAELens does.

        Raises:
            SpecError: it is a TopK transcoder, which SAELens does not have.
        """
        save_sae(self, folder)

    @classmethod
    def from_folder(cls: Any, folder: Path) -> Any:
        """Read a folder; see `load`."""
        return cls.load(folder)

    def card(self: Any) -> Card:
        """Return what the card of a repository says."""
        facts: dict[str, object] = {"Hook point": self.hook_name or "unknown"}
        facts |= {"Width": self.width, "Features": self.num_features}
        facts["Form"] = repr(self)[1:].split(":")[0]
        use = 'llm.saes.register("sae", found)\nllm.generate(prompt, capture=Features("sae"))'
        return Card("Transcoder" if self.is_transcoder else "SAE", facts, use=use)
