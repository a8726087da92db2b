"""Named vectors and server-wide edits of the settings, set when an engine's front end starts."""

from __future__ import annotations

import logging
from typing import Any

from midstream.config.config import KEY
from midstream.errors import ConfigError, SpecError
from midstream.runtime.vllm.additional_config import Settings
from midstream.steering import VectorRegistry
from midstream.steering.tiers import Steering

# Beneath vLLM's logger, which has handlers in every program that starts an engine.
_LOGGER = logging.getLogger("vllm.midstream")


def set_steering(vllm_config: Any, vectors: VectorRegistry, steering: Steering) -> None:
    """Register the vectors of the settings, then set the tiers."""
    settings = vllm_config.additional_config[KEY]
    if not isinstance(settings, Settings):
        return
    for name, path in settings.vectors.items():
        try:
            vectors.register(name, path)
        except SpecError as error:
            problem = str(error).removeprefix("vectors").lstrip(".: ")
            raise ConfigError(f"{KEY}.vectors.{name}: {problem}") from None
    if settings.steering:
        try:
            steering.set(**settings.steering)
        except SpecError as error:
            raise ConfigError(f"{KEY}.{error.under('steering')}") from None
        state = steering.show()
        _LOGGER.info(
            'midstream steering.started edits=%d digest="%s": every request is steered',
            len(state.edits),
            state.digest,
        )
