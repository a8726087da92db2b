"""The `additional_config` of engines that midstream makes itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from midstream.config import KEY, Config, from_environment
from midstream.errors import ConfigError

# What a rival's `steering_vectors` speak of: pre_attn, post_attn, post_block.
STEERING_SITES = ("resid_pre", "resid_mid", "resid_post")


def with_midstream(
    additional_config: Mapping[str, Any] | None,
    midstream: Config | Mapping[str, Any] | None,
    enable_steering: bool,
) -> dict[str, Any]:
    """vLLM's `additional_config` with midstream enabled.

    Args:
        additional_config: as the caller gave it.
        midstream: settings as the caller gave them. Without any, here and there, those of the
            environment, or the defaults.
        enable_steering: whether the defaults tap the three residual sites.

    Raises:
        ConfigError: a wrong setting, or settings in both places.
    """
    given = dict(additional_config or {})
    if midstream is not None and given.get(KEY) is not None:
        raise ConfigError(f"{KEY}: settings are in `midstream` and in `additional_config`")
    settings = midstream if midstream is not None else given.get(KEY)
    if settings is None:
        settings = from_environment() or Config(
            sites=STEERING_SITES if enable_steering else Config().sites
        )
    given[KEY] = Config.parse(settings).to_dict()
    return given
