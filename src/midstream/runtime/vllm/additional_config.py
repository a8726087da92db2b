"""midstream's settings in vLLM's `additional_config`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from midstream.compat.act_environment import (
    WORKER_CLASS,
    from_act_environment,
    is_capture_worker,
)
from midstream.config.config import KEY, Config, from_additional_config, from_environment
from midstream.config.controllers import DeclaredController, read_controllers
from midstream.config.sinks import read_sinks
from midstream.config.steering import WEIGHTS
from midstream.errors import ConfigError, SpecError
from midstream.plan.sink_target import MEMORY
from midstream.sinks.registry import make_sink
from midstream.steering.edit_forms import TIERS, read_tier
from midstream.steering.files import is_json_file, read_file, read_json_file

# Sites that `steering_vectors` of another project name: pre_attn, post_attn, post_block.
STEERING_SITES = ("resid_pre", "resid_mid", "resid_post")


def with_midstream(
    additional_config: Mapping[str, Any] | None,
    midstream: Config | Mapping[str, Any] | None,
    enable_steering: bool,
) -> dict[str, Any]:
    """Return `additional_config` with midstream: the caller's settings, those there, the
    environment's, or defaults, which tap three sites to `enable_steering`.
    """
    config = dict(additional_config or {})
    if midstream is not None and config.get(KEY) is not None:
        raise ConfigError(
            f"{KEY}: settings in both `midstream` and `additional_config`; give one of them"
        )
    settings = midstream if midstream is not None else config.get(KEY)
    if settings is None:
        settings = from_environment() or Config(
            sites=STEERING_SITES if enable_steering else Config().sites
        )
    config[KEY] = Config.parse(settings).to_dict()
    return config


# Settings that do not change what is compiled.
_UNHASHED = ("controllers", "events", "lenses", "saes", "sinks", "steering", "vectors")


class Settings(dict[str, Any]):
    """midstream's settings, with sinks, vectors and so on as attributes in plain form: among the
    items, vLLM would hash them with compiled graphs; on its config, it would copy them for draft
    models.
    """

    def __init__(self, plain: Mapping[str, Any], replicas: int = 1) -> None:
        super().__init__({name: value for name, value in plain.items() if name not in _UNHASHED})
        self.controllers: Mapping[str, Mapping[str, Any]] = plain["controllers"]
        self.sinks: Mapping[str, Mapping[str, Any]] = plain["sinks"]
        self.events: Mapping[str, Mapping[str, Any]] = plain["events"]
        self.vectors: Mapping[str, str] = plain["vectors"]
        self.lenses: Mapping[str, str] = plain["lenses"]
        self.saes: Mapping[str, str] = plain["saes"]
        self.steering: Mapping[str, Any] = plain["steering"]
        # Engines of this front end on this machine, known once vLLM has completed its settings.
        # vLLM does not tell its engines.
        self.replicas = replicas

    def __reduce__(self) -> tuple[Any, ...]:
        apart = {name: getattr(self, name) for name in _UNHASHED}
        return Settings, ({**self, **apart}, self.replicas)


def check_steering(settings: Settings) -> None:
    """Check files of vectors and edits early; of lenses and SAEs only that they exist."""
    for name, path in settings.vectors.items():
        try:
            read_json_file(path) if is_json_file(path) else read_file(path)
        except SpecError as error:
            raise ConfigError(f"{KEY}.vectors.{name}: {error}") from None
    for setting in WEIGHTS:
        for name, path in getattr(settings, setting).items():
            if not Path(path).exists():
                raise ConfigError(f"{KEY}.{setting}.{name}: there is no file or folder {path!r}")
    for tier, value in settings.steering.items():
        try:
            read_tier(value, TIERS[tier])
        except SpecError as error:
            raise ConfigError(f"{KEY}.steering.{error.under(tier)}") from None


def controllers_of(vllm_config: Any) -> dict[str, DeclaredController]:
    section = (vllm_config.additional_config or {}).get(KEY)
    return read_controllers(section.controllers if isinstance(section, Settings) else {})


def steers(additional_config: object) -> bool:
    """Return whether vLLM's `additional_config` has server-wide edits for an engine's start."""
    section = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    return isinstance(section, Settings) and any(section.steering.values())


def check_sinks(plain: Mapping[str, Mapping[str, Any]]) -> None:
    """Check the settings of `plain_sinks` before the engine starts, which takes a while."""
    for settings in read_sinks(plain):
        if settings.name != MEMORY:
            make_sink(settings)


def api_process(parallel: Any) -> tuple[int, int]:
    """Return the number of API servers, and which this process is: −1: the one that starts them."""
    return parallel._api_process_count, parallel._api_process_rank


def replicas_of(vllm_config: Any) -> int:
    """Return the number of engines of one front end on this machine; see `Settings`."""
    section = vllm_config.additional_config[KEY]
    return section.replicas if isinstance(section, Settings) else 1


def settings_of(args: Any) -> Config | None:
    """Return midstream's settings for an engine with these EngineArgs; None: not enabled."""
    additional_config = args.additional_config
    config = from_additional_config(additional_config)
    is_named = isinstance(additional_config, dict) and KEY in additional_config
    if config is None and not is_named:
        config = from_environment()
    if not is_capture_worker(args.worker_cls):
        return config
    acts = from_act_environment()
    if acts is not None and (config is not None or is_named):
        raise ConfigError(
            f"{KEY}: settings in both `{KEY}` and the environment variables VLLM_ACT_*, which "
            f'worker_cls={WORKER_CLASS!r} enables; omit one of them, or set VLLM_ACT_CAPTURE="0"'
        )
    return config or acts


def key_of_environment() -> str | None:
    """Return the server's API key from the environment, used if no option sets one."""
    key: str | None = importlib.import_module("vllm.envs").VLLM_API_KEY
    return key
