"""An engine's sinks: kept apart from its other settings, and opened for its front end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from midstream.config import KEY
from midstream.sinks.base import Origin
from midstream.sinks.finding import make_sink
from midstream.sinks.opened import OpenSinks
from midstream.sinks.settings import read_sinks
from midstream.spec.destination import MEMORY
from midstream.version import __version__

if TYPE_CHECKING:
    from midstream.runtime.door import EngineInfo


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


def open_sinks(vllm_config: Any, info: EngineInfo) -> OpenSinks:
    """The sinks of an engine's settings, opened.

    Raises:
        ConfigError: a setting is wrong.
        Exception: whatever one of them raises when it is opened.
    """
    found = vllm_config.additional_config[KEY]
    settings = read_sinks(found.sinks if isinstance(found, Settings) else {})
    return OpenSinks(settings, origin_of(vllm_config, info))


def origin_of(vllm_config: Any, info: EngineInfo) -> Origin:
    """What sinks are told of an engine."""
    import vllm

    model = vllm_config.model_config
    return Origin(
        model=str(model.model),
        revision=str(model.revision or ""),
        num_layers=info.shape.num_layers,
        hidden_size=info.shape.hidden_size,
        dtype=info.dtype,
        vllm=vllm.__version__,
        midstream=__version__,
        tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
    )
