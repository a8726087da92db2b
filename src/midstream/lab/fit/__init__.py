"""Directions between two classes of texts: fitted, scored on held-out texts, and used to steer.

Importing it needs neither torch nor vLLM; scikit-learn and gguf are the extra `fit`.
"""

from midstream.lab.fit.direction import Direction
from midstream.lab.fit.directions import Directions
from midstream.lab.fit.guards import MaxKL, MaxPerplexity
from midstream.lab.fit.probes import FittedProbe
from midstream.lab.fit.scores import LayerScore
from midstream.lab.fit.text_scores import TextScore
from midstream.lab.fit.tune_result import Tuning, TuningCell

__all__ = [
    "Direction",
    "Directions",
    "FittedProbe",
    "LayerScore",
    "MaxKL",
    "MaxPerplexity",
    "TextScore",
    "Tuning",
    "TuningCell",
]
