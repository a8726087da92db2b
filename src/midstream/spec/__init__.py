"""What one request asks for: values, strict parsing, one emitter, and resolution.

Pure Python: importable without torch and without vLLM.
"""

from __future__ import annotations

from midstream.spec.capture import Capture
from midstream.spec.plan import Plan
from midstream.spec.positions import Positions, Span
from midstream.spec.resolve import resolve
from midstream.spec.resolved import ResolvedCapture, ResolvedEdit, ResolvedPlan
from midstream.spec.selection import Layers, Sites
from midstream.spec.shape import ModelShape
from midstream.spec.steer import Steer
from midstream.spec.vector import Vector

__all__ = [
    "Capture",
    "Layers",
    "ModelShape",
    "Plan",
    "Positions",
    "ResolvedCapture",
    "ResolvedEdit",
    "ResolvedPlan",
    "Sites",
    "Span",
    "Steer",
    "Vector",
    "resolve",
]
