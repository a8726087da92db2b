"""Named steering vectors: registry, parsers of dicts and files, and descriptions.

Requires neither vLLM nor a device. Import is cheap: torch and safetensors are imported only when a
safetensors file is read.
"""

from __future__ import annotations

from midstream.steering.registry import VectorRegistry

__all__ = ["VectorRegistry"]
