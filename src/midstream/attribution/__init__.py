"""Gradients and attribution patching by a transformers model on the engine's weights.

vLLM computes without gradients. A `Twin` is the same model in transformers; `attribution_patching`
estimates a whole grid of activation patches from two forward passes and one backward pass.
"""

from __future__ import annotations

from midstream.attribution.attribution import Attribution
from midstream.attribution.check import AttributionCheck
from midstream.attribution.patching import attribution_patching
from midstream.attribution.twin import Twin

__all__ = ["Attribution", "AttributionCheck", "Twin", "attribution_patching"]
