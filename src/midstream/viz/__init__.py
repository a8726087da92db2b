"""Pictures of results, as HTML without a network and as text: each function returns a `Picture`."""

from __future__ import annotations

from midstream.viz.answer_cards import answers
from midstream.viz.curves import curve
from midstream.viz.heatmaps import heatmap
from midstream.viz.picture import Picture
from midstream.viz.token_spans import tokens

__all__ = ["Picture", "answers", "curve", "heatmap", "tokens"]
