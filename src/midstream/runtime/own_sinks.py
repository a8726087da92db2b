"""An engine's sinks: kept apart from its other settings, and opened for its front end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from midstream.sinks.base import Origin
from midstream.sinks.finding import make_sink
from midstream.sinks.opened import OpenSinks
from midstream.sinks.settings import read_sinks
from midstream.spec.destination import MEMORY
from midstream.version import __version__

if TYPE_CHECKING:
    from midstream.runtime.door import EngineInfo

# Not in `additional_config`, which is hashed with compiled graphs: where rows are kept makes no
# other graph, and a new folder for each run would compile anew each time.
_ATTRIBUTE = "midstream_sinks"


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


def note_sinks(vllm_config: Any, plain: Mapping[str, Mapping[str, Any]]) -> None:
    """Lets them ride with an engine's settings."""
    setattr(vllm_config, _ATTRIBUTE, plain)


def open_sinks(vllm_config: Any, info: EngineInfo) -> OpenSinks:
    """The sinks that `note_sinks` laid by, opened.

    Raises:
        ConfigError: a setting is wrong.
        Exception: whatever one of them raises when it is opened.
    """
    settings = read_sinks(getattr(vllm_config, _ATTRIBUTE, {}))
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
