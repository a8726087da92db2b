"""Types of the outputs of `generate` and `chat`: vLLM's own, with midstream's attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from vllm import RequestOutput
    from vllm.outputs import CompletionOutput

    from midstream.results.activations import Activations
    from midstream.results.probe_scores import Probes
    from midstream.results.readouts import OutputReadOuts
    from midstream.results.receipt import CaptureResult, Receipt

    class GenerateCompletion(OutputReadOuts, CompletionOutput):
        """One completion of an output; its results are of this completion, if n > 1, else None."""

        activations: Activations
        probes: Probes
        receipt: Receipt
        capture_results: Mapping[str, CaptureResult]

    class GenerateOutput(OutputReadOuts, RequestOutput):
        """The output of one prompt.

        Attributes:
            activations: captured rows; None if nothing was captured.
            probes: scores by probe name; None without probes.
            receipt: what was asked for, against what the device counted; None without a plan.
            capture_results: what each sink did; None without captures.
            hidden_states, prefill_hidden_states: of an engine with `layers`: rows [rows, hidden] by
                layer.
        """

        outputs: list[GenerateCompletion]
        activations: Activations
        probes: Probes
        receipt: Receipt
        capture_results: Mapping[str, CaptureResult]
        hidden_states: Mapping[int, Tensor]
        prefill_hidden_states: Mapping[int, Tensor]

else:
    from vllm import RequestOutput as GenerateOutput
    from vllm.outputs import CompletionOutput as GenerateCompletion

__all__ = ["GenerateCompletion", "GenerateOutput"]
