"""`vllm.LLM(model, worker_cls="midstream.worker.CaptureWorker")`: captures that environment
variables drive; `midstream.compat.act_environment` has them.
"""

from __future__ import annotations

from typing import Any

from midstream.errors import UnsupportedError


class CaptureWorker:
    """A name by which vLLM is told to capture. Its own worker for the platform does the work: the
    front end puts that in this one's place, and midstream taps its model like any other.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises:
        UnsupportedError: always; this process's front end has not put another in its place.
        """
        raise UnsupportedError(
            "worker_cls: the process that made this engine's settings did not load midstream; "
            "name the class by its full name as a `str`, and if another engine came first in that "
            "process call midstream.activate() before it"
        )
