"""The sinks of an engine, opened for its front end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from midstream.config.config import KEY
from midstream.config.sinks import read_sinks
from midstream.runtime.vllm.additional_config import Settings
from midstream.sinks.base import Origin
from midstream.sinks.sink_set import SinkSet
from midstream.version import __version__

if TYPE_CHECKING:
    from midstream.runtime.frontend.engine_info import EngineInfo


def open_sinks(vllm_config: Any, info: EngineInfo) -> SinkSet:
    section = vllm_config.additional_config[KEY]
    settings = read_sinks(section.sinks if isinstance(section, Settings) else {})
    return SinkSet(settings, origin_of(vllm_config, info))


def origin_of(vllm_config: Any, info: EngineInfo) -> Origin:
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
        widths=dict(info.shape.widths),
    )
