"""Server-wide steering in `system_fingerprint`, which tells states of a server apart."""

from __future__ import annotations

import importlib
from typing import Any

from midstream.runtime.install import front_end
from midstream.runtime.vllm import seams

_NAME = "system_fingerprint"
_DIGITS = 8


def install() -> None:
    """Make the attribute of vLLM's handlers a property, in this process."""
    seams.check("server")
    module = importlib.import_module("vllm.entrypoints.generate.base.serving")
    setattr(module.GenerateBaseServing, _NAME, property(_get, _set))


def _get(handler: Any) -> str | None:
    """Return vLLM's fingerprint, if any, followed by `-midstream-DIGEST` while a tier is set."""
    fingerprint: str | None = vars(handler)[_NAME]
    front = front_end(handler.engine_client)
    if fingerprint is None or front is None or not front.steering.plan_edits():
        return fingerprint
    return f"{fingerprint}-midstream-{front.steering.digest[:_DIGITS]}"


def _set(handler: Any, value: str | None) -> None:
    vars(handler)[_NAME] = value
