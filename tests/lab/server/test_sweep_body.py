"""The body of a sweep: any JSON is read or refused, and what is read is what was meant."""

import json

from hypothesis import given
from hypothesis import strategies as st
from unit.plan.strategies import json_values, reads_or_refuses

from midstream.lab.server.sweep_body import read_sweep
from midstream.lab.sweep import KL, LogitDiff, LogProb, Recovered, SweepRequest
from midstream.lab.sweep.request import OPTIONS
from midstream.validation import read_json

NAMES = st.sampled_from(["prompt", "source", "metric", "model", "stream", *OPTIONS])
metrics = st.sampled_from([LogProb(" a"), LogProb(3), LogitDiff(1, " b"), KL()]).flatmap(
    lambda one: st.sampled_from([one, Recovered(one)])
)
places = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"positions": st.sampled_from(["prompt", [0, -1], "last_prompt", 3])}),
    st.just({"groups": {"a": [0, 1], "b": "last_prompt"}}),
)
requests = st.builds(
    lambda source, metric, where, more: SweepRequest(source, metric, **where, **more),
    st.sampled_from(["a text", [1, 2], 0, "mean:v", {"captured": "x", "positions": [1]},
                     {"resid_pre.3": [[1.0, 2.0]]}]),
    metrics,
    places,
    st.fixed_dictionaries(
        {},
        optional={
            "layers": st.sampled_from(["all", 3, [1, -1]]),
            "sites": st.sampled_from(["resid_pre", ["z", "q"]]),
            "heads": st.sampled_from(["all", 1, [0, 3]]),
            "align": st.sampled_from(["suffix", "prefix", "exact", {1: 2}]),
            "alpha": st.floats(0, 2, width=16),
            "mask": st.sampled_from([[1, 2], [0.5, 1.0]]),
            "repeats": st.integers(0, 9),
        },
    ),
)  # fmt: skip


@given(st.dictionaries(NAMES, json_values) | json_values)
def test_any_value_is_read_or_refused(value):
    reads_or_refuses(read_sweep, value)


@given(
    requests, st.booleans(), st.sampled_from(["text", [1, 2], [{"role": "user", "content": "a"}]])
)
def test_a_request_that_is_sent_is_the_request_that_is_read(request, stream, prompt):
    body = {"prompt": prompt, "stream": stream, "model": "m", **request.to_dict()}
    found = read_sweep(read_json(json.dumps(body)))
    assert found.request.to_dict() == request.to_dict()
    assert (found.prompt, found.stream, found.model) == (prompt, stream, "m")
