"""The `vllm.general_plugins` entry point: called by vLLM in each of its processes.

vLLM calls it without saying for which engine, and installed must not mean enabled. The calls come
from three places, each of which has the engine's settings at hand: `EngineArgs.__post_init__`,
`EngineCore.__init__` and `WorkerWrapperBase.init_worker`. So the settings are looked for in the
callers' variables, which changes nothing; hooks are installed only when they name midstream.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_KEY = "midstream"
_DEPTH = 12


def register() -> None:
    """Installs midstream's hooks in this process if the engine that is starting enables it."""
    # Kept free of imports: this also runs in every process of engines that do not use midstream.
    if os.environ.get("MIDSTREAM", "").strip() not in ("", "0") or _caller_enables():
        from midstream.runtime.patches import activate

        activate()


def _caller_enables() -> bool:
    frame = sys._getframe(2)  # noqa: SLF001
    for _ in range(_DEPTH):
        if frame is None:
            return False
        values = frame.f_locals
        candidates = [values.get("vllm_config"), values.get("self")]
        kwargs = values.get("kwargs")
        if isinstance(kwargs, dict):
            candidates.append(kwargs.get("vllm_config"))
        if any(_enables(candidate) for candidate in candidates):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _enables(value: Any) -> bool:
    for holder in (value, getattr(value, "__dict__", {}).get("vllm_config")):
        found = getattr(holder, "__dict__", {}).get("additional_config")
        if isinstance(found, dict) and found.get(_KEY) not in (None, False):
            return True
    return False
