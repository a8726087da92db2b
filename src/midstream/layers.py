"""Decoder layers of models that midstream does not know: where their sites are; see
`register_layer`.
"""

from __future__ import annotations

from midstream.runtime.models.convention import Input, Lack, Output, pair, single
from midstream.runtime.models.registry import register_layer

__all__ = ["Input", "Lack", "Output", "pair", "register_layer", "single"]
