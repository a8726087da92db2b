"""What is raised for a prompt that an engine cannot take."""

import pytest

pytest.importorskip("vllm")
from jinja2 import UndefinedError
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from midstream.errors import NothingSelectedError, SpecError
from midstream.runtime.frontend.request.prompt.inputs import named_refusals


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (VLLMValidationError("too long"), "too long"),
        (ValueError("empty"), "empty"),
        (UndefinedError("'content' is undefined"), "UndefinedError: 'content' is undefined"),
        (KeyError("role"), "KeyError: 'role'"),
        (TypeError("no string"), "TypeError: no string"),
        (AttributeError("no text"), "AttributeError: no text"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_is_a_spec_error_that_says_the_same(error, said):
    with pytest.raises(SpecError, match=said) as found, named_refusals():
        raise error
    assert found.value.__cause__ is error


def test_midstreams_own_stay_as_they_are():
    error = NothingSelectedError("capture[0]", "nowhere")
    with pytest.raises(NothingSelectedError) as found, named_refusals():
        raise error
    assert found.value is error


@pytest.mark.parametrize("error", [EngineDeadError(), RuntimeError("no memory"), OSError(28, "x")])
def test_an_engine_that_cannot_go_on_is_no_prompts_fault(error):
    with pytest.raises(type(error)), named_refusals():
        raise error
