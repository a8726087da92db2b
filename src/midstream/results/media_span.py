"""`MediaSpan`: where an image, audio or video is in a prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Where an image, audio or video is in a prompt.

    Attributes:
        kind: "image", "audio" or "video".
        index: among the items of this kind, from 0, in the order of the prompt; see `Media`.
        first: position of the first token of its placeholder.
        length: tokens of its placeholder, with those that a model writes around and between the
            ones that `Media` selects, which hold its embeddings.
    """

    kind: str
    index: int
    first: int
    length: int
