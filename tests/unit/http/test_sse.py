"""Events are the same however the bytes come, and go out as they came."""

import json

from hypothesis import given
from hypothesis import strategies as st

from midstream.http.sse import DONE, Event, Events

VALUES = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=4
)
LINES = st.one_of(
    VALUES.map(lambda value: b"data: " + json.dumps({"v": value}).encode()),
    st.sampled_from(
        [b"data: [DONE]", b"data:tight", b": ping", b"event: x\ndata: {}", b"id: 4\ndata: {}",
         b"data: 1\ndata: 2", b"retry: 5", b""]
    ),
)  # fmt: skip
ENDS = st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n\r\n"])


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Events with whatever line ends, and what is left of one."""
    parts = draw(st.lists(st.tuples(LINES, ENDS), max_size=8))
    return b"".join(line + end for line, end in parts) + draw(st.sampled_from([b"", b"data: {"]))


@st.composite
def cut(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    stream = draw(streams())
    places = draw(st.lists(st.integers(0, len(stream)), max_size=12).map(sorted))
    bounds = [0, *places, len(stream)]
    return stream, [stream[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


@given(cut())
def test_any_cutting_of_the_bytes_gives_the_same_events(given_):
    stream, pieces = given_
    whole, parts = Events(), Events()
    expected = whole.feed(stream)
    assert [event for piece in pieces for event in parts.feed(piece)] == expected
    assert parts.rest == whole.rest


@given(streams())
def test_what_is_not_changed_goes_out_byte_by_byte(stream):
    events = Events()
    assert b"".join(event.encoded for event in events.feed(stream)) + events.rest == stream


@given(st.lists(st.text()))
def test_byte_by_byte_events_are_what_was_said(texts):
    events = Events()
    stream = b"".join(Event(b"", b"").with_data({"text": text}).encoded for text in texts)
    found = [event for byte in stream for event in events.feed(bytes([byte]))]
    assert [event.value["text"] for event in found] == texts


def test_the_kind_is_kept_when_an_event_says_something_else():
    (event,) = Events().feed(b'event: response.completed\r\ndata: {"a": 1}\r\n\r\n')
    assert (event.name, event.value) == (b"response.completed", {"a": 1})
    assert event.with_data({"a": 2}).encoded == b'event: response.completed\ndata: {"a": 2}\n\n'


def test_what_is_no_json_object_has_no_value():
    stream = b"data: [DONE]\n\n: ping\n\ndata: {]\n\ndata: 1\n\ndata: {\ndata: }\n\ndata: "
    stream += b'{"a":' * 100_000 + b"\n\n"
    found = Events().feed(stream)
    assert [event.value for event in found] == [None] * 6
    assert found[0].data == DONE
    assert found[1].data == b""


def test_text_that_is_no_unicode_can_be_said():
    written = Event(b"", b"").with_data({"text": "\ud83d"}).encoded
    assert Events().feed(written)[0].value == {"text": "\ud83d"}


def test_an_event_of_megabytes_is_looked_through_once():
    events, piece = Events(), b"x" * (1 << 16)
    assert events.feed(b"data: ") == []
    for _ in range(800):
        assert events.feed(piece) == []
    (found,) = events.feed(b"\n\n")
    assert len(found.data) == 800 << 16
