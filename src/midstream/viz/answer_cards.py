"""Completions of one prompt side by side, by strength of the steering."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from midstream.errors import SpecError
from midstream.validation import at, read_float32
from midstream.viz.color_scale import ColorScale
from midstream.viz.markup import escape, tag
from midstream.viz.picture import Picture, figure


def answers(
    texts: Mapping[float, Any],
    *,
    prompt: str = "",
    notes: Mapping[float, str] | None = None,
    title: str = "",
) -> Picture:
    """Draw completions side by side, by rising strength; 0 is headed `plain`.

    Args:
        texts: the completions by strength: texts, or outputs of `generate`, of which the first
            completion is shown.
        prompt: what they answer.
        notes: a few words for some of the strengths, such as a score.
        title: title of the picture.

    Raises:
        SpecError: a strength is no number, a completion no text, or a note has no completion.
    """
    notes, raw_texts = notes or {}, texts
    for scale in raw_texts:
        with at("texts"):
            read_float32(scale)
    texts = {scale: _text(scale, value) for scale, value in raw_texts.items()}
    for scale in notes:
        if scale not in texts:
            raise SpecError("notes", f"there is no completion of strength {scale!r}")
    ordered = sorted(texts)
    largest = max((abs(scale) for scale in ordered), default=0.0) or 1.0
    colors = ColorScale.of(np.array([-largest, largest]), 0.0)
    cards, lines = [], [f"“{prompt}”"] if prompt else []
    for scale in ordered:
        note = notes.get(scale, "")
        name = strength(scale)
        chip = tag("div", tag("strong", escape(name)) + tag("span", escape(note)), "chip")
        text = escape(texts[scale]) or "(nothing)"
        card = tag("div", chip + tag("p", text, dir="auto"), f"answer {colors.style(scale)}")
        cards.append(card)
        lines.append(f"{name:>6}  {texts[scale]}" + (f"  ({note})" if note else ""))
    asked = tag("p", escape(prompt), "prompt", dir="auto") if prompt else ""
    head = [title] if title else []
    body = figure(title, asked + tag("div", "".join(cards), "answers"), "midstream wide")
    return Picture(title, "\n".join([*head, *lines]), body)


def _text(scale: float, value: Any) -> str:
    if isinstance(value, str):
        return value
    outputs = getattr(value, "outputs", None)
    completions = outputs if isinstance(outputs, (list, tuple)) else ()
    text = getattr(completions[0], "text", None) if completions else None
    if not isinstance(text, str):
        expected = "expected `str` or an output of `generate`"
        raise SpecError(f"texts[{scale!r}]", f"{expected}, got `{type(value).__name__}`")
    return text


def strength(scale: float) -> str:
    """Return a strength as text: `+2`, `−0.5`, or `plain` for 0."""
    return "plain" if scale == 0 else f"{scale:+g}".replace("-", "−")
