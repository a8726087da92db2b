"""Audit log: one line for each rejected request and each change of server state.

A line is `midstream event field=value …` with values as JSON, so client data cannot break it; with
the setting `http.log` "json" it is one JSON object. The record's attribute `midstream` holds the
same fields as a dict. Lines never contain keys, vectors, prompts or the client's invalid values;
the response reports those. Request ids are vLLM's, which include what a client sends as
X-Request-Id.
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
    """Log an event.

    Args:
        event: name of the event, such as `steering.set`.
        fields: JSON values; fields that are None are omitted.
    """
    present = {name: value for name, value in fields.items() if value is not None}
    line = " ".join(f"{name}={json.dumps(value)}" for name, value in present.items())
    _LOGGER.info("midstream %s %s", event, line, extra={"midstream": {"event": event, **present}})


class JsonLines(logging.Formatter):
    """Formats each record as one line of JSON: `time`, `level`, `logger`, and either the fields of
    an event or `message`.
    """

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
    """Return whether a record is to be logged: vLLM logs a client's mistake in a stream as a fault
    with its traceback, and `request.refused` says it already.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], (SpecError, BusyError)))


def attach_handlers(form: str = "text") -> None:
    """Attach vLLM's log handlers to midstream's logger, unless it already has handlers; they log
    no traceback of clients' mistakes.

    Args:
        form: "json": midstream's logger writes JSON lines to stderr instead.
    """
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
