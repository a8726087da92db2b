"""Request body of a client: the field `midstream`."""

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
    controller: Any = None,
    activations: str = "handle",
) -> dict[str, Any]:
    """Return the argument `extra_body` of the `openai` client, to capture, edit and probe.

    Args:
        capture, steer, edits, probes, controller: as for `midstream.LLM.generate`, for one prompt.
        activations: how captured rows are returned: "handle" (cached on the server, to be fetched),
            "inline" (in the response) or "none".

    Returns:
        `{"midstream": {…}}`, JSON values.

    Raises:
        SpecError: an argument is malformed.
    """
    plan = PromptArguments(capture, steer, edits, probes, controller).plan()
    fields: dict[str, Any] = {} if plan is None else plan.to_dict()
    return {KEY: {**fields, "activations": activations}}
