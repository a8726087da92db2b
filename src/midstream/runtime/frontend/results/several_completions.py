"""Output of a request with several completions, whose results are on the completions."""

from __future__ import annotations

from typing import Any

from vllm import RequestOutput

from midstream.results.readouts import RESULTS as READOUTS

# Attributes that each completion has of its own.
PER_COMPLETION = (
    "activations",
    *READOUTS,
    "probes",
    "receipt",
    "hidden_states",
    "prefill_hidden_states",
)


class SeveralCompletions(RequestOutput):  # type: ignore[misc]
    """vLLM's output of a request with n > 1.

    `activations`, `probes`, `receipt` and the like are on each of its `outputs`. Reading one of
    them here raises an AttributeError that says so; `hasattr` is False, and `getattr` with a
    default gives the default.
    """

    @staticmethod
    def convert(output: Any) -> None:
        """Make an output of several completions one of this class, in place."""
        for name in PER_COMPLETION:
            output.__dict__.pop(name, None)
        if type(output) is RequestOutput:
            output.__class__ = SeveralCompletions

    def __getattr__(self, name: str) -> Any:
        if name not in PER_COMPLETION:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # Of a half-made copy `outputs` may be missing.
        count = len(self.__dict__.get("outputs", ()))
        raise AttributeError(
            f"this output has {count} completions (n > 1), each with its own `{name}`: read "
            f"output.outputs[i].{name}, i from 0 to {count - 1}"
        )
