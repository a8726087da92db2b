"""Pictures of results: HTML for notebooks and pages that needs no network, and plain text.

Each function returns a `Picture`: a notebook shows it, `print` writes it as text, and
`save("x.html")` makes a page of its own. Needs numpy alone.
"""

from __future__ import annotations

from midstream.viz.answer_cards import answers
from midstream.viz.curves import curve
from midstream.viz.heatmaps import heatmap
from midstream.viz.picture import Picture
from midstream.viz.token_spans import tokens

__all__ = ["Picture", "answers", "curve", "heatmap", "tokens"]
