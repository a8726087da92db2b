"""Outputs with several completions say where their results are."""

import copy
import pickle

import pytest
from vllm import RequestOutput
from vllm.outputs import CompletionOutput

from midstream.runtime.frontend.results.delivery import PER_COMPLETION, SeveralCompletions


@pytest.fixture
def output():
    found = RequestOutput(
        "0", "p", [1], None, [CompletionOutput(n, "", [2], None, None) for n in range(3)], True
    )
    for name in ("activations", "probes", "receipt"):
        setattr(found, name, None)
        for one in found.outputs:
            setattr(one, name, f"{name} of {one.index}")
    SeveralCompletions.convert(found)
    return found


@pytest.mark.parametrize("name", PER_COMPLETION)
def test_reading_a_result_names_the_completions(output, name):
    with pytest.raises(AttributeError, match=rf"3 completions .* read output.outputs\[i\].{name}"):
        getattr(output, name)
    assert not hasattr(output, name)
    assert getattr(output, name, 5) == 5


def test_the_completions_have_their_results(output):
    assert [one.activations for one in output.outputs] == [f"activations of {n}" for n in range(3)]


def test_it_is_vllms_output_otherwise(output):
    assert isinstance(output, RequestOutput)
    assert "RequestOutput(request_id=0" in repr(output)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = output.nonsense


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
)
def test_it_survives_copying_and_pickling(output, again):
    other = again(output)
    assert type(other) is SeveralCompletions
    assert [one.receipt for one in other.outputs] == [f"receipt of {n}" for n in range(3)]
    with pytest.raises(AttributeError, match="3 completions"):
        _ = other.receipt
