"""Pictures of results: charts by matplotlib, and text coloured by token as HTML."""

from __future__ import annotations

from midstream.viz.answer_cards import answers
from midstream.viz.chart import Chart
from midstream.viz.curves import curve
from midstream.viz.heatmaps import heatmap
from midstream.viz.picture import Picture
from midstream.viz.token_spans import tokens

__all__ = ["Chart", "Picture", "answers", "curve", "heatmap", "tokens"]
