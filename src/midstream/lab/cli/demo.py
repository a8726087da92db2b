"""`midstream demo`: capture, steer and show a real model, and write a report.

The command is defined in `midstream.lab.demo.cli`: `python -m midstream.lab.demo` runs it too.
"""

from __future__ import annotations

from midstream.lab.demo.cli import demo
from midstream.lab.report.command import ScalesCommand as CommandClass

__all__ = ["CommandClass", "demo"]
