"""The former place of `midstream.jobs.engine`, kept for one release."""

from midstream.jobs.engine import VllmEngine

__all__ = ["VllmEngine"]
