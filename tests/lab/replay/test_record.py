"""Records are read as they were written: sampling parameters, and numbers that JSON lacks."""

import json
import math

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from midstream.errors import SpecError
from midstream.lab.replay.record import (
    RecordedRequest,
    RecordedResult,
    RecordedScores,
    read_records,
    recordable,
    sampling_of,
    sampling_to_dict,
)

PARAMS = {
    "bias": {"logit_bias": {5: 1.5, 7: -100.0}},
    "choice": {"structured_outputs": StructuredOutputsParams(choice=["a", "b"])},
    "schema": {"structured_outputs": StructuredOutputsParams(json={"type": "object"})},
    "stops": {"stop": ["x"], "stop_token_ids": [3, 1], "bad_words": ["y"], "min_tokens": 2},
    "drawn": {"temperature": 0.5, "seed": 3, "top_k": 4, "min_p": 0.1, "n": 2},
    "allowed": {"allowed_token_ids": [1, 2], "repetition_penalty": 1.2, "logprobs": 3},
    "repeated": {
        "repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_count=3)
    },
}


@pytest.mark.parametrize("fields", PARAMS.values(), ids=PARAMS)
def test_sampling_parameters_are_the_same_after_they_were_written(fields):
    params = recordable(SamplingParams(**{"temperature": 0, **fields}))
    again = sampling_of(json.loads(json.dumps(sampling_to_dict(params))))
    for name in params.__struct_fields__:
        assert getattr(again, name) == getattr(params, name), name


def test_results_without_scores_and_with_numbers_that_are_none_can_be_read(tmp_path):
    logprobs = (math.nan, -math.inf, -0.25)
    result = RecordedResult((1, 2, 3), logprobs, {"p": RecordedScores((), b"")}, {}, "")
    record = RecordedRequest((4, 5), {}, None, None, (result,), {}, {})
    path = tmp_path / "record.jsonl"
    path.write_text(json.dumps(record.to_dict(), allow_nan=False) + "\n")
    (again,) = read_records(path)
    (read,) = again.results
    assert read.scores == result.scores
    assert read.scores["p"].numbers().shape[0] == 0
    assert [*map(repr, read.logprobs)] == [*map(repr, logprobs)]


@pytest.mark.parametrize("name", ["extra_args", "_eos_token_id", "temprature"])
def test_a_parameter_that_no_record_has_is_refused(name):
    with pytest.raises(SpecError, match=rf"^request.sampling.{name}: vLLM has none"):
        sampling_of({name: None})


@pytest.mark.parametrize("value", ["0.5", None, True, [1]])
def test_a_logprob_that_is_no_number_is_refused(value):
    result = RecordedResult((1,), (-0.5,), {}, {}, "")
    form = RecordedRequest((4, 5), {}, None, None, (result,), {}, {}).to_dict()
    form["results"][0]["logprobs"] = [value]
    with pytest.raises(SpecError, match=r"^results\[0\].logprobs: expected numbers"):
        RecordedRequest.parse(form)
