"""Both clients return the sweep that the server computed."""

import json

import httpx
import numpy as np
import pytest
from support.sweep_fake import logprob_of, unpatched
from unit.client.both import KINDS, Both, streamed

from midstream.client import ServerError
from midstream.errors import SpecError
from midstream.lab.sweep import LogitDiff, LogProb, Recovered, Sweep
from midstream.lab.sweep.cells import SweepCell
from midstream.plan import CapturedRows, Named

A, B = ord("x"), ord("z")


def test_a_sweep_is_what_the_engine_computes_and_cells_come_one_by_one(both, tmp_path):
    seen = []
    found = both.call(
        "sweep", "abcd", "efgh", LogitDiff("x", "z"), layers=[0, 2], sites="resid_post",
        groups={"one": [1], "three": [3]}, on_cell=lambda *each: seen.append(each), model="m",
    )  # fmt: skip
    expected = [[[logprob_of(A, n, p) - logprob_of(B, n, p) for p in (1, 3)] for n in (0, 2)]]
    assert np.array_equal(found.values, np.array(expected, np.float32))
    assert found.values.dtype == np.float32
    assert found.coords == {"site": ["resid_post"], "layer": [0, 2], "position": ["one", "three"]}
    assert found.metric == LogitDiff("x", "z")
    assert found.tokens == ("b", "d")
    assert found.noise_floor == 0
    runs = [tuple(map(ord, text)) for text in ("abcd", "efgh")]
    assert (found.corrupt, found.clean) == tuple(
        unpatched(A, run) - unpatched(B, run) for run in runs
    )
    assert (len(found.receipts), found.receipts.status, found.receipts.applied) == (5, "ok", 4)
    assert found.receipts.prompt_tokens == 4 * 9
    assert sorted(seen, key=lambda one: one[0].index) == [
        (SweepCell((0, row, column), ("resid_post", layer), (place,), None),
         logprob_of(A, layer, place) - logprob_of(B, layer, place))
        for row, layer in enumerate((0, 2)) for column, place in enumerate((1, 3))
    ]  # fmt: skip
    again = Sweep.load(found.save(tmp_path / "sweep.json"))
    assert np.array_equal(again.values, found.values)
    assert again.receipts == found.receipts


def test_sources_of_every_form_reach_the_server(both, site):
    site.engine.vectors.register("v", [1.0, 2.0, 2.0])
    for source in (0, "zero", "mean:v", Named("v"), {("resid_post", 1): np.ones((4, 3))}):
        found = both.call("sweep", "abcd", source, LogProb("x"), layers=1, sites="resid_post")
        assert not np.isnan(found.values).any()
    with pytest.raises(ServerError, match="there are no rows") as caught:
        both.call("sweep", "abcd", CapturedRows("none"), LogProb("x"), sites="resid_post")
    assert (caught.value.status, caught.value.param) == (400, "source.captured")


def test_what_has_no_json_form_or_is_malformed_is_refused_before_a_request(both, site):
    for metric, path in ((len, "metric"), ("logprob", "metric")):
        with pytest.raises(SpecError) as caught:
            both.call("sweep", "abcd", "efgh", metric)
        assert caught.value.path == path
    with pytest.raises(SpecError, match="layerz"):
        both.call("sweep", "abcd", "efgh", "kl", layerz=[1])
    assert site.engine.calls == []


def test_errors_of_the_server_name_the_field_before_and_within_the_stream(both, site):
    with pytest.raises(ServerError) as caught:
        both.call("sweep", "abcd", "efgh", LogProb("xx"), sites="resid_post")
    assert caught.value.param == "metric.logprob"
    with pytest.raises(ServerError, match="nothing to recover"):
        both.call("sweep", "abcd", "abcd", Recovered(LogProb("x")), sites="resid_post")
    calls = site.engine.calls

    def script(prompt, params, request_id):
        if len(calls) > 9:
            return [SpecError("layers", "broken")]
        return [type("Output", (), {"request_id": request_id, "outputs": []})]

    site.engine.script = script
    with pytest.raises(ServerError, match="broken") as caught:
        both.call("sweep", "abcd", "abce", LogProb("x"), sites="resid_post")
    assert (caught.value.status, caught.value.param) == (400, "layers")


def event(**value):
    return f"event: {value['type']}\ndata: {json.dumps(value)}\n\n"


START = {
    "type": "start", "id": "s", "dims": ["site", "layer", "position"], "clean": 1.0, "corrupt": 0.0,
    "coords": {"site": ["resid_pre"], "layer": [0], "position": [0]}, "tokens": ["a"],
    "positions": [[0]], "metric": "kl", "cells": 1,
}  # fmt: skip
SUMS = {"runs": 1, "status": "ok", "expected": 1, "applied": 1, "cached": 0, "problems": []}
RESULT = {
    "type": "result", "noise_floor": None, "receipts": SUMS, "prompt_tokens": 1, "cached_tokens": 0
}  # fmt: skip
DONE = "data: [DONE]\n\n"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (event(**START), "before it was complete"),
        (DONE, "no sweep"),
        (event(**START) + DONE, "no sweep"),
        (event(type="cell", index=[0, 0, 0], value=1) + DONE, "invalid event"),
        (event(**START) + event(type="cell", index=[0, 0], value=1), "invalid event"),
        (event(**START) + event(type="cell", index=[0, 0, 9], value=1), "invalid event"),
        (event(**START) + event(type="cell", index=[0, 0, 0], value="x"), "invalid event"),
        (event(**{**START, "tokens": 3}) + event(**RESULT) + DONE, "invalid sweep"),
        (event(**START) + event(**{**RESULT, "receipts": 3}) + DONE, "invalid sweep"),
    ],
)
def test_a_response_that_is_no_sweep_is_an_error(kind, text, problem):
    made = Both(kind, httpx.MockTransport(lambda _: streamed(text)))
    with pytest.raises(ServerError, match=problem):
        made.call("sweep", "a", "b", "kl")
    made.close()


@pytest.mark.parametrize("kind", KINDS)
def test_infinities_and_later_kinds_of_events_are_read(kind):
    cell = event(type="cell", index=[0, 0, 0], value="-Infinity")
    text = event(**START) + cell + event(type="later") + event(**RESULT) + DONE
    made = Both(kind, httpx.MockTransport(lambda _: streamed(text)))
    found = made.call("sweep", "a", "b", "kl")
    assert found.values.item() == -np.inf
    assert Sweep.from_json(json.loads(json.dumps(found.to_json()))).values.item() == -np.inf
    made.close()
