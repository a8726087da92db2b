"""Named steering vectors. Import is cheap: torch and safetensors only where a file is read."""

from __future__ import annotations

from midstream.steering.registry import VectorRegistry

__all__ = ["VectorRegistry"]
