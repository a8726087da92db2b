"""Puts midstream into vLLM's server: its engine is midstream's, and its app has our endpoints."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from midstream import entries
from midstream.config.config import is_enabled


def install() -> None:
    """Wraps the two functions by which a server makes its engine and its app."""
    engine = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
    make = engine.__dict__["from_vllm_config"].__func__

    @functools.wraps(make)
    def from_vllm_config(cls: Any, vllm_config: Any, *args: Any, **named: Any) -> Any:
        if cls is engine and is_enabled(vllm_config.additional_config):
            cls = entries.public("AsyncLLM")
        return make(cls, vllm_config, *args, **named)

    engine.from_vllm_config = classmethod(from_vllm_config)
    plugins: Any = importlib.import_module("vllm.plugins")
    load: Callable[..., list[Any]] = plugins.load_endpoint_plugins

    @functools.wraps(load)
    def load_endpoint_plugins(*args: Any, **named: Any) -> list[Any]:
        from midstream.server.app.endpoint_plugin import Endpoints

        # vLLM lists only those that VLLM_PLUGINS names, and being installed is not enough here:
        # ours looks itself whether the server enables it.
        return [*load(*args, **named), Endpoints()]

    plugins.load_endpoint_plugins = load_endpoint_plugins
