"""The former place of `midstream.plugin`, kept for one release: older editable installs name it as
vLLM's entry point.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # No wrapper around `register`: it counts the frames of its callers.
    return getattr(importlib.import_module("midstream.plugin"), name)
