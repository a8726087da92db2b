"""Probes fitted to labelled texts, with what held-out texts say of them.

Importing it needs neither torch nor vLLM; scikit-learn and SciPy are the extra `fit`.
"""

from midstream.lab.fit.probes.attention import AttentionFit
from midstream.lab.fit.probes.calibration import CalibrationReport
from midstream.lab.fit.probes.curves import LearningCurve, Roc
from midstream.lab.fit.probes.fitted_probe import FittedProbe
from midstream.lab.fit.probes.intervals import Interval
from midstream.lab.fit.probes.rates import Slice, SliceTable, ThresholdChoice

__all__ = [
    "AttentionFit",
    "CalibrationReport",
    "FittedProbe",
    "Interval",
    "LearningCurve",
    "Roc",
    "Slice",
    "SliceTable",
    "ThresholdChoice",
]
