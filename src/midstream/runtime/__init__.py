"""All that touches vLLM. Nothing outside this package imports vLLM's internals."""

from __future__ import annotations

from collections.abc import Callable

INSTALLERS: list[Callable[[], None]] = []
"""What `midstream.activate` installs beside the engine's hooks: `midstream.plugin` lists it."""
