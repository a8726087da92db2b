"""What operators are told: one line of the log for each refusal and each change.

The line is `midstream event field=value …`, values as JSON, so that nothing of a client's breaks
it; the record's attribute `midstream` has the same as a dict, for formatters that write JSON. No
line has a key, a vector, a prompt or what a client wrote in a wrong field: its answer tells it
that.
"""

from __future__ import annotations

import json
import logging
from typing import Any

_LOGGER = logging.getLogger("midstream.serving")


def note(event: str, **fields: Any) -> None:
    """Logs an event.

    Args:
        event: what happened, as `steering.set`.
        fields: JSON values; None is left out.
    """
    told = {name: value for name, value in fields.items() if value is not None}
    line = " ".join(f"{name}={json.dumps(value)}" for name, value in told.items())
    _LOGGER.info("midstream %s %s", event, line, extra={"midstream": {"event": event, **told}})


def show() -> None:
    """Has midstream's log written where vLLM's is, if nobody has said where else."""
    ours, theirs = logging.getLogger("midstream"), logging.getLogger("vllm")
    if ours.hasHandlers():
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
