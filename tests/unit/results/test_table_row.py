"""An output of the offline API as a row of a table."""

import json
from types import SimpleNamespace

import torch

from midstream.results.probe_scores import Probes
from midstream.results.readouts import OutputReadOuts
from midstream.results.readouts.norms import NormResults, NormRows
from midstream.results.receipt import Action, Captured, CaptureResult, Edited, Receipt


class Output(OutputReadOuts, SimpleNamespace):
    """vLLM's output or completion, with what was asked for."""


def test_every_result_has_flat_names_and_plain_values():
    places = torch.arange(3)
    none = torch.zeros(0)
    receipt = Receipt(
        "r-0", 4, 2,
        captured=(Captured("resid_post", 3, 5, 5), Captured("resid_post", 4, 5, 4)),
        edited=Edited(5, 4, 3, cached=1),
        problems=("a row is missing",),
        actions=(Action("p", "stop", 4, 2.5),),
    )  # fmt: skip
    completion = Output(
        index=0, text=" no", finish_reason="stop", token_ids=[7, 8], receipt=receipt,
        probes=Probes({"p": torch.tensor([0.5, 2.5, 0]), "q": none}, {"p": places, "q": none}, []),
        norms=NormResults({("mlp_out", 3): NormRows(torch.tensor([2.0, 4.0]), places[:2])}),
        capture_results={"store": CaptureResult("partial")},
    )  # fmt: skip
    output = Output(
        request_id="r", prompt="yes?", prompt_token_ids=[1, 2, 3, 4], outputs=[completion]
    )
    row = output.to_dict()
    assert row == {
        "request_id": "r", "prompt": "yes?", "index": 0, "text": " no", "finish_reason": "stop",
        "prompt_tokens": 4, "generated_tokens": 2,
        "probe.p.max": 2.5, "probe.p.mean": 1.0, "probe.q.max": None, "probe.q.mean": None,
        "norms.mlp_out.3.max": 4.0, "norms.mlp_out.3.mean": 3.0, "sink.store": "partial",
        "status": "error", "problems": ["a row is missing"], "actions": ["p:stop"], "captured": 9,
        "edited.expected": 5, "edited.applied": 4, "edited.tokens": 3, "edited.cached": 1,
    }  # fmt: skip
    assert json.loads(json.dumps(row)) == row
    bare = Output(index=0, text="", finish_reason=None, token_ids=[7])
    output.outputs = [bare]
    counts = {"prompt_tokens": 4, "generated_tokens": 1}
    assert output.to_dict() == {"request_id": "r", "prompt": "yes?"} | bare.to_dict() | counts
