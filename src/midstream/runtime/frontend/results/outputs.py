"""vLLM's outputs with midstream's results: what they print, and what a missing result says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm import RequestOutput
from vllm.outputs import CompletionOutput

from midstream.errors import NotAskedError
from midstream.results.printed_output import results_of, shown_text
from midstream.results.readouts import OutputReadOuts
from midstream.validation import no_attribute

if TYPE_CHECKING:
    from torch import Tensor

    from midstream.results.activations import Activations
    from midstream.results.probe_scores import Probes
    from midstream.results.receipt import CaptureResult, Receipt

_LAYERS = "start the engine with LLM(model, layers=[…]) for it"
# What to write for each attribute that a request without it lacks.
_REMEDIES = {
    "activations": "nothing was captured: ask for it, as capture=True or capture=Capture(layers=…)",
    "probes": "no probe was asked for: give it probes=Probe(vector, layer=…)",
    "receipt": "the request asked for nothing: give it capture=…, edits=… or probes=…",
    "capture_results": "nothing was captured: ask for it, as capture=Capture(layers=…, sink=…)",
    "attention": "it was not asked for: give it capture=Attention(layers)",
    "lens": "it was not asked for: give it capture=Lens(layers)",
    "features": "they were not asked for: give it capture=Features(sae)",
    "logits": "they were not asked for: give it capture=Logits(top=10)",
    "norms": "they were not asked for: give it capture=Norms(layers)",
    **dict.fromkeys(
        ("hidden_states", "hidden", "prefill_hidden_states", "prefill_hidden"), _LAYERS
    ),
}
# Names of other tools.
_INSTEAD = {
    **dict.fromkeys(("cache", "rows"), "write output.activations"),
    **dict.fromkeys(("scores", "probe"), 'write output.probes["name"]'),
    "text": "write output.outputs[0].text",
    "token_ids": "write output.outputs[0].token_ids",
}
# Those that each of several completions has of its own.
PER_COMPLETION = tuple(
    name for name in _REMEDIES if name not in ("capture_results", "hidden", "prefill_hidden")
)


class _Results(OutputReadOuts):
    """What an output and a completion have in common.

    Attributes:
        activations: captured rows.
        probes: scores by probe name.
        receipt: what was asked for, against what the device counted.
        capture_results: what each sink did.

    Raises:
        NotAskedError: it was not asked for; the message says how to ask. It is an AttributeError,
            so that `hasattr` and `getattr(output, "probes", None)` work.
    """

    activations: Activations
    probes: Probes
    receipt: Receipt
    capture_results: Mapping[str, CaptureResult]

    # A type checker would accept any name.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            remedy = _REMEDIES.get(name)
            if remedy is None:
                raise no_attribute(self, name, _INSTEAD)
            if name == "activations" and "capture_results" in self.__dict__:
                remedy = (
                    "the rows went to sinks: see `capture_results`; a capture without `sink` "
                    "returns rows here"
                )
            raise NotAskedError(f"this output has no `{name}`: {remedy}")


class GenerateCompletion(_Results, CompletionOutput):  # type: ignore[misc]
    """One completion of an output; it has the results of this completion."""


class GenerateOutput(_Results, RequestOutput):  # type: ignore[misc]
    """The output of one prompt: vLLM's own, with results. With n > 1 each of `outputs` has them.

    Attributes:
        hidden_states, prefill_hidden_states: of an engine with `layers`: rows [rows, hidden] by
            layer.
    """

    outputs: list[GenerateCompletion]
    hidden_states: Mapping[int, Tensor]
    prefill_hidden_states: Mapping[int, Tensor]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Of a half-made copy `outputs` may be missing.
            count = len(self.__dict__.get("outputs", ()))
            if count > 1 and name in PER_COMPLETION:
                raise NotAskedError(
                    f"this output has {count} completions (n > 1), each with its own `{name}`: "
                    f"read output.outputs[i].{name}, i from 0 to {count - 1}"
                )
            return super().__getattr__(name)

    def __repr__(self) -> str:
        ids = self.prompt_token_ids
        tokens = "" if ids is None else f"; {len(ids)} tokens"
        lines = [f"GenerateOutput(request {self.request_id}{'' if self.finished else ', running'})"]
        lines.append(f"prompt: {shown_text(self.prompt)}{tokens}")
        for completion in self.outputs:
            name = "text" if len(self.outputs) == 1 else f"outputs[{completion.index}].text"
            end = f", {completion.finish_reason}" if completion.finish_reason else ""
            count = len(completion.token_ids)
            lines.append(f"{name}: {shown_text(completion.text)}; {count} tokens{end}")
            if isinstance(completion, GenerateCompletion) and len(self.outputs) > 1:
                lines += [f"  {line}" for line in results_of(completion.__dict__)]
        return "\n  ".join([*lines, *results_of(self.__dict__)])


class StreamedOutput(GenerateOutput):
    """An output of `AsyncLLM.generate`: before the last one its results are those so far, or None.

    The last output of a request has all results, and None where it asked for nothing.
    """

    if TYPE_CHECKING:
        activations: Activations | None  # type: ignore[assignment]
        probes: Probes | None  # type: ignore[assignment]
        receipt: Receipt | None  # type: ignore[assignment]
        capture_results: Mapping[str, CaptureResult] | None  # type: ignore[assignment]


def with_results(output: Any, several: bool) -> None:
    """Make vLLM's output, whose results are set, one that prints them. With `several` completions
    these have results, and the output has none.
    """
    if several:
        for name in PER_COMPLETION:
            output.__dict__.pop(name, None)
    if type(output) is RequestOutput:
        output.__class__ = GenerateOutput
        for completion in output.outputs:
            if type(completion) is CompletionOutput:
                completion.__class__ = GenerateCompletion


def without_nothing(output: Any) -> None:
    """Remove results that are None of an output and its completions: reading one then says how to
    ask for it.
    """
    with_results(output, several=len(output.outputs) > 1)
    for holder in (output, *output.outputs):
        attributes = holder.__dict__
        for name in _REMEDIES.keys() & attributes.keys():
            if attributes[name] is None:
                del attributes[name]
