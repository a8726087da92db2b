"""`midstream demo`: capture, steer and show a real model, and write a report.

The command is defined in `midstream.demo.cli`, because `python -m midstream.demo` runs it too.
"""

from __future__ import annotations

from midstream.demo.cli import demo
from midstream.report.command import ScalesCommand as CommandClass

__all__ = ["CommandClass", "demo"]
