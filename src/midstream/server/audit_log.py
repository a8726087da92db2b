"""Audit log: a line `midstream event field=JSON …`, or a JSON object, for each rejected request and
each change of server state. It never has keys, vectors, prompts or a client's invalid values.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any

from midstream.errors import BusyError, SpecError

_LOGGER = logging.getLogger("midstream.serving")


def log_event(event: str, **fields: Any) -> None:
    """Log an event, such as `steering.set`, with fields of JSON values; None is omitted."""
    present = {name: value for name, value in fields.items() if value is not None}
    line = " ".join(f"{name}={json.dumps(value)}" for name, value in present.items())
    _LOGGER.info("midstream %s %s", event, line, extra={"midstream": {"event": event, **present}})


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON: `time`, `level`, `logger`, fields or `message`."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(),
            "level": record.levelname,
            "logger": record.name,
        }
        fields.update(getattr(record, "midstream", None) or {"message": record.getMessage()})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _is_no_mistake(record: logging.LogRecord) -> bool:
    """Return False for vLLM's report of a client's mistake, which `request.refused` has."""
    return not (record.exc_info and isinstance(record.exc_info[1], (SpecError, BusyError)))


def attach_handlers(form: str = "text") -> None:
    """Log as vLLM does, or with `form` "json" as lines of JSON, without clients' mistakes."""
    ours, theirs = logging.getLogger("midstream"), logging.getLogger("vllm")
    if form == "json":
        own = logging.StreamHandler(sys.stderr)
        own.setFormatter(JsonLines())
        ours.handlers, ours.propagate = [own], False
        ours.setLevel(theirs.getEffectiveLevel())
    for handler in theirs.handlers:
        handler.addFilter(_is_no_mistake)
    if ours.hasHandlers():
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
