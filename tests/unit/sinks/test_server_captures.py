"""Server-wide captures by name: set, listed, collected and cleared."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.sinking import ORIGIN, Keeping, activations, delivery, put_now

from midstream.config.sinks import plain_sinks, read_sinks
from midstream.errors import ConfigError, SpecError
from midstream.plan import Capture, ModelShape
from midstream.sinks import registry as finding
from midstream.sinks.kept_rows import KeptRows
from midstream.sinks.server_captures import MAX_NAMES, ServerCaptures
from midstream.sinks.sink_set import SinkSet

SHAPE = ModelShape(4, 8, [("resid_post", layer) for layer in range(4)])
AT_1 = Capture(1, positions="last_prompt")


def made(given=None, check=lambda _: None):
    return ServerCaptures(SinkSet(read_sinks(plain_sinks(given or {})), ORIGIN), SHAPE, check)


def put(captures, tag, **changes):
    put_now(captures._sinks.queue("kept"), delivery(tag=tag, **changes), 64)


def test_captures_of_the_settings_are_set_under_the_name_of_their_sink():
    captures = made({"log": {"capture": {"layers": 1}}, "memory": {"capture": [{"layers": 2}]}})
    assert captures.current == (Capture(1, sink="log"), Capture(2))
    assert [one.name for one in captures.list()] == ["log", "memory"]
    captures.clear("log")
    assert captures.current == (Capture(2),)
    with pytest.raises(ConfigError, match="midstream.sinks.log.capture.layers: .*out of range"):
        made({"log": {"capture": {"layers": 9}}})


def test_a_name_is_set_replaced_and_cleared():
    captures = made()
    assert not captures
    captures.set("watch", AT_1, "memory")
    captures.set("more", [{"layers": 2}, {"layers": 3}], sink="memory")
    assert captures.current == (AT_1, Capture(2), Capture(3))
    captures.set("watch", Capture(0), "memory")
    assert captures.show("watch").captures == (Capture(0),)
    assert captures.show("watch").kept is None
    captures.clear()
    assert captures.current == ()
    assert not captures
    assert captures.list() == ()


def test_what_is_shown_can_be_set_again():
    captures = made()
    for sink in (None, "kept"):
        before = captures.set("watch", AT_1, sink)
        assert before.captures[0].place == ("kept", "watch", "")
        assert captures.set("watch", before.to_dict()["capture"]).captures == before.captures


def test_rows_without_a_sink_are_kept_until_they_are_collected():
    captures = made()
    about = captures.set("watch", AT_1)
    assert about.captures[0].place == ("kept", "watch", "")
    assert about.to_dict()["kept"] == {"completions": 0, "bytes": 0, "dropped": 0}
    put(captures, "watch", request_id="a")
    put(captures, "watch", request_id="b")
    put(captures, "gone", request_id="c")  # cleared while its request ran
    assert captures.show("watch").kept == {"completions": 2, "bytes": 128, "dropped": 0}
    first = captures.collect("watch", most_bytes=1)
    assert [one.request_id for one in first] == ["a"]
    assert first[0].activations["resid_post", 1].equal(activations()["resid_post", 1])
    assert first[0].activations.token_ids.equal(activations().token_ids)
    assert [one.request_id for one in captures.collect("watch")] == ["b"]
    assert captures.collect("watch") == ()
    put(captures, "watch")
    captures.set("watch", Capture(2))  # begins anew
    assert captures.collect("watch") == ()
    put(captures, "watch")
    captures.set("watch", Capture(2), "memory")
    with pytest.raises(SpecError, match="the rows of `watch` go to `memory`"):
        captures.collect("watch")


def test_rows_of_requests_that_still_run_are_not_those_of_a_name_that_was_set_anew():
    captures = made()
    captures.set("watch", AT_1)
    (first,) = captures.current
    about = captures.set("watch", Capture(2))
    (second,) = captures.current
    put(captures, first.tag, request_id="admitted before")
    put(captures, second.tag, request_id="admitted after")
    assert about.captures[0].place == ("kept", "watch", "")
    assert captures.show("watch").kept["completions"] == 1
    assert [one.request_id for one in captures.collect("watch")] == ["admitted after"]
    captures.clear("watch")
    captures.set("watch", AT_1)
    for tag in (first.tag, second.tag):
        put(captures, tag)
    assert captures.collect("watch") == ()


def test_rows_that_could_not_be_used_are_put_back_before_later_ones():
    captures = made()
    captures.set("watch", AT_1)
    for name in "abc":
        put(captures, "watch", request_id=name)
    before = captures.show("watch").kept
    found = captures.collect("watch", most_bytes=128)
    assert [one.request_id for one in found] == ["a", "b"]
    captures.put_back(found)
    assert captures.show("watch").kept == before
    found = captures.collect("watch")
    assert [one.request_id for one in found] == ["a", "b", "c"]
    captures.set("watch", Capture(2))
    captures.put_back(found)  # of what the name stood for before
    assert captures.collect("watch") == ()


def test_rows_that_are_put_back_count_against_the_limit_and_kept_rows_are_copies():
    kept = KeptRows(most_bytes=128)
    kept.begin("x")
    for name in "abc":
        kept.write(delivery(tag="x", request_id=name))
    found = kept.take("x")
    kept.write(delivery(tag="x", request_id="d"))
    kept.put_back(found)
    assert kept.usage("x") == {"completions": 2, "bytes": 128, "dropped": 2}
    assert [one.request_id for one in kept.take("x")] == ["c", "d"]
    kept = KeptRows()
    kept.begin("x")
    rows = activations()
    kept.write(delivery(tag="x", activations=rows))
    rows["resid_post", 1].zero_()
    (found,) = kept.take("x")
    assert found.activations["resid_post", 1].equal(activations()["resid_post", 1])


WRONG = {
    "a name": ("a b", AT_1, None, "name", "characters"),
    "no capture": ("x", 5.5, None, "capture", "expected a `Capture`"),
    "an empty list": ("x", [], None, "capture", "the list is empty"),
    "a stream": ("x", Capture(1, stream=True), None, "capture.stream", "must be omitted"),
    "an id": ("x", [Capture(1, request_id="r")], None, "capture[0].request_id", "must be omitted"),
    "a tag without a sink": ("x", Capture(1, tag="t"), None, "capture.tag", "must be omitted"),
    "a layer": ("x", Capture(9), None, "capture.layers", "out of range"),
    "a site": ("x", Capture(1, "mlp_out"), None, "capture.sites", "not tapped"),
    "a sink": ("x", AT_1, "nowhere", "capture[0].sink", "no sink 'nowhere'"),
    "two sinks": ("x", Capture(1, sink="log"), "memory", "capture.sink", "and `sink` is"),
    "the same twice": ("x", [AT_1, AT_1], None, "capture[1]", "duplicate"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_captured_is_rejected_and_nothing_changes(name):
    captures = made()
    captures.set("x", Capture(3))
    name, value, sink, path, problem = WRONG[name]
    with pytest.raises(SpecError, match=problem) as caught:
        captures.set(name, value, sink)
    assert caught.value.path == path
    assert [one.layers.indices for one in captures.current] == [(3,)]


def test_captures_that_no_request_could_have_together_are_rejected():
    def check(every):
        if len(every) > 1:
            raise SpecError("capture[1].codec", "differs")

    captures = made(check=check)
    captures.set("x", Capture(1))
    with pytest.raises(SpecError, match="differs"):
        captures.set("y", Capture(2))
    assert [one.name for one in captures.list()] == ["x"]


def test_who_reads_does_not_wait_while_a_change_is_checked():
    begun, end = threading.Event(), threading.Event()

    def check(captures):
        if len(captures) > 1:
            begun.set()
            assert end.wait(60)

    captures = made(check=check)
    captures.set("watch", AT_1)
    with ThreadPoolExecutor(2) as pool:
        change = pool.submit(captures.set, "more", Capture(2), "memory")
        assert begun.wait(60)
        try:
            read = pool.submit(lambda: (captures.list(), captures.show("watch"), captures.current))
            names = [one.name for one in read.result(10)[0]]
            assert list(captures.collect("watch")) == []
        finally:
            end.set()
        assert names == ["watch"]
        assert change.result(60).name == "more"
    assert [one.name for one in captures.list()] == ["more", "watch"]


def test_unknown_names_and_too_many_are_rejected():
    captures = made()
    captures.set("watch", AT_1)
    for call in (captures.clear, captures.show, captures.collect):
        with pytest.raises(SpecError, match="no capture is set as 'wach'.*`watch`"):
            call("wach")
    with pytest.raises(SpecError, match="expected `str`"):
        captures.show(5)
    captures = made()
    for nth in range(MAX_NAMES):
        captures.set(f"n{nth}", AT_1)
    with pytest.raises(SpecError, match="limit of 64 names"):
        captures.set("more", AT_1)
    captures.set("n0", Capture(2))


def test_a_sink_of_the_engine_may_have_the_name_of_the_kept_rows(monkeypatch):
    monkeypatch.setitem(finding.BUILTIN, "kept", "support.sinking:Keeping")
    captures = made({"kept": {}})
    assert Keeping
    with pytest.raises(SpecError, match="a sink of its own named kept"):
        captures.set("x", AT_1)
