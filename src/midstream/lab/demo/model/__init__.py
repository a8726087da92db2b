"""A real model for the demo and for tests, made from a package that pip can download."""

from __future__ import annotations

from midstream.errors import ModelError

__all__ = ["ModelError"]
