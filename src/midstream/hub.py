"""Results in repositories of the Hugging Face Hub: `push_to_hub`, `from_pretrained` and cards."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from midstream.errors import MissingExtraError, SpecError
from midstream.validation import show

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self

_CARD = "README.md"


@dataclass(frozen=True, slots=True)
class Card:
    """What a repository's card says of an object.

    Attributes:
        kind: what it is, such as "Steering directions".
        facts: what else is known of it, by name: site, layers, method.
        scores: rows of a table of held-out scores, of which the first has the headings.
        use: Python code that uses `found`, which it was read as.
    """

    kind: str
    facts: Mapping[str, object]
    scores: Sequence[Sequence[str]] = ()
    use: str = ""


class HubObject:
    """Base class of what can be in a repository of the Hub."""

    __slots__ = ()

    # The files of an object, as patterns: what `from_pretrained` downloads.
    hub_files: ClassVar[tuple[str, ...]]
    hub_type: ClassVar[str] = "model"  # of the repository

    @abstractmethod
    def to_folder(self, folder: Path) -> None:
        """Write the object's files into a folder that exists."""

    @classmethod
    @abstractmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read what `to_folder` wrote."""

    @abstractmethod
    def card(self) -> Card:
        """Return what a card says of it."""

    def push_to_hub(
        self,
        repo_id: str,
        *,
        model: str,
        license: str | None = None,
        notes: str = "",
        revision: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
    ) -> str:
        """Upload it to a repository of the Hugging Face Hub, which is created if there is none.

        Args:
            repo_id: "owner/name" of the repository.
            model: the model whose activations it is of: a repository's id, or "id@revision"; the
                card names it.
            license: identifier of its licence, such as "mit"; None: the card says that there is
                none.
            notes: more text for the card, such as the data and scores of a probe.
            revision: branch of the repository; None: its main one.
            private: whether a new repository is private.
            token: of the Hub; None: the one that was logged in with.

        Returns:
            URL of the commit.

        Raises:
            SpecError: the id is malformed, or the Hub refuses.
        """
        from pathlib import Path
        from tempfile import TemporaryDirectory

        api = _api(token)
        with TemporaryDirectory() as name:
            folder = Path(name)
            self.to_folder(folder)
            (folder / _CARD).write_text(self._card_text(repo_id, model, license, notes), "utf-8")
            with _named(repo_id):
                api.create_repo(repo_id, private=private, exist_ok=True, repo_type=self.hub_type)
                commit = api.upload_folder(
                    repo_id=repo_id,
                    folder_path=folder,
                    revision=revision,
                    repo_type=self.hub_type,
                    commit_message="Upload by midstream",
                )
        return str(commit.commit_url)

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> Self:
        """Read what `push_to_hub` uploaded. Nothing of a repository is executed.

        Args:
            repo_id: "owner/name" of the repository; or a local folder with its files.
            revision: branch, tag or commit of the repository; None: its main branch.
            token: as for `push_to_hub`.

        Raises:
            SpecError: there is no such repository, or its files are missing or malformed.
        """
        from pathlib import Path

        if Path(repo_id).is_dir():
            return cls.from_folder(Path(repo_id))
        name = os.fspath(repo_id)
        return cls.from_folder(download(name, cls.hub_files, cls.hub_type, revision, token))

    def _card_text(self, repo_id: str, model: str, licence: str | None, notes: str) -> str:
        from huggingface_hub import ModelCardData

        card = self.card()
        base, _, commit = model.partition("@")
        tags = ["midstream", "interpretability", card.kind.lower().replace(" ", "-")]
        data = ModelCardData(base_model=base, license=licence, library_name="midstream", tags=tags)
        facts = {"Model": base, "Revision": commit or "not given", **card.facts}
        facts["Licence"] = licence or "none is given"
        lines = ["---", data.to_yaml(), "---", "", f"# {repo_id.split('/')[-1]}", ""]
        lines += [f"{card.kind} of `{base}`.", ""]
        lines += _table([("", ""), *((name, str(value)) for name, value in facts.items())])
        if card.scores:
            lines += ["", "## Scores on held-out rows", "", *_table(card.scores)]
        if notes:
            lines += ["", notes]
        name = type(self).__name__
        use = ["```python", f"from midstream import {name}" if name != "Store" else _STORE]
        use += ["", f'found = {name}.from_pretrained("{repo_id}")', card.use, "```"]
        return "\n".join([*lines, "", "## Use", "", *use, ""])


_STORE = "from midstream.store import Store"


def download(
    repo_id: str,
    patterns: Sequence[str],
    repo_type: str = "model",
    revision: str | None = None,
    token: str | bool | None = None,
) -> Path:
    """Return the local folder with the files of a repository of these patterns."""
    _api(token)
    from huggingface_hub import snapshot_download

    with _named(repo_id):
        from pathlib import Path

        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                repo_type=repo_type,
                allow_patterns=list(patterns),
                token=token,
            )
        )


def _api(token: str | bool | None) -> Any:
    MissingExtraError.require("huggingface_hub", "a repository of the Hub")
    from huggingface_hub import HfApi

    return HfApi(token=token, library_name="midstream")


@contextmanager
def _named(repo_id: str) -> Iterator[None]:
    """Raise what the Hub's client raises as errors of `repo_id`."""
    try:
        yield
    # Its own errors, and those of the HTTP library that it was built on: there are several.
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise SpecError("repo_id", f"{show(repo_id)}: {lines[0]}") from error


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = rows
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]
