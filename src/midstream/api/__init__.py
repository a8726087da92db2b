"""Public Python API: `LLM`, `AsyncLLM`, `SamplingParams`."""
