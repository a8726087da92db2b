"""Types of the outputs of `generate` and `chat`: vLLM's own, with midstream's attributes."""

from midstream.runtime.frontend.results.outputs import (
    GenerateCompletion,
    GenerateOutput,
    StreamedOutput,
)

__all__ = ["GenerateCompletion", "GenerateOutput", "StreamedOutput"]
