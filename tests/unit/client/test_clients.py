"""Both clients return what the offline API returns, and refuse alike."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import serving_fake
from support.serving_fake import rows
from unit.client.both import KINDS, Both, streamed

from midstream import Capture, Probe, Replace, Steer
from midstream.client import AsyncClient, Client, ServerError
from midstream.client.outputs import Reader, ServedCompletion
from midstream.errors import ConfigError, SpecError
from midstream.plan import Classes
from midstream.plan.vectors.vector import Vector
from midstream.results.activations import with_heads
from midstream.results.arrays import Heads
from midstream.results.plan_update import PlanUpdate
from midstream.results.receipt import Receipt

V = [1.0, 2.0, 2.0]
PROBE = Probe(V, 1, name="p")


@pytest.fixture(params=KINDS)
def over(request):
    """A client of either kind whose server answers with what a function makes of a request."""
    with contextlib.ExitStack() as stack:

        def make(answer):
            return stack.enter_context(
                contextlib.closing(Both(request.param, httpx.MockTransport(answer)))
            )

        yield make


@pytest.mark.parametrize("activations", ["handle", "inline"])
def test_an_answer_has_what_the_offline_api_returns(both, site, activations):
    given_ = {"capture": Capture([1]), "probes": PROBE, "steer": Steer(V, 1)}
    output = both.call("complete", "abc", model="m", activations=activations, **given_)
    assert output.text == "t1t2t3"
    assert output.receipt.status == "ok"
    expected = rows((1,), 5)
    assert torch.equal(output.activations["resid_post", 1], expected["resid_post", 1])
    assert torch.equal(output.activations.token_ids, expected.token_ids)
    assert output.probes["p"].tolist() == [nth / 8 for nth in range(5)]
    assert output.probes.token_ids_of("p").tolist() == [100, 101, 102, 103, 104]
    assert site.seen == [{"model": "m", "prompt": "abc"}]
    # What was fetched is not held any longer.
    assert len(site.server.captures) == 0
    printed = repr(output).splitlines()
    assert printed[:2] == [f"ServedOutput(request {output.request_id})", "  text: 't1t2t3'; length"]
    assert printed[2].startswith("  activations: Activations(resid_post; layers 1; 5 rows of ")
    assert printed[3].startswith("  probes: Probes(p: 5 scores, ")
    assert printed[4].startswith("  receipt: ok; ")
    assert len(printed) == 5
    output.outputs.append(ServedCompletion(1, "x", guards=[{"guard": "calm"}]))
    assert repr(output).endswith(
        "\n  ServedCompletion(1)\n    text: 'x'\n    guards: [{'guard': 'calm'}]"
    )


@pytest.mark.parametrize("activations", ["handle", "inline"])
@pytest.mark.parametrize("chosen", [None, (0, 2)])
def test_rows_of_heads_come_by_head(both, monkeypatch, activations, chosen):
    def by_head(*args):
        found = rows(*args)
        return with_heads(found, {tap: Heads(3, chosen) for tap in found})

    monkeypatch.setattr(serving_fake, "rows", by_head)
    asked = {"capture": Capture([1], stream=True), "activations": activations}
    expected = by_head((1,), 5)["resid_post", 1]
    assert expected.shape == (5, 3 if chosen is None else 2, 1)
    output = both.call("complete", "abc", **asked)
    assert torch.equal(output.activations["resid_post", 1], expected)
    (last,) = both.stream(lambda output: output, "abc", **asked)[-1:]
    early = torch.cat([each["resid_post", 1] for each in last.outputs[0].rows])
    assert torch.equal(early, expected[: len(early)])
    assert len(early)
    rest = both.stream(lambda output: output, "abc", **{**asked, "activations": "none"})[-1]
    every = torch.cat([each["resid_post", 1] for each in rest.outputs[0].rows])
    assert torch.equal(every, expected)


def test_rows_that_stay_on_the_server_are_used_by_later_requests(both, site):
    output = both.call("complete", "abc", capture=Capture([1]), activations="keep")
    captured = output.outputs[0].captured
    assert output.activations is None
    assert output.receipt.status == "ok"
    assert len(site.server.captures) == 1
    site.engine.calls.clear()
    edit = Replace(captured.at([0, 2]), layer=1, positions=[1, 2])
    assert both.call("complete", "abc", edits=edit).outputs[0].captured is None
    ((_, params, _),) = site.engine.calls
    (patched,) = params.extra_args["midstream"].plan.edits
    assert patched == edit.replace(rows=rows((1,), 5)["resid_post", 1][[0, 2]])
    (last,) = both.stream(lambda found: found, "abc", capture=Capture([1]), activations="keep")[-1:]
    both.call("delete", last.outputs[0].captured)
    both.call("delete", captured)
    assert len(site.server.captures) == 0
    with pytest.raises(ServerError, match="there are no rows"):
        both.call("complete", "abc", edits=edit)
    with pytest.raises(ServerError, match="there are no rows"):
        both.call("delete", captured)


def test_an_output_is_a_row_of_a_table_with_what_was_asked_for(both):
    answer = {"id": "r", "choices": [{"index": 0, "text": "t1t2t3", "finish_reason": "length"}]}
    output = both.call("read", answer | {"usage": {"prompt_tokens": 3, "completion_tokens": 3}})
    plain = {"index": 0, "text": "t1t2t3", "finish_reason": "length", "prompt_tokens": 3}
    assert output.to_dict() == plain | {"generated_tokens": 3, "request_id": "r"}
    row = both.call("complete", "abc", capture=Capture([1]), probes=PROBE).to_dict()
    assert row == plain | {
        "request_id": "cmpl", "generated_tokens": 3, "probe.p.max": 0.5, "probe.p.mean": 0.25,
        "status": "ok", "problems": [], "actions": [], "captured": 5,
    }  # fmt: skip
    several = both.call("complete", "abc", n=2, probes=PROBE)
    with pytest.raises(SpecError, match="outputs: expected one completion, got 2, each with its"):
        several.to_dict()
    assert [one.to_dict()["index"] for one in several.outputs] == [0, 1]


def test_without_anything_asked_it_is_a_plain_request(both, site):
    output = both.call("complete", "abc", max_tokens=2)
    assert (output.text, output.receipt, output.activations) == ("t1t2t3", None, None)
    assert site.seen == [{"prompt": "abc", "max_tokens": 2}]


@pytest.mark.parametrize(
    "asked", [{"capture": Capture([1])}, {"probes": PROBE}, {"steer": Steer(V, 1)}]
)
def test_a_server_that_does_not_know_of_midstream_is_an_error(over, asked):
    whole = {"id": "1", "choices": [{"index": 0, "text": "t"}]}

    def answer(request):
        if json.loads(request.content).get("stream"):
            return streamed(events(whole))
        return httpx.Response(200, json=whole)

    both = over(answer)
    assert both.call("complete", "abc").text == "t"
    with pytest.raises(ServerError, match="ignored the field"):
        both.call("complete", "abc", **asked)
    with pytest.raises(ServerError, match="ignored the field"):
        both.stream(lambda output: output.text, "abc", **asked)


def test_several_choices_have_each_their_own(both):
    output = both.call("complete", ["abc", "abcd"], n=2, capture=Capture([1]))
    assert [one.index for one in output.outputs] == [0, 1, 2, 3]
    assert [len(one.activations["resid_post", 1]) for one in output.outputs] == [5, 5, 6, 6]
    assert output.activations is output.receipt is None


def test_a_chat_is_answered(both):
    output = both.call("chat", [{"role": "user", "content": "x"}], capture=Capture([1]))
    assert len(output.activations["resid_post", 1]) == len("chat") + 2


def test_a_stream_adds_up_to_the_whole(both):
    asked = {"capture": Capture([1], stream=True), "probes": PROBE}
    seen = both.stream(
        lambda output: (
            output.text,
            len(output.probes["p"]),
            sum(len(each["resid_post", 1]) for each in output.outputs[0].rows),
            output.receipt is not None,
        ),
        "abc",
        **asked,
    )
    assert seen == [("t1", 3, 3, False), ("t1t2", 4, 4, False), ("t1t2t3", 5, 4, True)]
    whole = both.call("complete", "abc", **asked)
    (last,) = both.stream(lambda output: output, "abc", **asked)[-1:]
    assert torch.equal(last.probes["p"], whole.probes["p"])
    assert torch.equal(last.activations["resid_post", 1], whole.activations["resid_post", 1])
    early = torch.cat([each["resid_post", 1] for each in last.outputs[0].rows])
    assert torch.equal(early, whole.activations["resid_post", 1][:4])


def test_the_scores_of_classes_come_back_with_their_names(both):
    classes = Classes([V, V], names=["no", "yes"])
    asked = {"probes": [PROBE, Probe(classes=classes, layer=1, name="q", link="softmax")]}
    whole = both.call("complete", "abc", **asked)
    expected = torch.tensor([[nth, nth / 8] for nth in range(5)])
    assert torch.equal(whole.probes["q"], expected)
    assert whole.probes["q"].dtype == torch.float32
    assert whole.probes.outputs_of("q") == ("no", "yes")
    assert whole.probes.outputs_of("p") == ()
    row = whole.to_dict()
    assert (row["probe.q.yes.max"], row["probe.q.no.mean"]) == (0.5, 2.0)
    seen = both.stream(lambda output: output.probes["q"], "abc", **asked)
    assert [len(scores) for scores in seen] == [3, 4, 5]
    assert torch.equal(seen[-1], expected)


def test_numbers_of_classes_that_json_has_not_come_back(both, site):
    def script(prompt, params, request_id):
        found = serving_fake.scores(["q"], 1, {"q": ("no", "yes")})
        found["q"][0] = torch.tensor([float("nan"), -float("inf")])
        receipt = Receipt(request_id, 1, 1, (), None)
        return [
            SimpleNamespace(
                request_id=request_id,
                finished=True,
                outputs=[serving_fake.completion(probes=found, receipt=receipt)],
            )
        ]

    site.engine.script = script
    probe = Probe(classes=Classes([V, V]), layer=1, name="q")
    scores = both.call("complete", "abc", probes=probe).probes["q"].tolist()
    assert str(scores) == "[[nan, -inf]]"


def test_a_refusal_is_an_error_with_status_and_field(both, site):
    with pytest.raises(ServerError, match="400: midstream.activations") as caught:
        both.call("complete", "abc", capture=Capture([1]), activations="zip")
    assert (caught.value.status, caught.value.param) == (400, "midstream.activations")
    site.engine.script = lambda *_: [SpecError("capture[0].layers[0]", "there is no layer 9")]
    for ask in (both.call, lambda _, *args, **named: both.stream(id, *args, **named)):
        with pytest.raises(ServerError, match="there is no layer 9") as caught:
            ask("complete", "abc", capture=Capture([9]))
        assert caught.value.status == 400


def test_what_is_malformed_is_not_sent(both, site):
    with pytest.raises(SpecError, match="layrs"):
        both.call("complete", "abc", capture={"layrs": [1]})
    for name in ("../steering", "a b", "", "a?b", "a#b", "/a", 3):
        for ask in (["vectors.register", name, V], ["vectors.remove", name]):
            with pytest.raises(SpecError, match="name"):
                both.call(*ask)
    for path in ("/some/file", Path("/some/file")):
        with pytest.raises(SpecError, match="expected"):
            both.call("vectors.register", "x", path)
    for name, path in (("complete", "stream"), ("chat", "stream")):
        with pytest.raises(SpecError, match=r"use the client's stream\(\)") as caught:
            both.call(name, "abc", stream=True)
        assert caught.value.path == path
    with pytest.raises(SpecError, match="give one of them") as caught:
        both.stream(str, "abc", messages=[{"role": "user", "content": "x"}])
    assert caught.value.path == "messages"
    with pytest.raises(SpecError, match="`capture` too") as caught:
        both.call("complete", "abc", midstream={"probes": PROBE.to_dict()}, capture=Capture([1]))
    assert caught.value.path == "midstream"
    assert site.seen == []
    assert len(site.engine.vectors) == 0


@pytest.mark.parametrize("turns", [1, 2])
def test_a_response_has_the_results_of_each_call_of_the_model(both, site, turns):
    asked = {"capture": {"layers": [1]}}
    answer = both.call(
        "call", "POST", "/v1/responses", {"input": "abc", "turns": turns, "midstream": asked}
    )
    outputs = both.call("read", answer).outputs
    assert [one.receipt.request_id for one in outputs] == ["resp-0", "resp-1"][:turns]
    for one in outputs:
        assert torch.equal(one.activations["resid_post", 1], rows((1,), 5)["resid_post", 1])
    assert len(site.server.captures) == 0


VECTORS = {
    "by layer": {1: V, -1: {"vector": np.asarray(V), "scale": 2}},
    "by site": {"resid_post": {1: torch.tensor(V)}, "post_attn": {2: V}},
    "by tap": {("resid_post", 1): V},
    "for no layer": torch.tensor(V),
    "base64": Vector.parse(V).emit(),
}


@pytest.mark.parametrize("vectors", VECTORS.values(), ids=VECTORS)
def test_vectors_are_registered_as_they_are_offline(both, site, vectors):
    about = both.call("vectors.register", "a/b:c", vectors)
    site.engine.vectors.register("same", vectors)
    assert site.engine.vectors.lookup("a/b:c") == site.engine.vectors.lookup("same")
    assert about["name"] == "a/b:c"
    assert [one["name"] for one in both.call("vectors.list")] == ["a/b:c", "same"]
    assert both.call("vectors.remove", "a/b:c") is None
    with pytest.raises(ServerError, match="404"):
        both.call("vectors.remove", "a/b:c")


def test_steering_is_set_shown_and_cleared(both, site):
    both.call("vectors.register", "x", {1: V})
    state = both.call("steering.set", base=[Steer(V, 1), "x", ("x", 2.0)], generated=Steer(V, 2))
    assert state["epoch"] == 1
    assert len(site.engine.steering.show().base) == 3
    assert both.call("steering.show") == state
    assert both.call("steering.clear")["base"] == []
    with pytest.raises(ServerError, match="no tier is given"):
        both.call("steering.set")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>Bad Gateway</html>", "502: <html>Bad Gateway</html>"),
        (b"", "502: None"),
        (b'{"error": "Unauthorized"}', "502: Unauthorized"),
        (b'{"detail": "x"}', "502: {'detail': 'x'}"),
        (b'{"error": {"message": "no", "param": "p"}}', "502: no"),
        (b"[" * 100_000, r"502: \[\["),
        (b"\xff", "502: \ufffd"),
    ],
)
def test_any_answer_that_refuses_is_a_server_error(over, content, message):
    both = over(lambda request: httpx.Response(502, content=content))
    for ask in (both.call, lambda _, *args: both.stream(id, *args)):
        with pytest.raises(ServerError, match=message) as caught:
            ask("complete", "abc")
        assert caught.value.status == 502
        assert len(str(caught.value)) < 1100


def events(*values, done=True):
    data = b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values)
    return data + (b"data: [DONE]\n\n" if done else b"")


CHUNKS = [{"id": "r", "choices": [{"index": 0, "text": text}]} for text in "abc"]


def test_a_stream_that_ends_with_an_error_or_breaks_off_is_one_after_what_there_was(over):
    error = {"error": {"message": "no more", "code": 507, "param": "x"}}
    for content, message, status in (
        (events(*CHUNKS, done=False), "ended before it was complete", None),
        (events(*CHUNKS, error), "507: no more", (507, "x")),
    ):
        both = over(lambda _, content=content: streamed(content))
        seen = []
        with pytest.raises(ServerError, match=message) as caught:
            both.stream(lambda output, seen=seen: seen.append(output.text), "abc")
        assert seen == ["a", "ab", "abc"]
        assert status in (None, (caught.value.status, caught.value.param))


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_a_stream_is_read_however_a_proxy_frames_it(over, newline):
    chunk = json.dumps(CHUNKS[0] | {"note": "\u2028"}, ensure_ascii=False, indent=0)
    lines = [": waits", "", "retry: 5", "", "id: 7", "event: part"]
    lines += [f"data:{line}" for line in chunk.split("\n")]
    lines = [*lines, "more: x", "", "data: [DONE]", "", ""]
    content = newline.join(lines).encode()
    both = over(lambda _: streamed(content[i : i + 3] for i in range(0, len(content), 3)))
    if isinstance(both.client, AsyncClient):
        both = over(lambda _: streamed(content))
    assert both.stream(lambda output: output.text, "abc") == ["a"]


@pytest.mark.parametrize(
    ("content", "shown"), [('{"id": 1}', "{'id': 1}"), ("<p>hello</p>", "<p>hello"), ("", "None")]
)
def test_an_answer_that_is_no_stream_is_an_error(over, content, shown):
    both = over(lambda _: httpx.Response(200, text=content))
    with pytest.raises(ServerError, match=f"expected a stream of events, got {shown}"):
        both.stream(str, "abc")


@pytest.mark.parametrize(
    "url", ["https://example.org/x", "//example.org/x", "/v1/midstream/activations/../vectors", ""]
)
def test_keys_go_nowhere_but_to_the_server(over, url):
    asked = []

    def answer(request):
        asked.append(request.url)
        value = {"choices": [{"index": 0, "text": ""}], "midstream": {"activations": {"url": url}}}
        return httpx.Response(200, json=value)

    both = over(answer)
    with pytest.raises(ServerError, match="rows are at"):
        both.call("complete", "abc")
    assert len(asked) == 1


def test_rows_that_are_gone_are_an_error(over):
    url = "/v1/midstream/activations/abc"

    def answer(request):
        if request.method == "GET":
            return httpx.Response(404, json={"error": {"message": "they have expired"}})
        value = {"choices": [{"index": 0, "text": ""}], "midstream": {"activations": {"url": url}}}
        return httpx.Response(200, json=value)

    both = over(answer)
    with pytest.raises(ServerError, match="404: they have expired"):
        both.call("complete", "abc")


@pytest.mark.parametrize("cls", [Client, AsyncClient])
def test_keys_are_sent_and_not_beside_ones_own_connections(cls):
    client = cls(api_key="a", admin_key="b")
    assert client._http.headers["authorization"] == "Bearer a"
    assert client._http.headers["x-midstream-admin-key"] == "b"
    for keys in ({"api_key": "a"}, {"admin_key": "b"}):
        with pytest.raises(ConfigError, match="in its own headers"):
            cls(http=client._http, **keys)


@settings(max_examples=50)
@given(st.data())
def test_scores_of_any_cutting_add_up_to_the_whole(data):
    count = data.draw(st.integers(0, 12))
    numbers = st.floats(width=32, allow_nan=False) | st.sampled_from(["NaN", "-Infinity"])
    scores = data.draw(st.lists(numbers, min_size=count, max_size=count))
    at = sorted(data.draw(st.sets(st.integers(0, 40), min_size=count, max_size=count)))
    places = sorted(data.draw(st.lists(st.integers(0, count), max_size=5)))
    reader = Reader()
    bounds = [0, *places, count]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        told = {
            "scores": [
                float(each) if isinstance(each, float) and abs(each) < float("inf") else str(each)
                for each in scores[start:stop]
            ],
            "positions": at[start:stop],
            "token_ids": [position + 7 for position in at[start:stop]],
        }
        output = reader.read(
            {"choices": [{"index": 0, "text": "x"}], "midstream": {"probes": {"p": told}}}, {}
        )
    found = output.probes["p"]
    expected = torch.tensor([float(each) for each in scores])
    assert torch.equal(found.nan_to_num(3.0), expected.nan_to_num(3.0))
    assert output.probes.positions_of("p").tolist() == at
    assert output.probes.token_ids_of("p").tolist() == [position + 7 for position in at]
    assert len(output.text) == len(bounds) - 1


def test_scores_of_a_stream_are_read_once_and_earlier_ones_stay_as_they_were():
    """Its time would grow with the square of its length."""
    reads = []

    class Score:
        def __init__(self, value):
            self.value = value

        def __float__(self):
            reads.append(self.value)
            return self.value

    reader, seen = Reader(), []
    for nth in range(40):
        told = {"scores": [Score(nth / 8)], "positions": [nth], "token_ids": [nth + 7]}
        value = {"choices": [{"index": 0, "midstream": {"probes": {"p": told}}}]}
        seen.append(reader.read(value, {}).outputs[0].probes)
    assert reads == [nth / 8 for nth in range(40)]
    for nth, probes in enumerate(seen):
        assert probes["p"].tolist() == reads[: nth + 1]
        assert probes.token_ids_of("p").tolist() == list(range(7, 8 + nth))
    seen[-1]["p"].zero_()
    assert seen[20]["p"].tolist() == reads[:21]


def test_an_event_without_choices_changes_nothing():
    reader = Reader()
    reader.read({"id": "r", "choices": [{"index": 0, "text": "a"}]}, {})
    for value in ({"id": "r", "choices": []}, {"id": "r", "choices": None}, {"usage": {}}):
        assert reader.handles(value) == []
        assert reader.read(value, {}).text == "a"


def test_an_update_is_sent_for_the_id_and_its_answer_is_read(over):
    seen = []

    def answer(request):
        seen.append((request.url.raw_path.decode(), json.loads(request.content)))
        choices = [{"index": n, "version": 2, "position": 9 + n} for n in range(2)]
        return httpx.Response(200, json={"id": "cmpl/1", "choices": choices})

    client = over(answer)
    edit = Steer([1.0, 0.0], 1)
    found = client.call("update", "cmpl/1", edits=edit, scale=0.5)
    assert found == PlanUpdate(2, {0: 9, 1: 10})
    client.call("update", "x", edits=[])
    place = "/v1/midstream/requests/cmpl%2F1/update"
    assert seen[0] == (place, {"edits": [edit.to_dict()], "scale": 0.5})
    assert seen[1][1] == {"edits": []}
