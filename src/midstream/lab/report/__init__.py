"""The report: captures pairs of texts, fits a direction, steers along it, and shows the effect."""

from __future__ import annotations

from midstream.errors import MidstreamError


class ReportError(MidstreamError):
    """A report cannot be made as requested; the message says what would be right."""
