"""Outputs name their results when printed, and say of a missing one how to ask for it."""

import copy
import pickle

import pytest
import torch
from support.refusals import refused
from vllm import RequestOutput
from vllm.outputs import CompletionOutput

from midstream import Activations, Probes, Receipt
from midstream.errors import NotAskedError
from midstream.results.readouts import RESULTS as READOUTS
from midstream.results.receipt import Captured, Edited
from midstream.runtime.frontend.results.delivery import RESULTS
from midstream.runtime.frontend.results.outputs import (
    PER_COMPLETION,
    GenerateCompletion,
    GenerateOutput,
    with_results,
    without_nothing,
)

TAP = ("resid_post", 3)
FOUND = {
    "activations": Activations({TAP: torch.ones(2, 4)}, {TAP: torch.tensor([0, 1])}, [5, 6]),
    "probes": Probes({"mood": torch.ones(2)}, {"mood": torch.tensor([0, 1])}, [5, 6]),
    "receipt": Receipt("7", 2, 1, captured=(Captured(*TAP, 2, 2),), edited=Edited(4, 4, 2)),
}


def made(count, **results):
    """An output of so many completions, as the front end makes it."""
    completions = [CompletionOutput(n, f"t{n}", [2], None, None) for n in range(count)]
    output = RequestOutput("7", "p" * 500, [1, 2], None, completions, True)
    for holder in (output, *completions):
        holder.__dict__.update({**dict.fromkeys(RESULTS), **results})
    return output


def test_a_missing_result_says_how_to_ask_for_it():
    for results in ({}, FOUND):
        output = made(1, **results)
        without_nothing(output)
        for holder in (output, output.outputs[0]):
            assert {name for name in RESULTS if hasattr(holder, name)} == results.keys() | {
                "activation_manifest"
            }
            assert getattr(holder, "lens", 5) == 5
            refused(
                lambda name, holder=holder: getattr(holder, name),
                *((name, rf"no `{name}`: .*capture=") for name in READOUTS),
                *(
                    (name, rf"^this output has no `{name}`: .*{words}")
                    for name, words in {
                        "activations": r"capture=True or capture=Capture\(layers=…\)$",
                        "probes": r"probes=Probe\(vector, layer=…\)$",
                        "receipt": "capture=…, edits=… or probes=…$",
                        "hidden_states": r"LLM\(model, layers=\[…\]\) for it$",
                        "capture_results": "capture=Capture",
                    }.items()
                    if name not in results
                ),
                error=NotAskedError,
            )
    stored = made(1, capture_results={"files": None})
    without_nothing(stored)
    with pytest.raises(NotAskedError, match="the rows went to sinks: see `capture_results`"):
        _ = stored.activations
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = stored.nonsense


def test_an_output_prints_what_came_back():
    for count in (1, 2):
        output = made(count, **FOUND)
        with_results(output, several=count > 1)
        text = str(output)
        assert text == repr(output)
        assert "activations: Activations(resid_post; layers 3; 2 rows of 4, float32)" in text
        assert "probes: Probes(mood: 2 scores, " in text
        assert "receipt: ok; 2 prompt and 1 generated tokens; captured 2 of 2 rows" in text
        assert text.count("'t1'; 1 tokens") == count - 1
        assert "2 tokens" in text
        assert len(text) < 2000
    assert isinstance(output, RequestOutput)
    plain = made(1)
    with_results(plain, several=False)
    assert "activations" not in str(plain)


@pytest.mark.parametrize(
    "again",
    [lambda one: one, copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))],
)
def test_of_several_completions_each_has_its_results_and_the_output_says_so(again):
    output = made(3)
    for one in output.outputs:
        one.receipt = f"receipt of {one.index}"
    with_results(output, several=True)
    output = again(output)
    assert type(output) is GenerateOutput
    assert {type(one) for one in output.outputs} == {GenerateCompletion}
    assert [one.receipt for one in output.outputs] == [f"receipt of {n}" for n in range(3)]
    for name in PER_COMPLETION:
        assert getattr(output, name, 5) == 5
        with pytest.raises(AttributeError, match=rf"3 completions .* output.outputs\[i\].{name}"):
            getattr(output, name)


def test_vllms_outputs_are_rows_of_a_table():
    output = made(1, **FOUND)
    without_nothing(output)
    row = output.to_dict()
    assert (row["request_id"], row["prompt"], row["text"]) == ("7", "p" * 500, "t0")
    assert (row["probe.mood.mean"], row["captured"], row["edited.applied"]) == (1.0, 2, 4)
    assert {"prompt": "p" * 500, "request_id": "7", **output.outputs[0].to_dict()} == row
