"""What a client sends: a request's body, with midstream's field in it."""

from __future__ import annotations

from typing import Any

from midstream.api.arguments import PromptArguments
from midstream.config.config import KEY


def extra_body(
    *,
    capture: Any = None,
    steer: Any = None,
    edits: Any = None,
    probes: Any = None,
    activations: str = "handle",
) -> dict[str, Any]:
    """What the `openai` client's `extra_body` takes, to capture, edit and probe.

    Args:
        capture, steer, edits, probes: as `midstream.LLM.generate` takes them, for one prompt.
        activations: how captured rows come: "handle", "inline" or "none".

    Raises:
        SpecError: something is malformed.
    """
    plan = PromptArguments(capture, steer, edits, probes).plan()
    asked: dict[str, Any] = {} if plan is None else plan.to_dict()
    return {KEY: {**asked, "activations": activations}}
