"""Worker class configured by the variables of `midstream.compat.act_environment`."""

from __future__ import annotations

from typing import Any

from midstream.errors import UnsupportedError


class CaptureWorker:
    """Placeholder, in place of which the front end has vLLM's own worker and taps its model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            "worker_cls: the process that created this engine's settings did not load midstream; "
            "give the class's full name as a `str`, and call midstream.activate() before the first "
            "engine of that process"
        )
