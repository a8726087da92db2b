"""The demo: one command that captures, fits a direction, steers, and writes a report.

midstream demo --help
"""

from __future__ import annotations

from midstream.errors import MidstreamError


class DemoError(MidstreamError):
    """The demo cannot do what was requested; the message says what would be right."""
