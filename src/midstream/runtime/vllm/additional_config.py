"""The `additional_config` of engines that midstream makes itself."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from midstream.compat.act_environment import WORKER_CLASS, from_act_environment
from midstream.config.config import KEY, Config, from_additional_config, from_environment
from midstream.config.sinks import read_sinks
from midstream.errors import ConfigError
from midstream.sinks.registry import make_sink
from midstream.spec.sink_target import MEMORY

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


class Settings(dict[str, Any]):
    """midstream's settings for vLLM's `additional_config`, in which the sinks ride unseen: that is
    hashed with compiled graphs, and a new folder for each run would compile anew each time.

    vLLM makes new configs of an engine's for its draft models, which have no attribute that is not
    a field; so they are not laid by there.

    Attributes:
        sinks: as `plain_sinks` gives them.
        replicas: how many engines of this front end share this machine; known once vLLM's own
            settings are. An engine is not told by vLLM.
    """

    def __init__(self, plain: Mapping[str, Any], replicas: int = 1) -> None:
        """Args:
        plain: all settings.
        replicas: see above.
        """
        super().__init__({name: value for name, value in plain.items() if name != "sinks"})
        self.sinks: Mapping[str, Mapping[str, Any]] = plain["sinks"]
        self.replicas = replicas

    def __reduce__(self) -> tuple[Any, ...]:
        return Settings, ({**self, "sinks": self.sinks}, self.replicas)


def check_sinks(plain: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuses wrong settings before the engine starts, which takes a while.

    Args:
        plain: as `plain_sinks` gives it.

    Raises:
        ConfigError: there is no such sink, or a setting is wrong.
    """
    for settings in read_sinks(plain):
        if settings.name != MEMORY:
            make_sink(settings)


def replicas_of(vllm_config: Any) -> int:
    """How many engines of one front end share this machine, see `Settings`."""
    found = vllm_config.additional_config[KEY]
    return found.replicas if isinstance(found, Settings) else 1


def settings_of(args: Any) -> Config | None:
    """midstream's settings for an engine of these arguments; None: it is not enabled."""
    given = args.additional_config
    found = from_additional_config(given)
    is_named = isinstance(given, dict) and KEY in given
    if found is None and not is_named:
        found = from_environment()
    if args.worker_cls != WORKER_CLASS:
        return found
    acts = from_act_environment()
    if acts is not None and (found is not None or is_named):
        raise ConfigError(
            f"{KEY}: there are settings besides the variables VLLM_ACT_*, for which worker_cls "
            f'names {WORKER_CLASS}; leave them out, or it, or set VLLM_ACT_CAPTURE="0"'
        )
    return found or acts


def key_of_environment() -> str | None:
    """The server's key where no option gives one."""
    key: str | None = importlib.import_module("vllm.envs").VLLM_API_KEY
    return key
