"""Sinks of events: what a guard did, as small JSON objects; see `docs/runbook.md`."""

from midstream.sinks.events.event_log import EventLog

__all__ = ["EventLog"]
